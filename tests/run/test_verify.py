"""Exports spoiled in one place each, and what is said of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from msgspec import structs
from safetensors.torch import save_file

from tests.support.forked import typed
from tests.support.plans import Wanted, digest_on_disk, export_plan, save, source_file
from zexport.api import verify as api
from zexport.errors import DamagedCheckpointError, VerificationError
from zexport.export.plan import ExportPlan, SideFile
from zexport.filenames import MANIFEST_NAME
from zexport.ranges.dtypes import DType
from zexport.run.against_checkpoint import Problem
from zexport.run.execute import Progress, run_plan
from zexport.run.verify import INDEX_NAME, verify_export

CHECKPOINT = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PLACES = {"a": SHARDS[0], "b": SHARDS[1]}
INDEX = {"metadata": {"total_size": 1000 * 2 + 500 * 2}, "weight_map": PLACES}


def _plan(folder: Path, a: torch.Tensor, b: torch.Tensor, names: str = "ab") -> ExportPlan:
    file, extents = save(folder / "run" / "rank.pt", [a, b])
    f32, bf16 = DType.F32, DType.BF16
    shards = {
        SHARDS[0]: [Wanted(names[0], (10, 100), f32, bf16, extents[0])],
        SHARDS[1]: [Wanted(names[1], (500,), f32, bf16, extents[1])],
    }
    sides = (SideFile(INDEX_NAME, content=json.dumps(INDEX).encode()),)
    return export_plan(folder / "out", shards, [file], side_files=sides, chunk_nbytes=400)


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    """An export of two shards that has been run."""
    plan = _plan(tmp_path, torch.rand(1000), torch.rand(500))
    run_plan(plan)
    return plan


def _edit_json(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    table = json.loads(path.read_bytes())
    change(table)
    text = json.dumps({key: value for key, value in table.items() if key != "blake3"})
    rest = f"{{\n{text[1:]}"
    seal = f'  "blake3": "{blake3(rest.encode()).hexdigest()}",\n' if "blake3" in table else ""
    path.write_text(f"{{\n{seal}{text[1:]}")


def _relist(out_dir: Path, name: str) -> None:
    """Make the manifest's file entry agree with a file that was changed."""
    path = out_dir / name
    entry = {"nbytes": path.stat().st_size, "blake3": digest_on_disk(name, path.read_bytes())}
    _edit_json(out_dir / MANIFEST_NAME, lambda table: table["files"].update({name: entry}))


def test_a_sound_export_has_no_problems(plan: ExportPlan) -> None:
    told: list[Progress] = []
    report = verify_export(plan.out_dir, plan=plan, progress=told.append)
    assert report.problems == ()
    assert report.ok
    assert (report.files, report.tensors, report.against_checkpoint) == (3, 2, True)
    assert told[-1].nbytes_done == told[-1].nbytes_total
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_folder_without_a_manifest_is_not_judged(tmp_path: Path) -> None:
    for words in ((), ("--against", CHECKPOINT)):
        done = typed("verify", tmp_path, *words)
        assert done.returncode == VerificationError.exit_code
        told = " ".join((done.stdout + done.stderr).split())
        assert "there is no manifest, so nothing can be verified against it" in told
        assert "zexport diff" in told


