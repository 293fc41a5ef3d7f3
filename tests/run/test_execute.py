"""Plans run over real files: what comes out, and what is left when it does not."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from msgspec import structs
from safetensors.torch import load_file

from tests.support.plans import (
    HUGE,
    Wanted,
    digest_on_disk,
    export_plan,
    save,
    source_file,
    torch_dtype,
)
from zexport.errors import (
    CheckpointError,
    DamagedCheckpointError,
    OutputError,
    VerificationError,
)
from zexport.export.plan import ExportPlan, SideFile, TensorPlan
from zexport.filenames import RECEIPTS
from zexport.findings import Finding, FindingKind
from zexport.formats.safetensors_file import SafetensorsFrame
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Chain, Extent, Striped
from zexport.ranges.ledger import Ledger
from zexport.run import finish, part
from zexport.run.execute import Phase, Progress, VerifyMode, run_plan
from zexport.run.manifest import FileEntry, read_manifest
from zexport.run.receipts import finished_files
from zexport.store.files import LocalOutput, OutputFile

FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)


def _values(numel: int, dtype: DType = DType.F32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(torch_dtype(dtype))


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., ExportPlan]:
    """Two ranks with two ZeRO-3 parameters and a file of buffers, planned into two shards."""
    a, b = _values(101), _values(57)
    flat = torch.cat([_stripe(a, 0), _stripe(b, 0)]), torch.cat([_stripe(a, 1), _stripe(b, 1)])
    tag = tmp_path / "run" / "global_step3"
    files, parts = zip(
        *(save(tag / f"rank_{d}.pt", [part]) for d, part in enumerate(flat)), strict=True
    )
    buffers = [torch.arange(5), torch.tensor(2.5), torch.empty(0, 3), torch.tensor([True, False])]
    other, (ids, scalar, none, flags) = save(tag / "model.pt", buffers)
    ranks = tuple(part[0] for part in parts)
    f32, i64, flag = DType.F32, DType.I64, DType.BOOL

    def plan(
        out_dir: Path | None = None, target: DType = f32, *, jobs: int = 2, chunk_nbytes: int = HUGE
    ) -> ExportPlan:
        shards = {
            "model-00001-of-00002.safetensors": [
                Wanted("flags", (2,), flag, flag, flags),
                Wanted("a", (101,), f32, target, Striped(ranks, 0, 51 * 4, 101 * 4)),
                Wanted("none", (0, 3), f32, target, none),
            ],
            "model-00002-of-00002.safetensors": [
                Wanted("b", (3, 19), f32, target, Striped(ranks, 51 * 4, 29 * 4, 57 * 4)),
                Wanted("ids", (5,), i64, i64, ids),
                Wanted("scalar", (), f32, target, scalar),
            ],
        }
        sides = (SideFile("config.json", content=b"{}\n"),)
        return export_plan(
            out_dir or tmp_path / "out",
            shards,
            [*files, other],
            side_files=sides,
            jobs=jobs,
            chunk_nbytes=chunk_nbytes,
        )

    return plan


def _stripe(values: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's part of a parameter under ZeRO-3, padding of sevens included."""
    count = -(-values.numel() // 2)
    padded = torch.nn.functional.pad(values, (0, 2 * count - values.numel()), value=7.0)
    return padded[rank * count : (rank + 1) * count]


def _expected(target: DType) -> dict[str, torch.Tensor]:
    dtype = torch_dtype(target)
    return {
        "a": _values(101).to(dtype),
        "b": _values(57).reshape(3, 19).to(dtype),
        "flags": torch.tensor([True, False]),
        "ids": torch.arange(5),
        "none": torch.empty(0, 3, dtype=dtype),
        "scalar": torch.tensor(2.5, dtype=dtype),
    }


def _loaded(out_dir: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in out_dir.glob("*.safetensors") for k, v in load_file(path).items()}


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("chunk_nbytes", [1, 4, 7, 28, 100, HUGE])
@pytest.mark.parametrize("target", FLOATS, ids=lambda dtype: dtype.name)
def test_every_tensor_comes_out_as_torch_would_cast_it(
    checkpoint: Callable[..., ExportPlan], target: DType, chunk_nbytes: int, jobs: int
) -> None:
    plan = checkpoint(target=target, chunk_nbytes=chunk_nbytes, jobs=jobs)
    run_plan(plan)
    _assert_same(_loaded(plan.out_dir), _expected(target))


@pytest.mark.parametrize("chunk_nbytes", [7, HUGE])
def test_the_manifest_holds_the_digests_of_the_bytes_on_the_disk(
    checkpoint: Callable[..., ExportPlan], chunk_nbytes: int
) -> None:
    plan = checkpoint(target=DType.F16, chunk_nbytes=chunk_nbytes)
    report = run_plan(plan)
    manifest = read_manifest(plan.out_dir)
    on_disk = {path.name: path.read_bytes() for path in plan.out_dir.iterdir()}
    own = on_disk.pop("zexport_manifest.json")
    assert {name: (e.nbytes, e.blake3) for name, e in manifest.files.items()} == {
        name: (len(data), digest_on_disk(name, data)) for name, data in on_disk.items()
    }
    for name, tensor in _expected(DType.F16).items():
        raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        assert manifest.tensors[name].blake3 == blake3(raw).hexdigest()
        assert manifest.tensors[name].shape == tuple(tensor.shape)
    assert manifest.provenance == {"tag": "global_step3", "world_size": 2}
    assert [s.path for s in manifest.sources] == ["model.pt", "rank_0.pt", "rank_1.pt"]
    assert report.nbytes_written == sum(map(len, on_disk.values())) + len(own)


def test_the_report_says_what_was_done(checkpoint: Callable[..., ExportPlan]) -> None:
    plan = checkpoint()
    report = run_plan(plan)
    assert report.out_dir == plan.out_dir
    assert report.files == tuple(sorted(path.name for path in plan.out_dir.iterdir()))
    assert report.tensors == 6
    assert report.warnings == ("no config was found",)
    assert report.verified is VerifyMode.READBACK
    # Both flat groups whole (the padding for its CRC), and the three buffers that hold something.
    assert report.nbytes_read == 2 * (51 + 29) * 4 + 5 * 8 + 4 + 2
    assert json.loads(json.dumps(report.to_json()))["verified"] == "readback"


@pytest.mark.parametrize("mode", VerifyMode)
def test_progress_only_grows_and_ends_at_its_total(
    checkpoint: Callable[..., ExportPlan], mode: VerifyMode
) -> None:
    told: list[Progress] = []
    run_plan(checkpoint(chunk_nbytes=16), verify=mode, progress=told.append)
    phases = [Phase.WRITE] if mode is VerifyMode.NONE else [Phase.WRITE, Phase.VERIFY]
    assert list(dict.fromkeys(step.phase for step in told)) == phases
    for phase in phases:
        steps = [step for step in told if step.phase is phase]
        done = [step.nbytes_done for step in steps]
        assert done == sorted(done)
        assert done[-1] == steps[-1].nbytes_total == told[0].nbytes_total


def test_remarkable_values_are_found_in_whole_and_in_split_tensors(tmp_path: Path) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 70000.0, -65520.0])
    file, (odd, zero) = save(tmp_path / "c" / "rank.pt", [values, torch.zeros(9)])
    wanted = [
        Wanted("odd", (6,), DType.F32, DType.F16, odd),
        Wanted("zero", (9,), DType.F32, DType.F32, zero),
    ]
    for chunk_nbytes in (8, HUGE):
        out_dir = tmp_path / f"out{chunk_nbytes}"
        plan = export_plan(
            out_dir, {"model.safetensors": wanted}, [file], chunk_nbytes=chunk_nbytes
        )
        report = run_plan(plan)
        assert report.findings == (
            Finding(FindingKind.NAN, "odd", 1),
            Finding(FindingKind.INF, "odd", 2),
            Finding(FindingKind.FP16_OVERFLOW, "odd", 2),
            Finding(FindingKind.ALL_ZERO, "zero", 9),
        )
        assert read_manifest(out_dir).findings == report.findings


