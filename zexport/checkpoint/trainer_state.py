"""What files beside a tag say of it: of its step, and the Trainer's of batch, ranks and past.

Source: transformers 5.23, ``trainer.py`` (``_save_checkpoint``, ``_save_rng_state``) and
``trainer_callback.py`` (``TrainerState``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.location import Location, TagChoice
from zexport.checkpoint.ranks import models_of
from zexport.checkpoint.same_save import step_of
from zexport.errors import CheckpointError, ZexportError
from zexport.facts.statements import Statement
from zexport.facts.training import TrainingFact
from zexport.formats.torch_file import read_torch_file
from zexport.printable import some
from zexport.store.boundary import Boundary
from zexport.store.contents import read_json_object
from zexport.store.folders import children, is_file
from zexport.store.json import Json, JsonObject, tables_in

_STATE = "trainer_state.json"
_SCHEDULER = "scheduler.pt"
_TAG_STEP = re.compile(r"global_step(\d{1,18})(?:_universal)?", re.ASCII)
_FOLDER_STEP = re.compile(r"checkpoint-(\d{1,18})", re.ASCII)
"""The names that DeepSpeed gives a tag by itself, and the Trainer a checkpoint's folder."""

_RANDOM_STATE = re.compile(r"rng_state_(\d{1,9})\.pth", re.ASCII)
_OF_ALL_RANKS = re.compile(r"(?:eval_(?:\w+_)?)?loss|learning_rate")
"""What the Trainer logs of all ranks together; times, and losses of a user's, are a rank's own."""

_KEYS_SHOWN = 4


def stated_beside(checkpoint: ZeroCheckpoint) -> Iterator[Statement]:
    """What names and files beside a tag say of it, and what its own files do."""
    location = checkpoint.location
    if checkpoint.global_steps is None:
        return
    yield from _of_updates(checkpoint, checkpoint.global_steps - checkpoint.skipped_steps)
    yield Statement(TrainingFact.RUN_STEP, checkpoint.global_steps, "the files of the tag")
    if found := _TAG_STEP.fullmatch(location.tag):
        yield Statement(TrainingFact.RUN_STEP, int(found[1]), "its name")
    if len(location.tags) > 1 and location.chosen in (TagChoice.OPTION, TagChoice.HANDED_OVER):
        return
    folders = {_STATE: location}
    folders |= {f"{_STATE} of folder {n}": one for n, one in enumerate(checkpoint.parts, start=2)}
    states = {by: _read(one.root, one.boundary) for by, one in folders.items()}
    for by, one in folders.items():
        yield from _of_state(states[by], by, one, checkpoint)
        yield from _of_past(states[by], by, one)
        if by != _STATE:
            both = (states[_STATE], _STATE), (states[by], by)
            yield from _parted(*both)
    yield from _of_random_states([one.root for one in folders.values()], checkpoint.ranks)


def _of_updates(checkpoint: ZeroCheckpoint, of_run: int) -> Iterator[Statement]:
    """Where the optimizer counts fewer updates: a save into one folder writes its files last.

    It may count more, as some do once for each sub-group.
    """
    files = (one for ranks in checkpoint.cells.values() for one in ranks.optimizer.values())
    first = next(files, None)
    step = None if first is None else step_of(first)
    if step is not None and step < of_run:
        yield Statement(TrainingFact.RUN_UPDATES, of_run, "the model files")
        yield Statement(TrainingFact.RUN_UPDATES, int(step), "the optimizer's")


def _of_state(
    state: JsonObject, by: str, location: Location, checkpoint: ZeroCheckpoint
) -> Iterator[Statement]:
    """Step, rows of a micro-batch, and the checkpoint that the run calls its best."""
    step, named = state.get("global_step"), _FOLDER_STEP.fullmatch(location.real_root.name)
    if isinstance(step, int):
        yield Statement(TrainingFact.RUN_STEP, step, by)
        if named:
            yield Statement(TrainingFact.RUN_STEP, int(named[1]), "the folder's name")
        yield from _of_schedule(location, step, checkpoint.ranks)
    model = next(iter(models_of(checkpoint.cells).values()), None)
    micro = None if model is None else model.ds_config.get("train_micro_batch_size_per_gpu")
    rows = state.get("train_batch_size")
    if isinstance(micro, int) and isinstance(rows, int):
        yield Statement(TrainingFact.RUN_BATCH, micro, "the files of the tag")
        yield Statement(TrainingFact.RUN_BATCH, rows, by)
    best = state.get("best_model_checkpoint")
    if named and isinstance(best, str):
        yield Statement(TrainingFact.RUN_BEST, named[0], "the folder's name")
        yield Statement(TrainingFact.RUN_BEST, Path(best).name, f"{by}, best_model_checkpoint")


def _of_schedule(location: Location, step: int, ranks: int | None) -> Iterator[Statement]:
    """How far the scheduler is, where that is later than the run; it skips updates as that does.

    Accelerate's own scheduler counts ranks times updates.
    """
    path = location.root / _SCHEDULER
    with suppress(OSError):
        if is_file(path) and location.boundary.holds(path):
            epoch = last_epoch(path)
            if epoch is not None and epoch > step and epoch != step * (ranks or 1):
                yield Statement(TrainingFact.RUN_STEP, epoch, _SCHEDULER)


