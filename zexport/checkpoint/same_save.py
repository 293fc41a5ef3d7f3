"""Whether rank files are of one save: the facts that each states, held against each other."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product
from math import isfinite
from pathlib import Path

from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.optimizer_states import OptimizerStates, inner_key
from zexport.checkpoint.rank_files import name_ranks
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.facts import statements as facts
from zexport.facts.statements import Statement
from zexport.facts.training import TrainingFact
from zexport.findings import FindingKind
from zexport.formats.inert import Opaque, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType
from zexport.store.contents import read_range

_STEP_BITS = 64
_DECIDING = (
    *("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16", "data_types"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
)
"""Sections of the configuration that decide what is trained; in others ranks may honestly differ
(who logs, and to where), as they may in where they offload to."""

_TRAINED_WITH = (
    TrainingFact.CONFIG,
    TrainingFact.GROUP_SETTINGS,
    TrainingFact.LOSS_SCALE,
    TrainingFact.SCHEDULE,
)
_SETTINGS = frozenset(
    {
        *("lr", "initial_lr", "max_lr", "min_lr", "lr_decay", "weight_decay", "eps", "lambd"),
        *("betas", "alpha", "rho", "momentum", "base_momentum", "max_momentum", "dampening"),
        *("nesterov", "amsgrad", "maximize", "centered", "bias_correction", "use_muon"),
    }
)
"""What users and schedules set of a parameter group. In others ranks may honestly differ: under
ZeRO, Prodigy works its ``d`` out of what one rank holds."""

_OFFLOAD = "zero_optimization.offload"
_SCHEDULE = ("last_batch_iteration", "last_epoch", "base_lrs", "_last_lr")
"""What a scheduler's state says of all ranks; others may watch a loss of their own."""

_SCALAR_FORMATS = {DType.F32: "<f", DType.F64: "<d", DType.I64: "<q", DType.I32: "<i"}


def disagreements(
    tag_dir: Path, model: Mapping[int, ModelStates], optimizer: Mapping[int, OptimizerStates]
) -> Iterator[ZexportError]:
    """Every contradiction between the states of the ranks, by which they are not of one save."""
    steps = {rank: step_of(states) for rank, states in optimizer.items()}
    for found in facts.disagreements(_statements(model, optimizer, steps)):
        yield found.error(tag_dir, name_ranks)
    yield from _other_steps(tag_dir, model, steps)
    yield from _other_shapes(tag_dir, model)


def _statements(
    model: Mapping[int, ModelStates],
    optimizer: Mapping[int, OptimizerStates],
    steps: Mapping[int, float | None],
) -> Iterator[Statement]:
    """What every rank of one save states alike."""
    prefixes = {r: s.file.path.name.partition("zero_")[0] or "no" for r, s in optimizer.items()}
    stated: list[tuple[TrainingFact, Mapping[int, object]]] = [
        (TrainingFact.PARTITION_COUNT, {r: s.partition_counts for r, s in optimizer.items()}),
        (TrainingFact.FILE_PREFIX, prefixes),
        (TrainingFact.STAGE, {r: s.stage for r, s in optimizer.items()}),
        (TrainingFact.FLAT_GROUPS, {r: len(s.flat_groups) for r, s in optimizer.items()}),
        (TrainingFact.OPTIMIZER_STEP, steps),
        (TrainingFact.GLOBAL_STEP, {r: s.global_steps for r, s in model.items()}),
        (TrainingFact.DP_WORLD_SIZE, {r: s.dp_world_size for r, s in model.items()}),
        (TrainingFact.SKIPPED_STEPS, {r: s.skipped_steps for r, s in model.items()}),
        (TrainingFact.DEEPSPEED_VERSION, {r: s.ds_version for r, s in optimizer.items()}),
    ]
    yield from stated_by_rank(stated)
    model_files = {s.file.path.name: s.file for s in model.values()}
    yield from stated_by_key(model_files | {r: s.file for r, s in optimizer.items()})


def stated_by_key(
    files: Mapping[str | int, TorchFile], facts: Collection[TrainingFact] = _TRAINED_WITH
) -> Iterator[Statement]:
    """What files state of how the run trained, key by key, wherever any two of them differ.

    What a rank leaves out and another states, it states to be nothing; files that go by their names
    are of another kind, and may say less.
    """
    ranks = {by for by in files if isinstance(by, int)}
    known: dict[int, dict[TrainingFact, dict[str, object]]] = {}
    for file in files.values():
        if id(file.value) not in known:  # ranks whose pickles are equal share the value
            known[id(file.value)] = _trained_with(file)
    for fact in facts:
        said = {by: known[id(file.value)].get(fact) for by, file in files.items()}
        stated = {by: values for by, values in said.items() if values}
        first = next(iter(stated.values()), None)
        if any(values is not first and values != first for values in stated.values()):
            of_ranks = {key for by, values in stated.items() for key in values if by in ranks}
            keys = dict.fromkeys(key for values in stated.values() for key in values)
            for key, (by, values) in product(keys, stated.items()):
                lacking = "nothing" if by in ranks and key in of_ranks else None
                yield Statement(fact, values.get(key, lacking), by, key)


