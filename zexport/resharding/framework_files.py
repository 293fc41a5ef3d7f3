"""Framework files next to the rank files: random states, schedulers, trainer state.

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

from zexport.checkpoint.resolve import LATEST, Framework, Location
from zexport.checkpoint.state import TrainingState
from zexport.errors import CheckpointError
from zexport.export.plan import SideFile
from zexport.filenames import MANIFEST_NAME
from zexport.formats.pickle_view import view
from zexport.formats.torch_file import read_torch_file
from zexport.resharding.target import Config, Settings, TargetSettings, layout_config
from zexport.storage.files import children, exists, is_file, is_folder, leaves
from zexport.storage.json import read_json_object
from zexport.storage.os_errors import reading
from zexport.text import some
from zexport.train.options import OPTIONS_FILE, without_auto

_WEIGHTS = re.compile(r"(model|pytorch_model)[^/]*\.(safetensors|bin)(\.index\.json)?")
"""Gathered weights, which the rank files have; adapters have other file names."""

_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
_TRAINER_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_ACCELERATE_RNG = re.compile(r"random_states_\d+\.pkl")
_SCHEDULER = re.compile(r"scheduler(_\d+)?\.bin")


def plan_framework_files(
    checkpoint: TrainingState, ranks_before: int, settings: Settings, config: Config | None
) -> tuple[list[SideFile], list[str], list[str]]:
    """Return the files around the tag folder for the new number of ranks, warnings and notes.

    ``config`` is a DeepSpeed config passed for the resumed run, ``ranks_before`` the data-parallel
    world size of the checkpoint.
    """
    location = checkpoint.location
    if location.framework in (Framework.DEEPSPEED, Framework.OPENRLHF):
        return [], [], []
    before, after = checkpoint.ranks or ranks_before, None
    if isinstance(settings, TargetSettings):
        after = settings.world_size * before // ranks_before
    with reading(location.root):
        found = {path.relative_to(location.root).as_posix(): path for path in _around(location)}
    kept = {name: path for name, path in found.items() if not _WEIGHTS.fullmatch(name)}
    warnings, notes = list[str](), list[str]()
    if location.framework is Framework.HF_TRAINER:
        kept = kept if after is None else _with_trainers_rng(kept, before, after)
    if location.framework is Framework.ACCELERATE and before != after:
        # They also count micro-batches: one rank would update too early, several wait forever.
        kept = {name: path for name, path in kept.items() if not _ACCELERATE_RNG.fullmatch(name)}
        updates = (checkpoint.global_steps or 0) - checkpoint.skipped_steps
        warnings += _scheduler_counts(kept, before, updates)
    copied = {*kept.values()}
    if left_out := sorted(name for name, path in found.items() if path not in copied):
        notes.append(f"not copied (gathered weights, or of other ranks): {some(left_out, 4)}")
    if pickles := sorted(name for name in kept if Path(name).suffix in _PICKLES):
        notes.append(f"{some(pickles, 6)}: copied unchecked. Loading a pickle can run code")
    files = {name: SideFile(name, origin=path) for name, path in sorted(kept.items())}
    if (
        location.framework is Framework.ZEXPORT
        and isinstance(settings, TargetSettings)
        and (path := kept.get(OPTIONS_FILE))
    ):
        given = None if config is None else layout_config(settings, config, checkpoint)
        files[OPTIONS_FILE] = _train_options(path, settings, after, given)
    return [*files.values()], warnings, notes


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


def _with_trainers_rng(kept: dict[str, Path], before: int, after: int) -> dict[str, Path]:
    """Return Trainer's random states under the names that it loads: no number for one rank."""
    states = {int(match[1] or 0): name for name in kept if (match := _TRAINER_RNG.fullmatch(name))}
    new = {
        "rng_state.pth" if after == 1 else f"rng_state_{rank}.pth": kept[name]
        for rank, name in states.items()
        if rank < min(before, after)  # others are of another run
    }
    return {name: path for name, path in kept.items() if name not in states.values()} | new


def _scheduler_counts(kept: Mapping[str, Path], ranks: int, updates: int) -> Iterator[str]:
    """Yield a warning for Accelerate's schedulers that count ranks times updates.

    Source: torch 2.13, ``optim/lr_scheduler.py`` (``last_epoch``).
    """
    for name in sorted(filter(_SCHEDULER.fullmatch, kept)):
        count = 0
        with suppress(CheckpointError):
            count = view(read_torch_file(kept[name]), name).table().get("last_epoch", 0)
        if count == updates * ranks and updates > 0:
            yield (
                f"{name} counts ranks x updates ({ranks:,} x {updates:,} = {count:,}) and is "
                "copied unchanged: on other ranks, the schedule continues at another point"
            )


def _train_options(
    path: Path, settings: TargetSettings, world_size: int | None, given: Config | None
) -> SideFile:
    """Return the options of ``zexport train`` for the new ranks, and for a passed config."""
    options = read_json_object(path)
    config: object = options.get("ds_config") if given is None else without_auto(given)
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(config, dict) and isinstance(zero, dict) and "stage" in zero:
        config = {**config, "zero_optimization": {**zero, "stage": settings.stage}}
    changed = {"world_size": world_size, "ds_config": config, "stage": settings.stage}
    return SideFile(OPTIONS_FILE, (json.dumps({**options, **changed}, indent=2) + "\n").encode())