@pytest.mark.parametrize(("count", "is_told"), [(2, False), (50, True)])
def test_values_that_vanish_in_float16_are_told_where_many_do(
    tmp_path: Path, count: int, *, is_told: bool
) -> None:
    values = torch.cat([torch.full((count,), -1e-9), torch.zeros(20), torch.ones(230 - count)])
    file, (stored,) = save(tmp_path / "c" / "rank.pt", [values])
    wanted = {"model.safetensors": [Wanted("w", (250,), DType.F32, DType.F16, stored)]}
    for chunk_nbytes in (80, HUGE):
        out_dir = tmp_path / f"out{chunk_nbytes}"
        plan = export_plan(out_dir, wanted, [file], chunk_nbytes=chunk_nbytes)
        found = run_plan(plan).findings
        assert found == ((Finding(FindingKind.FP16_UNDERFLOW, "w", count),) if is_told else ())


def test_a_tensor_written_twice_is_read_twice_and_still_proved(tmp_path: Path) -> None:
    values = _values(1000)
    file, (extent,) = save(tmp_path / "c" / "rank.pt", [values])
    wanted = [Wanted(name, (1000,), DType.F32, DType.F32, extent) for name in ("x", "y")]
    plan = export_plan(
        tmp_path / "out", {"model.safetensors": wanted}, [file], jobs=4, chunk_nbytes=60
    )
    run_plan(plan)
    _assert_same(_loaded(plan.out_dir), {"x": values, "y": values})