def test_a_checkpoint_of_another_step_is_warned_of(tmp_path: Path) -> None:
    (source := tmp_path / "run").symlink_to(CHECKPOINT)
    typed("consolidate", source, tmp_path / "out")
    assert "Warnings" not in typed("verify", tmp_path / "out", "--against", source).stdout
    source.unlink()
    shutil.copytree(CHECKPOINT, source)
    for path in source.glob("*/*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        torch.save(state | {"global_steps": 7}, path)
    done = typed("verify", tmp_path / "out", "--against", source)
    assert done.returncode == 0
    assert "the export is of step 2, the checkpoint of step 7" in done.stdout
    assert "made from run/global_step2 (step 2" in done.stdout.replace("ckpt/", "run/")


def test_a_changed_weight_is_found_in_the_file_and_the_tensor(plan: ExportPlan) -> None:
    path = plan.out_dir / SHARDS[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert verify_export(plan.out_dir).problems == (
        Problem(SHARDS[1], "", "does not hold the bytes that were written"),
        Problem(SHARDS[1], "b", "does not hold the values that were written"),
    )


def test_a_changed_side_file_is_found(plan: ExportPlan) -> None:
    path = plan.out_dir / INDEX_NAME
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"a" ').replace(b": {", b":{", 1))
    assert verify_export(plan.out_dir).problems == (
        Problem(INDEX_NAME, "", "does not hold the bytes that were written"),
    )


def test_a_manifest_that_says_something_else_is_found(plan: ExportPlan) -> None:
    """In what no file of the export bears out, too: every line is under the manifest's digest."""
    path = plan.out_dir / MANIFEST_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        digits = (c for c in b"0123456789" if bytes([c]) in line)
        other = line.replace(bytes([next(digits, 0)]), b"z", 1) + b" "
        path.write_bytes(b"".join([*lines[:number], other, *lines[number + 1 :]]))
        assert verify_export(plan.out_dir).problems, line
    path.write_bytes(b"".join(lines))
    assert verify_export(plan.out_dir).ok


@pytest.mark.parametrize("name", [SHARDS[0], INDEX_NAME])
def test_a_missing_file_is_found(plan: ExportPlan, name: str) -> None:
    (plan.out_dir / name).unlink()
    problems = verify_export(plan.out_dir).problems
    assert Problem(name, "", "cannot be read: No such file or directory") in problems


def test_a_truncated_shard_is_found(plan: ExportPlan) -> None:
    path = plan.out_dir / SHARDS[0]
    nbytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    problems = verify_export(plan.out_dir).problems
    assert Problem(SHARDS[0], "", f"has {nbytes - 1} bytes, {nbytes} were written") in problems
    assert Problem(SHARDS[0], "", "has another size than its header says") in problems


def test_a_shard_that_nothing_lists_is_found(plan: ExportPlan) -> None:
    save_file({"x": torch.ones(1)}, plan.out_dir / "stray.safetensors")
    assert verify_export(plan.out_dir).problems == (
        Problem("stray.safetensors", "", "is not listed in the manifest"),
    )


def test_a_shard_swapped_for_another_sound_one_is_found(plan: ExportPlan) -> None:
    tensors = {"a": torch.zeros(100, 10), "new": torch.zeros(1)}
    save_file(tensors, plan.out_dir / SHARDS[0])
    _relist(plan.out_dir, SHARDS[0])
    problems = verify_export(plan.out_dir).problems
    assert Problem(SHARDS[0], "a", "has another shape or dtype than listed") in problems
    assert Problem(SHARDS[0], "new", "is not listed for this file") in problems
    assert Problem(SHARDS[0], "a", "does not hold the values that were written") in problems
    assert Problem(INDEX_NAME, "new", "lies in another file than the index says") in problems


def test_a_tensor_that_is_listed_but_gone_is_found(plan: ExportPlan) -> None:
    save_file({"z": torch.zeros(1)}, plan.out_dir / SHARDS[0])
    _relist(plan.out_dir, SHARDS[0])
    problems = verify_export(plan.out_dir).problems
    assert Problem(SHARDS[0], "a", "is listed but not in the file") in problems


def test_a_tensor_in_a_file_that_is_not_listed_is_found(plan: ExportPlan) -> None:
    path = plan.out_dir / MANIFEST_NAME
    _edit_json(path, lambda table: table["files"].pop(SHARDS[0]))
    problems = verify_export(plan.out_dir).problems
    assert Problem(SHARDS[0], "a", "is listed in a file that is not") in problems
    assert Problem(SHARDS[0], "", "is not listed in the manifest") in problems


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (
            {**INDEX, "weight_map": {"a": SHARDS[1], "b": SHARDS[1]}},
            Problem(INDEX_NAME, "a", "lies in another file than the index says"),
        ),
        (
            {**INDEX, "weight_map": {**PLACES, "c": SHARDS[1]}},
            Problem(INDEX_NAME, "c", "lies in another file than the index says"),
        ),
        (
            {**INDEX, "metadata": {"total_size": 7}},
            Problem(INDEX_NAME, "", "total_size is 7, the shards hold 3000"),
        ),
        ({}, Problem(INDEX_NAME, "", "is not an index: KeyError: 'weight_map'")),
    ],
)
def test_an_index_that_differs_from_the_headers_is_found(
    plan: ExportPlan, index: object, expected: Problem
) -> None:
    (plan.out_dir / INDEX_NAME).write_text(json.dumps(index))
    _relist(plan.out_dir, INDEX_NAME)
    assert verify_export(plan.out_dir).problems == (expected,)


