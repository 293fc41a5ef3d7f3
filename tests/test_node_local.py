"""Parts of one checkpoint on several nodes' disks, made one again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import Run, edit, save, small_model
from zexport.checkpoint.assembly.node_local import unite
from zexport.checkpoint.location import Location, locate
from zexport.checkpoint.rank_files import list_rank_files
from zexport.errors import DamagedCheckpointError, UsageError

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
