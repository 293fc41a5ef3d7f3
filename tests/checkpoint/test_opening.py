"""A checkpoint opened: what it is, what stands in the way, and what was read to know it."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest
import torch

from tests.support.checkpoints import Run, edit, model_file, save, small_model
from tests.support.expert_checkpoints import MoeRun, save_moe
from zexport import consolidate
from zexport.checkpoint import reading
from zexport.checkpoint.contents import raise_problems
from zexport.checkpoint.opening import open_checkpoint
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnsafeError,
    UnsupportedError,
)


@pytest.mark.parametrize(
    ("run", "layout", "stage"),
    [
        (Run(stage=1), "ZeRO-1", 1),
        (Run(stage=1, bf16_optimizer=True), "ZeRO-1 (BF16_Optimizer)", 1),
        (Run(stage=2), "ZeRO-2", 2),
        (Run(stage=3), "ZeRO-3", 3),
    ],
)
def test_a_checkpoint_says_what_it_is(run: Run, layout: str, stage: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(small_model(), run, tmp_path))
    assert (checkpoint.layout, checkpoint.stage) == (layout, stage)
    assert (checkpoint.world_size, checkpoint.global_steps) == (2, 2)
    assert (checkpoint.ds_version, checkpoint.optimizer) == ("0.19.8", "AdamW")
    assert (checkpoint.problems, checkpoint.warnings) == ((), ())


def test_of_zero3_model_files_only_those_that_hold_values_are_needed(tmp_path: Path) -> None:
    model = small_model()
    frozen = open_checkpoint(save(model, Run(), tmp_path / "frozen"))
    excluded = open_checkpoint(save(model, Run(exclude_frozen=True), tmp_path / "excluded"))
    needed = [sum(file.needed for file in checkpoint.files) for checkpoint in (frozen, excluded)]
    assert needed == [4, 3]


def test_a_missing_model_file_matters_only_with_frozen_weights(tmp_path: Path) -> None:
    for name, run in (("frozen", Run()), ("none", Run(exclude_frozen=True))):
        root = save(small_model(), run, tmp_path / name)
        model_file(root / "global_step2", run, 1).unlink()
    with pytest.raises(IncompleteCheckpointError, match="model files of rank 1"):
        raise_problems(open_checkpoint(tmp_path / "frozen"))
    checkpoint = open_checkpoint(tmp_path / "none")
    assert checkpoint.problems == ()
    assert "files of rank 1 are missing" in checkpoint.notes[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_without_any_optimizer_file_is_incomplete(stage: int, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=stage), tmp_path)
    for path in root.glob("*/*_optim_states.pt"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match="optimizer files of all ranks") as caught:
        raise_problems(open_checkpoint(root))
    assert caught.value.path == root / "global_step2"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16_zero_pp_rank_0"), (torch.float16, "zero_pp_rank_0")],
)
def test_the_names_of_files_of_which_none_is_here_are_told_by_the_configuration(
    dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    root = save(small_model(dtype), Run(stage=2), tmp_path)
    for path in root.glob("*/*_optim_states.pt"):
        path.unlink()
    (problem,) = open_checkpoint(root).problems
    assert problem.expected == f"{name}_mp_rank_00_optim_states.pt and the like"
    edit(root / "global_step2" / "mp_rank_00_model_states.pt", lambda s: s.pop("ds_config"))
    (problem,) = open_checkpoint(root).problems
    plain = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert problem.expected == f"bf16_{plain} or {plain} and the like"


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PK")])
def test_a_checkpoint_whose_files_changed_just_now_may_still_be_being_written(
    damage: Callable[[Path], object], zero2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(next(zero2.glob("*/*rank_1*optim*")))
    monkeypatch.setattr(reading, "now", lambda: 10_000.0)
    for seconds, is_told in ((9_900, True), (1_000, False), (10_050, True)):
        for path in zero2.glob("*/*"):
            os.utime(path, (seconds, seconds))
        (problem,) = open_checkpoint(zero2).problems
        assert ("still being saved or copied, wait" in str(problem)) is is_told


@pytest.mark.parametrize(("recorded", "count"), [(2, 0), (4, 1), ("2", 0)])
def test_a_trainers_state_of_another_step_is_warned_of(
    recorded: object, count: int, zero2: Path
) -> None:
    (zero2 / "trainer_state.json").write_text(json.dumps({"global_step": recorded}))
    told = [text for text in open_checkpoint(zero2).warnings if "trainer_state.json" in text]
    said = "(found 2 in the files of the tag, its name but 4 in trainer_state.json)"
    assert told == [f"names or files beside the tag tell of another step {said}"][:count]


@pytest.mark.parametrize(
    ("folder", "tag", "count"),
    [
        ("checkpoint-2", "global_step2", 0),
        ("checkpoint-8", "global_step2", 1),
        ("checkpoint-2", "global_step400", 1),
        ("epoch_7", "final", 0),
    ],
)
def test_a_folder_or_tag_that_was_renamed_to_another_step_is_warned_of(
    folder: str, tag: str, count: int, zero2: Path
) -> None:
    (zero2 / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    (zero2 / "global_step2").rename(zero2 / tag)
    (zero2 / "latest").write_text(tag)
    root = zero2.rename(zero2.parent / folder)
    told = [text for text in open_checkpoint(root).warnings if "another step" in text]
    assert len(told) == count


def test_a_run_that_skipped_all_steps_says_so_and_its_card_counts_none(tmp_path: Path) -> None:
    skipped = {"skipped_steps": 2}
    run = Run(stage=2, optimizer_step=None, client_state=skipped)
    root = save(small_model(torch.float16), run, tmp_path / "run")
    checkpoint = open_checkpoint(root)
    assert checkpoint.warnings[0].startswith("no step was taken: all 2 were skipped")
    consolidate(root, tmp_path / "out")
    assert "after 0 steps" in (tmp_path / "out" / "README.md").read_text()


def test_optimizer_files_that_cannot_be_read_are_not_called_missing(zero3: Path) -> None:
    for path in zero3.glob("*/*_optim_states.pt"):
        path.write_bytes(b"")
    problems = [problem.problem for problem in open_checkpoint(zero3).problems]
    assert problems == ["is empty"] * 3


def test_an_optimizer_swapped_to_nvme_is_told_from_damage(zero3: Path) -> None:
    def shorten(state: dict[str, dict[str, list[object]]]) -> None:
        state["optimizer_state_dict"]["fp32_flat_groups"].pop()

    for path in zero3.glob("*/*_optim_states.pt"):
        edit(path, shorten)
    with pytest.raises(DamagedCheckpointError, match="do not add up"):
        raise_problems(open_checkpoint(zero3))
    (zero3 / "global_step2" / "offloaded_tensors").mkdir()
    with pytest.raises(UnsupportedError, match="NVMe"):
        raise_problems(open_checkpoint(zero3))


def test_newest_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        save(small_model(), Run(steps=step), tmp_path, f"global_step{step}")
    assert open_checkpoint(tmp_path, tag="newest").location.tag == "global_step10"
    next((tmp_path / "global_step10").glob("*rank_1*optim*")).unlink()
    assert open_checkpoint(tmp_path, tag="newest").location.tag == "global_step9"
    for step in (2, 9):
        next((tmp_path / f"global_step{step}").glob("*rank_1*optim*")).unlink()
    assert open_checkpoint(tmp_path, tag="newest").location.tag == "global_step10"


@pytest.mark.parametrize("tag", [None, "newest"])
def test_a_later_checkpoint_whose_tag_is_gone_is_told(tag: str | None, tmp_path: Path) -> None:
    save(small_model(), Run(), tmp_path / "checkpoint-2")
    for number in (1, 4):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "latest").write_text("global_step4")
    (told,) = open_checkpoint(tmp_path, tag=tag).newer
    assert told.startswith("checkpoint-4 was passed over: the tag that its latest")
    assert not open_checkpoint(tmp_path / "checkpoint-2").newer


def _refused_at(barred: set[Path], look: Callable[..., object]) -> Callable[[Path], object]:
    """What a user meets who is not root, and may not read some folders."""

    def guarded(path: Path) -> object:
        if path in barred:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    return guarded


@pytest.mark.parametrize("tag", [None, "newest"])
@pytest.mark.parametrize("name", ["checkpoint-{}", "global_step{}"])
def test_a_later_checkpoint_that_may_not_be_read_is_told(
    name: str, tag: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved by another user under umask 077, say."""
    place = name.format(2)
    if place.startswith("checkpoint"):
        save(small_model(), Run(), tmp_path / place)
    else:
        save(small_model(), Run(), tmp_path, place)
    for number in (1, 4):
        (tmp_path / name.format(number)).mkdir()
    barred = {tmp_path / name.format(number) for number in (1, 4)}
    for owner, call in ((Path, "iterdir"), (os, "scandir")):
        monkeypatch.setattr(owner, call, _refused_at(barred, getattr(owner, call)))
    (told,) = open_checkpoint(tmp_path, tag=tag).newer
    assert told == f"{name.format(4)} was passed over: it may not be read"


