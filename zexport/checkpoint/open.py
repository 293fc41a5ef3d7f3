"""Open a checkpoint: resolve paths, read metadata, name newer checkpoints that were not used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from zexport.checkpoint.resolve import (
    NEWEST,
    Location,
    TagChoice,
    are_of_one_run,
    list_candidates,
    locate,
    locate_all,
    location_of,
    original_name,
    source_in,
)
from zexport.checkpoint.state import TrainingState
from zexport.errors import UsageError, ZexportError
from zexport.options import checks_arguments
from zexport.storage.files import is_file
from zexport.storage.json import JsonObject, read_json_object, tables_in
from zexport.storage.location import place
from zexport.storage.os_errors import reading

_STATE = "trainer_state.json"
_TAG_STEP = re.compile(r"global_step(\d{1,18})(?:_universal)?", re.ASCII)
_FOLDER_STEP = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)

Checkpoint: TypeAlias = "Path | str | Sequence[Path | str]"
"""A path to a checkpoint, or one for each node that has a part of it."""


@checks_arguments
def open_checkpoint(
    path: Checkpoint, *, tag: str | None = None, follow_symlinks: bool = False
) -> TrainingState:
    """Return the metadata of a checkpoint, without reading tensors or running code.

    Args:
        path: a run folder, the folder with ``latest``, or a tag folder; several if each node has
            a part of the checkpoint.
        tag: a tag or checkpoint name; ``newest`` for the newest without problems (the newest, if
            all have some); by default the tag that ``latest`` names.
        follow_symlinks: also read links that lead out of ``path``.

    Problems that prevent an export are not raised but in ``problems`` of the result.

    Raises:
        CheckpointError: there is no checkpoint, or not this tag.
        AmbiguousTagError: there are several checkpoints; the error lists them.
        UsageError: the folders contain different checkpoints.
        UnsafeError: ``latest`` or a link leads out of its folder.
    """
    paths = [*map(place, [path] if isinstance(path, Path | str) else path)]
    if not paths:
        raise UsageError("no checkpoint folder was passed", hint="Pass the folder of a checkpoint")
    with reading(paths[0], hint="Check its permissions, and that nothing is writing there"):
        if tag != NEWEST:
            found = [locate(one, tag, follow_symlinks=follow_symlinks) for one in paths]
            opened = open_locations(found)
            return replace(opened, newer=tuple(_newer(opened)))
        if len(paths) > 1:
            raise UsageError(
                "--tag newest needs one checkpoint folder",
                hint="Choose the tag with --tag",
            )
        skipped: dict[str, TrainingState] = {}
        for name, location in locate_all(paths[0], follow_symlinks=follow_symlinks):
            opened = open_locations([location])
            if not opened.problems:
                newer = tuple(_skipped(name, one) for name, one in skipped.items())
                return replace(opened, newer=newer)
            skipped[name] = opened
        return next(iter(skipped.values()))


def open_locations(locations: Sequence[Location]) -> TrainingState:
    """Return the metadata of one checkpoint in a tag folder, or in one per node."""
    tags = sorted({original_name(one.tag) for one in locations})
    if len(tags) > 1:
        raise UsageError(
            "folders contain different tags",
            path=locations[0].root,
            found=", ".join(tags),
            hint="Choose the tag with --tag",
        )
    state = source_in(locations[0].tag_dir).read(locations)
    return replace(state, warnings=(*_run_warnings(state), *state.warnings))


def _newer(opened: TrainingState) -> Iterator[str]:
    location, step = opened.location, opened.global_steps
    if step is None or location.chosen not in (TagChoice.LATEST, TagChoice.ONLY):
        return
    for one in reversed(list_candidates(location.root, location.boundary)):
        if one.name == location.tag:
            return
        is_older = one.step is not None and one.step <= step
        if is_older or not are_of_one_run((one.name, location.tag)):
            continue
        newer = open_locations([location_of(one.tag_dir, TagChoice.NEWEST, location.boundary)])
        if not newer.problems:
            yield (
                f"{one.name} (step {newer.global_steps:,}) is newer than {location.tag} (step "
                f"{step:,}), the tag {location.chosen.value}. Pass --tag {one.name} to use it"
            )
            return
        yield _skipped(one.name, newer)


def _skipped(name: str, other: TrainingState) -> str:
    step = "unknown step" if other.global_steps is None else f"step {other.global_steps:,}"
    first, *more = (problem.statement() for problem in other.problems)
    rest = f", and {len(more)} more problems" if more else ""
    return f"{name} ({step}) was skipped: {first}{rest}"


def _run_warnings(state: TrainingState) -> Iterator[str]:
    """Yield warnings if ``trainer_state.json`` or a name is of another step or run.

    Source: transformers 5.23, ``trainer.py`` (``_save_checkpoint``), ``trainer_callback.py``.
    """
    location, saved = state.location, _read(state.location)
    steps = {"rank files": state.global_steps}
    if found := _TAG_STEP.fullmatch(location.tag):
        steps["tag name"] = int(found[1])
    if len(location.tags) == 1 and isinstance(step := saved.get("global_step"), int):
        steps[_STATE] = step
        if found := _FOLDER_STEP.fullmatch(location.real_root.name):
            steps["folder name"] = int(found[1])
    if state.global_steps is not None and len(set(steps.values())) > 1:
        listed = ", ".join(f"{step} in {by}" for by, step in steps.items())
        yield f"{location.name}: steps differ ({listed}). Copy all its files again"
    for part in state.parts:  # ZeRO-3 files record nothing else of their run
        ours, theirs = _losses(saved), _losses(_read(part))
        if any(ours[step] != theirs[step] for step in ours.keys() & theirs.keys()):
            yield (
                f"{part.root}: may be from another run, because losses differ in its {_STATE} "
                f"and in {location.root}. Pass the folders of one run"
            )


def _losses(saved: JsonObject) -> dict[int, str]:
    entries = [one for one in tables_in(saved.get("log_history")) if "loss" in one]
    return {step: str(one["loss"]) for one in entries if isinstance(step := one.get("step"), int)}


def _read(location: Location) -> JsonObject:
    path = location.root / _STATE
    with suppress(ZexportError, OSError):
        return read_json_object(path) if is_file(path) and location.boundary.holds(path) else {}
    return {}
