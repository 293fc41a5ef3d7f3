"""The other files of a framework's checkpoint, for other ranks.

Sources: transformers 5.23 (``trainer.py``: ``_save_rng_state``, ``_load_rng_state``,
``_load_best_model``), accelerate 1.15 (``checkpointing.py``, ``scheduler.py``), Lightning 2.6
(``training_epoch_loop.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.resolve import LATEST, Framework, Location
from zexport.checkpoint.trainer_state import best_of
from zexport.errors import CheckpointError
from zexport.filenames import MANIFEST_NAME
from zexport.formats.torch_file import read_torch_file
from zexport.plan.plan import SideFile
from zexport.printable import shown, some
from zexport.store.contents import read_json_object
from zexport.store.files import reading
from zexport.store.folders import children, exists, is_file, is_folder, leaves
from zexport.train.options import OPTIONS_FILE, without_auto


class Ranks(Struct, frozen=True):
    """Numbers of training processes; ``after`` is ``None`` for any number."""

    before: int
    after: int | None


class Beside(Struct, frozen=True):
    """The files next to the tag folder, with warnings and notes."""

    files: tuple[SideFile, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


_WEIGHTS = re.compile(r"(model|pytorch_model)[^/]*\.(safetensors|bin)(\.index\.json)?")
"""Gathered weights, which the rank files have; adapters have other file names."""

_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
_TRAINER_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_ACCELERATE_RNG = re.compile(r"random_states_\d+\.pkl")
_SCHEDULER = re.compile(r"scheduler(_\d+)?\.bin")


def beside(
    location: Location,
    ranks: Ranks,
    stage: int | None,
    step: int | None,
    ds_config: Mapping[str, object] | None = None,
) -> Beside:
    """Return the files around a tag folder, for the new ``ranks``.

    ``stage`` is the new ZeRO stage, ``ds_config`` the config given for it; ``step`` counts the
    optimizer's updates.
    """
    if location.framework in (Framework.DEEPSPEED, Framework.OPENRLHF):
        return Beside((), (), ())
    with reading(location.root):
        found = {path.relative_to(location.root).as_posix(): path for path in _around(location)}
    left_out = {name: path for name, path in found.items() if _WEIGHTS.fullmatch(name)}
    kept = {name: path for name, path in found.items() if name not in left_out}
    notes = []
    if left_out:
        notes.append(
            f"the model's gathered weights are not copied ({some(sorted(left_out), 3)}): the rank "
            "files hold them"
        )
    warnings: list[str] = []
    if location.framework is Framework.HF_TRAINER:
        kept, told = _trainers_rng(kept, ranks)
        notes += told
        warnings += _of_best(location)
    if location.framework is Framework.ACCELERATE:
        kept, told = _without_accelerates_rng(kept, ranks)
        notes += told
        warnings += _scheduler_counts(kept, ranks, step)
    files = [SideFile(name, origin=path) for name, path in sorted(kept.items())]
    if location.framework is Framework.ZEXPORT:
        files = [_for_train(file, ranks.after, stage, ds_config) for file in files]
    return Beside(tuple(files), tuple(warnings), (*notes, *_not_looked_into(kept)))


def _around(location: Location) -> Iterator[Path]:
    """Yield files of the checkpoint's folder outside tag folders."""
    skipped = {*location.tags, location.tag, *LATEST, MANIFEST_NAME, "gathered"}
    for path in children(location.root):
        is_below = is_folder(path)
        is_ours = is_below and exists(path / MANIFEST_NAME)
        if path.name in skipped or path.name.startswith(".") or is_ours:
            continue  # another tag, or what zexport has written here
        for file in leaves(path) if is_below else (path,):
            location.boundary.check(file)
            if is_file(file):
                yield file


