"""What DeepSpeed makes of a universal checkpoint as it loads it: what it leaves out, and where.

Source: DeepSpeed 0.14.5, 0.17.6, 0.18.0, 0.19.2, 0.19.3 and 0.19.8, ``runtime/engine.py``
(``_load_checkpoint``), ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from zexport.checkpoint.layouts import zero12
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.layouts.universal_weights import STEP
from zexport.checkpoint.model_states import ZERO3
from zexport.errors import UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.options import ReshardOptions
from zexport.printable import some
from zexport.resharding.read_cells import MOMENTUM, is_by_parameter
from zexport.resharding.settings import (
    SUB_GROUP_SIZE,
    TAKES_EITHER_FORM,
    UniversalSettings,
    release,
)
from zexport.resharding.state import CellState, Group, TrainingState
from zexport.resharding.universal_files import shared_settings

_ADAMS = ("exp_avg", "exp_avg_sq")
"""The states that ZeRO-3 looks for, and none beside them."""

_OF_LAYERS = (
    "DeepSpeed loads no frozen weights and no buffers of a universal checkpoint: those in the "
    "files of a pipeline's layers stay as the new run makes its model"
)
_RIGHT_ON_NODES = (0, 18, 0)
_RANKS_MAX = 513
"""More ranks than small groups are looked at for."""


def check_loadable(cells: Sequence[CellState], settings: UniversalSettings) -> None:
    """Refuse a version whose loader would leave weights as they are, or fails.

    Under ZeRO-3 it loads the first flat group (0.14.5 and 0.17.6,
    ``load_hp_checkpoint_state_from_checkpoint_dir_stage3``), and of tensor ranks none.
    """
    cell, version = cells[0], settings.for_deepspeed
    if version is not None and any(group.of_experts for group in cell.groups):
        _check_loads_experts(cell, version)
    if settings.is_flat and cells[-1].index:
        raise UnsupportedError(
            f"has tensor ranks, and DeepSpeed {version} loads no universal checkpoint of such "
            "under ZeRO-3",
            path=cell.model.file.path,
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
            path=cell.model.file.path,
            found=f"{len(cell.groups)} groups",
            expected="1",
            hint="Load it with DeepSpeed 0.18.0 or newer, or make rank files (--world-size)",
        )


def _check_loads_experts(cell: CellState, version: str) -> None:
    """Refuse a version from before AutoEP's ZeRO-3 (0.19.3), whose loader was another."""
    if release(version) < TAKES_EITHER_FORM:
        raise UnsupportedError(
            f"has experts, of which DeepSpeed {version} loads no universal checkpoint under every "
            "stage",
            path=cell.model.file.path,
            found=version,
            expected="0.19.3 or newer",
            hint="Load it with a newer DeepSpeed, or make rank files (--world-size)",
        )


def told_of_loading(
    options: ReshardOptions, settings: UniversalSettings, state: TrainingState
) -> Iterator[str]:
    """How it is loaded, by how many ranks, and which given options it does not depend on."""
    yield (
        'load it with {"checkpoint": {"load_universal": true}} in the DeepSpeed configuration, and '
        "take that out again for rank files, such as the run saves from then on"
    )
    given = {
        "--world-size": options.world_size is not None,
        "--stage": options.stage is not None and settings.stage is None,
        "--ds-config": options.ds_config is not None and settings.stage is None,
    }
    for option in (name for name, is_given in given.items() if is_given):
        yield f"{option} is not needed: any number of ranks loads it, under ZeRO-1, 2 or 3"
    if settings.stage != ZERO3:
        yield from dict.fromkeys(text for cell in state.cells for text in _too_many_ranks(cell))


