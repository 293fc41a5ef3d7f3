"""Which checkpoint is the newest: what it records counts, its name only where that is all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import zexport
from tests.support.expert_checkpoints import rewrite
from zexport.checkpoint import candidates
from zexport.checkpoint.candidates import are_of_one_run, by_age, newest_last, recorded_step
from zexport.checkpoint.opening import NEWEST
from zexport.errors import AmbiguousTagError
from zexport.inspect.inspect import inspect_checkpoint
from zexport.report.inspect_json import inspection_json
from zexport.store.boundary import Boundary

FIXTURES = Path(__file__).parents[2] / "fixtures"


def add_tag(root: Path, tag: str, step: int) -> None:
    """A real tag under another name, of another step."""
    folder = Path(
        shutil.copytree(FIXTURES / "z2_w3_bf16_odd" / "ckpt" / "global_step2", root / tag)
    )
    rewrite(folder / "mp_rank_00_model_states.pt", lambda s: s.update(global_steps=step))


def add_bare_tag(root: Path, tag: str, step: int) -> None:
    (root / tag).mkdir(parents=True)
    state = {"module": {}, "global_steps": step}
    torch.save(state, root / tag / "mp_rank_00_model_states.pt")


def test_the_newest_is_the_one_of_the_highest_step_whatever_its_name(tmp_path: Path) -> None:
    add_tag(tmp_path, "global_step2", 2)
    add_tag(tmp_path, "final", 4)
    add_tag(tmp_path, "best", 1)
    assert zexport.open_checkpoint(tmp_path, tag=NEWEST).location.tag == "final"
    for tag in (None, "best"):
        told = [(one.name, one.step) for one in inspect_checkpoint(tmp_path, tag=tag).tags]
        assert told == [("best", 1), ("global_step2", 2), ("final", 4)]
    assert inspect_checkpoint(tmp_path).verdict.next_step.endswith("--tag final")
    with pytest.raises(AmbiguousTagError, match="for example --tag final"):
        zexport.open_checkpoint(tmp_path)


def test_the_newest_complete_one_is_taken_where_the_newest_is_not(tmp_path: Path) -> None:
    add_tag(tmp_path, "global_step2", 2)
    add_tag(tmp_path, "global_step3", 3)
    add_tag(tmp_path, "final", 4)
    next((tmp_path / "final").glob("*rank_1*optim*")).unlink()
    assert zexport.open_checkpoint(tmp_path, tag=NEWEST).location.tag == "global_step3"


def trainer_run(run: Path, *, own: int, checkpoints: tuple[int, ...]) -> Path:
    """What the Trainer leaves under ZeRO-3: the end of training beside its checkpoints."""
    for step in checkpoints:
        add_tag(run / f"checkpoint-{step}", f"global_step{step}", step)
        (run / f"checkpoint-{step}" / "latest").write_text(f"global_step{step}")
    add_tag(run, f"global_step{own}", own)
    (run / "latest").write_text(f"global_step{own}")
    return run


def test_the_newest_of_a_run_may_be_a_tag_or_a_checkpoint_beside_it(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, own=6, checkpoints=(4, 8))
    newest = zexport.open_checkpoint(run, tag=NEWEST)
    assert newest.location.tag_dir == run / "checkpoint-8" / "global_step8"
    next(newest.location.tag_dir.glob("*rank_1*optim*")).unlink()
    assert zexport.open_checkpoint(run, tag=NEWEST).location.tag == "global_step6"


def test_a_newer_checkpoint_beside_what_latest_names_is_told(tmp_path: Path) -> None:
    run = trainer_run(tmp_path / "run", own=6, checkpoints=(6, 8))
    plan = zexport.plan_export(zexport.open_checkpoint(run), tmp_path / "out")
    assert plan.provenance["checkpoint"]["global_steps"] == 6  # type: ignore[index, call-overload]
    told = (
        "checkpoint-8 beside global_step6 is of step 8, and this one, which is named by latest, of "
        "step 6: --tag checkpoint-8 takes that one"
    )
    assert plan.warnings[0] == told
    found = inspect_checkpoint(run)
    assert [(one.name, one.step, one.chosen) for one in found.tags] == [
        ("checkpoint-6", 6, False),
        ("global_step6", 6, True),
        ("checkpoint-8", 8, False),
    ]
    assert inspection_json(found)["checkpoint"]["warnings"][0] == told  # type: ignore[index, call-overload]
    assert not zexport.open_checkpoint(run, tag="global_step6").newer
    shutil.rmtree(run / "checkpoint-8")
    assert not zexport.open_checkpoint(run).newer


def test_an_export_is_verified_against_the_run_it_came_from(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    for step in (2, 4):
        add_tag(run / f"checkpoint-{step}", f"global_step{step}", step)
    zexport.consolidate(run, out, tag=NEWEST)
    assert zexport.verify_export(out, against=run).ok


def test_a_newer_one_that_was_passed_over_is_named_with_the_reason(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 4):
        add_tag(run / f"checkpoint-{step}", f"global_step{step}", step)
    next((run / "checkpoint-4" / "global_step4").glob("*rank_1*optim*")).unlink()
    plan = zexport.plan_export(zexport.open_checkpoint(run, tag=NEWEST), tmp_path / "out")
    told = "checkpoint-4 (step 4) was passed over: it lacks the optimizer files of rank 1 "
    assert plan.warnings[0].startswith(f"{told}(found 2 of 3 ranks, ")
    add_tag(run, "global_step3", 3)
    (run / "latest").write_text("global_step3")
    assert zexport.open_checkpoint(run).newer[0].startswith(told)


def test_a_newer_tag_beside_the_one_that_latest_names_is_told(tmp_path: Path) -> None:
    add_tag(tmp_path, "global_step2", 2)
    add_tag(tmp_path, "global_step4", 4)
    (tmp_path / "latest").write_text("global_step2")
    (told,) = zexport.open_checkpoint(tmp_path).newer
    assert told.startswith("global_step4 beside global_step2 is of step 4, and this one, which is")
    (tmp_path / "latest").write_text("global_step4")
    assert not zexport.open_checkpoint(tmp_path).newer


def written_at(folder: Path, seconds: int) -> None:
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))


def test_the_end_of_training_is_the_newest_of_a_run_by_step_then_by_time(tmp_path: Path) -> None:
    for name, step in (("checkpoint-2", 2), ("checkpoint-4", 4), ("final", 6), ("best", 2)):
        add_tag(tmp_path / name, f"global_step{step}", step)
    assert zexport.open_checkpoint(tmp_path, tag=NEWEST).location.root.name == "final"
    shutil.rmtree(tmp_path / "final")
    add_tag(tmp_path / "final", "global_step4", 4)
    one, other = (tmp_path / n / "global_step4" for n in ("checkpoint-4", "final"))
    for newer, older in ((one, other), (other, one)):
        written_at(newer, 2000)
        written_at(older, 1000)
        assert zexport.open_checkpoint(tmp_path, tag=NEWEST).location.tag_dir == newer
    written_at(one, 2000)
    written_at(other, 2000)
    with pytest.raises(AmbiguousTagError, match="found checkpoint-4, final"):
        zexport.open_checkpoint(tmp_path, tag=NEWEST)
    next(other.glob("*rank_1*optim*")).unlink()
    assert zexport.open_checkpoint(tmp_path, tag=NEWEST).location.tag_dir == one


def test_models_of_one_step_are_refused_and_none_is_an_example(tmp_path: Path) -> None:
    for number, name in enumerate(("actor", "actor_ema", "critic")):
        add_tag(tmp_path, name, 4)
        written_at(tmp_path / name, 1000 * number)
    with pytest.raises(AmbiguousTagError, match="found actor, actor_ema, critic"):
        zexport.open_checkpoint(tmp_path, tag=NEWEST)
    with pytest.raises(AmbiguousTagError, match=r"Choose one with --tag\.$"):
        zexport.open_checkpoint(tmp_path)
    assert inspect_checkpoint(tmp_path).verdict.next_step.endswith("--tag NAME")


def test_accelerates_project_folder_leads_to_its_checkpoints(tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "out"
    for number in (0, 1):
        root = project / "checkpoints" / f"checkpoint_{number}"
        add_tag(root, "pytorch_model", 2 * number + 2)
        (root / "latest").write_text("pytorch_model")
    found = zexport.open_checkpoint(project, tag=NEWEST)
    assert found.location.tag_dir == root / "pytorch_model"
    shown = inspect_checkpoint(project)
    assert [(one.name, one.step) for one in shown.tags] == [
        ("checkpoint_0", 2),
        ("checkpoint_1", 4),
    ]
    zexport.consolidate(project, out, tag="checkpoint_0")
    for above in (tmp_path / "project", project / "checkpoints", root.parent / "checkpoint_0"):
        assert zexport.verify_export(out, against=above).ok


def test_an_export_is_verified_against_the_one_model_of_a_run_it_came_from(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    for name, step in (("actor", 2), ("critic", 4)):
        add_tag(run / name, "model", step)
    zexport.consolidate(run / "actor", out)
    assert zexport.verify_export(out, against=run).ok


def test_tags_of_unknown_steps_follow_those_of_their_own_kind() -> None:
    tags = ("final", "global_step2", "global_step10", "global_step9", "x1")
    steps = {"final": 5, "global_step2": 2, "global_step9": 9}
    assert newest_last(tags, steps) == (
        "x1",
        "global_step2",
        "final",
        "global_step9",
        "global_step10",
    )


def test_of_very_many_tags_only_some_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"tokens_{n}000000" for n in range(1, 41)]
    for step, name in enumerate(names, start=1):
        add_bare_tag(tmp_path, name, step)
    add_bare_tag(tmp_path, "final", 99)
    read: list[str] = []

    def counted(tag_dir: Path, boundary: Boundary) -> int | None:
        read.append(tag_dir.name)
        return recorded_step(tag_dir, boundary)

    monkeypatch.setattr(candidates, "recorded_step", counted)
    within = Boundary.of(tmp_path, follow=False)
    assert by_age(tmp_path, within) == (*names, "final")
    assert sorted(read) == sorted(["final", *names[-15:]])


def test_the_step_of_a_file_that_lies_outside_or_is_broken_is_not_known(tmp_path: Path) -> None:
    add_bare_tag(tmp_path / "run", "inside", 3)
    add_bare_tag(tmp_path, "outside", 4)
    (tmp_path / "run" / "linked").symlink_to(tmp_path / "outside")
    within = Boundary.of(tmp_path / "run", follow=False)
    assert recorded_step(tmp_path / "run" / "inside", within) == 3
    assert recorded_step(tmp_path / "run" / "linked", within) is None
    (tmp_path / "run" / "inside" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    assert recorded_step(tmp_path / "run" / "inside", within) is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["checkpoint-5", "checkpoint-100"], True),
        (["epoch=1-step=20.ckpt", "epoch=2-step=40.ckpt"], True),
        (["_actor"], True),
        (["_actor", "_critic"], False),
        (["checkpoint-5", "checkpoint-best", "final", "last", "epoch_1"], True),
        (["checkpoint-5", "critic"], False),
    ],
)
def test_folders_that_differ_in_a_number_or_an_age_are_of_one_run(
    names: list[str], expected: bool
) -> None:
    assert are_of_one_run(names) is expected


def test_nothing_says_which_of_several_models_is_the_newest(tmp_path: Path) -> None:
    for model in ("_actor", "_critic"):
        add_tag(tmp_path / model, "global_step2", 2)
    for ask in (zexport.open_checkpoint, inspect_checkpoint):
        with pytest.raises(AmbiguousTagError, match="_actor, _critic"):
            ask(tmp_path, tag=NEWEST)
    shown = inspect_checkpoint(tmp_path)
    assert [one.name for one in shown.tags] == ["_actor", "_critic"]
    assert shown.verdict.next_step.endswith("--tag NAME")