def _trained_with(file: TorchFile) -> dict[TrainingFact, dict[str, object]]:
    """What a rank file says of how the run trained; a fact that it does not state is left out."""
    root = Value(file.path, "states", file.value)
    config = root.get("ds_config").mapping_or_empty()
    schedule = root.get("lr_scheduler").mapping_or_empty()
    zero = root.get("optimizer_state_dict")
    optimizer = zero.mapping_or_empty()
    inner = optimizer.get(inner_key(zero))
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    scaler = optimizer.get("loss_scaler")
    stated: dict[TrainingFact, object] = {
        TrainingFact.CONFIG: {key: config[key] for key in _DECIDING if key in config},
        TrainingFact.SCHEDULE: {key: schedule[key] for key in _SCHEDULE if key in schedule},
        TrainingFact.GROUP_SETTINGS: [_settings(group) for group in groups]
        if isinstance(groups, list)
        else None,
        TrainingFact.LOSS_SCALE: scaler.state if isinstance(scaler, Opaque) else None,
    }
    found = {fact: Value(file.path, "", value).plain_values() for fact, value in stated.items()}
    for key in [key for key in found[TrainingFact.CONFIG] if key.startswith(_OFFLOAD)]:
        del found[TrainingFact.CONFIG][key]
    return found


def _settings(group: object) -> object:
    """What of a parameter group's settings the user or the schedule sets, for all ranks alike."""
    if not isinstance(group, dict):
        return None
    return {key: value for key, value in group.items() if key in _SETTINGS}


def stated_by_rank(
    stated: Iterable[tuple[TrainingFact, Mapping[int, object]]],
) -> Iterator[Statement]:
    """What each rank states of each fact."""
    for fact, by_rank in stated:
        yield from (Statement(fact, value, rank) for rank, value in by_rank.items())


def _other_steps(
    tag_dir: Path, model: Mapping[int, ModelStates], steps: Mapping[int, float | None]
) -> Iterator[ZexportError]:
    """The optimizer's steps against those of the model files; only told, as it has honest causes.

    The optimizer counts what was not skipped for an overflow, and begins anew where a run was
    resumed without its state. DeepSpeed 0.10 counts one more (``initialize_optimizer_states`` took
    a step to allocate it). A save that was cut off over an older one of the same tag looks like it.
    """
    first = model[min(model)] if model else None
    taken = next((step for step in steps.values() if step is not None), None)
    if first is None or first.global_steps is None or taken is None or not isfinite(taken):
        return
    due = first.global_steps - first.skipped_steps
    if taken not in (due, due + 1):
        yield DamagedCheckpointError(
            "the optimizer counts other steps than the model file does",
            path=tag_dir,
            found=f"{taken:g} steps of the optimizer",
            expected=f"{due}, or one more",
            finding=FindingKind.STEP_MISMATCH,
        )


def _other_shapes(tag_dir: Path, model: Mapping[int, ModelStates]) -> Iterator[ZexportError]:
    """Model files of several ranks describe the same weights in the same order, but for experts."""
    first = model[min(model)] if model else None
    if first is None or first.has_experts:
        return
    shapes = [list(group.items()) for group in first.param_shapes]
    others = [
        rank
        for rank, states in model.items()
        if states.param_shapes is not first.param_shapes
        and (
            [list(group.items()) for group in states.param_shapes] != shapes
            or states.frozen_shapes != first.frozen_shapes
        )
    ]
    if others:
        yield DamagedCheckpointError(
            "mixes files of different saves: the model files describe different weights",
            path=tag_dir,
            found=f"others in those of {name_ranks(others)}",
            expected="the weights of rank 0, in the same order",
            hint="Copy all rank files of one save again",
        )


def step_of(states: OptimizerStates) -> float | None:
    """The optimizer's step, read from its scalar tensor where it is one (4 or 8 bytes)."""
    step = states.step
    if isinstance(step, TensorRef):
        found = scalar_in(states.file, step) if step.numel == 1 else None
        return found if isinstance(found, float) else None
    return None if step is None or step.bit_length() >= _STEP_BITS else float(step)


def scalar_in(file: TorchFile, scalar: TensorRef) -> float | str:
    """The number in a tensor of one element; its bytes where it is not one of 4 or 8 bytes."""
    source = file.source(scalar)
    (extent,) = source.extents(0, source.nbytes)
    raw = read_range(extent.path, extent.offset, extent.nbytes)
    if scalar.dtype not in _SCALAR_FORMATS:
        return f"{scalar.dtype.torch_name} {raw.hex()}"
    return float(struct.unpack(_SCALAR_FORMATS[scalar.dtype], raw)[0])
