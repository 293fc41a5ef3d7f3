"""What DeepSpeed does not load, or loads wrongly, from a universal checkpoint.

Source: DeepSpeed 0.14.5, 0.17.6, 0.18.0, 0.19.2, 0.19.3 and 0.19.8, ``runtime/engine.py``
(``_load_checkpoint``), ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from zexport.checkpoint.state import MASTER, Cell, FileKind, TrainingState
from zexport.checkpoint.zero.flat_groups import (
    MOMENTUM,
    is_per_parameter,
)
from zexport.checkpoint.zero.records import ZERO3
from zexport.checkpoint.zero.universal import STEP
from zexport.errors import UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.printable import some
from zexport.resharding.model_files import module_entries
from zexport.resharding.settings import (
    SUB_GROUP_SIZE,
    TAKES_EITHER_FORM,
    UniversalSettings,
    release,
)
from zexport.resharding.universal_files import shared_settings
from zexport.resharding.values import carried_files, records_of, slots_of

_ADAMS = ("exp_avg", "exp_avg_sq")
"""The only optimizer states that ZeRO-3 loads."""

_OF_LAYERS = (
    "DeepSpeed loads no frozen weights and no buffers of a universal checkpoint: those in the "
    "files of a pipeline's layers stay as the new run makes its model"
)
_RIGHT_ON_NODES = (0, 18, 0)
HOW_TO_LOAD = (
    'load it with {"checkpoint": {"load_universal": true}} in the DeepSpeed config, and remove '
    "that again for rank files, such as the run saves from then on"
)


def check_loadable(cells: Sequence[Cell], settings: UniversalSettings) -> None:
    """Raise for a version whose loader skips weights, or fails.

    With ZeRO-3 it loads only the first flat group (0.14.5 and 0.17.6,
    ``load_hp_checkpoint_state_from_checkpoint_dir_stage3``), and none of tensor ranks.
    """
    cell, version = cells[0], settings.for_deepspeed
    if version is not None and any(group.of_experts for group in cell.groups):
        _check_loads_experts(cell, version)
    if settings.is_flat and cells[-1].index:
        raise UnsupportedError(
            f"has tensor ranks, and DeepSpeed {version} loads no universal checkpoint of such "
            "under ZeRO-3",
            path=records_of(cell)[0].file.path,
            found=f"{len({one.index for one in cells})} model-parallel ranks",
            expected="1",
            hint="Load it with DeepSpeed 0.19.3 or newer, or make rank files (--world-size)",
        )
    if version is None or settings.stage != ZERO3 or release(version) >= _RIGHT_ON_NODES:
        return
    if len(cell.groups) > 1:
        raise UnsupportedError(
            f"has several parameter groups, of which DeepSpeed {version} loads the first alone "
            "from a universal checkpoint under ZeRO-3",
            path=records_of(cell)[0].file.path,
            found=f"{len(cell.groups)} groups",
            expected="1",
            hint="Load it with DeepSpeed 0.18.0 or newer, or make rank files (--world-size)",
        )


def _check_loads_experts(cell: Cell, version: str) -> None:
    """Raise for a version before AutoEP's ZeRO-3 (0.19.3), whose loader was different."""
    if release(version) < TAKES_EITHER_FORM:
        raise UnsupportedError(
            f"has experts, of which DeepSpeed {version} loads no universal checkpoint under every "
            "stage",
            path=records_of(cell)[0].file.path,
            found=version,
            expected="0.19.3 or newer",
            hint="Load it with a newer DeepSpeed, or make rank files (--world-size)",
        )


def lost_in_loading(state: TrainingState, settings: UniversalSettings) -> Iterator[str]:
    """Yield warnings about everything that DeepSpeed does not load, and the alternative."""
    told = dict.fromkeys(text for cell in state.cells for text in _lost(cell, settings))
    if [*carried_files(state, FileKind.PIPELINE_LAYER)]:
        told[_OF_LAYERS] = None
    yield from told
    if told:
        yield (
            "rank files lose nothing of this: --world-size N in place of --format universal makes "
            "them"
        )


