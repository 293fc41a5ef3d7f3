"""Warnings: another global batch, and what DeepSpeed does not load or loads wrongly.

Source: DeepSpeed 0.14.5, 0.17.6, 0.18.0, 0.19.2, 0.19.3 and 0.19.8, ``runtime/engine.py``
(``_load_checkpoint``), ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod

from msgspec import Struct

from zexport.checkpoint.state import MASTER, Cell, FileKind, Role, TrainingState
from zexport.checkpoint.zero.flat_groups import MOMENTUM, is_per_parameter
from zexport.checkpoint.zero.records import ZERO3
from zexport.checkpoint.zero.universal import STEP
from zexport.errors import UnsupportedError
from zexport.formats.pickle_values import TensorRef
from zexport.resharding.rank_files import differing_keys, keeps_own
from zexport.resharding.target import (
    SUB_GROUP_SIZE,
    TAKES_EITHER_FORM,
    Config,
    Settings,
    UniversalSettings,
    release,
)
from zexport.resharding.universal_files import shared_settings
from zexport.resharding.values import records_of, slots_of
from zexport.text import some

_ADAMS = ("exp_avg", "exp_avg_sq")
"""The only optimizer states that ZeRO-3 loads from a universal checkpoint."""

_RIGHT_ON_NODES = (0, 18, 0)


class Batch(Struct, frozen=True):
    """A global batch: ranks x micro-batch x gradient accumulation."""

    ranks: int
    micro: int
    accumulation: int

    @property
    def rows(self) -> int:
        return self.ranks * self.micro * self.accumulation

    def __str__(self) -> str:
        return (
            f"{self.rows:,} ({self.ranks:,} rank{'s' * (self.ranks != 1)} x micro-batch "
            f"{self.micro:,} x accumulation {self.accumulation:,})"
        )


def _batch(config: Config, ranks: int) -> Batch | None:
    """Return the global batch of a DeepSpeed config; ``None`` if it is not recorded.

    It is not if ranks share sequences (Ulysses): then the product is no number of rows. Source:
    DeepSpeed 0.19.8, ``runtime/config.py`` (``_set_batch_related_parameters``): the third number
    follows from two, and accumulation defaults to 1.
    """
    if config.get("sequence_parallel_size", 1) != 1:
        return None
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulation = (_count(config.get(key)) for key in keys)
    if whole is not None and micro is None:
        micro = whole // (ranks * (accumulation or 1))
    elif whole is not None and micro is not None and accumulation is None:
        accumulation = whole // (ranks * micro)
    return Batch(ranks, micro, accumulation or 1) if micro else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def describe_batch_change(
    source_config: Config, before: int, given: Config | None, after: int
) -> tuple[list[str], list[str]]:
    """Return warnings and notes about the global batch on another number of ranks."""
    source, target = _batch(source_config, before), _batch(given or {}, after)
    if source is None or (target is None and before == after):
        return [], []
    if target is not None:
        changed = f"--ds-config: the global batch changes from {source} to {target}"
        return [changed] if target.rows != source.rows else [], []
    share, rest = divmod(source.rows, after)
    micro = source.micro if rest else gcd(source.micro, share)
    near = Batch(after, micro, max(1, round(share / micro)))
    how = f"impossible on {after:,} ranks. Closest: {near}" if rest else f"keep it with {near}"
    return [], [f"global batch: {source} before; {how}"]


# What is not loaded


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


def describe_losses(
    state: TrainingState, settings: Settings, dropped: Sequence[str]
) -> Iterator[str]:
    """Yield a warning for everything that is not written, not loaded, or loaded wrongly."""
    if dropped:
        yield f"client state {', '.join(dropped)} left out: it cannot be written safely"
    cells = (cell for cell in state.cells if not keeps_own(cell, settings))
    if differing := dict.fromkeys(str(key) for cell in cells for key in differing_keys(cell)):
        yield (
            f"client state and buffers differ between ranks ({some([*differing], 8)}): every rank "
            "gets those of rank 0, except with ZeRO-3 on as many ranks as before"
        )
    if isinstance(settings, UniversalSettings):
        yield from dict.fromkeys(text for cell in state.cells for text in _lost(cell, settings))
        if any(one.kind is FileKind.PIPELINE_LAYER for one in state.files):
            yield (
                "DeepSpeed loads no frozen weights and buffers from a pipeline's layer files; they "
                "stay as the new run initializes them"
            )


def _lost(cell: Cell, settings: UniversalSettings) -> Iterator[str]:
    """Yield what DeepSpeed does not load from a universal checkpoint, or loads wrongly."""
    for kind, role in (("frozen weight", Role.FROZEN), ("buffer", Role.BUFFER)):
        names = [one.name for one in cell.parameters.values() if one.role is role]
        if names:
            yield (
                f"DeepSpeed does not load {len(names):,} {kind}{'s' * (len(names) != 1)} "
                f"({some(names, 2)}); they stay as the new run initializes them"
            )
    recorded = [group.settings.values for group in cell.groups if group.settings is not None]
    if len(recorded) < len(cell.groups):
        yield "settings of parameter groups are not recorded; those of the new run stay"
    scalars = {name for group in cell.groups for name in group.scalars.values}
    if left_out := sorted(scalars - {STEP}):
        yield f"{', '.join(left_out)} left out: of scalar states, DeepSpeed loads only the step"
    stages = (1, 2, ZERO3) if settings.stage is None else (settings.stage,)
    if ZERO3 in stages:
        yield from _lost_under_zero3(cell, recorded)
    if min(stages) < ZERO3 and any(is_per_parameter(one, MOMENTUM) for one in recorded):
        yield "under ZeRO-1 and 2, DeepSpeed loads Muon's momentum wrongly, except on one rank"
    version = settings.for_deepspeed
    if version is not None and settings.stage == ZERO3 and release(version) < _RIGHT_ON_NODES:
        yield (
            f"DeepSpeed {version} loads it wrongly on several nodes, and only the first "
            "sub_group_size elements of a rank. Load it with 0.18.0 or newer"
        )


def _lost_under_zero3(cell: Cell, recorded: Sequence[Mapping[str, object]]) -> Iterator[str]:
    trained = cell.trained()
    steps = [group.scalars.values.get(STEP) for group in cell.groups]
    if None in steps or not all({*_ADAMS} <= slots_of(one).keys() for one in trained):
        yield (
            "under ZeRO-3, DeepSpeed cannot load this optimizer: it requires exp_avg, exp_avg_sq "
            "and the step"
        )
        return
    names = {name for one in trained for name in slots_of(one)}
    if more := sorted(names - {MASTER, *_ADAMS}):
        yield f"under ZeRO-3, DeepSpeed does not load {', '.join(more)}"
    shared, own = shared_settings(cell.groups), {str(key) for one in recorded for key in one}
    if shared is not None and (differing := sorted(own - shared.values.keys())):
        yield (
            f"groups differ in {', '.join(differing)}: under ZeRO-3, DeepSpeed does not load them; "
            "those of the new run stay (lr until the schedule sets it)"
        )
    is_cut = len(cell.groups) > 1 or sum(prod(one.shape) for one in trained) > SUB_GROUP_SIZE
    if is_cut and any(isinstance(step, TensorRef) for step in steps):
        yield (
            "under ZeRO-3, DeepSpeed gives all flat groups one step count, which torch's "
            "optimizers advance once per group in every update"
        )