def test_several_shards_need_an_index(plan: ExportPlan) -> None:
    (plan.out_dir / INDEX_NAME).unlink()
    _edit_json(plan.out_dir / MANIFEST_NAME, lambda table: table["files"].pop(INDEX_NAME))
    assert verify_export(plan.out_dir).problems == (
        Problem(INDEX_NAME, "", "is missing though there are several shards"),
    )


def test_a_checkpoint_with_other_values_is_found(plan: ExportPlan, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = _plan(tmp_path / "other", torch.rand(1000), torch.rand(500))
    found = verify_export(plan.out_dir, plan=other)
    assert found.problems == (
        Problem(SHARDS[0], "a", "has other values in the checkpoint"),
        Problem(SHARDS[1], "b", "has other values in the checkpoint"),
    )
    assert found.conclusion.startswith("2 of 2 tensors differ, and so do the files")
    assert "another checkpoint" in found.conclusion
    named = _plan(tmp_path / "named", torch.rand(1000), torch.rand(500), names="ac")
    assert verify_export(plan.out_dir, plan=named).conclusion.startswith("3 of 3 tensors differ")
    assert verify_export(plan.out_dir).ok
    (plan.out_dir / SHARDS[0]).write_bytes(b"")
    assert verify_export(plan.out_dir, plan=other).conclusion == ""  # whose fault it is is open


def test_a_source_that_differs_in_what_no_tensor_uses_is_found(plan: ExportPlan) -> None:
    path = plan.out_dir / MANIFEST_NAME
    _edit_json(path, lambda table: table["sources"][0].update(blake3="00"))
    found = verify_export(plan.out_dir, plan=plan)
    assert found.problems == (
        Problem("", "", "source rank.pt is not what was read for the export"),
    )
    assert found.conclusion.startswith("All 2 tensors are equal; only the files")
    _edit_json(path, lambda table: table["sources"][0].update(path="other.pt"))
    assert [one.problem for one in verify_export(plan.out_dir, plan=plan).problems] == [
        "source rank.pt was not read for the export",
        "source other.pt is not read any more",
    ]


def test_a_source_that_was_only_copied_is_the_same(plan: ExportPlan) -> None:
    _edit_json(plan.out_dir / MANIFEST_NAME, lambda table: table["sources"][0].update(mtime_ns=1))
    assert verify_export(plan.out_dir, plan=plan).ok


def test_a_checkpoint_with_other_tensors_is_found(plan: ExportPlan) -> None:
    first, second = plan.shards
    b = structs.replace(second.tensors[0], shape=(5, 100))
    c = structs.replace(first.tensors[0], name="c")
    other = replace(
        plan, shards=(structs.replace(first, tensors=(c,)), structs.replace(second, tensors=(b,)))
    )
    assert verify_export(plan.out_dir, plan=other).problems == (
        Problem("", "c", "is in the checkpoint but not in the export"),
        Problem("", "a", "is in the export but not in the checkpoint"),
        Problem(SHARDS[1], "b", "has another shape or dtype in the checkpoint"),
    )


def test_a_damaged_checkpoint_is_raised(plan: ExportPlan) -> None:
    source = plan.sources[0]
    data = bytearray(source.path.read_bytes())
    data[source.members[0].offset] ^= 1
    source.path.write_bytes(data)
    changed = replace(plan, sources=(source_file(source.path, source.members),))
    with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
        verify_export(plan.out_dir, plan=changed)


def test_what_is_no_folder_is_told_for_what_it_is(plan: ExportPlan, tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "nope", "does not exist"),
        (plan.out_dir / MANIFEST_NAME, "is not a folder"),
    ):
        with pytest.raises(VerificationError, match=words):
            api.verify_export(path)
