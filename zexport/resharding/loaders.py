"""What DeepSpeed does not load, or loads wrongly, from a universal checkpoint.

Source: DeepSpeed 0.14.5, 0.17.6, 0.18.0, 0.19.2, 0.19.3 and 0.19.8, ``runtime/engine.py``
(``_load_checkpoint``), ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from zexport.checkpoint.state import MASTER, Cell, FileKind, TrainingState
from zexport.checkpoint.zero.flat_groups import MOMENTUM, is_per_parameter
from zexport.checkpoint.zero.records import ZERO3
from zexport.checkpoint.zero.universal import STEP
from zexport.errors import UnsupportedError
from zexport.formats.pickle_values import TensorRef
from zexport.resharding.model_files import module_entries
from zexport.resharding.settings import (
    SUB_GROUP_SIZE,
    TAKES_EITHER_FORM,
    UniversalSettings,
    release,
)
from zexport.resharding.universal_files import shared_settings
from zexport.resharding.values import records_of, slots_of
from zexport.text import some

_ADAMS = ("exp_avg", "exp_avg_sq")
"""The only optimizer states that ZeRO-3 loads."""

_RIGHT_ON_NODES = (0, 18, 0)
HOW_TO_LOAD = (
    'to load it, set {"checkpoint": {"load_universal": true}} in the DeepSpeed config; remove that '
    "to resume from rank files, which the run saves from then on"
)


def check_loadable(cells: Sequence[Cell], settings: UniversalSettings) -> None:
    """Raise for a version whose loader skips weights, or fails.

    Before 0.19.3, with another loader of AutoEP's experts, ZeRO-3 loads no tensor ranks. Before
    0.18.0 it loads only the first flat group
    (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
    """
    if (version := settings.for_deepspeed) is None:
        return
    first, is_zero3 = cells[0], settings.stage == ZERO3
    checks = (
        (any(group.of_experts for group in first.groups), "experts", TAKES_EITHER_FORM),
        (is_zero3 and cells[-1].index > 0, "tensor ranks under ZeRO-3", TAKES_EITHER_FORM),
        (is_zero3 and len(first.groups) > 1, "several groups under ZeRO-3", _RIGHT_ON_NODES),
    )
    for is_held, what, needed in checks:
        if is_held and release(version) < needed:
            raise UnsupportedError(
                f"DeepSpeed {version} cannot load a universal checkpoint with {what}",
                path=records_of(first)[0].file.path,
                expected=f"{'.'.join(map(str, needed))} or newer",
                hint="Load it with a newer DeepSpeed, or write rank files with --world-size",
            )


def lost_in_loading(state: TrainingState, settings: UniversalSettings) -> Iterator[str]:
    """Yield warnings about everything that DeepSpeed does not load."""
    yield from dict.fromkeys(text for cell in state.cells for text in _lost(cell, settings))
    if any(one.kind is FileKind.PIPELINE_LAYER for one in state.files):
        yield (
            "DeepSpeed loads no frozen weights and buffers from a pipeline's layer files; they "
            "stay as the new run initializes them"
        )


def _lost(cell: Cell, settings: UniversalSettings) -> Iterator[str]:
    stages = (1, 2, ZERO3) if settings.stage is None else (settings.stage,)
    yield from _outside_optimizer(cell)
    if any(group.settings is None for group in cell.groups):
        yield "settings of parameter groups are not recorded; those of the new run stay"
    scalars = {name for group in cell.groups for name in group.scalars.values}
    if left_out := sorted(scalars - {STEP}):
        yield f"{', '.join(left_out)} left out: of scalar states, DeepSpeed loads only the step"
    if ZERO3 in stages:
        yield from _under_zero3(cell)
    recorded = (group.settings.values for group in cell.groups if group.settings is not None)
    if min(stages) < ZERO3 and any(is_per_parameter(one, MOMENTUM) for one in recorded):
        yield "under ZeRO-1 and 2, DeepSpeed loads Muon's momentum wrongly, except on one rank"
    version = settings.for_deepspeed
    if version is not None and settings.is_flat and release(version) < _RIGHT_ON_NODES:
        yield (
            f"DeepSpeed {version} loads it wrongly on several nodes, and only the first "
            "sub_group_size elements of a rank. Load it with 0.18.0 or newer"
        )


def _outside_optimizer(cell: Cell) -> Iterator[str]:
    """Yield a warning about weights outside the optimizer."""
    trained = {one.name for one in cell.trained()}
    rest = {one.owner: one for one in module_entries(cell).values() if one.owner not in trained}
    for kind, is_parameter in (("frozen weight", True), ("buffer", False)):
        names = [name for name, one in rest.items() if one.is_parameter is is_parameter]
        if names:
            yield (
                f"DeepSpeed does not load {len(names):,} {kind}{'s' * (len(names) != 1)} "
                f"({some(names, 2)}); they stay as the new run initializes them"
            )


def _under_zero3(cell: Cell) -> Iterator[str]:
    """Yield what ZeRO-3's loader changes."""
    steps = [group.scalars.values.get(STEP) for group in cell.groups]
    if None in steps or not all({*_ADAMS} <= slots_of(one).keys() for one in cell.trained()):
        yield (
            "under ZeRO-3, DeepSpeed cannot load this optimizer: it requires exp_avg, exp_avg_sq "
            "and the step"
        )
        return
    names = {name for one in cell.trained() for name in slots_of(one)}
    if more := sorted(names - {MASTER, *_ADAMS}):
        yield f"under ZeRO-3, DeepSpeed does not load {', '.join(more)}"
    shared = shared_settings(cell.groups)
    own = {str(key) for group in cell.groups if group.settings for key in group.settings.values}
    if shared is not None and (differing := sorted(own - shared.values.keys())):
        yield (
            f"groups differ in {', '.join(differing)}: under ZeRO-3, DeepSpeed does not load them; "
            "those of the new run stay (lr until the schedule sets it)"
        )
    numel = sum(prod(one.shape) for one in cell.trained())
    is_cut = len(cell.groups) > 1 or numel > SUB_GROUP_SIZE
    if is_cut and any(isinstance(step, TensorRef) for step in steps):
        yield (
            "under ZeRO-3, DeepSpeed gives all flat groups one count of steps, which torch's "
            "optimizers advance once per group in every update"
        )
