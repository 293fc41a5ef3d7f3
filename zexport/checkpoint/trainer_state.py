"""What the Trainer's files next to a tag record.

Source: transformers 5.23, ``trainer.py`` (``_save_checkpoint``) and ``trainer_callback.py``
(``TrainerState``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from zexport.checkpoint.resolve import Location
from zexport.checkpoint.state import TrainingState
from zexport.errors import ZexportError
from zexport.storage.contents import read_json_object
from zexport.storage.files import children, is_file
from zexport.storage.json import JsonObject, tables_in

_STATE = "trainer_state.json"
_TAG_STEP = re.compile(r"global_step(\d{1,18})(?:_universal)?", re.ASCII)
_FOLDER_STEP = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)


def run_warnings(state: TrainingState) -> Iterator[str]:
    """Yield warnings if names or ``trainer_state.json`` are of another step or run."""
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
        yield f"{location.name}: files or names of different steps ({listed}). Copy it again"
    for part in state.parts:  # ZeRO-3 has nothing else that ties ranks of one run together
        ours, theirs = _losses(saved), _losses(_read(part))
        if differing := [one for one in ours.keys() & theirs.keys() if ours[one] != theirs[one]]:
            step = min(differing)
            yield (
                f"{part.root}: {_STATE} has another loss at step {step} ({theirs[step]}) than "
                f"that of {location.root} ({ours[step]}), so they may be of different runs. "
                "Pass the folders of one run"
            )


def checkpoint_before(location: Location) -> Path | None:
    """Return the Trainer's checkpoint folder before this one in the run."""
    own = _FOLDER_STEP.fullmatch(location.real_root.name)
    older: dict[int, Path] = {}
    with suppress(OSError):  # another user's folder
        for path in children(location.real_root.parent) if own else ():
            found = _FOLDER_STEP.fullmatch(path.name)
            older |= {int(found[1]): path} if found and own and int(found[1]) < int(own[1]) else {}
    return older[max(older)] if older else None


def _losses(saved: JsonObject) -> dict[int, str]:
    entries = [one for one in tables_in(saved.get("log_history")) if "loss" in one]
    return {step: str(one["loss"]) for one in entries if isinstance(step := one.get("step"), int)}


def _read(location: Location) -> JsonObject:
    """Return the Trainer's state next to a tag; empty if it cannot be read."""
    path = location.root / _STATE
    with suppress(ZexportError, OSError):
        return read_json_object(path) if is_file(path) and location.boundary.holds(path) else {}
    return {}
