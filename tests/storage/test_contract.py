"""Every storage: equal bytes, and nothing half-made after a failure."""

from __future__ import annotations

import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zexport
from tests.storage.conftest import Bucket, Local, Place, files
from tests.support.buckets import EMULATORS, REFUSED, Answer, Request
from tests.support.checkpoints import Model, Run, save, values
from zexport import CheckpointError, ExportOptions, OutputError, ReshardOptions, ZexportError

ROOT = Path(__file__).parents[2]
RANKS = ROOT / "fixtures" / "z2_w2_bf16_groups" / "ckpt"
SHARDS = ExportOptions(max_shard_nbytes=1_000_000)
MANIFEST_NAME = "zexport_manifest.json"
OVERWRITE = replace(SHARDS, overwrite=True)
ON_3 = ReshardOptions(world_size=3)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Model([{f"layers.{n}.w": values((300, 300), n) for n in range(8)}])
    return save(model, Run(stage=2), tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed export on a disk."""
    out = tmp_path_factory.mktemp("whole") / "out"
    zexport.consolidate(run, out, SHARDS)
    return files(out)


@pytest.fixture(scope="module")
def on_3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed resharding on a disk."""
    out = tmp_path_factory.mktemp("ranks") / "out"
    zexport.reshard(RANKS, out, ON_3)
    return files(out)


def _weights(found: dict[str, bytes]) -> dict[str, bytes]:
    """All files except the manifest, which records times of the sources."""
    return {name: content for name, content in found.items() if name != MANIFEST_NAME}


def _leaves_nothing(place: Place, name: str = "out") -> None:
    """Nothing looks complete."""
    if isinstance(place, Local):
        assert not Path(place.at(name)).exists()
    assert MANIFEST_NAME not in place.files(name)


# --- the same bytes ---


def test_export_into_a_storage_equals_export_on_a_disk(
    place: Place, run: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, far = place.at("out"), place.put(run, "run")
    assert str(zexport.consolidate(run, out, SHARDS).out_dir) == out
    assert place.files("out") == whole
    zexport.consolidate(far, place.at("far"), SHARDS)
    zexport.consolidate(far, tmp_path / "near", SHARDS)
    assert _weights(place.files("far")) == _weights(files(tmp_path / "near")) == _weights(whole)
    assert zexport.verify_export(out, against=run).ok
    assert zexport.verify_export(place.at("far"), against=far).ok
    assert zexport.diff_models(out, tmp_path / "near").is_equal
    with pytest.raises(OutputError, match="exists and is not empty"):
        zexport.consolidate(run, out, SHARDS)
    assert place.files("out") == whole


def test_resharding_into_a_storage_equals_resharding_on_a_disk(
    place: Place, on_3: dict[str, bytes]
) -> None:
    far = place.put(RANKS, f"{RANKS.parent.name}/{RANKS.name}")
    zexport.reshard(RANKS, place.at("out"), ON_3)
    assert place.files("out") == on_3
    zexport.reshard(far, place.at("far"), ON_3)
    assert _weights(place.files("far")) == _weights(on_3)
    assert zexport.open_checkpoint(place.at("far")).ranks == 3
    with pytest.raises(OutputError, match="contains a checkpoint, which an export never replaces"):
        zexport.consolidate(RANKS, place.at("out"), OVERWRITE)
    assert place.files("out") == on_3


# --- parts ---


def _part(run: Path | str, place: Place, number: int, count: int = 3, **other: Any) -> Any:
    options = replace(SHARDS, **other)
    return zexport.consolidate_part(run, place.at("out"), zexport.Share(number, count), options)


def test_parts_write_what_one_process_writes(
    place: Place, run: Path, whole: dict[str, bytes]
) -> None:
    with place.full_after(1), pytest.raises(OutputError):
        _part(run, place, 3)
    for number in (3, 1):
        assert isinstance(_part(run, place, number), zexport.PartReport)
        _leaves_nothing(place)
    with pytest.raises(OutputError):
        _part(run, place, 2, dtype="bf16")
    with pytest.raises(OutputError):  # a part is missing
        zexport.finish_export(place.at("out"))
    _leaves_nothing(place)
    assert isinstance(_part(run, place, 2), zexport.ExportReport)
    assert place.files("out") == whole
    _part(run, place, 2)
    assert place.files("out") == whole


# --- interruptions ---


def _consolidated(place: Place, run: Path) -> None:
    zexport.consolidate(run, place.at("out"), SHARDS)


def _resharded(place: Place, _: Path) -> None:
    zexport.reshard(RANKS, place.at("out"), ON_3)


@pytest.mark.parametrize(("act", "writes"), [(_consolidated, 3), (_resharded, 0)])
def test_refused_write_leaves_nothing_that_looks_complete(
    act: Callable[..., Any],
    writes: int,
    place: Place,
    run: Path,
    whole: dict[str, bytes],
    on_3: dict[str, bytes],
) -> None:
    with place.full_after(writes), pytest.raises(OutputError) as caught:
        act(place, run)
    assert (caught.value.exit_code, caught.value.kind) == (6, "output")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(place.at(""))
    _leaves_nothing(place)
    with pytest.raises(ZexportError):
        zexport.verify_export(place.at("out"))
    act(place, run)
    assert place.files("out") == (whole if act is _consolidated else on_3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
@pytest.mark.parametrize("place", EMULATORS[:1], indirect=True)
def test_interrupted_command_leaves_nothing_and_a_rerun_finishes(
    number: int, code: int, place: Bucket, run: Path, whole: dict[str, bytes]
) -> None:
    process: list[subprocess.Popen[str]] = []

    def interrupt(one: Request) -> Answer | None:
        if not one.writes("model-00003-of-00004.safetensors"):
            return None
        process[0].send_signal(number)
        return Answer(after_s=0.5)

    place.server.fault = interrupt
    words = (sys.executable, "-m", "zexport", "consolidate", run, place.at("out"), "-q")
    options = ("--max-shard-size", "1MB", "--jobs", "1")
    process.append(subprocess.Popen([*words, *options], stderr=subprocess.PIPE, text=True))
    said = process[0].communicate(timeout=60)[1]
    assert process[0].returncode == code, said
    assert said.count("\n") == (code > 0)
    place.server.fault = lambda _: None
    _leaves_nothing(place)
    zexport.consolidate(run, place.at("out"), SHARDS)
    assert place.files("out") == whole


def test_interrupted_overwrite_leaves_one_model_or_none(
    place: Place, run: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    other = save(Model([{"w": values((700, 900), 1)}]), Run(stage=2), tmp_path / "other")
    zexport.consolidate(other, place.at("out"))
    before = place.files("out")
    with place.full_after(3), pytest.raises(OutputError):
        zexport.consolidate(run, place.at("out"), OVERWRITE)
    left = {n: c for n, c in place.files("out").items() if not n.startswith(".zexport_journal")}
    assert left == before or MANIFEST_NAME not in left
    zexport.consolidate(run, place.at("out"), OVERWRITE)
    assert place.files("out") == whole


# --- changes by others ---


def test_foreign_files_are_never_removed(place: Place, run: Path) -> None:
    place.write("out/notes/mine.txt", b"mine")
    with pytest.raises(OutputError, match="exists and is not empty"):
        zexport.consolidate(run, place.at("out"), SHARDS)
    with pytest.raises(OutputError):
        zexport.consolidate(run, place.at("out"), OVERWRITE)
    with pytest.raises(OutputError):
        zexport.reshard(RANKS, place.at("out"), replace(ON_3, overwrite=True))
    assert place.files("out") == {"notes/mine.txt": b"mine"}


def test_edited_export_is_not_replaced_and_not_verified(
    place: Place, run: Path, whole: dict[str, bytes]
) -> None:
    zexport.consolidate(run, place.at("out"), SHARDS)
    name = "model-00002-of-00004.safetensors"
    place.write(f"out/{name}", whole[name][:-4] + b"mine")
    with pytest.raises(OutputError, match=name):
        zexport.consolidate(run, place.at("out"), OVERWRITE)
    assert place.files("out")[name].endswith(b"mine")
    assert not zexport.verify_export(place.at("out")).ok


def test_source_that_changes_after_planning_is_not_exported(place: Place, run: Path) -> None:
    far = place.put(run, "run")
    plan = zexport.plan_export(zexport.open_checkpoint(far), place.at("out"), SHARDS)
    (path,) = run.rglob("*rank_1*optim_states.pt")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    place.write(f"run/{path.relative_to(run)}", bytes(content))
    with pytest.raises(CheckpointError, match=r"changed|replaced") as caught:
        zexport.run_export(plan)
    assert str(caught.value.path) == f"{far}/{path.relative_to(run)}"
    _leaves_nothing(place)


# --- faults ---

_BUSY = Answer("503 Service Unavailable", "SlowDown", (("Retry-After", "1"),))
_PASSING = (
    *(
        Answer("500 Internal Server Error", "InternalError", is_done=is_done)
        for is_done in (False, True)
    ),
    *(_BUSY, Answer(cut=100), Answer(after_s=0.1)),
)
_LASTING = {
    "refuses access": REFUSED,
    "replaced": Answer("412 Precondition Failed", "PreconditionFailed"),
    "503": _BUSY,
    "cut off|cannot be reached": Answer(cut=1000),
    "too short": Answer(cut=1000, is_short=True),
    "cannot be reached": Answer(is_closed=True),
}


@pytest.mark.parametrize("place", EMULATORS[:1], indirect=True)
def test_passing_fault_of_a_store_changes_no_byte(
    place: Bucket, run: Path, whole: dict[str, bytes]
) -> None:
    """Every third request fails the first time, each in another way."""
    far, failed = place.put(run, "run"), list[Answer]()

    def fail(one: Request) -> Answer | None:
        if one.count or zlib.crc32(f"{one.method} {one.key[-30:]}".encode()) % 3:
            return None
        failed.append(_PASSING[len(failed) % len(_PASSING)])
        return failed[-1]

    place.server.fault = fail
    zexport.consolidate(far, place.at("out"), SHARDS)
    place.server.fault = lambda _: None
    assert len(failed) >= len(_PASSING)
    assert _weights(place.files("out")) == _weights(whole)
    assert zexport.verify_export(place.at("out"), against=far).ok


@pytest.mark.parametrize("place", EMULATORS[:1], indirect=True)
def test_lasting_fault_of_a_store_is_one_error(place: Bucket, run: Path) -> None:
    far = place.put(run, "run")
    plan = zexport.plan_export(zexport.open_checkpoint(far), place.at("out"), SHARDS)
    for word, fault in _LASTING.items():
        place.server.fault = lambda one, fault=fault: (  # type: ignore[misc]
            fault if one.method == "GET" and one.key.endswith("optim_states.pt") else None
        )
        with pytest.raises(CheckpointError, match=word) as caught:
            zexport.run_export(plan)
        assert (caught.value.exit_code, caught.value.kind) == (3, "checkpoint")
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{far}/global_step2/")
    place.server.fault = lambda _: None
    _leaves_nothing(place)
