"""What names and the Trainer's files next to a tag say of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Run, save, small_model
from tests.support.forked import typed
from zexport import open_checkpoint

TAG = "global_step2"
PAST = [{"grad_norm": 1.1, "step": 1, "loss": 4.0}, {"step": 2, "loss": float("nan")}]
STATE: dict[str, Any] = {"global_step": 2, "log_history": PAST}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The Trainer's checkpoint-2 of two ranks."""
    folder = save(small_model(), Run(stage=2), tmp_path / "run" / "checkpoint-2", TAG)
    for rank in range(2):
        (folder / f"rng_state_{rank}.pth").touch()
    write(folder)
    return folder


def write(folder: Path, **changed: object) -> None:
    (folder / "trainer_state.json").write_text(json.dumps(STATE | changed))


def add_node(root: Path, **changed: object) -> Path:
    """Move the files of rank 1 to a second node's folder."""
    node = root.parents[1] / "node1" / root.name
    (node / TAG).mkdir(parents=True)
    (node / "latest").write_text(TAG)
    for path in (*(root / TAG).glob("*pp_rank_1_*"), root / "rng_state_1.pth"):
        path.rename(node / path.relative_to(root))
    write(node, **changed)
    return node


def test_files_of_one_run_cause_no_warning(root: Path) -> None:
    opened = open_checkpoint(root)
    assert (opened.warnings, opened.notes) == ((), ())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: write(root, global_step=4), "2 in rank files.* 4 in trainer_state.json"),
        (
            lambda root: root.rename(root.parent / "checkpoint-8"),
            "2 in rank files.* 8 in folder name",
        ),
        (lambda root: rename_tag(root, "global_step400"), "400 in tag name"),
    ],
    ids=["step", "folder", "tag"],
)
def test_files_of_another_step_cause_a_warning(
    root: Path, change: Callable[[Path], Path | None], told: str
) -> None:
    moved = change(root)
    shown = typed("inspect", moved or root, "--json").stdout
    (warning,) = json.loads(shown)["checkpoint"]["warnings"]
    assert re.search(told, warning), warning


def rename_tag(root: Path, name: str) -> None:
    (root / TAG).rename(root / name)
    (root / "latest").write_text(name)


def test_nodes_that_logged_another_loss_cause_a_warning(root: Path) -> None:
    node = add_node(root, log_history=[PAST[0] | {"loss": 9.5}])
    (warning,) = open_checkpoint([root, node]).warnings
    assert "another loss at step 1 (9.5)" in warning