def test_side_files_are_copied_and_modes_follow_the_umask(
    checkpoint: Callable[..., ExportPlan], tmp_path: Path
) -> None:
    origin = tmp_path / "tokenizer.json"
    origin.write_bytes(b"x" * 3_000_000)
    origin.chmod(0o600)
    plan = checkpoint()
    plan = replace(plan, side_files=(*plan.side_files, SideFile("tokenizer.json", origin=origin)))
    before = os.umask(0o027)
    try:
        run_plan(plan)
    finally:
        os.umask(before)
    assert (plan.out_dir / "tokenizer.json").read_bytes() == origin.read_bytes()
    assert (plan.out_dir / "config.json").read_bytes() == b"{}\n"
    assert {path.stat().st_mode & 0o777 for path in plan.out_dir.iterdir()} == {0o640}
    assert plan.out_dir.stat().st_mode & 0o777 == 0o750


def test_a_side_file_that_is_gone_is_refused(
    checkpoint: Callable[..., ExportPlan], tmp_path: Path
) -> None:
    plan = replace(checkpoint(), side_files=(SideFile("t.json", origin=tmp_path / "t.json"),))
    with pytest.raises(CheckpointError, match=r"t\.json: cannot be read: No such file"):
        run_plan(plan)
    assert not plan.out_dir.exists()


class _FaultyReader:
    """Zeros, until the n-th call, which raises."""

    nbytes_read = 0

    def __init__(self, calls: int, error: BaseException) -> None:
        self.left = calls
        self._error = error

    def new_ledger(self) -> Ledger:
        return Ledger({})

    def take(self, ranges: object) -> None:
        del ranges

    def expect(self, pieces: object) -> None:
        del pieces

    def read_into(self, tensor: TensorPlan, start: int, buffer: memoryview, ledger: Ledger) -> None:
        del tensor, start, ledger
        self._count()
        buffer[:] = bytes(buffer.nbytes)

    def finish(self) -> dict[Path, str]:
        self._count()
        return {}

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self._error


