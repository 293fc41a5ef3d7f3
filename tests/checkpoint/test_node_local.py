"""Parts of one checkpoint on several nodes' disks, made one again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.forked import typed
from zexport.checkpoint.find import locate
from zexport.checkpoint.location import Location
from zexport.checkpoint.node_local import unite
from zexport.checkpoint.opening import open_checkpoint
from zexport.checkpoint.rank_files import list_rank_files
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, UsageError
from zexport.inspect.inspect import inspect_checkpoint
from zexport.options import ExportOptions, NameLayout
from zexport.plan.plan import ExportPlan

FIXTURES = Path(__file__).parents[2] / "fixtures"
MEMORY = ExportOptions(layout=NameLayout.MEMORY)
TAG = "global_step2"
MODEL_FILE = "mp_rank_00_model_states.pt"


def nodes(root: Path, run: Run, *, copy_model: bool = False) -> list[Location]:
    """The ranks of a run dealt out to two folders, the last rank to the second."""
    first = save(small_model(), run, root / "node0")
    second = save(small_model(), run, root / "node1")
    for node, kept in ((first, range(run.world_size - 1)), (second, [run.world_size - 1])):
        for file in list_rank_files(node / "global_step2"):
            if file.rank not in kept and not (copy_model and file.path.name == MODEL_FILE):
                file.path.unlink()
    return [locate(first), locate(second)]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_parts_give_the_files_of_the_whole_in_its_order(
    tmp_path: Path, stage: int, turned: bool
) -> None:
    run = Run(stage=stage, world_size=3)
    whole = list_rank_files(save(small_model(), run, tmp_path / "whole") / "global_step2")
    parts = nodes(tmp_path, run)
    united = unite(parts[::-1] if turned else parts)
    assert [file.path.name for file in united] == [file.path.name for file in whole]
    assert {file.path.parent.parent.name for file in united} == {"node0", "node1"}


def test_equal_copies_count_as_one(tmp_path: Path) -> None:
    united = unite(nodes(tmp_path, Run(stage=2), copy_model=True))
    assert [file.path.name for file in united].count(MODEL_FILE) == 1


def test_the_model_file_of_rank_0_is_taken_where_only_that_one_names_tied_weights(
    tmp_path: Path,
) -> None:
    parts = nodes(tmp_path, Run(stage=2), copy_model=True)
    edit(parts[1].tag_dir / MODEL_FILE, lambda state: state.update(shared_params={"x.y": "z"}))
    for order in (parts, parts[::-1]):
        taken = next(file for file in unite(order) if file.path.name == MODEL_FILE)
        assert taken.path.parent == parts[0].tag_dir


def test_model_files_of_different_steps_are_damage(tmp_path: Path) -> None:
    parts = nodes(tmp_path, Run(stage=2), copy_model=True)
    edit(parts[1].tag_dir / MODEL_FILE, lambda state: state.update(global_steps=7))
    with pytest.raises(DamagedCheckpointError, match="another file than the one of the same name"):
        unite(parts)


def test_optimizer_files_of_one_name_must_be_equal_to_the_last_byte(tmp_path: Path) -> None:
    parts = [locate(save(small_model(), Run(stage=3), tmp_path / name)) for name in "ab"]
    assert len(unite(parts)) == len(list_rank_files(parts[0].tag_dir))
    path = next(path for path in parts[1].tag_dir.iterdir() if "optim" in path.name)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="another file than the one of the same name"):
        unite(parts)


def test_folders_of_different_tags_are_no_parts(tmp_path: Path) -> None:
    parts = [locate(save(small_model(), Run(), tmp_path / tag, tag)) for tag in ("step1", "step2")]
    with pytest.raises(UsageError, match="different tags"):
        unite(parts)
    for tag in (None, "step2", "newest"):
        with pytest.raises(UsageError, match=r"step1 in .*Give one checkpoint alone"):
            open_checkpoint([tmp_path / "step1", tmp_path / "step2"], tag=tag)


# --- from several folders to one model ---


def dealt_out(name: str, root: Path) -> list[Path]:
    """A real checkpoint on two nodes: ranks in turn, what is not of a rank on the first."""
    folders = [root / "node0", root / "node1"]
    source = FIXTURES / name / "ckpt"
    for folder in folders:
        (folder / TAG).mkdir(parents=True)
        shutil.copy(source / "latest", folder / "latest")
    for file in list_rank_files(source / TAG):
        shutil.copy(file.path, folders[file.rank % 2] / TAG / file.path.name)
    return folders


def plan(parts: list[Path]) -> ExportPlan:
    """The plan of an export of a checkpoint on several nodes."""
    return zexport.plan_export(open_checkpoint(parts), parts[0].parent / "out", MEMORY)


def test_nodes_with_other_files_beside_their_parts_are_refused(tmp_path: Path) -> None:
    parts = [location.root for location in nodes(tmp_path, Run(stage=3))]
    for turned, eps in enumerate((1e-5, 1e-6)):
        for part, said in zip(parts, (1e-5, eps), strict=True):
            content = {
                "model_type": "mine",
                "rms_norm_eps": said,
                "transformers_version": part.name,
            }
            (part / "config.json").write_text(json.dumps(content))
        if not turned:
            (warning,) = plan(parts).warnings
            assert "a tokenizer" in warning
        for given in (parts, parts[::-1]) if turned else ():
            with pytest.raises(DamagedCheckpointError, match=r"config\.json, rms_norm_eps: 1e-0"):
                plan(given)


def test_what_one_node_alone_has_is_the_checkpoints_whichever_is_named_first(
    tmp_path: Path,
) -> None:
    parts = [location.root for location in nodes(tmp_path, Run(stage=3))]
    content = {"model_type": "mine", "rms_norm_eps": 1e-5}
    (parts[1] / "config.json").write_text(json.dumps(content))
    (parts[1] / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    for given in (parts, parts[::-1]):
        out = tmp_path / f"out {given[0].name}"
        zexport.consolidate(given, out, MEMORY)
        assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-5
        assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 7}
        assert "config.json" not in inspect_checkpoint(given).missing_sidecars


def exported(checkpoint: Path | list[Path], out: Path) -> dict[str, bytes]:
    """The weight files of an export, by name."""
    zexport.consolidate(checkpoint, out, MEMORY)
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


REAL = ["z3_w4_bf16_odd", "z2_w3_bf16_odd", "z3_w2_bf16_frozen", "tp2_z2_w4_bf16", "moe_z2_w4_ep2"]


@pytest.mark.parametrize("name", REAL)
def test_the_parts_give_the_model_of_the_whole(name: str, tmp_path: Path) -> None:
    parts = dealt_out(name, tmp_path)
    whole = exported(FIXTURES / name / "ckpt", tmp_path / "whole")
    assert exported(parts, tmp_path / "out") == whole
    assert exported(parts[::-1], tmp_path / "turned") == whole
    moved = [parts[0], parts[1].rename(tmp_path / "whole" / "elsewhere")]
    assert zexport.verify_export(tmp_path / "out", against=moved).ok
    if name == REAL[0]:
        done = typed("verify", tmp_path / "out", "--against", moved[0], "--against", moved[1])
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["z3_w4_bf16_odd", "moe_z2_w4_ep2"])
def test_a_rank_that_lies_in_no_folder_is_named(name: str, tmp_path: Path) -> None:
    parts = dealt_out(name, tmp_path)
    next((parts[1] / TAG).glob("*rank_1_*optim*")).unlink()
    with pytest.raises(IncompleteCheckpointError, match="optimizer files of rank 1"):
        zexport.consolidate(parts, tmp_path / "out", MEMORY)
    assert not (tmp_path / "out").exists()


def test_one_folder_of_two_is_not_the_whole(tmp_path: Path) -> None:
    first, _ = dealt_out("z3_w4_bf16_odd", tmp_path)
    with pytest.raises(IncompleteCheckpointError, match="optimizer files of ranks 1, 3"):
        zexport.consolidate(first, tmp_path / "out", MEMORY)


def test_a_folder_of_another_save_is_refused(tmp_path: Path) -> None:
    parts = [save(small_model(), Run(steps=steps), tmp_path / str(steps)) for steps in (2, 4)]
    with pytest.raises(DamagedCheckpointError, match="another file than the one of the same name"):
        zexport.consolidate(parts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line_takes_all_folders_and_then_the_output(tmp_path: Path) -> None:
    parts, out = dealt_out("z3_w4_bf16_odd", tmp_path), tmp_path / "out"
    assert json.loads(typed("inspect", *parts, "--json").stdout)["verdict"]["exportable"]
    alone = json.loads(typed("inspect", parts[0], "--json").stdout)
    assert not alone["verdict"]["exportable"]
    done = typed("consolidate", *parts, out, "--layout", "memory")
    assert done.returncode == 0, done.stderr
    whole = exported(FIXTURES / "z3_w4_bf16_odd" / "ckpt", tmp_path / "whole")
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == whole


def test_the_command_line_names_the_ranks_that_no_folder_holds(tmp_path: Path) -> None:
    first, _ = dealt_out("z3_w4_bf16_odd", tmp_path)
    done = typed("consolidate", first, tmp_path / "out")
    assert (done.returncode, done.stdout) == (3, "")
    assert "optimizer files of ranks 1, 3" in done.stderr
    assert not (tmp_path / "out").exists()
