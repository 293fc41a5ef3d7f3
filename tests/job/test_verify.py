"""``zexport verify`` reports every change of an export."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import Model, Run, edit, save, values
from tests.support.published import check
from tests.support.stopping import SHARDS, Job, files, flip, four_shards
from zexport import (
    CheckpointError,
    OutputError,
    ReshardOptions,
    UnsafeError,
    UsageError,
    VerificationError,
)
from zexport.export.verify import find_edits
from zexport.filenames import MANIFEST_NAME

FIXTURES = Path(__file__).parents[2] / "fixtures"
INDEX = "model.safetensors.index.json"
W = tuple(f"layers.{n}.w" for n in range(4))
OTHER_BYTES = "does not contain the bytes that were written"
OTHER_VALUES = "has other values in the file than when exported"
OTHER_SHAPE = "has another shape or dtype in the file than when exported"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An export of four shards; not to be changed."""
    job = four_shards(tmp_path_factory.mktemp("exported"))
    job.run()
    return job


@pytest.fixture
def out(exported: Job, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(exported.out, tmp_path / "out")


def _problems(out: Path, against: Path | None = None) -> set[tuple[str, str, str]]:
    report = zexport.verify_export(out, against=against)
    assert report.ok == bool(report) == (not report.problems)
    return {(one.file, one.tensor, one.problem) for one in report.problems}


def _edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file; a manifest has the right digest afterwards."""
    table = json.loads(path.read_bytes())
    change(table)
    text = json.dumps({key: value for key, value in table.items() if key != "blake3"})
    rest = f"{{\n{text[1:]}"
    seal = f'  "blake3": "{blake3(rest.encode()).hexdigest()}",\n' if "blake3" in table else ""
    path.write_text(f"{{\n{seal}{text[1:]}")


def _digest(name: str, data: bytes) -> str:
    """Return a file's digest in the manifest; a shard's covers header and tensor digests."""
    if not name.endswith(".safetensors"):
        return blake3(data).hexdigest()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    table.pop("__metadata__", None)
    ranges = sorted(entry["data_offsets"] for entry in table.values())
    digests = [blake3(data[begin + a : begin + b]).digest() for a, b in ranges]
    return blake3(data[:begin] + b"".join(digests)).hexdigest()


def _relist(out: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed."""
    data = (out / name).read_bytes()
    entry = {"nbytes": len(data), "blake3": _digest(name, data)}
    _edit_json(out / MANIFEST_NAME, lambda table: table["files"].update({name: entry}))


def test_sound_export_has_no_problems(exported: Job) -> None:
    steps: list[zexport.Progress] = []
    report = zexport.verify_export(exported.out, against=exported.source, progress=steps.append)
    assert report.ok
    assert (report.files, report.tensors, report.against_checkpoint) == (6, 4, True)
    assert steps[-1].nbytes_done == steps[-1].nbytes_total
    small = ("README.md", INDEX)
    assert (report.by_manifest_alone, report.warnings, report.conclusion) == (small, (), "")
    (note,) = report.notes
    assert note.startswith("warning of the export: weights only")
    assert report.origin == report.compared_with
    assert report.origin is not None
    assert (report.origin.folder, report.origin.step) == (f"{exported.source}/global_step2", 2)
    first, alone = len(steps), zexport.verify_export(exported.out, progress=steps.append)
    assert steps[-1].nbytes_done == steps[-1].nbytes_total < steps[0].nbytes_total
    assert len(steps) > first
    assert (alone.against_checkpoint, alone.compared_with, alone.is_checkpoint) == (
        False,
        None,
        False,
    )
    assert alone.by_manifest_alone == tuple(sorted([*small, *SHARDS]))
    assert alone.origin is not None
    assert (alone.origin.folder, alone.origin.step) == ("ckpt/global_step2", 2)
    assert (alone.base, alone.conclusion) == (None, "")


def test_manifest_has_the_digests_of_the_bytes_on_the_disk(exported: Job) -> None:
    found = files(exported.out)
    manifest = check("manifest", json.loads(found.pop(MANIFEST_NAME)))
    assert {name: (one["nbytes"], one["blake3"]) for name, one in manifest["files"].items()} == {
        name: (len(data), _digest(name, data)) for name, data in found.items()
    }
    for name, shard in zip(W, SHARDS, strict=True):
        entry, tensor = manifest["tensors"][name], load_file(exported.out / shard)[name]
        assert entry["blake3"] == blake3(tensor.numpy().tobytes()).hexdigest()
        assert (entry["shard"], entry["dtype"], entry["shape"]) == (shard, "F32", [500, 500])
    for one in manifest["sources"]:
        status = next(exported.source.glob(f"*/{Path(one['path']).name}")).stat()
        assert (one["nbytes"], one["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    lines = (exported.out / MANIFEST_NAME).read_bytes().splitlines(keepends=True)
    others = [line for line in lines if not line.startswith(b'  "blake3": ')]
    assert manifest["blake3"] == blake3(b"".join(others)).hexdigest()


def _swap(out: Path) -> None:
    save_file({W[0]: torch.zeros(100, 10), "new": torch.zeros(1)}, out / SHARDS[0])
    _relist(out, SHARDS[0])


def _lose(out: Path) -> None:
    save_file({"new": torch.zeros(1)}, out / SHARDS[0])
    _relist(out, SHARDS[0])


_TAMPERED: dict[str, tuple[Callable[[Path], object], tuple[str, str, str]]] = {
    "value": (lambda out: flip(out / SHARDS[1], -1), (SHARDS[1], W[1], OTHER_VALUES)),
    "header": (
        lambda out: flip(out / SHARDS[1], 34),
        (SHARDS[1], "", "header"),
    ),
    "small file": (lambda out: flip(out / "README.md", -1), ("README.md", "", OTHER_BYTES)),
    "missing shard": (
        lambda out: (out / SHARDS[0]).unlink(),
        (SHARDS[0], "", "cannot be read"),
    ),
    "cut shard": (
        lambda out: os.truncate(out / SHARDS[0], 1_000_119),
        (SHARDS[0], "", "1000119 bytes"),
    ),
    "stray shard": (
        lambda out: save_file({"x": torch.ones(1)}, out / "stray.safetensors"),
        ("stray.safetensors", "", "not listed"),
    ),
    "another shape": (_swap, (SHARDS[0], W[0], OTHER_SHAPE)),
    "another tensor": (_swap, (SHARDS[0], "new", "is in the file but was not exported")),
    "missing tensor": (_lose, (SHARDS[0], W[0], "was exported but is not in the file")),
}


@pytest.mark.parametrize("what", _TAMPERED)
def test_tampering_is_reported(out: Path, what: str) -> None:
    act, (name, tensor, words) = _TAMPERED[what]
    act(out)
    found = _problems(out)
    assert any((file, of) == (name, tensor) and words in text for file, of, text in found)
    assert {file for file, *_ in found} <= {name, INDEX}


def test_every_damaged_file_is_reported(out: Path) -> None:
    (out / "README.md").unlink()
    (out / SHARDS[0]).write_bytes(b"")
    flip(out / SHARDS[2], -1)
    assert {file for file, *_ in _problems(out)} == {"README.md", SHARDS[0], SHARDS[2]}
    (out / MANIFEST_NAME).write_bytes((out / MANIFEST_NAME).read_bytes() + b" ")
    assert zexport.verify_export(out).problems[0].file == MANIFEST_NAME


def test_added_files_that_change_what_loads_are_named(out: Path) -> None:
    for name in ("modeling_x.py", "notes.txt", "sub.json"):
        (out / name).write_text("x")
    report = zexport.verify_export(out)
    assert report.ok
    assert report.warnings == ("modeling_x.py was added to the export and may change what loads",)


def test_edits_since_the_export_are_found_without_reading_shards(out: Path) -> None:
    assert find_edits(out) == []
    at, size = (out / SHARDS[0]).stat().st_mtime_ns, (out / SHARDS[0]).stat().st_size
    flip(out / SHARDS[0], -1)
    assert find_edits(out) == []  # as it was published, by size and time
    os.truncate(out / SHARDS[0], size - 4)
    os.utime(out / SHARDS[0], ns=(at, at))
    flip(out / SHARDS[1], -1)
    os.utime(out / SHARDS[1])
    flip(out / "README.md", -1)
    (out / INDEX).unlink()
    (out / "more.txt").write_text("x")
    assert {(one.file, one.problem) for one in find_edits(out) if not one.tensor} == {
        (SHARDS[0], f"has {size - 4} bytes, {size} were written"),
        (SHARDS[1], OTHER_BYTES),
        ("README.md", OTHER_BYTES),
        (INDEX, "was removed"),
        ("more.txt", "was added"),
    }
    (out / MANIFEST_NAME).write_bytes((out / MANIFEST_NAME).read_bytes() + b" ")
    assert [one.problem for one in find_edits(out)] == [
        "is not what was written: its digest differs"
    ]
    (out / MANIFEST_NAME).unlink()
    (out / "not of zexport").mkdir()
    (out / "not of zexport" / "link").symlink_to("/")
    assert [one.file for one in find_edits(out)] == [MANIFEST_NAME]
    report = zexport.verify_export(out)
    assert (report.files, report.tensors, report.against_checkpoint) == (0, 0, False)
    assert _problems(out) == {(MANIFEST_NAME, "", report.problems[0].problem)}


def test_changed_line_of_a_manifest_is_reported(out: Path) -> None:
    path = out / MANIFEST_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines[::3]):
        digits = (c for c in b"0123456789" if bytes([c]) in line)
        other = line.replace(bytes([next(digits, 0)]), b"z", 1) + b" "
        path.write_bytes(b"".join([*lines[: 3 * number], other, *lines[3 * number + 1 :]]))
        assert _problems(out), line
    path.write_bytes(b"".join(lines))
    assert not _problems(out)


@pytest.mark.parametrize("key", ["schema", "files", "tensors", "sources"])
def test_malformed_manifest_is_refused(out: Path, key: str) -> None:
    for value in (None, 7, "x", ["x"], {"x": "x"}):
        _edit_json(out / MANIFEST_NAME, lambda table, value=value: table.update({key: value}))
        assert MANIFEST_NAME in {file for file, *_ in _problems(out)}
        with pytest.raises(OutputError, match=MANIFEST_NAME):
            zexport.consolidate(FIXTURES / "z3_w2_bf16" / "ckpt", out, overwrite=True)


# --- against a checkpoint ---


def test_other_values_in_the_checkpoint_are_reported(
    exported: Job, out: Path, tmp_path: Path
) -> None:
    other = four_shards(tmp_path, seed=1).source
    report = zexport.verify_export(out, against=other)
    found = {(one.file, one.tensor, one.problem) for one in report.problems}
    assert found == {
        (shard, name, "has other values in the checkpoint than when exported")
        for shard, name in zip(SHARDS, W, strict=True)
    }
    assert report.conclusion.startswith("4 of 4 tensors differ")
    assert "another run or step" in report.conclusion
    (out / SHARDS[0]).write_bytes(b"")
    report = zexport.verify_export(out, against=other)
    assert report.conclusion == ""
    assert {one.tensor for one in report.problems} == {"", *W}
    _edit_json(out / MANIFEST_NAME, lambda table: table.pop("checkpoint"))
    assert zexport.verify_export(out, against=other).origin is None
    assert not _problems(exported.out)


def test_conclusion_needs_other_files_and_most_tensors(
    exported: Job, out: Path, tmp_path: Path
) -> None:
    def conclusion(folder: str, changed: Sequence[str]) -> str:
        layers = {name: values((500, 500), number) for number, name in enumerate(W)}
        layers |= {name: values((500, 500), 9) for name in changed}
        root = save(Model([layers]), Run(stage=2), tmp_path / folder)
        return zexport.verify_export(exported.out, against=root).conclusion

    assert conclusion("half", W[:2]) == ""
    assert conclusion("all", [*W, "more"]).startswith("5 of 5 tensors differ")
    change = {"dtype": "bf16"}
    _edit_json(out / MANIFEST_NAME, lambda table: table["options"].update(change))
    report = zexport.verify_export(out, against=exported.source)
    assert (len(report.problems), report.conclusion) == (4, "")


def test_tensors_that_are_in_another_shard_now_are_equal(tmp_path: Path) -> None:
    tensors = {name: values((4, 4), number) for number, name in enumerate("abc")}
    for name, more in (("then", {}), ("now", {"0": values((1,), 9)})):
        save(Model([{**more, **tensors}]), Run(stage=2), tmp_path / name)
    options = zexport.ExportOptions(layout=zexport.NameLayout.MEMORY, max_shard_nbytes=128)
    zexport.consolidate(tmp_path / "then", tmp_path / "out", options)
    assert _problems(tmp_path / "out", tmp_path / "now") == {
        ("model-00001-of-00002.safetensors", "0", "is in the checkpoint but was not exported")
    }


def test_step_of_the_export_differs_from_the_checkpoint(exported: Job, out: Path) -> None:
    change = {"global_steps": 9, "warnings": ["of the run"]}
    _edit_json(out / MANIFEST_NAME, lambda table: table["checkpoint"].update(change))
    report = zexport.verify_export(out, against=exported.source)
    assert report.ok
    assert report.warnings == ("the export is of step 9, the checkpoint of step 2",)
    assert report.notes[0] == "warning of the export: of the run"
    assert report.origin is not None
    assert report.origin.step == 9
    (out / MANIFEST_NAME).write_bytes((exported.out / MANIFEST_NAME).read_bytes())
    _edit_json(out / MANIFEST_NAME, lambda table: table["checkpoint"].update(tag=5))
    assert zexport.verify_export(out, against=exported.source).ok  # by `latest`
    _edit_json(out / MANIFEST_NAME, lambda table: table.pop("checkpoint"))
    assert zexport.verify_export(out).origin is None
    assert zexport.verify_export(out, against=exported.source).origin is not None


def test_other_source_files_with_equal_tensors_are_reported(exported: Job, out: Path) -> None:
    path = out / MANIFEST_NAME
    _edit_json(path, lambda table: table["sources"][0].update(mtime_ns=1))
    assert not _problems(out, exported.source)  # it was only copied
    _edit_json(path, lambda table: table["sources"][0].update(blake3="00"))
    report = zexport.verify_export(out, against=exported.source)
    (problem,) = report.problems
    assert problem.problem.endswith("is not what was read for the export")
    assert (problem.file, problem.tensor) == ("", "")
    assert "equal" in report.conclusion
    _edit_json(path, lambda table: table["sources"][0].update(path="other.pt"))
    assert {one.partition(".pt ")[2] for *_, one in _problems(out, exported.source)} == {
        "was not read for the export",
        "is not read any more",
    }
    _edit_json(path, lambda table: table["tensors"][W[0]].update(blake3="00"))
    report = zexport.verify_export(out, against=exported.source)
    assert ({one.tensor for one in report.problems}, report.conclusion) == ({W[0]}, "")


def test_folder_and_checkpoint_that_are_verified_are_checked_first(
    exported: Job, out: Path, tmp_path: Path
) -> None:
    for path, words in ((tmp_path / "x", "does not exist"), (out / INDEX, "is not a folder")):
        with pytest.raises(VerificationError, match=words):
            zexport.verify_export(path)
    partial = shutil.copytree(out, tmp_path / "z.partial")
    (tmp_path / "z.partial.lock").touch()
    for path in (partial, tmp_path / "z"):
        with pytest.raises(VerificationError, match="is not finished"):
            zexport.verify_export(path)
    (tmp_path / "shard").write_bytes((out / SHARDS[0]).read_bytes())
    (out / SHARDS[0]).unlink()
    (out / SHARDS[0]).symlink_to(tmp_path / "shard")
    with pytest.raises(UnsafeError):
        zexport.verify_export(out)
    assert zexport.verify_export(out, follow_symlinks=True).ok
    run = shutil.copytree(exported.source, tmp_path / "run")
    shutil.copytree(run / "global_step2", run / "global_step4")
    (run / "latest").write_text("global_step4")
    report = zexport.verify_export(exported.out, against=run)
    assert report.compared_with is not None
    assert report.compared_with.folder.endswith("global_step2")  # the tag of the export
    shutil.rmtree(run / "global_step2")
    with pytest.raises(CheckpointError, match="is not the checkpoint that the export was made"):
        zexport.verify_export(exported.out, against=run)
    change = {"dtype": "fp4"}
    _edit_json(out / MANIFEST_NAME, lambda table: table["options"].update(change))
    with pytest.raises(VerificationError, match="records options that no export can have"):
        zexport.verify_export(out, against=exported.source, follow_symlinks=True)


def test_steps_of_verl_all_have_the_tag_actor(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    for step in (2, 10):
        actor = run / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        torch.save({"w": values((4, 4), step)}, actor / "model_world_size_1_rank_0.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    zexport.consolidate(run, out)
    for against in (run, str(run), [run]):
        assert zexport.verify_export(out, against=against).ok
    step = run / "global_step_2"
    shutil.copytree(step / "actor", step / "critic")
    weights = step / "actor" / "model_world_size_1_rank_0.pt"
    weights.symlink_to(weights.rename(tmp_path / "elsewhere.pt"))
    assert zexport.verify_export(out, against=run, follow_symlinks=True).ok
    step.rename(run / "global_step_3")
    with pytest.raises(UsageError, match="global_step_3, global_step_10"):
        zexport.verify_export(out, against=run)


# --- a resharded checkpoint ---


def test_tampering_with_a_resharded_checkpoint_is_reported(tmp_path: Path) -> None:
    source = FIXTURES / "z2_w2_bf16_tied" / "ckpt"
    job = Job(source, tmp_path / "out", ReshardOptions(world_size=3))
    job.run()
    assert not _problems(job.out)
    assert not _problems(job.out, source)
    assert zexport.verify_export(job.out).is_checkpoint
    zexport.reshard(source, tmp_path / "one", ReshardOptions(world_size=1))
    report = zexport.verify_export(job.out, against=tmp_path / "one")
    assert re.match(r"All \d+ pieces are equal", report.conclusion), report
    path = next(job.out.glob("*/*rank_1_*optim*"))
    name, content = path.relative_to(job.out).as_posix(), path.read_bytes()
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    flat = state["single_partition_of_fp32_groups"][0].numpy().tobytes()
    flip(path, content.rindex(flat) + 4)
    found = _problems(job.out)
    assert (name, "", OTHER_BYTES) in found
    assert [tensor for _, tensor, problem in found if problem == OTHER_VALUES]
    path.write_bytes(content)
    stray = path.with_name("stray_optim_states.pt")
    stray.write_bytes(content)
    name = stray.relative_to(job.out).as_posix()
    assert _problems(job.out) == {(name, "", "is not listed in the manifest")}
    stray.unlink()
    other = shutil.copytree(source, tmp_path / "other")
    edit(next(other.glob("*/*rank_0_*optim*")), _add_to_states)
    assert "has other values in the checkpoint than when exported" in {
        one[2] for one in _problems(job.out, other)
    }

    other = shutil.copytree(source, tmp_path / "settings")
    for rank in range(2):
        edit(next(other.glob(f"*/*rank_{rank}_*optim*")), _change_settings)
    problems = _problems(job.out, other)
    settings = "has other settings, or other values than tensors, in the checkpoint"
    assert {one[1:] for one in problems if "source" not in one[2]} == {("", settings)}
    assert {name for name, *_ in problems if name} == {
        path.relative_to(job.out).as_posix() for path in job.out.glob("*/*optim*")
    }


def _change_settings(state: dict[str, Any]) -> None:
    for group in state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        group["weight_decay"] = 0.125


def _add_to_states(state: dict[str, Any]) -> None:
    for one in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        one["exp_avg"] += 1