def test_several_problems_come_as_one_error_that_tells_them_all(zero3: Path) -> None:
    folder = zero3 / "global_step2"
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DamagedCheckpointError, match="has 2 problems") as caught:
        raise_problems(open_checkpoint(zero3))
    assert "is empty" in str(caught.value)
    assert "files of rank 1" in str(caught.value)
    assert caught.value.exit_code == 3
    head, first, second, *_ = caught.value.lines()
    assert head.endswith("global_step2: has 2 problems:")
    assert "is empty" in first
    assert second.startswith("  2. lacks the optimizer files of rank 1")


def test_of_several_problems_the_gravest_kind_is_raised(zero3: Path) -> None:
    folder = zero3 / "global_step2"
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()

    def hide(state: dict[str, object]) -> None:
        state["buffer_names"] = io.BytesIO(b"names")

    edit(folder / "zero_pp_rank_2_mp_rank_00_model_states.pt", hide)
    with pytest.raises(UnsafeError, match="has 2 problems"):
        raise_problems(open_checkpoint(zero3))


def test_strays_beside_the_rank_files_do_not_matter(zero3: Path) -> None:
    folder = zero3 / "global_step2"
    for name in (".DS_Store", "notes.pt", "old_zero_pp_rank_0_mp_rank_00_optim_states.pt.tmp"):
        (folder / name).write_bytes(b"stray")
    (folder / "empty").mkdir()
    assert open_checkpoint(zero3).problems == ()


def test_the_work_of_opening_does_not_grow_with_the_square_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with experts have a file for each of them: tens of thousands."""
    run = MoeRun(experts=24, layers=10)
    folder = save_moe(run, tmp_path / "global_step2")
    compared = 0
    equal = Path.__eq__

    def count(one: Path, other: object) -> bool:
        nonlocal compared
        compared += 1
        return bool(equal(one, other))

    monkeypatch.setattr(PurePath, "__eq__", count)
    assert open_checkpoint(folder).problems == ()
    assert compared < 20 * run.experts * run.layers
