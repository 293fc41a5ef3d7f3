"""Opening a checkpoint: which one a path and a tag mean, and which newer ones were passed over."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from zexport.checkpoint.candidates import (
    are_of_one_run,
    are_tied,
    list_ages,
    list_candidates,
    list_tags,
    recorded_step,
)
from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.find import locate, locate_all, locate_named
from zexport.checkpoint.location import NEWEST, Location, TagChoice, location_of
from zexport.checkpoint.node_local import check_parts
from zexport.checkpoint.pruned import original_name
from zexport.checkpoint.reading import read_checkpoint
from zexport.errors import AmbiguousTagError, NoSuchTagError, UsageError
from zexport.options import checks_arguments
from zexport.printable import some
from zexport.store.address import place
from zexport.store.files import reading
from zexport.store.folders import children, is_file, real

_OF_STEP = re.compile(r"(checkpoint-|global_step)(\d{1,18})", re.ASCII)
_CHECK = "Check its permissions, and that nothing is writing there"


Checkpoint: TypeAlias = "Path | str | Sequence[Path | str]"
"""Where a checkpoint lies: one path, or those of its parts on several nodes."""


@checks_arguments
def open_checkpoint(
    path: Checkpoint, *, tag: str | None = None, follow_symlinks: bool = False
) -> ZeroCheckpoint:
    """The checkpoint that ``path`` and ``tag`` mean, from metadata alone.

    Args:
        path: any level: a run's folder, the folder with ``latest``, or a tag folder; several where
            nodes kept their own parts of one checkpoint.
        tag: name of the tag; ``newest`` for the newest without problems (the newest, if all have
            some); ``None`` takes it from the level given or ``latest``.
        follow_symlinks: read what a link leads to, wherever that is; without it, only what lies
            below ``path``.

    Guarantees that no tensor data is read, but for one scalar a rank file and a few KB of one that
    does not say which rank's it is, and that no code of the checkpoint runs. What stands in the way
    of an export is in ``problems``, not raised.

    Raises:
        CheckpointError: there is no checkpoint, or the tag is not there.
        AmbiguousTagError: several tags, and nothing says which.
        UsageError: the parts are of different tags.
        UnsafeError: ``latest`` or a link leads outside its folder.
    """
    paths = [*map(place, [path] if isinstance(path, Path | str) else path)]
    if not paths:
        raise UsageError("no folder was given", hint="Give the checkpoint's")
    with reading(paths[0], hint=_CHECK):
        if len(paths) > 1:
            check_parts(paths, tag)
        if tag == NEWEST:
            opened = _open_newest(locate_all(paths[0], follow_symlinks=follow_symlinks))
        else:
            opened = read_checkpoint(
                [locate(part, tag, follow_symlinks=follow_symlinks) for part in paths]
            )
            opened = dataclasses.replace(opened, newer=tuple(_newer(opened)))
        hidden = _out_of_reach(opened, paths[0]) if tag in (None, NEWEST) else ()
        return dataclasses.replace(opened, newer=(*opened.newer, *hidden))


def open_recorded(
    path: Checkpoint, tag: str | None, step: int | None, *, follow_symlinks: bool = False
) -> ZeroCheckpoint:
    """The checkpoint of that tag and step, wherever in a run it lies.

    Accelerate gives every checkpoint's tag the same name, so that a tag alone means none of them.
    """
    try:
        opened = open_checkpoint(path, tag=tag, follow_symlinks=follow_symlinks)
        if step is None or opened.global_steps == step:
            return opened
    except (AmbiguousTagError, NoSuchTagError):
        opened = None
    paths = [path] if isinstance(path, Path | str) else path
    if tag is not None and len(paths) == 1:
        with reading(folder := place(paths[0]), hint=_CHECK):
            named = locate_named(folder, tag, follow_symlinks=follow_symlinks)
            found = [one for one in named if recorded_step(one.tag_dir, one.boundary) == step]
            if len(found) == 1:
                return read_checkpoint(found)
    return opened or open_checkpoint(path, tag=tag, follow_symlinks=follow_symlinks)


def _open_newest(locations: Sequence[Location]) -> ZeroCheckpoint:
    """The newest without problems; it tells of those that were passed over for theirs."""
    passed_over: list[ZeroCheckpoint] = []
    for number, location in enumerate(locations, start=1):
        opened = read_checkpoint([location])
        if not opened.problems:
            _check_alone(opened, locations[number:])
            told = (_passed_over(location, one) for one in passed_over)
            return dataclasses.replace(opened, newer=tuple(told))
        passed_over.append(opened)
    return passed_over[0]


def _check_alone(newest: ZeroCheckpoint, older: Iterable[Location]) -> None:
    """Refuse the newest if another whole one is of its step, and nothing says which is newer."""
    step, here = newest.global_steps, newest.location
    of_same_step = takewhile(
        lambda one: step is not None and recorded_step(one.tag_dir, one.boundary) == step, older
    )
    rivals = [
        one
        for one in of_same_step
        if are_tied(one.tag_dir, here.tag_dir) and not read_checkpoint([one]).problems
    ]
    if rivals:
        raise _no_newest(here, rivals)


def _newer(opened: ZeroCheckpoint) -> Iterator[str]:
    """Tells of newer checkpoints of the run, where the tag was not chosen by the user."""
    location, step = opened.location, opened.global_steps
    for other in _newer_than(location, step):
        name = _name_beside(location, other)
        newer = read_checkpoint([other])
        if newer.problems:
            yield _passed_over(location, newer)
        else:
            yield (
                f"{name} beside {location.tag} is of step {newer.global_steps:,}, and this one, "
                f"which is {location.chosen.value}, of step {step:,}: --tag {name} takes that one"
            )
            return


def _out_of_reach(opened: ZeroCheckpoint, run: Path) -> Iterator[str]:
    """Tells of later checkpoints in a run's folder that cannot be looked into."""
    location = opened.location
    is_of_run = location.real_root.parent == real(run)
    here = location.real_root if is_of_run else location.tag_dir
    own = _OF_STEP.fullmatch(original_name(here.name))
    for folder in children(run) if own else ():
        found = _OF_STEP.fullmatch(folder.name)
        is_later = own and found and found[1] == own[1] and int(found[2]) > int(own[2])
        if is_later and (problem := _lack_of(folder)):
            yield f"{folder.name} was passed over: {problem}"


