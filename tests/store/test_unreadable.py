"""What may not be read, or is gone, is told by its path: never a traceback, never a guess."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zexport
from tests.support.checkpoints import Run, save, small_model
from zexport.checkpoint.zero import source as reading
from zexport.errors import CheckpointError, IncompleteCheckpointError
from zexport.inspect.inspect import inspect_checkpoint
from zexport.options import ExportOptions, NameLayout

TAG = "global_step2"
Bar = Callable[[Path], Path]


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> Bar:
    """Take every permission from a path, and from what lies below it, of root as well."""
    barred: list[str] = []

    def guard(name: str) -> None:
        plain = getattr(os, name)

        def guarded(path: object, *args: object, **named: object) -> object:
            given = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if any(given == one or given.startswith(f"{one}/") for one in barred):
                raise PermissionError(13, "Permission denied", given)
            return plain(path, *args, **named)

        monkeypatch.setattr(os, name, guarded)

    for name in ("stat", "open", "scandir", "listdir"):
        guard(name)
    return lambda path: (barred.append(str(path)), path)[1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save(small_model(), Run(), tmp_path / "run")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model folder with one of each kind of file that is looked for."""
    folder = tmp_path / "models" / "base"
    (folder / "1_Pooling").mkdir(parents=True)
    steps = [{"type": "x.Pooling", "path": "1_Pooling"}]
    for name, content in {
        "config.json": {"model_type": "odd"},
        "1_Pooling/config.json": {},
        "modules.json": steps,
    }.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    save_file({"emb.weight": torch.zeros(13, 7)}, folder / "model.safetensors")
    return folder


def plan(run: Path, **chosen: Any) -> None:
    options = ExportOptions(layout=NameLayout.MEMORY, **chosen)
    zexport.plan_export(zexport.open_checkpoint(run), "out", options)


@pytest.mark.parametrize("part", ["README.md", ".", ".."])
def test_a_base_of_which_something_may_not_be_read_is_told(
    part: str, run: Path, base: Path, bar: Bar
) -> None:
    barred = bar(Path(os.path.normpath(base / part)))
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as caught:
        plan(run, base=base)
    assert caught.value.path is not None
    assert caught.value.path.is_relative_to(barred)


def test_an_inspection_tells_all_that_may_be_read(run: Path, bar: Bar) -> None:
    save(small_model(), Run(), run, "global_step1")
    (barred := run / "global_step1" / "zero").mkdir()
    bar(barred)
    bar(run / "config.json")
    found = inspect_checkpoint(run, tag=TAG)
    assert [tag.name for tag in found.tags] == ["global_step1", TAG]
    assert [problem.path for problem in found.problems] == [run / "config.json"]


def test_a_rank_file_that_goes_while_the_checkpoint_is_opened_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = next((run / TAG).glob("*optim_states.pt"))
    check = reading.check_consistency

    def lose(*given: Any) -> Any:
        gone.unlink()  # as save_total_limit does
        return check(*given)

    monkeypatch.setattr(reading, "check_consistency", lose)
    with pytest.raises(CheckpointError, match="No such file or directory") as caught:
        zexport.open_checkpoint(run)
    assert caught.value.path == gone


@pytest.mark.parametrize("kind", ["folders", "links to nothing"])
def test_a_tag_without_a_file_is_not_exportable(kind: str, tmp_path: Path) -> None:
    (tag := tmp_path / TAG).mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        if kind == "folders":
            (tag / name).mkdir()
        else:
            (tag / name).symlink_to(tag / "gone")
    found = inspect_checkpoint(tag)
    assert [type(problem) for problem in found.problems] == [IncompleteCheckpointError]
