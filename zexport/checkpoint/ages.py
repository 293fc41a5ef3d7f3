"""Which of several checkpoints is the newest: by the step that each records, else by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zexport.checkpoint.rank_files import RankFileKind, list_rank_files
from zexport.checkpoint.states import read_model_states
from zexport.errors import ZexportError
from zexport.formats.torch_file import read_torch_file
from zexport.store.boundary import Boundary

_TAGS_READ_MAX = 16
"""So many tags are looked into for their step; among the others, names decide."""

_DIGITS = re.compile(r"\d{1,18}", re.ASCII)
_ACCELERATE = re.compile(r"pytorch_model(?:_\d{1,9})?", re.ASCII)
_MODEL_FILES = (RankFileKind.MODEL, RankFileKind.MODEL_PER_RANK)


def by_number(name: str) -> tuple[list[int], str]:
    """What sorts names by the numbers in them."""
    return [int(digits) for digits in _DIGITS.findall(name)], name


def are_of_one_run(names: Iterable[str]) -> bool:
    """Whether folders differ in nothing but a number, as ``checkpoint-N`` do.

    Others (an actor and a critic, say) are models beside one another, none of them the newer.
    """
    return len({_without_numbers(name) for name in names}) <= 1


def models_of_accelerate(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags that hold one of several models each, all of one save.

    Source: Accelerate 1.15, ``accelerator.py`` (``save_state``: ``pytorch_model``, and
    ``pytorch_model_1`` and on for further models; ``latest`` names whichever was saved last).
    """
    return tuple(tag for tag in tags if _ACCELERATE.fullmatch(tag))


def recorded_step(tag_dir: Path, boundary: Boundary) -> int | None:
    """The steps taken, as a model file says; ``None`` where none does, or it lies outside."""
    models = [file.path for file in list_rank_files(tag_dir) if file.kind in _MODEL_FILES]
    if not models or not boundary.holds(models[0]):
        return None
    try:
        return read_model_states(read_torch_file(models[0])).global_steps
    except ZexportError:  # opening this tag tells what is wrong
        return None


def recorded_steps(folders: Mapping[str, Path], boundary: Boundary) -> dict[str, int | None]:
    """The steps of the tags that are looked into: those without a number, and the highest.

    Args:
        folders: the tag folder of each name.
        boundary: where its files may lie.
    """
    ordered = sorted(folders, key=lambda tag: (not _DIGITS.search(tag), by_number(tag)))
    return {tag: recorded_step(folders[tag], boundary) for tag in ordered[-_TAGS_READ_MAX:]}


def newest_last(tags: Iterable[str], steps: Mapping[str, int | None]) -> tuple[str, ...]:
    """The tags by their steps; at the same step, by the numbers in their names.

    One whose step is not known comes right after the next lower one of its kind of name (an
    interrupted save after the one before it), and before all tags of other names if there is none.
    """
    highest: dict[str, int] = {}
    places: dict[str, tuple[int, tuple[list[int], str]]] = {}
    for tag in sorted(tags, key=by_number):
        kind, step = _without_numbers(tag), steps.get(tag)
        known = highest.get(kind, -1)
        places[tag] = (known if step is None else step, by_number(tag))
        highest[kind] = places[tag][0]
    return tuple(sorted(places, key=places.__getitem__))


def by_age(root: Path, tags: Sequence[str], boundary: Boundary) -> tuple[str, ...]:
    """The tags in ``root``, newest last."""
    folders = {tag: root / tag for tag in tags}
    return newest_last(tags, recorded_steps(folders, boundary) if len(tags) > 1 else {})


def _without_numbers(name: str) -> str:
    return _DIGITS.sub("0", name)
