"""What a stopped export leaves, and how the next one goes on from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.stopping import SHARDS, files, four_shards, stopped_after
from zexport.errors import DamagedCheckpointError, OutputError, VerificationError
from zexport.export import plan_digest as digest
from zexport.export.plan import ExportPlan
from zexport.filenames import RECEIPTS
from zexport.ranges.dtypes import DType
from zexport.run.execute import VerifyMode, run_plan
from zexport.run.receipts import finished_files
from zexport.run.verify import verify_export

FULL = OutputError("cannot be written: No space left on device")
FULL.__cause__ = OSError(28, "No space left on device")


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """Four shards that share their records."""
    return four_shards(tmp_path / "ckpt", tmp_path / "out")


@pytest.fixture
def whole(plan: ExportPlan, tmp_path: Path) -> dict[str, bytes]:
    """The files of an export that nothing stopped."""
    run_plan(replace(plan, out_dir=tmp_path / "whole"))
    return files(tmp_path / "whole")


def _stop(plan: ExportPlan, count: int, error: BaseException | None = None) -> Path:
    """Stop an export after some shards; the folder that it leaves."""
    error = error or KeyboardInterrupt()
    with stopped_after(count, error), pytest.raises(type(error)):
        run_plan(plan)
    assert not plan.out_dir.exists()
    return plan.out_dir.with_name("out.partial")


@pytest.mark.parametrize("mode", VerifyMode)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), FULL], ids=repr)
def test_a_rerun_takes_finished_files_over_and_gives_the_same_bytes(
    plan: ExportPlan,
    whole: dict[str, bytes],
    count: int,
    mode: VerifyMode,
    error: BaseException,
) -> None:
    left = _stop(plan, count, error)
    assert finished_files(left) == SHARDS[:count]
    assert {path.name for path in left.iterdir()} == {RECEIPTS, *SHARDS[:count]}
    report = run_plan(plan, verify=mode)
    assert report.resumed == SHARDS[:count]
    assert report.nbytes_read < 2 * 16000 + 56
    assert files(plan.out_dir) == whole
    assert sorted(path.name for path in plan.out_dir.parent.iterdir() if "out" in path.name) == [
        "out"
    ]
    assert verify_export(plan.out_dir, plan=plan).ok


def test_an_export_stopped_again_and_again_ends_all_the_same(
    plan: ExportPlan, whole: dict[str, bytes]
) -> None:
    for count in (1, 2, 3):
        assert finished_files(_stop(plan, count)) == SHARDS[:count]
    assert run_plan(plan).resumed == SHARDS[:3]
    assert files(plan.out_dir) == whole


def test_an_interrupt_says_what_is_kept(plan: ExportPlan) -> None:
    error = KeyboardInterrupt()
    left = _stop(plan, 2, error)
    assert error.__notes__ == [
        f"Kept 2 finished shards in {left}: the same command goes on from there."
    ]


@pytest.mark.parametrize("error", [VerificationError("bad"), DamagedCheckpointError("bad")])
def test_after_a_refusal_nothing_is_kept(plan: ExportPlan, error: Exception) -> None:
    assert not _stop(plan, 2, error).exists()
    assert not list(plan.out_dir.parent.glob("out*"))


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda left: _flip(left / SHARDS[1], -1),
        lambda left: _flip(left / SHARDS[1], 20),
        lambda left: _flip(left / RECEIPTS / f"{SHARDS[1]}.json", -30),
        lambda left: (left / RECEIPTS / f"{SHARDS[1]}.json").write_bytes(b"{}"),
        lambda left: (left / RECEIPTS / f"{SHARDS[1]}.json").unlink(),
        lambda left: (left / SHARDS[1]).unlink(),
        lambda left: os.truncate(left / SHARDS[1], 100),
    ],
    ids=["value", "header", "note", "seal", "no note", "no shard", "short"],
)
def test_a_shard_that_does_not_hold_is_made_anew(
    plan: ExportPlan, whole: dict[str, bytes], spoil: Callable[[Path], object]
) -> None:
    spoil(_stop(plan, 3))
    assert run_plan(plan).resumed == (SHARDS[0], SHARDS[2])
    assert files(plan.out_dir) == whole


def test_what_does_not_belong_is_cleared_away(plan: ExportPlan, whole: dict[str, bytes]) -> None:
    left = _stop(plan, 1)
    (left / "sub").mkdir()
    (left / "sub" / "stray").touch()
    (left / "stray.safetensors").touch()
    (left / RECEIPTS / "stray.safetensors.json").touch()
    (left / RECEIPTS / f"{SHARDS[2]}.json.new").touch()
    assert run_plan(plan).resumed == SHARDS[:1]
    assert files(plan.out_dir) == whole


def test_another_plan_starts_over(plan: ExportPlan, tmp_path: Path) -> None:
    _stop(plan, 3)
    other = four_shards(tmp_path / "ckpt", plan.out_dir, DType.BF16)
    assert run_plan(other).resumed == ()
    assert verify_export(plan.out_dir, plan=other).ok


def test_other_threads_and_memory_are_the_same_plan(
    plan: ExportPlan, whole: dict[str, bytes]
) -> None:
    _stop(plan, 2)
    assert run_plan(replace(plan, jobs=1, chunk_nbytes=700)).resumed == SHARDS[:2]
    assert files(plan.out_dir) == whole


def test_a_source_of_another_time_starts_over(plan: ExportPlan, tmp_path: Path) -> None:
    _stop(plan, 3)
    os.utime(plan.sources[0].path, ns=(0, plan.sources[0].version.mtime_ns + 1))
    assert run_plan(four_shards(tmp_path / "ckpt", plan.out_dir)).resumed == ()


def test_a_source_without_checksums_elsewhere_starts_over(plan: ExportPlan, tmp_path: Path) -> None:
    """Two bases may be alike in name, size and time; nothing else tells one from the other."""
    plain = [structs.replace(source, members=()) for source in plan.sources]
    one = replace(plan, sources=tuple(plain))
    _stop(one, 2)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    places = {source.path: elsewhere / source.path.name for source in plain}
    for source in plain:
        status = source.path.stat()
        source.path.rename(places[source.path])
        places[source.path].write_bytes(places[source.path].read_bytes()[::-1])
        os.utime(places[source.path], ns=(status.st_atime_ns, status.st_mtime_ns))
        source.path.symlink_to(places[source.path])
    assert run_plan(one).resumed == ()


def test_a_link_in_the_place_of_a_finished_file_is_not_taken_over(
    plan: ExportPlan, whole: dict[str, bytes], tmp_path: Path
) -> None:
    left = _stop(plan, 2)
    (left / SHARDS[0]).rename(tmp_path / "elsewhere")
    (left / SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    assert run_plan(plan).resumed == SHARDS[1:2]
    assert files(plan.out_dir) == whole
    assert not (plan.out_dir / SHARDS[0]).is_symlink()


def test_another_version_starts_over(plan: ExportPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    _stop(plan, 3)
    monkeypatch.setattr(digest, "__version__", "9.9")
    assert run_plan(plan).resumed == ()


def test_what_was_read_before_the_stop_is_proved_with_the_rest(plan: ExportPlan) -> None:
    """The first run read a wrong byte, which is right again when the second begins."""
    source = plan.sources[0]
    at = source.members[0].offset + 40
    _flip(source.path, at)
    os.utime(source.path, ns=(0, source.version.mtime_ns))
    left = _stop(plan, 2)
    assert finished_files(left) == SHARDS[:2]
    _flip(source.path, at)
    os.utime(source.path, ns=(0, source.version.mtime_ns))
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        run_plan(plan)
    assert not list(plan.out_dir.parent.glob("out*"))
    assert run_plan(plan).resumed == ()