def _lost(cell: Cell, settings: UniversalSettings) -> Iterator[str]:
    stages = (1, 2, ZERO3) if settings.stage is None else (settings.stage,)
    yield from _of_module(cell)
    yield from _of_groups(cell)
    if ZERO3 in stages:
        yield from _under_zero3(cell)
    if min(stages) < ZERO3:
        yield from _under_zero12(cell)
    version = settings.for_deepspeed
    if version is not None and settings.is_flat and release(version) < _RIGHT_ON_NODES:
        yield (
            f"DeepSpeed {version} loads it wrongly on several nodes, where it takes a rank's "
            "number on its node for that among all, and loads the first sub_group_size elements "
            "of a rank alone; 0.18.0 and newer do neither"
        )


def _of_module(cell: Cell) -> Iterator[str]:
    """Yield a warning about weights outside the optimizer, which DeepSpeed does not load."""
    trained = {one.name for one in cell.trained()}
    rest = {one.owner: one for one in module_entries(cell).values() if one.owner not in trained}
    kinds = {
        "frozen weight": [name for name, one in rest.items() if one.is_parameter],
        "buffer": [name for name, one in rest.items() if not one.is_parameter],
    }
    lost = [
        f"{len(names):,} {kind}{'s' * (len(names) != 1)} ({some(names, 2)})"
        for kind, names in kinds.items()
        if names
    ]
    if lost:
        yield (
            "DeepSpeed loads no frozen weights and no buffers of a universal checkpoint: "
            f"{' and '.join(lost)} stay as the new run makes its model"
        )


def _of_groups(cell: Cell) -> Iterator[str]:
    if any(group.settings is None for group in cell.groups):
        yield "settings of parameter groups are not recorded: those of the new run stay"
    scalars = {name for group in cell.groups for name in group.scalars.values}
    if left_out := sorted(scalars - {STEP}):
        yield (
            f"left out: the optimizer's {', '.join(left_out)}, since DeepSpeed takes every state "
            "but the step for one of the weight's shape"
        )


def _under_zero3(cell: Cell) -> Iterator[str]:
    """Yield what ZeRO-3's loader changes."""
    steps = [group.scalars.values.get(STEP) for group in cell.groups]
    if None in steps or not all({*_ADAMS} <= slots_of(one).keys() for one in cell.trained()):
        yield (
            "loads under ZeRO-1 and 2 alone: under ZeRO-3 DeepSpeed looks for exp_avg, exp_avg_sq "
            "and the step, whatever the optimizer"
        )
        return
    names = {name for one in cell.trained() for name in slots_of(one)}
    if more := sorted(names - {MASTER, *_ADAMS}):
        yield f"under ZeRO-3 DeepSpeed loads no {', '.join(more)}"
    shared = shared_settings(cell.groups)
    own = {str(key) for group in cell.groups if group.settings for key in group.settings.values}
    if shared is not None and (differing := sorted(own - shared.values.keys())):
        yield (
            f"groups differ in {', '.join(differing)}: under ZeRO-3 DeepSpeed gives all of them "
            "the same, so each keeps the new run's own (lr until the schedule sets it)"
        )
    numel = sum(prod(one.shape) for one in cell.trained())
    is_cut = len(cell.groups) > 1 or numel > SUB_GROUP_SIZE
    if is_cut and any(isinstance(step, TensorRef) for step in steps):
        yield (
            "under ZeRO-3 DeepSpeed gives all flat groups one count of steps, which torch's "
            "optimizers then advance once for each of them in every update"
        )


def _under_zero12(cell: Cell) -> Iterator[str]:
    """Yield what the loader of other stages cannot load."""
    settings = (group.settings.values for group in cell.groups if group.settings is not None)
    if any(is_per_parameter(one, MOMENTUM) for one in settings):
        yield (
            "under ZeRO-1 and 2 DeepSpeed loads Muon's momentum in another form than Muon keeps "
            "it in, unless on one rank"
        )
