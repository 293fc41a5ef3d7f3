"""Open a checkpoint: resolve paths, read metadata, name newer checkpoints that were not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from zexport.checkpoint.resolve import (
    NEWEST,
    SOURCES,
    Location,
    TagChoice,
    are_of_one_run,
    list_candidates,
    locate,
    locate_all,
    location_of,
    original_name,
)
from zexport.checkpoint.state import TrainingState
from zexport.checkpoint.trainer_state import run_warnings
from zexport.errors import UsageError
from zexport.options import checks_arguments
from zexport.storage.location import place
from zexport.storage.os_errors import reading

Checkpoint: TypeAlias = "Path | str | Sequence[Path | str]"
"""A path to a checkpoint, or one for each node that has a part of it."""


@checks_arguments
def open_checkpoint(
    path: Checkpoint, *, tag: str | None = None, follow_symlinks: bool = False
) -> TrainingState:
    """Read the metadata of a checkpoint; no tensor data, and no code of it is run.

    Args:
        path: a run folder, the folder with ``latest``, or a tag folder; several if each node has
            a part of the checkpoint.
        tag: a tag or checkpoint name; ``newest`` for the newest without problems (the newest, if
            all have some); by default the tag that ``latest`` names.
        follow_symlinks: also read links that lead out of ``path``.

    What prevents an export is in ``problems`` of the result, not raised.

    Raises:
        CheckpointError: there is no checkpoint, or not this tag.
        AmbiguousTagError: there are several checkpoints; the error lists them.
        UsageError: the folders contain different checkpoints.
        UnsafeError: ``latest`` or a link leads out of its folder.
    """
    paths = [*map(place, [path] if isinstance(path, Path | str) else path)]
    if not paths:
        raise UsageError("no folder was given", hint="Pass the folder of a checkpoint")
    with reading(paths[0], hint="Check its permissions, and that nothing is writing there"):
        if tag != NEWEST:
            found = [locate(one, tag, follow_symlinks=follow_symlinks) for one in paths]
            opened = open_locations(found)
            return replace(opened, newer=tuple(_newer(opened)))
        if len(paths) > 1:
            raise UsageError("--tag newest needs one folder", hint="Choose the tag with --tag")
        skipped: dict[str, TrainingState] = {}
        for name, location in locate_all(paths[0], follow_symlinks=follow_symlinks):
            opened = open_locations([location])
            if not opened.problems:
                newer = tuple(_skipped(name, one) for name, one in skipped.items())
                return replace(opened, newer=newer)
            skipped[name] = opened
        return next(iter(skipped.values()))


def open_locations(locations: Sequence[Location]) -> TrainingState:
    """Read one checkpoint from its tag folder, or from one per node."""
    tags = sorted({original_name(one.tag) for one in locations})
    if len(tags) > 1:
        raise UsageError(
            "folders contain different tags",
            path=locations[0].root,
            found=", ".join(tags),
            hint="Choose the tag with --tag",
        )
    source = next(one for one in SOURCES if one.holds(locations[0].tag_dir))
    state = source.read(locations)
    return replace(state, warnings=(*run_warnings(state), *state.warnings))


def _newer(opened: TrainingState) -> Iterator[str]:
    """Name newer checkpoints of the run if the user did not choose the tag."""
    location, step = opened.location, opened.global_steps
    if step is None or location.chosen not in (TagChoice.LATEST, TagChoice.ONLY):
        return
    for one in reversed(list_candidates(location.root, location.boundary)):
        if one.name == location.tag:
            return
        is_newer = one.step is None or one.step > step
        if not is_newer or not are_of_one_run((one.name, location.tag)):
            continue
        newer = open_locations([location_of(one.tag_dir, TagChoice.NEWEST, location.boundary)])
        if not newer.problems:
            yield (
                f"{one.name} is newer (step {newer.global_steps:,}) than {location.tag} (step "
                f"{step:,}), the tag {location.chosen.value}. Pass --tag {one.name} to use it"
            )
            return
        yield _skipped(one.name, newer)


def _skipped(name: str, other: TrainingState) -> str:
    step = "unknown step" if other.global_steps is None else f"step {other.global_steps:,}"
    first, *more = (problem.statement() for problem in other.problems)
    rest = f", and {len(more)} more problems" if more else ""
    return f"{name} ({step}) was skipped: {first}{rest}"
