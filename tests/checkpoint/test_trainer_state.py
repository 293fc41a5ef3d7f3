"""What the Trainer wrote beside a tag, held against the tag's own files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.real_cases import copied
from zexport import open_checkpoint
from zexport.resharding.folders import Ranks, beside

TAG = "global_step2"
PAST = [{"grad_norm": 1.1, "step": 1, "loss": 4.0}, {"step": 2, "loss": float("nan")}]
STATE: dict[str, Any] = {"global_step": 2, "train_batch_size": 4, "log_history": PAST}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A Trainer's checkpoint of two ranks and micro-batches of four rows, after an older one."""
    folder = save(small_model(), Run(stage=2), tmp_path / "run" / "checkpoint-2", TAG)
    for path in (folder / TAG).glob("*model_states.pt"):
        edit(path, lambda states: states["ds_config"].update(train_micro_batch_size_per_gpu=4))
    older = tmp_path / "run" / "checkpoint-1"
    older.mkdir()
    _write(older, global_step=1, log_history=PAST[:1])
    for rank in range(2):
        (folder / f"rng_state_{rank}.pth").touch()
    _write(folder)
    return folder


def _write(folder: Path, **changed: object) -> None:
    (folder / "trainer_state.json").write_text(json.dumps(STATE | changed))


def _add_random_states(root: Path) -> None:
    (root / "rng_state_3.pth").touch()


def _add_node(root: Path, **changed: object) -> Path:
    """The folder of a second node, which has the second rank's files alone."""
    node = root.parents[1] / "node1" / root.name
    (node / TAG).mkdir(parents=True)
    (node / "latest").write_text(TAG)
    for path in (*(root / TAG).glob("*pp_rank_1_*"), root / "rng_state_1.pth"):
        path.rename(node / path.relative_to(root))
    _write(node, **changed)
    return node


@pytest.mark.parametrize(
    ("updates", "is_told"),
    [(7, True), (2, False), (1, False), (4, False)],
    ids=["later", "as the run", "one skipped", "ranks x updates"],
)
def test_a_scheduler_of_a_later_step_is_told(updates: int, is_told: bool, root: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(updates):
        optimizer.step()
        scheduler.step()
    torch.save(scheduler.state_dict(), root / "scheduler.pt")
    told = [one for one in open_checkpoint(root).warnings if "7 in scheduler.pt" in one]
    assert bool(told) == is_told


@pytest.mark.parametrize(
    ("steps", "skipped", "is_told"), [(5, 0, True), (5, 3, False), (2, 0, False), (1, 0, False)]
)
def test_an_optimizer_that_took_fewer_updates_than_the_run_is_told(
    steps: int, skipped: int, is_told: bool, tmp_path: Path
) -> None:
    """A save into the same folder that was killed between model files and optimizer's."""
    root = copied("z3_w2_bf16_frozen", tmp_path)
    for path in root.glob("*/*model_states.pt"):
        edit(path, lambda said: said.update(global_steps=steps, skipped_steps=skipped))
    told = [one for one in open_checkpoint(root).warnings if "fewer updates" in one]
    found = f"found {steps} in the model files but 2 in the optimizer's"
    assert [found in warning for warning in told] == [True] * is_told


def test_a_scheduler_that_cannot_be_read_tells_nothing(root: Path) -> None:
    (root / "scheduler.pt").write_bytes(b"no pickle")
    assert not open_checkpoint(root).warnings


def test_nodes_that_keep_their_own_files_are_told_nothing_of(root: Path) -> None:
    own: dict[str, object] = {"eval_runtime": 9.5, "train_samples_per_second": 3, "ce_loss": 1.31}
    times = [{"step": 0, "ce_loss": 1.3}, *(one | own for one in PAST)]  # as users log
    found = open_checkpoint([root, _add_node(root, log_history=times)])
    assert not found.warnings
    assert not found.notes


def test_nodes_whose_runs_learnt_otherwise_are_told(root: Path) -> None:
    node = _add_node(root, log_history=[PAST[0] | {"loss": 9.5}])
    (warning,) = open_checkpoint([root, node]).warnings
    assert "step 1: loss 4.0 in trainer_state.json but loss 9.5 in trainer_state.json of" in warning
    assert "different runs" in warning


def test_weights_of_the_trainings_own_are_noted(tmp_path: Path) -> None:
    masters = small_model().masters
    for place in (
        {"ema_state_dict": masters},
        {"ema": {"shadow": {f"module.{n}": t for n, t in masters.items()}}},
    ):
        run = Run(stage=2, client_state={**place, "best": {"loss": 1}})
        (note,) = open_checkpoint(save(small_model(), run, tmp_path / next(iter(place)))).notes
        assert f"{len(masters)} tensors of their names in ema" in note


def _change_past(root: Path) -> None:
    _write(root.parent / "checkpoint-1", log_history=[PAST[0] | {"loss": 9.5}])


def test_a_run_that_agrees_with_itself_is_told_nothing_of(root: Path) -> None:
    found = open_checkpoint(root)
    assert not found.warnings
    assert not found.notes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: _write(root, train_batch_size=64), "4 in the files of the tag but 64 in"),
        (_add_random_states, "expected below 2, the number of ranks"),
        (_change_past, "step 1: loss 4.0 in trainer_state.json but loss 9.5 in that of "),
    ],
)
def test_files_of_another_run_are_told(
    root: Path, change: Callable[[Path], None], told: str
) -> None:
    change(root)
    (warning,) = open_checkpoint(root).warnings
    assert told in warning


def test_the_best_checkpoint_of_a_run_is_noted_where_it_is_another(root: Path) -> None:
    _write(root, best_model_checkpoint="/there/run/checkpoint-1")
    (note,) = open_checkpoint(root).notes
    assert "checkpoint-1 in trainer_state.json" in note
    assert "/there" not in note


def test_random_states_of_another_run_are_handed_to_no_rank(root: Path) -> None:
    _add_random_states(root)
    found = beside(open_checkpoint(root).location, Ranks(2, 4), 2, 2)
    assert [one.filename for one in found.files if "rng" in one.filename] == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]
    assert any("for 2 of 4 ranks there is no random state" in n for n in found.notes)
