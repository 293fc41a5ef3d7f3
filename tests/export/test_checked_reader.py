"""Elements that are used once, replicas that are equal, and records that are whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.stored_file import StoredFile
from zexport.checkpoint.state import FlatData, Role, StoredTensor
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.export.checked_reader import Accounting, ProvenWeights, WeightReader, account
from zexport.export.plan import SourceFile
from zexport.findings import FindingKind
from zexport.options import CheckMode
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Chain, Extent, Window

F32, BF16 = DType.F32, DType.BF16
FLAT, OTHER = Path("optim.pt"), Path("model.pt")


def _tensor(numel: int, source: ByteSource | None, role: Role = Role.TRAINABLE) -> StoredTensor:
    return StoredTensor("w", (numel,), F32, role, source)


A, B = _tensor(30, Extent(FLAT, 0, 120)), _tensor(20, Extent(FLAT, 120, 80))
FROZEN, EMPTY = _tensor(5, Extent(FLAT, 200, 20), Role.FROZEN), _tensor(0, Chain(()))
APART, UNREAD = _tensor(7, Extent(OTHER, 0, 28)), _tensor(99, None)
BUFFER = _tensor(4, Extent(OTHER, 28, 16), Role.BUFFER)
REPLICAS = [
    Replica("w", Extent(OTHER, 0, 140), Extent(FLAT, 220, 140)),
    Replica("w", Extent(FLAT, 0, 12), Extent(OTHER, 44, 12)),
]


def _state(**changes: object) -> Any:
    flats = (
        FlatData(Extent(FLAT, 0, 200), F32, 0),
        FlatData(Extent(FLAT, 200, 200), F32, 10),
    )
    tensors = (A, B, FROZEN, EMPTY, APART, UNREAD, BUFFER, _tensor(9, None, Role.FROZEN))
    whole = {"flats": flats, "tensors": tensors, "replicas": REPLICAS}
    return SimpleNamespace(**whole | {"location": SimpleNamespace(tag_dir=Path("tag"))} | changes)


def test_each_element_is_used_padding_a_replica_or_left_out() -> None:
    sliced = _tensor(4, Chain((Window(A.source, 0, 12), Window(A.source, 0, 4))))  # type: ignore[arg-type]
    for exported, used in (((A, APART), 37), ((sliced, BUFFER, UNREAD), 30), ((), 0)):
        found = account(_state(), exported)
        assert found == Accounting(107, used, 10, 35, 62 - used)
    assert account(_state(flats=(), replicas=(), tensors=(APART,)), [APART]).total == 7
    for changes in ({"replicas": ()}, {"tensors": (A, B, APART)}):
        with pytest.raises(UnsupportedError, match="belong to no parameter") as caught:
            account(_state(**changes), [A])
        assert caught.value.path == Path("tag")


class _Weights:
    """Master weights with a second copy, module weights and gathered ones; all may be changed."""

    def __init__(self, folder: Path) -> None:
        self.optim, self.model = StoredFile(folder / "optim"), StoredFile(folder / "model")
        values = np.linspace(1, 2, 5000, dtype=np.float32)
        rounded = (values.view(np.uint32) + 0x7FFF + (values.view(np.uint32) >> 16 & 1)) >> 16
        self.master, self.again, self.third = (self.optim.store(values).bind() for _ in range(3))
        self.module, self.gathered = (
            self.model.store(rounded.astype(np.uint16), BF16).bind() for _ in range(2)
        )

    def flip(self, source: ByteSource, *, proof: bool = False, at: int = 0) -> None:
        """Change a value; ``proof`` keeps the CRC-32, so that only a comparison can notice."""
        (extent,) = source.extents(at, at + 1)
        data = bytearray(extent.path.read_bytes())
        data[extent.offset + 1] ^= 0x40
        extent.path.write_bytes(data)
        for file in (self.optim, self.model) if not proof else ():
            file.records = ()

    def _cast(self, other: ByteSource, *, by_value: bool) -> CastReplica:
        return CastReplica("w", self.model.path, self.master, F32, other, BF16, by_value)

    def reader(
        self, *allow: FindingKind, by_value: bool = False, full: bool = False
    ) -> WeightReader:
        replicas = [Replica("w", self.master, one) for one in (self.again, self.third)]
        return WeightReader(
            map(SourceFile.of, (self.optim, self.model)),
            [*replicas, self._cast(self.module, by_value=by_value)],
            gathered=[self._cast(self.gathered, by_value=False)],
            check=CheckMode.FULL if full else CheckMode.SAMPLED,
            allow=frozenset(allow),
        )


CAST, REPLICA = FindingKind.CAST_MISMATCH, FindingKind.REPLICA_MISMATCH


def test_replicas_that_differ_are_refused_or_found(tmp_path: Path) -> None:
    def weights(*names: str) -> _Weights:
        (folder := tmp_path / "-".join(["w", *names])).mkdir(exist_ok=True)
        made = _Weights(folder)
        for name in names:
            made.flip(getattr(made, name))
        return made

    assert (
        weights().reader().compare() == weights().reader(by_value=True, full=True).compare() == ()
    )
    for names, kinds in (
        (["again"], {REPLICA}),
        (["again", "third"], {REPLICA}),
        (["module"], {CAST}),
        (["again", "module"], {REPLICA, CAST}),
    ):
        made = weights(*names)
        for allowed in ([], [REPLICA], [CAST]):
            if kinds - {*allowed}:
                with pytest.raises(DamagedCheckpointError) as caught:
                    made.reader(*allowed).compare()
                refused = [one.finding for one in caught.value.problems] or [caught.value.finding]
                assert {*refused} == kinds - {*allowed}
        found = made.reader(REPLICA, CAST, full=True).compare()
        assert {(one.kind, one.tensor, one.accepted) for one in found} == {
            (kind, "w", True) for kind in kinds
        }
        assert len(found) == len(kinds)
        assert {one.count for one in found} == {int(kind is CAST) for kind in kinds}
    (found,) = weights("gathered").reader().compare()
    assert (found.kind, found.count, found.accepted) == (FindingKind.GATHERED_MISMATCH, 1, False)
    made = weights()
    made.flip(made.module, at=5678)  # not among the samples
    assert made.reader().compare() == ()
    with pytest.raises(DamagedCheckpointError, match="do not match its module weights"):
        made.reader(CAST, by_value=True).compare()


def test_records_of_replicas_are_proved_and_those_of_samples_are_not(tmp_path: Path) -> None:
    made = _Weights(tmp_path)
    for names, full, is_proved in (
        (["module"], False, True),
        ([], True, False),
        (["master", "again", "third"], False, False),
    ):
        for name in names:
            made.flip(getattr(made, name), proof=True)
        with made.reader(CAST, full=full) as reader:
            reader.compare()
            if is_proved:
                reader.finish()
                continue
            other = made.reader()
            other.take_compared(reader.compared)  # of another worker
            for one in (reader, other):
                with pytest.raises(DamagedCheckpointError, match="CRC-32"):
                    one.finish()


def test_weights_are_not_read_without_comparison(tmp_path: Path) -> None:
    with _Weights(tmp_path).reader() as reader:
        assert reader.compared == {}
        with pytest.raises(AssertionError, match="not compared"):
            reader.finish()


def test_weights_of_one_checkpoint_are_compared_once_and_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zexport.ranges.reader._GAP_CHUNK_NBYTES", 1000)

    made = _Weights(tmp_path)
    made.flip(made.module, proof=True)
    flats = [FlatData(one, F32, 0) for one in (made.master, made.again)]
    replicas, tensors = [Replica("w", made.master, made.again)], [_tensor(5000, made.master)]
    state = _state(flats=flats, tensors=tensors, replicas=replicas)
    state.torch_files = (made.optim, made.model)
    weights = ProvenWeights(state, tensors)
    with pytest.raises(UnsupportedError):
        ProvenWeights(_state(flats=flats, tensors=tensors, replicas=()), tensors)
    with weights.reading(is_whole=False) as reader:  # more than a chunk of the record is unread
        reader.read_into(made.module, 0, memoryview(bytearray(100)))
    assert reader.nbytes_read == 40_100
    with weights.reading(is_whole=False) as reader:  # replicas are not compared again
        reader.read_into(made.module, 100, memoryview(bytearray(100)))
    assert reader.nbytes_read == 100
    with pytest.raises(DamagedCheckpointError, match="CRC-32"), weights.reading() as reader:
        reader.read_into(made.module, 0, memoryview(bytearray(100)))