def lost_in_loading(state: TrainingState, settings: UniversalSettings) -> Iterator[str]:
    """What DeepSpeed will not take from it though it is there, in sentences, and the way out."""
    told = dict.fromkeys(text for cell in state.cells for text in _lost(cell, settings))
    if state.carried:
        told[_OF_LAYERS] = None
    yield from told
    if told:
        yield (
            "rank files lose nothing of this: --world-size N in place of --format universal makes "
            "them"
        )


def _lost(cell: CellState, settings: UniversalSettings) -> Iterator[str]:
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


def _of_module(cell: CellState) -> Iterator[str]:
    """Weights outside of the optimizer, which no universal checkpoint is loaded for."""
    trained = {one.name for one in cell.parameters()}
    rest = {one.owner: one for one in cell.module if one.owner not in trained}
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


def _of_groups(cell: CellState) -> Iterator[str]:
    if any(group.settings is None for group in cell.groups):
        yield "settings of parameter groups are not recorded: those of the new run stay"
    scalars = {name for group in cell.groups for name in group.scalars.values}
    if left_out := sorted(scalars - {STEP}):
        yield (
            f"left out: the optimizer's {', '.join(left_out)}, since DeepSpeed takes every state "
            "but the step for one of the weight's shape"
        )


def _under_zero3(cell: CellState) -> Iterator[str]:
    """What the loader of ZeRO-3 has otherwise than the run had it."""
    steps = [group.scalars.values.get(STEP) for group in cell.groups]
    if None in steps or not all({*_ADAMS} <= one.tensors.keys() for one in cell.parameters()):
        yield (
            "loads under ZeRO-1 and 2 alone: under ZeRO-3 DeepSpeed looks for exp_avg, exp_avg_sq "
            "and the step, whatever the optimizer"
        )
        return
    names = {name for one in cell.parameters() for name in one.tensors}
    if more := sorted(names - {MASTERS, *_ADAMS}):
        yield f"under ZeRO-3 DeepSpeed loads no {', '.join(more)}"
    shared = shared_settings(cell.groups)
    own = {str(key) for group in cell.groups if group.settings for key in group.settings.values}
    if shared is not None and (differing := sorted(own - shared.values.keys())):
        yield (
            f"groups differ in {', '.join(differing)}: under ZeRO-3 DeepSpeed gives all of them "
            "the same, so each keeps the new run's own (lr until the schedule sets it)"
        )
    numel = sum(prod(one.shape) for one in cell.parameters())
    is_cut = len(cell.groups) > 1 or numel > SUB_GROUP_SIZE
    if is_cut and any(isinstance(step, TensorRef) for step in steps):
        yield (
            "under ZeRO-3 DeepSpeed gives all flat groups one count of steps, which torch's "
            "optimizers then advance once for each of them in every update"
        )


def _under_zero12(cell: CellState) -> Iterator[str]:
    """What the loader of other stages cannot load."""
    if any(is_by_parameter(group.settings, MOMENTUM) for group in cell.groups):
        yield (
            "under ZeRO-1 and 2 DeepSpeed loads Muon's momentum in another form than Muon keeps "
            "it in, unless on one rank"
        )


def _too_many_ranks(cell: CellState) -> Iterator[str]:
    """From how many ranks on one of them would have no part of a group."""
    least = [
        (_first_empty(group) * (cell.expert_ranks if group.of_experts else 1), number)
        for number, group in enumerate(cell.groups)
    ]
    ranks, number = min(least, default=(_RANKS_MAX, 0))
    if ranks < _RANKS_MAX:
        yield (
            f"on {ranks:,} ranks or more, DeepSpeed cannot load it under ZeRO-1 or 2 (IndexError): "
            f"one of them would have no part of parameter group {number}"
        )


def _first_empty(group: Group) -> int:
    """The least number of ranks one of which has no part of a group."""
    numel = sum(prod(one.shape) for one in group.parameters)
    tried = range(1, _RANKS_MAX)
    return next(
        (n for n in tried if (n - 1) * zero12.partition_numel(numel, n) >= numel), _RANKS_MAX
    )