def _assert_as_before_or_resumable(
    folder: Path, before: dict[str, bytes | None], plan: ExportPlan
) -> None:
    """Everything is as it was, or finished shards are kept and nothing else."""
    after = _tree(folder)
    if after == before:
        return
    place = plan.out_dir.with_name(f"{plan.out_dir.name}.partial")
    kept = {path.name for path in place.iterdir()}
    assert kept == {RECEIPTS, *finished_files(place)}
    shutil.rmtree(place)
    place.with_name(f"{place.name}.lock").unlink()
    if plan.out_dir.parent != folder:
        plan.out_dir.parent.rmdir()
    assert _tree(folder) == before


@pytest.mark.parametrize("error", [CheckpointError("broke"), KeyboardInterrupt(), OSError("x")])
def test_a_failure_at_any_read_leaves_nothing_unfinished(
    checkpoint: Callable[..., ExportPlan], tmp_path: Path, error: BaseException
) -> None:
    plan = checkpoint(tmp_path / "new" / "out", chunk_nbytes=64, jobs=2)
    counter = _FaultyReader(1000, error)
    run_plan(replace(plan, out_dir=tmp_path / "whole"), reader=counter)
    calls = 1000 - counter.left
    assert calls > 15
    before = _tree(tmp_path)
    descriptors = _descriptors()
    for count in range(calls):
        with pytest.raises(type(error)) as caught:
            run_plan(plan, reader=_FaultyReader(count, error))
        assert caught.value is error
        if isinstance(error, KeyboardInterrupt):
            _assert_as_before_or_resumable(tmp_path, before, plan)
        assert _tree(tmp_path) == before
        assert _descriptors() == descriptors


def test_an_interrupt_at_any_step_of_progress_leaves_nothing_unfinished(
    checkpoint: Callable[..., ExportPlan], tmp_path: Path
) -> None:
    plan = checkpoint(chunk_nbytes=64)
    steps: list[Progress] = []
    run_plan(checkpoint(tmp_path / "whole", chunk_nbytes=64), progress=steps.append)
    before = _tree(tmp_path)

    for count in range(len(steps)):
        seen: list[Progress] = []

        def stop(progress: Progress, count: int = count, seen: list[Progress] = seen) -> None:
            seen.append(progress)
            if len(seen) > count:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, progress=stop)
        _assert_as_before_or_resumable(tmp_path, before, plan)


@pytest.mark.parametrize("where", ["value", "padding"])
def test_a_flipped_bit_in_the_checkpoint_leaves_nothing(
    checkpoint: Callable[..., ExportPlan], where: str
) -> None:
    plan = checkpoint()
    member = plan.sources[1].members[0]
    path = plan.sources[1].path
    data = bytearray(path.read_bytes())
    data[member.offset + (8 if where == "value" else 50 * 4)] ^= 4
    path.write_bytes(data)
    sources = tuple(source_file(source.path, source.members) for source in plan.sources)
    with pytest.raises(DamagedCheckpointError, match=r"rank_1.pt: record 'rank_1/data/0'"):
        run_plan(replace(plan, sources=sources))
    assert not plan.out_dir.exists()
    assert not list(plan.out_dir.parent.glob("out*"))


@pytest.mark.parametrize("mode", [VerifyMode.READBACK, VerifyMode.DISK])
def test_a_disk_that_changes_a_byte_is_noticed(
    checkpoint: Callable[..., ExportPlan], mode: VerifyMode
) -> None:
    plan = checkpoint()

    spoiled: list[Progress] = []

    def spoil(progress: Progress) -> None:
        """Change the second shard once, when all of it is written and none of it read again."""
        if progress.phase is Phase.VERIFY and not spoiled:
            spoiled.append(progress)
            path = plan.out_dir.with_name("out.partial") / plan.shards[1].filename
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xee")

    with pytest.raises(VerificationError, match="does not read back as it was written"):
        run_plan(plan, verify=mode, progress=spoil)
    assert not plan.out_dir.exists()