def last_epoch(path: Path) -> int | None:
    """How often the scheduler in a file of ``torch.save`` has stepped; ``None`` if it says nothing.

    Source: torch 2.13, ``optim/lr_scheduler.py`` (``LRScheduler.state_dict``).
    """
    try:
        value = read_torch_file(path).value
    except CheckpointError:
        return None
    epoch = value.get("last_epoch") if isinstance(value, dict) else None
    return epoch if type(epoch) is int else None


def _of_random_states(roots: Iterable[Path], ranks: int | None) -> Iterator[Statement]:
    """The number of ranks, and the highest that has a random state in any folder."""
    names = (path.name for root in roots for path in children(root))
    found = map(_RANDOM_STATE.fullmatch, names)
    highest = max((int(one[1]) for one in found if one), default=None)
    if ranks is not None and highest is not None:
        yield Statement(TrainingFact.RUN_RANKS, ranks, "the number of ranks")
        yield Statement(TrainingFact.RUN_RANKS, highest, f"rng_state_{highest}.pth")


def checkpoint_before(location: Location, step: int | None = None) -> Path | None:
    """The folder of the Trainer's last checkpoint before this one, or before a step, in its run."""
    runs, named = location.real_root.parent, _FOLDER_STEP.fullmatch(location.real_root.name)
    last = int(named[1]) if step is None and named else step
    older: dict[int, Path] = {}
    with suppress(OSError):  # it may be another user's
        found = ((_FOLDER_STEP.fullmatch(p.name), p) for p in (children(runs) if last else ()))
        older = {int(name[1]): path for name, path in found if name}
    before = max((n for n in older if last is not None and n < last), default=None)
    return None if before is None else older[before]


def _of_past(state: JsonObject, by: str, location: Location) -> Iterator[Statement]:
    """Where the checkpoint before this one has logged something else of the steps of both."""
    step = state.get("global_step")
    before = checkpoint_before(location, step) if isinstance(step, int) else None
    if before is None:
        return
    other = _read(before, location.boundary.including(before.parent))
    both = (state, by), (other, f"that of {before.name}")
    yield from _apart(TrainingFact.RUN_PAST, *both)


def _apart(
    fact: TrainingFact,
    one: tuple[JsonObject, str],
    other: tuple[JsonObject, str],
) -> Iterator[Statement]:
    """The first step of which two states have logged different things."""
    both = zip(_logged(one[0]), _logged(other[0]), strict=False)
    for a, b in islice(((a, b) for a, b in both if _text(a) != _text(b)), 1):
        about = f"step {a.get('step')}:"
        yield Statement(fact, _told(a, b), one[1], about)
        yield Statement(fact, _told(b, a), other[1], about)


def _logged(state: JsonObject) -> list[JsonObject]:
    """What a state has logged, in order."""
    return tables_in(state.get("log_history"))


def _parted(one: tuple[JsonObject, str], other: tuple[JsonObject, str]) -> Iterator[Statement]:
    """The first step at which two parts of one checkpoint have logged what all ranks have alike."""
    ours, theirs = _by_step(one[0]), _by_step(other[0])
    for step in sorted(ours.keys() & theirs.keys()):
        both = ours[step].keys() & theirs[step].keys()
        a, b = ({key: table[step][key] for key in sorted(both)} for table in (ours, theirs))
        if _text(a) != _text(b):
            yield Statement(TrainingFact.RUN_PARTS, _told(a, b), one[1], f"step {step}:")
            yield Statement(TrainingFact.RUN_PARTS, _told(b, a), other[1], f"step {step}:")
            return


def _by_step(state: JsonObject) -> dict[int, dict[str, Json]]:
    """What was logged of all ranks together, by step."""
    found: dict[int, dict[str, Json]] = {}
    for entry in _logged(state):
        if isinstance(step := entry.get("step"), int):
            told = {key: one for key, one in entry.items() if _OF_ALL_RANKS.fullmatch(key)}
            found.setdefault(step, {}).update(told)
    return found


def best_of(location: Location) -> str | None:
    """The checkpoint that the Trainer calls its best so far; ``None`` where it calls none so."""
    best = _read(location.root, location.boundary).get("best_model_checkpoint")
    return best if isinstance(best, str) else None


def _read(folder: Path, within: Boundary) -> JsonObject:
    """The Trainer's state in a folder; empty where there is none, or none that can be read."""
    path = folder / _STATE
    with suppress(ZexportError, OSError):
        return read_json_object(path) if is_file(path) and within.holds(path) else {}
    return {}


def _told(entry: Mapping[str, Json], other: Mapping[str, Json]) -> str:
    """What was logged at a step, and otherwise by another."""
    differing = {**entry, **other}.keys()
    told = (f"{k} {entry.get(k)}" for k in differing if _text(entry.get(k)) != _text(other.get(k)))
    return some([*told], _KEYS_SHOWN)


def _text(entry: object) -> str:
    return json.dumps(entry, sort_keys=True)  # NaN is like NaN
