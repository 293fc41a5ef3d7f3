"""The other files of a framework's checkpoint, for other ranks.

Sources: transformers 5.23 (``trainer.py``: ``_save_rng_state``, ``_load_rng_state``,
``_load_best_model``), accelerate 1.15 (``checkpointing.py``, ``scheduler.py``), Lightning 2.6
(``training_epoch_loop.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.resolve import LATEST, Framework, Location
from zexport.errors import CheckpointError, ZexportError
from zexport.export.plan import SideFile
from zexport.filenames import MANIFEST_NAME
from zexport.formats.torch_file import read_torch_file
from zexport.storage.contents import read_json_object
from zexport.storage.files import children, exists, is_file, is_folder, leaves
from zexport.storage.json import JsonObject
from zexport.storage.os_errors import reading
from zexport.text import shown, some
from zexport.train.options import OPTIONS_FILE, without_auto


class Ranks(Struct, frozen=True):
    """Numbers of training processes; ``after`` is ``None`` for any number."""

    before: int
    after: int | None


class Beside(Struct, frozen=True):
    """The files next to the tag folder, with warnings and notes."""

    files: tuple[SideFile, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


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
        return Beside()
    with reading(location.root):
        found = {path.relative_to(location.root).as_posix(): path for path in _around(location)}
    kept = {name: path for name, path in found.items() if not _WEIGHTS.fullmatch(name)}
    warnings, notes = list[str](), list[str]()
    if location.framework is Framework.HF_TRAINER:
        kept = _with_trainers_rng(kept, ranks)
        state: JsonObject = {}
        with suppress(ZexportError):
            state = read_json_object(location.root / "trainer_state.json")
        if isinstance(best := state.get("best_model_checkpoint"), str):
            warnings.append(
                f"trainer_state.json: with load_best_model_at_end, Trainer loads {shown(best)} "
                "when training ends, and fails for other ranks or another stage. Reshard it too, "
                "and write its new path to best_model_checkpoint"
            )
    if location.framework is Framework.ACCELERATE and ranks.before != ranks.after:
        # They also count micro-batches: one rank would update too early, several wait forever.
        kept = {name: path for name, path in kept.items() if not _ACCELERATE_RNG.fullmatch(name)}
        warnings += _scheduler_counts(kept, ranks.before, step)
    copied = {*kept.values()}
    if left_out := sorted(name for name, path in found.items() if path not in copied):
        notes.append(f"not copied (gathered weights, or of other ranks): {some(left_out, 4)}")
    if pickles := sorted(name for name in kept if Path(name).suffix in _PICKLES):
        notes.append(f"{some(pickles, 6)}: copied unchecked. Loading a pickle can run code")
    files = {name: SideFile(name, origin=path) for name, path in sorted(kept.items())}
    if location.framework is Framework.ZEXPORT and ranks.after and OPTIONS_FILE in kept:
        files[OPTIONS_FILE] = _for_train(kept[OPTIONS_FILE], ranks.after, stage, ds_config)
    return Beside(tuple(files.values()), tuple(warnings), tuple(notes))


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


def _with_trainers_rng(kept: dict[str, Path], ranks: Ranks) -> dict[str, Path]:
    """Return Trainer's random states under the names that it loads: no number for one rank."""
    states = {int(match[1] or 0): name for name in kept if (match := _TRAINER_RNG.fullmatch(name))}
    if ranks.after is None:
        return kept
    new = {
        "rng_state.pth" if ranks.after == 1 else f"rng_state_{rank}.pth": kept[name]
        for rank, name in states.items()
        if rank < min(ranks.before, ranks.after)  # others are of another run
    }
    return {name: path for name, path in kept.items() if name not in states.values()} | new


def _scheduler_counts(kept: Mapping[str, Path], ranks: int, step: int | None) -> Iterator[str]:
    """Yield a warning for Accelerate's schedulers that count ranks times updates."""
    for name, path in sorted(kept.items()):
        if step and _SCHEDULER.fullmatch(name) and _last_epoch(path) == step * ranks:
            yield (
                f"{name} counts ranks x updates ({ranks:,} x {step:,} = {step * ranks:,}) and is "
                "copied unchanged: on other ranks, the schedule continues at another point"
            )


def _last_epoch(path: Path) -> object:
    """Return the count in a scheduler's state dict (torch 2.13, ``optim/lr_scheduler.py``)."""
    with suppress(CheckpointError):
        value = read_torch_file(path).value
        return value.get("last_epoch") if isinstance(value, dict) else None
    return None


def _for_train(
    path: Path, world_size: int, stage: int | None, ds_config: Mapping[str, object] | None
) -> SideFile:
    """Return the options of ``zexport train``, for the new ranks and a config given for them."""
    options = read_json_object(path)
    config: object = options.get("ds_config") if ds_config is None else without_auto(ds_config)
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(config, dict) and isinstance(zero, dict) and "stage" in zero:
        config = {**config, "zero_optimization": {**zero, "stage": stage}}
    changed = {"world_size": world_size, "ds_config": config, "stage": stage}
    return SideFile(OPTIONS_FILE, (json.dumps({**options, **changed}, indent=2) + "\n").encode())