def test_a_small_file_that_a_disk_changes_is_noticed(
    checkpoint: Callable[..., ExportPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = finish.write_file

    def spoil(path: Path, content: Iterable[bytes]) -> FileEntry:
        (path.parent / "config.json").write_bytes(b"[]\n")
        return write(path, content)

    monkeypatch.setattr(finish, "write_file", spoil)
    plan = checkpoint()
    with pytest.raises(VerificationError, match="does not read back as it was written"):
        run_plan(plan)
    assert not plan.out_dir.exists()


def test_a_disk_that_once_did_not_take_bytes_is_not_believed_later(
    checkpoint: Callable[..., ExportPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk tells of lost bytes once: what is asked of it after that succeeds."""
    asked: list[OutputFile] = []

    def sync(file: OutputFile) -> None:
        asked.append(file)
        if len(asked) == 1:
            raise OutputError("cannot be written: Input/output error", path=file.path)

    monkeypatch.setattr(part, "_FLUSH_NBYTES", 1)
    monkeypatch.setattr(LocalOutput, "sync", sync)
    plan = checkpoint(chunk_nbytes=28)
    with pytest.raises(OutputError, match="Input/output error"):
        run_plan(plan)
    assert not plan.out_dir.exists()


def _replaced(plan: ExportPlan, old: bytes, new: bytes) -> SafetensorsFrame:
    ((_, header),) = plan.shards[0].frame.pieces(())
    return SafetensorsFrame(header.replace(old, new))


@pytest.mark.parametrize("mode", VerifyMode)
def test_a_file_that_the_library_cannot_open_is_never_committed(
    checkpoint: Callable[..., ExportPlan], mode: VerifyMode
) -> None:
    plan = checkpoint()
    first = structs.replace(plan.shards[0], frame=_replaced(plan, b"F32", b"F99"))
    with pytest.raises(VerificationError, match="safetensors library cannot open it"):
        run_plan(replace(plan, shards=(first, plan.shards[1])), verify=mode)
    assert not plan.out_dir.exists()


def test_a_file_that_holds_another_name_is_never_committed(
    checkpoint: Callable[..., ExportPlan],
) -> None:
    plan = checkpoint()
    first = structs.replace(plan.shards[0], frame=_replaced(plan, b'"a"', b'"z"'))
    with pytest.raises(VerificationError, match="holds other tensors than planned"):
        run_plan(replace(plan, shards=(first, plan.shards[1])))


def test_a_file_system_that_refuses_a_write_is_an_output_error(tmp_path: Path) -> None:
    """The limit on a file's size stands for a full disk: the system refuses in the same place."""
    script = (
        "import resource, sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from zexport.errors import OutputError\n"
        "from zexport.run.execute import run_plan\n"
        "from zexport.export.plan import SideFile\n"
        "from tests.support.plans import export_plan\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "side = SideFile('big', content=bytes(5000))\n"
        "plan = export_plan(Path(sys.argv[1]), {}, [], side_files=(side,))\n"
        "try: run_plan(plan)\n"
        "except OutputError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "big: cannot be written: File too large." in done.stdout
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A tensor of 400 MB goes through a process that stays below 120."""
    (tmp_path / "c").mkdir()
    path = tmp_path / "c" / "rank.pt"
    with path.open("wb") as file:
        file.truncate(1 << 20)
    file_ = source_file(path)
    piece = Extent(path, 0, 1 << 20)
    source = Chain((piece,) * 400)
    plan = export_plan(
        tmp_path / "out",
        {"model.safetensors": [Wanted("x", (100 << 20,), DType.F32, DType.F32, source)]},
        [file_],
    )
    script = (
        "import pickle, re, sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from zexport.run.execute import run_plan\n"
        "run_plan(pickle.load(sys.stdin.buffer))\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])\n"
    )
    frozen = pickle.dumps(replace(plan, chunk_nbytes=4 << 20, provenance={}))
    done = subprocess.run(
        [sys.executable, "-c", script], input=frozen, capture_output=True, check=True, timeout=120
    )
    assert int(done.stdout) < 120 * 1024