def _lack_of(folder: Path) -> str | None:
    """Why no tag is found in a checkpoint's folder: its ``latest`` names one that is gone, say."""
    try:
        if not list_tags(folder) and is_file(folder / "latest"):
            return "the tag that its latest names is not there"
    except PermissionError:
        return "it may not be read"
    return None


def _passed_over(location: Location, other: ZeroCheckpoint) -> str:
    step = "unknown step" if other.global_steps is None else f"step {other.global_steps:,}"
    first, *more = (problem.statement() for problem in other.problems)
    rest = f", and {len(more)} more problems" if more else ""
    return f"{_name_beside(location, other.location)} ({step}) was passed over: it {first}{rest}"


def _newer_than(location: Location, step: int | None) -> tuple[Location, ...]:
    """Newer checkpoints of the same run, newest first, where the tag was not chosen by the user.

    Args:
        location: a tag in a folder that may be a run's ``output_dir``.
        step: the steps that it records.
    """
    if location.chosen not in (TagChoice.LATEST, TagChoice.ONLY) or step is None:
        return ()
    if len(location.tags) <= 1 and not list_ages(location.root):
        return ()
    candidates = list_candidates(location.root, location.boundary)
    names = [one.name for one in candidates]
    later = candidates[names.index(location.tag) + 1 :] if location.tag in names else ()
    return tuple(
        location_of(one.root, one.tags[-1], TagChoice.NEWEST, location.boundary)
        for one in reversed(later)
        if (one.step is None or one.step > step) and are_of_one_run((one.name, location.tag))
    )


def _name_beside(location: Location, other: Location) -> str:
    """What ``--tag`` takes for another checkpoint of a run: the tag's name, or its folder's."""
    return other.tag if other.root == location.root else other.root.name


def _no_newest(one: Location, others: Sequence[Location]) -> AmbiguousTagError:
    """The refusal to take one of several for the newest."""
    first, *rest = (location.tag_dir for location in (one, *others))
    above = next(parent for parent in first.parents if all(p.is_relative_to(parent) for p in rest))
    names = [str(folder.relative_to(above).parts[0]) for folder in (first, *rest)]
    return AmbiguousTagError(
        "holds several checkpoints of one step, and nothing says which is the newest",
        path=above,
        found=some(sorted(names)),
        hint="Choose one with --tag",
    )
