"""Reads of real files by range, in any order, and their CRC-32."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zexport import CheckpointError, DamagedCheckpointError
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges import reader as module
from zexport.ranges.computed import Elements, Recast, Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource, Chain, Extent, Mosaic, Tile, Window
from zexport.storage.files import open_input
from zexport.storage.storage import InputFile, Version

Saved = tuple[TorchFile, list[ByteSource], list[bytes]]


def _save(path: Path, tensors: Sequence[torch.Tensor]) -> Saved:
    """Return a file of tensors, their places and their bytes."""
    torch.save(list(tensors), path)
    file = read_torch_file(path)
    assert isinstance(file.value, list)
    places = [file.source(value) for value in file.value]
    return file, places, [tensor.numpy().tobytes() for tensor in tensors]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(count, generator=generator) for count in (1000, 7, 300)]
    return _save(tmp_path_factory.mktemp("three") / "rank.pt", tensors)


def _read(reader: SourceReader, source: ByteSource, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    reader.read_into(source, start, memoryview(buffer))
    return bytes(buffer)


def _flipped(path: Path, source: ByteSource, at: int) -> TorchFile:
    """Return the file with one bit of a tensor flipped."""
    (extent,) = source.extents(at, at + 1)
    data = bytearray(path.read_bytes())
    data[extent.offset] ^= 1
    path.write_bytes(data)
    return read_torch_file(path)


_READS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4000), st.integers(0, 4000)), max_size=12
)


@given(reads=_READS)
@settings(max_examples=60, deadline=None)
def test_reads_in_any_order_pass(three: Saved, reads: list[tuple[int, int, int]]) -> None:
    file, places, data = three
    with SourceReader([file]) as reader:
        for index, start, nbytes in reads:
            first = min(start, places[index].nbytes)
            count = min(nbytes, places[index].nbytes - first)
            assert _read(reader, places[index], first, count) == data[index][first:][:count]
        reader.finish()


@given(reads=_READS, where=st.integers(0, 3999))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_flipped_bit_anywhere_in_a_read_record_is_refused(
    tmp_path: Path, reads: list[tuple[int, int, int]], where: int
) -> None:
    file, (place,), _ = _save(tmp_path / "rank.pt", [torch.arange(1000.0)])
    with SourceReader([_flipped(file.path, place, where)]) as reader:
        for _, start, nbytes in [*reads, (0, 0, 1)]:
            first = min(start, 3999)
            _read(reader, place, first, max(min(nbytes, 4000 - first), 1))
        with pytest.raises(DamagedCheckpointError, match="CRC-32 of record"):
            reader.finish()


def test_damaged_record_that_is_not_read_is_ignored(tmp_path: Path) -> None:
    file, places, _ = _save(tmp_path / "rank.pt", [torch.ones(10), torch.ones(20)])
    with SourceReader([_flipped(file.path, places[1], 0)]) as reader:
        _read(reader, places[0], 0, 40)
        reader.finish()


def test_read_beyond_the_end_is_refused(tmp_path: Path) -> None:
    file, _, _ = _save(tmp_path / "rank.pt", [torch.ones(1)])
    end = file.path.stat().st_size
    with (
        SourceReader([file]) as reader,
        pytest.raises(DamagedCheckpointError, match="file is too short"),
    ):
        _read(reader, Extent(file.path, end - 5, 10), 0, 10)


@pytest.mark.parametrize("change", ["touched", "longer", "gone"])
def test_file_that_changes_meanwhile_is_refused(tmp_path: Path, change: str) -> None:
    file, (place,), _ = _save(tmp_path / "rank.pt", [torch.ones(1)])
    with SourceReader([file]) as reader:
        _read(reader, place, 0, 1)
        if change == "touched":
            os.utime(file.path, ns=(0, 0))
        elif change == "longer":
            file.path.write_bytes(file.path.read_bytes() + b"a")
        else:
            file.path.unlink()
        with pytest.raises(CheckpointError, match=r"file changed|No such file"):
            reader.finish()


def _descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_file_that_changed_before_it_is_opened_is_refused(tmp_path: Path) -> None:
    file, (place,), _ = _save(tmp_path / "rank.pt", [torch.ones(1)])
    os.utime(file.path, ns=(0, 0))
    before = _descriptors()
    with SourceReader([file]) as reader, pytest.raises(DamagedCheckpointError, match="changed"):
        _read(reader, place, 0, 1)
    assert _descriptors() == before


def test_more_files_than_descriptors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zexport.ranges.reader.getrlimit", lambda _: (384, 384))
    saved = [_save(tmp_path / f"{n}.pt", [torch.tensor([float(n)])]) for n in range(300)]
    before = _descriptors()
    with SourceReader([file for file, _, _ in saved]) as reader:
        for _, (place,), (data,) in saved + saved:
            assert _read(reader, place, 0, 4) == _read(reader, place, 0, 4) == data
            assert _descriptors() - before <= 128  # the rest is left to others
    assert _descriptors() == before


def test_transposed_tensor_is_read_with_proof_of_its_bytes(tmp_path: Path) -> None:
    values = torch.arange(1000.0).view(20, 50)
    file, (place,), _ = _save(tmp_path / "rank.pt", [values])
    turned = Mosaic((50, 20), 4, (Tile((0, 0), (50, 20), place, 0, (1, 50)),))
    part = Window(Window(turned, 80, 3920), 40, 3880)
    data = values.t().contiguous().numpy().tobytes()[120:]
    for first, nbytes in ((0, 3880), (40, 3800), (3, 21), (8, 2), (3880, 0)):  # some cut elements
        with SourceReader([file]) as reader:
            own = reader.new_coverage()
            buffer = bytearray(nbytes)
            reader.read_into(part, first, memoryview(buffer), own)
            assert bytes(buffer) == data[first : first + nbytes]
            assert bool(len(own.of(file.path).ranges())) == (nbytes > 0)
            assert reader.finish() == {}
    with SourceReader([_flipped(file.path, place, 7)]) as reader:
        own = reader.new_coverage()
        for first, nbytes in ((0, 400), (401, 2)):
            reader.read_into(turned, first, memoryview(bytearray(nbytes)), own)
        cast = Recast(Elements(place, DType.F32), DType.F16)
        reader.read_into(cast, 0, memoryview(bytearray(20)), own)
        reader.finish()  # nothing was read on its own account
        reader.take(own.ranges())
        with pytest.raises(DamagedCheckpointError, match="CRC-32 of record"):
            reader.finish()


def test_bytes_of_files_are_counted_with_those_for_checksums(three: Saved) -> None:
    file, places, data = three
    both = Chain((Zeros(12), places[1], Zeros(4), places[0]))
    with SourceReader([file]) as reader:
        assert _read(reader, both, 4, 60) == bytes(8) + data[1] + bytes(4) + data[0][:20]
        assert _read(reader, both, 0, 10) == bytes(10)
        assert reader.nbytes_read == 48
        assert reader.finish() == {}
        assert reader.nbytes_read == 4000 + 28
        own = reader.new_coverage()
        reader.read_into(places[2], 0, memoryview(bytearray(8)), own)
        reader.take(own.ranges())
        assert reader.finish() == {file.path: own_digest(file, 2)}


def own_digest(file: TorchFile, number: int) -> str:
    """Return the digest of one record, as a manifest has it."""
    one = next(one for one in file.records if one.name.endswith(f"data/{number}"))
    line = f"{one.name} {one.offset} {one.nbytes} {one.crc32:08x}\n"
    return blake3(line.encode()).hexdigest()


def test_other_readers_prove_the_bytes_that_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of which more than a chunk is unread is left to the readers that follow."""
    monkeypatch.setattr(module, "_GAP_CHUNK_NBYTES", 1000)
    file, (place,), _ = _save(tmp_path / "rank.pt", [torch.rand(1000)])
    seen = SourceReader([file]).new_coverage()
    for first, missing in ((0, 0), (2000, 0), (3000, 1000)):
        with SourceReader([file]) as reader:
            _read(reader, place, first, 1000)
            reader.finish(seen)
            assert reader.nbytes_read == 1000 + missing
    own = seen.of(file.path)
    assert [[*own.gaps(record, 4000)] for record in own.touched()] == [[]]
    damaged = _flipped(file.path, place, 1)
    with SourceReader([damaged]) as reader:
        _read(reader, place, 0, 1)
        with pytest.raises(DamagedCheckpointError):
            reader.finish()
    seen = SourceReader([damaged]).new_coverage()
    with SourceReader([damaged]) as reader:
        _read(reader, place, 0, 2999)
        reader.finish(seen)
    with SourceReader([damaged]) as reader:
        _read(reader, place, 2999, 1)
        with pytest.raises(DamagedCheckpointError):
            reader.finish(seen)


