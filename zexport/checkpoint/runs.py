"""The checkpoints of one run: which folders in its ``output_dir`` are its, and which is the newest.

A run's ``output_dir`` holds a folder for each checkpoint, with the tags in it, and may hold tags of
its own beside those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from zexport.checkpoint.ages import are_of_one_run, by_age, newest_last, recorded_steps
from zexport.checkpoint.location import Location, TagChoice, list_children, list_tags
from zexport.store.boundary import Boundary

_CHECKPOINT = re.compile(r"checkpoint[-_]\d{1,18}", re.ASCII)


def list_run_checkpoints(path: Path) -> tuple[str, ...]:
    """Names of the folders in a run's ``output_dir`` that hold tags, by the numbers in them."""
    return list_children(path, lambda child: child.is_dir() and bool(list_tags(child)))


def list_ages(path: Path) -> tuple[str, ...]:
    """Those of ``list_run_checkpoints`` that are of one run, with the tags beside them if any are.

    Beside tags these are ``checkpoint-N`` alone: other folders may be other models (a critic below
    its actor). Source: transformers 5.23, ``trainer.py`` (``save_model``: under ZeRO-3 that gathers
    nothing on saving, DeepSpeed's ``save_checkpoint`` writes the end of training to ``output_dir``
    itself, beside ``checkpoint-N``).
    """
    runs = list_run_checkpoints(path)
    if list_tags(path):
        return tuple(run for run in runs if _CHECKPOINT.fullmatch(run))
    return runs if are_of_one_run(runs) else ()


def steps_by_age(path: Path, boundary: Boundary) -> dict[str, int | None]:
    """The steps of a folder's tags and of the checkpoints of its run, by name, newest last.

    A name in a run stands for the newest tag there.
    """
    folders = {run: _newest_tag(path / run, boundary) for run in list_ages(path)}
    folders |= {tag: path / tag for tag in list_tags(path)}
    steps = recorded_steps(folders, boundary)
    return {name: steps.get(name) for name in newest_last(folders, steps)}


def newer_than(location: Location, step: int | None) -> Iterator[str]:
    """Tells of a newer checkpoint of the same run, where the tag was not chosen by the user.

    Args:
        location: a tag in a folder that may be a run's ``output_dir``.
        step: the steps that it records.
    """
    if location.chosen not in (TagChoice.LATEST, TagChoice.ONLY) or step is None:
        return
    runs = list_ages(location.root)
    if not runs:
        return
    steps = steps_by_age(location.root, location.boundary)
    newest = [run for run in steps if run in runs][-1]
    newest_step = steps[newest]
    if newest_step is not None and newest_step > step:
        yield (
            f"{newest} beside {location.tag} is of step {newest_step:,}, and this one, which is "
            f"{location.chosen.value}, of step {step:,}: --tag {newest} takes that one"
        )


def _newest_tag(root: Path, boundary: Boundary) -> Path:
    return root / by_age(root, list_tags(root), boundary)[-1]
