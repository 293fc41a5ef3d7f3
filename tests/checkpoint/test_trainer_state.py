"""trainer_state.json or a name of another step or run causes a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from zexport import open_checkpoint

TAG = "global_step2"
PAST = [{"grad_norm": 1.1, "step": 1, "loss": 4.0}, {"step": 2, "loss": float("nan")}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The Trainer's checkpoint-2 of two ranks."""
    return write(save(small_model(), Run(stage=2), tmp_path / "run" / "checkpoint-2", TAG))


def write(folder: Path, **changed: object) -> Path:
    content = {"global_step": 2, "log_history": PAST} | changed
    (folder / "trainer_state.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("folder", "tag", "step", "words"),
    [
        ("checkpoint-2", TAG, 2, ()),
        ("checkpoint-2", TAG, 4, ("2 in rank files", "4 in trainer_state.json")),
        ("checkpoint-8", TAG, 2, ("2 in rank files", "8 in folder name")),
        ("checkpoint-2", "global_step400", 2, ("2 in rank files", "400 in tag name")),
    ],
)
def test_another_step_causes_a_warning(
    folder: str, tag: str, step: int, words: tuple[str, ...], root: Path
) -> None:
    (root / TAG).rename(root / tag)
    (root / "latest").write_text(tag)
    warnings = open_checkpoint(write(root.rename(root.parent / folder), global_step=step)).warnings
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


def test_another_loss_on_another_node_causes_a_warning(root: Path) -> None:
    node = root.parents[1] / "node1" / root.name
    (node / TAG).mkdir(parents=True)
    (node / "latest").write_text(TAG)
    for path in (root / TAG).glob("*pp_rank_1_*"):
        path.rename(node / TAG / path.name)
    write(node)
    assert open_checkpoint([root, node]).warnings == ()
    write(node, log_history=[PAST[0] | {"loss": 9.5}])
    (warning,) = open_checkpoint([root, node]).warnings
    assert "another run" in warning