class _Slow(InputFile):
    """A file of a bucket: short reads, and it notes what is announced."""

    def __init__(self, file: InputFile, expected: list[tuple[int, int]]) -> None:
        self.path, self._file, self._expected = file.path, file, expected

    def version(self) -> Version:
        return self._file.version()

    def read(self, offset: int, part: memoryview) -> int:
        if offset >= 10**6:
            raise OSError(5, "Input/output error")
        return self._file.read(offset, part[:7])

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(offset, nbytes)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._expected.extend(ranges)

    def close(self) -> None:
        self._file.close()


def test_short_reads_and_announced_ranges_of_a_bucket(
    three: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, places, data = three
    expected: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "is_local", lambda _: False)
    monkeypatch.setattr(module, "open_input", lambda *one: _Slow(open_input(*one), expected))
    monkeypatch.setattr(module, "_EXTENTS_MAX", 2)
    (at,) = (extent.offset for extent in places[0].extents(0, 1))
    parts = [Window(places[0], 8 * n, 4) for n in range(3)]
    with SourceReader([file]) as reader:
        reader.expect(
            [
                (places[0], 4, 10),
                (Chain((places[0], Zeros(4))), 0, 4004),  # computed in part
                (Chain(tuple(parts)), 0, 12),  # scattered
                (Chain(tuple(parts[:2])), 0, 8),
            ]
        )
        assert expected == [(at + 4, at + 10), (at, at + 4), (at + 8, at + 12)]
        assert _read(reader, places[0], 5, 100) == data[0][5:105]
        reader.finish()
        with pytest.raises(CheckpointError, match="cannot be read at byte 1000007: Input"):
            _read(reader, Extent(file.path, 10**6 + 7, 10), 0, 10)
        with pytest.raises(DamagedCheckpointError, match="too short") as caught:
            _read(reader, Extent(file.path, file.version.nbytes - 10, 30), 0, 30)
        assert caught.value.found == f"{file.version.nbytes} bytes"
        assert caught.value.expected == f"at least {file.version.nbytes + 20}"
    expected.clear()
    monkeypatch.setattr(module, "is_local", lambda _: True)
    with SourceReader([file]) as reader:
        reader.expect([(places[0], 4, 10)])
    assert expected == []


def test_file_that_is_being_read_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is read, it is read again, and more files than may be open are."""
    monkeypatch.setattr(module, "getrlimit", lambda _: (384, 384))
    saved = [_save(tmp_path / f"{n}.pt", [torch.tensor([float(n)])]) for n in range(99)]
    waiting, last = list[ByteSource](), (saved[98][0].path, saved[98][1][0], 0)

    class Busy(_Slow):
        def read(self, offset: int, part: memoryview) -> int:
            others, waiting[:] = [*waiting], []
            for source in others if self.path == saved[0][0].path else ():
                _read(reader, source, 0, 4)
            return super().read(offset, part)

    monkeypatch.setattr(module, "open_input", lambda *one: Busy(open_input(*one), []))
    with SourceReader([file for file, _, _ in saved[:60]]) as reader:
        reader.add(*(file for file, _, _ in saved[60:98]), _flipped(*last))
        for _ in range(2):
            waiting = [source for _, (source,), _ in (saved[0], *saved[1:])]
            assert _read(reader, saved[0][1][0], 0, 4) == saved[0][2][0]
            assert not waiting
        with pytest.raises(DamagedCheckpointError, match="CRC-32"):
            reader.finish()