def _trainers_rng(kept: dict[str, Path], ranks: Ranks) -> tuple[dict[str, Path], list[str]]:
    """Return Trainer's random states under the names that it loads: no number for one rank."""
    states = {int(match[1] or 0): name for name in kept if (match := _TRAINER_RNG.fullmatch(name))}
    if not states:
        return kept, []
    if ranks.after is None:
        return kept, [
            f"{some(sorted(states.values()), 4)}: random states of {ranks.before} "
            f"rank{'s' * (ranks.before != 1)}; another number of ranks begins with its seed"
        ]
    new = {
        "rng_state.pth" if ranks.after == 1 else f"rng_state_{rank}.pth": kept[name]
        for rank, name in states.items()
        if rank < min(ranks.before, ranks.after)  # others are of another run
    }
    rest = {name: path for name, path in kept.items() if name not in states.values()}
    lacking = ranks.after - len(new)
    told = [
        f"for {lacking} of {ranks.after} ranks there is no random state to copy: a rank without "
        "one begins with that of its seed"
    ]
    return rest | new, told if lacking > 0 else []


def _of_best(location: Location) -> Iterator[str]:
    """Yield a warning: Trainer loads its best checkpoint for the present ranks and stage."""
    if (best := best_of(location)) is not None:
        yield (
            f"trainer_state.json names the best checkpoint so far ({shown(best)}): with "
            "load_best_model_at_end, Trainer loads it when it ends, and fails where that is for "
            "other ranks or another stage. Reshard that, too, and let best_model_checkpoint in "
            "OUT's trainer_state.json name the result"
        )


def _without_accelerates_rng(
    kept: dict[str, Path], ranks: Ranks
) -> tuple[dict[str, Path], list[str]]:
    """Return the files without random states if ranks change: they also count micro-batches.

    One rank would update too early, and several would wait for each other forever.
    """
    states = [name for name in kept if _ACCELERATE_RNG.fullmatch(name)]
    if not states or ranks.before == ranks.after:
        return kept, []
    rest = {name: path for name, path in kept.items() if name not in states}
    return rest, [
        f"{some(states, 4)}: not copied, since Accelerate keeps the count of micro-batches in "
        "them, which another number of ranks has otherwise; random states begin with their seed"
    ]


def _scheduler_counts(kept: Mapping[str, Path], ranks: Ranks, step: int | None) -> Iterator[str]:
    """Yield a warning for Accelerate's schedulers that count ranks times updates."""
    if ranks.before == ranks.after or not step:
        return
    there = f"{step:,} times their number on others"
    if ranks.after is not None:
        there = f"{step * ranks.after:,} on {ranks.after:,} ranks"
    for name in sorted(kept):
        if _SCHEDULER.fullmatch(name) and _last_epoch(kept[name]) == step * ranks.before:
            yield (
                f"{name} counts ranks x updates ({step * ranks.before:,} = {ranks.before:,} x "
                f"{step:,}) and is copied as it is: a schedule made for all ranks' steps stands at "
                f"{there}"
            )


def _last_epoch(path: Path) -> object:
    """Return the count in a scheduler's state dict (torch 2.13, ``optim/lr_scheduler.py``)."""
    with suppress(CheckpointError):
        value = read_torch_file(path).value
        return value.get("last_epoch") if isinstance(value, dict) else None
    return None


def _for_train(
    file: SideFile,
    world_size: int | None,
    stage: int | None,
    ds_config: Mapping[str, object] | None,
) -> SideFile:
    """Return the options of ``zexport train`` for the new ranks; other files as they are.

    A config given for the target replaces its ``ds_config``, which is what was typed.
    """
    if file.filename != OPTIONS_FILE or file.origin is None or world_size is None:
        return file
    options = read_json_object(file.origin)
    typed = options.get("ds_config") if ds_config is None else without_auto(ds_config)
    changed: dict[str, object] = {"world_size": world_size, "ds_config": _at_stage(typed, stage)}
    changed |= {} if stage is None else {"stage": stage}
    return SideFile(OPTIONS_FILE, (json.dumps({**options, **changed}, indent=2) + "\n").encode())


def _at_stage(config: object, stage: int | None) -> object:
    """Return a config with the stage, if it states one."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(zero, dict) or "stage" not in zero:
        return config
    return {**config, "zero_optimization": {**zero, "stage": stage}}


def _not_looked_into(names: Iterable[str]) -> list[str]:
    pickles = sorted(name for name in names if Path(name).suffix in _PICKLES)
    if not pickles:
        return []
    return [
        f"copied as they are, without being looked into ({some(pickles, 6)}): pickles, which can "
        "run code when something loads them"
    ]
