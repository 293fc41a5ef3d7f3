"""Typed contents of model states files and optimizer states files.

Source of the keys: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``,
``_save_zero_checkpoint``), ``runtime/zero/stage3.py``, ``stage_1_and_2.py`` and
``runtime/bf16_optimizer.py`` (``state_dict``). ``client_state`` is merged into the top level of
model states, so unknown keys are ignored there. What only few layouts need is read on demand, so
that damage there affects no other layout.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import isfinite

from msgspec import Struct

from zexport.checkpoint.state import Parallelism
from zexport.formats.pickle_values import FRAGMENT, Opaque, TensorRef
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType, Shape
from zexport.storage.files import read_range

Shapes = Mapping[str, Shape]
Fragments = Mapping[str, tuple[int, int]]
"""Parameter name to (first element, number of elements) within a partition."""

ZERO3 = 3
MAX_DEGREE = 65536
"""Larger than any real degree of model parallelism; a larger number is damage."""

PRUNED = "pruned_optimizer_state"
"""Key of the optimizer state after ``zexport prune``; DeepSpeed fails to resume without its own."""

_CASTS = {"bf16": DType.BF16, "bfloat16": DType.BF16, "fp16": DType.F16}
_SCALARS = {DType.F32: "<f", DType.F64: "<d", DType.I64: "<q", DType.I32: "<i"}


class ModelStates(Struct, frozen=True):
    """Contents of a ``*_model_states.pt`` file.

    Attributes:
        module: the module's state dict; with ZeRO-3 its parameters are empty placeholders.
        param_shapes: one mapping per flat group, in the order of the flat data.
        frozen_shapes: ``None`` if frozen weights are not recorded (ZeRO-1) or excluded (ZeRO-2, 3).
        frozen: frozen weights: whole (ZeRO-2) or this rank's partition (ZeRO-3).
        shared: tied name to stored name; only rank 0 records any.
        skipped_steps: steps that the optimizer skipped because of an overflow.
        has_experts: whether expert weights are in other files (DeepSpeed-MoE, AutoEP).
    """

    file: TorchFile
    module: Mapping[str, TensorRef]
    buffers: tuple[str, ...]
    param_shapes: tuple[Shapes, ...]
    frozen_shapes: Shapes | None
    frozen: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    config: Mapping[str, object]
    steps: int | None
    skipped_steps: int
    lr_step: int | None
    dp_world_size: int | None
    mp_world_size: int
    version: str | None
    has_experts: bool

    @property
    def root(self) -> PickleView:
        return view(self.file, "model states")

    @property
    def trained(self) -> dict[str, Shape]:
        return {name: shape for group in self.param_shapes for name, shape in group.items()}

    @property
    def zero_config(self) -> Mapping[str, object]:
        return _section(self.config, "zero_optimization")

    @property
    def is_round_robin(self) -> bool:
        """Whether ``param_slice_mappings`` are in another order than the data (ZeRO-1/2)."""
        return bool(self.zero_config.get("round_robin_gradients"))

    @property
    def cast_dtype(self) -> DType | None:
        """Dtype that the config casts the module to.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_configure_distributed_model``).
        """
        enabled = (key for key in _CASTS if _section(self.config, key).get("enabled") is True)
        return _CASTS.get(next(enabled, ""))

    @property
    def extra_state(self) -> list[str]:
        """Entries of the module's state dict that are no tensors."""
        entries = self.root.get("module").table().items()
        return [name for name, one in entries if not isinstance(one, TensorRef)]

    @property
    def num_experts(self) -> tuple[int, ...]:
        """Number of experts of every layer that has some, in the module's order."""
        return tuple(item.number() for item in self.root.get("num_experts").items_or_self())

    @property
    def grid(self) -> Parallelism | None:
        """Recorded degrees of model parallelism (DeepSpeed 0.19 and later)."""
        degrees = self.root.get("checkpoint_parallel_dimensions").table()
        match degrees.get("pp_degree"), degrees.get("tp_degree"):
            case int(stages), int(tensor) if 0 < stages <= MAX_DEGREE and 0 < tensor <= MAX_DEGREE:
                return Parallelism(stages, tensor)
        return None


def model_states(file: TorchFile) -> ModelStates:
    """Parse a model states file."""
    root = view(file, "model states")
    frozen = root.get("frozen_param_shapes")
    schedule = root.get("lr_scheduler").table()
    steps = (schedule.get(key) for key in ("last_batch_iteration", "last_epoch"))
    experts = (root.get("ds_autoep_layers").value, root.get("num_experts").value)
    shapes = () if _lacks_masters(root) else root.get("param_shapes").items()
    return ModelStates(
        file=file,
        module=root.get("module").tensors(),
        buffers=tuple(item.text() for item in root.get("buffer_names").items()),
        param_shapes=tuple(one.shapes() for one in shapes),
        frozen_shapes=None
        if frozen.value is None and root.has("frozen_param_shapes")
        else frozen.shapes(),
        frozen=root.get("frozen_param_fragments").tensors(),
        shared={alias: name.text() for alias, name in root.get("shared_params").entries()},
        config=root.get("ds_config").table(),
        steps=root.get("global_steps").number_or(None),
        skipped_steps=root.get("skipped_steps").number_or(0) or 0,
        lr_step=next((step for step in steps if type(step) is int), None),
        dp_world_size=root.get("dp_world_size").number_or(None),
        mp_world_size=root.get("mp_world_size").number_or(1) or 1,
        version=root.get("ds_version").text_or(None),
        has_experts=any(one not in (None, []) for one in experts),
    )


def _lacks_masters(root: PickleView) -> bool:
    """Whether no file has master weights although ``param_shapes`` names them.

    DeepSpeed 0.17 and 0.18 do that for bf16 without ZeRO (``runtime/engine.py``: with DDP_BFLOAT16
    ``_save_checkpoint`` leaves the optimizer to optimizer states files, which no rank writes).
    """
    config = root.get("ds_config").table()
    return (
        (root.get("ds_version").text_or("") or "").startswith(("0.17.", "0.18."))
        and _section(config, "bf16").get("enabled") is True
        and _section(config, "zero_optimization").get("stage", 0) == 0
        and _section(config, "data_types").get("grad_accum_dtype") in (None, "bf16", "bfloat16")
        and root.get("optimizer").value is None
        and root.get("module").value is not None
        and root.get("num_experts").value in (None, [])
    )


def _section(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


class Kept(Struct, frozen=True):
    """Optimizer state of one numbered parameter (with ZeRO: one flat group).

    Attributes:
        tensors: states with a dimension, usually with one element per weight element.
        scalars: the rest, such as ``step``.
    """

    tensors: Mapping[str, TensorRef]
    scalars: Mapping[str, object]


class SharedGroup(Struct, frozen=True):
    """Ranks that partition a ZeRO-3 flat group under AutoEP, in order; ``part``: who wrote this."""

    ranks: tuple[int, ...]
    part: int | None


class ParameterGroup(Struct, frozen=True):
    """Flat groups of a parameter group (several with ZeRO-3); ``None`` if it has no settings."""

    flat_groups: tuple[int, ...]
    settings: Mapping[str, object] | None


class OptimizerStates(Struct, frozen=True):
    """Contents of a ``*_optim_states.pt`` file; tuples have an entry per flat group, or are empty.

    Attributes:
        stage: ZeRO stage; ``None`` for BF16_Optimizer, which records none.
        partition_counts: partitions of each group (one number with ZeRO-3).
        master_weights: this rank's partition of the master weights.
        kept: this rank's partition of the optimizer states.
        paddings: padding elements after each parameter (``parameter_alignment``).
        fragments: recorded parameters of this rank's partition (empty ones excluded).
        step: the optimizer's step, or the tensor that stores it.
        shared_groups: ranks that partition each flat group (AutoEP with ZeRO-3).
        is_pruned: whether ``zexport prune`` removed the optimizer states.
    """

    file: TorchFile
    stage: int | None
    partition_counts: tuple[int, ...]
    master_weights: tuple[TensorRef, ...]
    kept: tuple[Kept, ...]
    paddings: tuple[tuple[int, ...], ...]
    fragments: tuple[Fragments, ...]
    inner: PickleView
    step: int | TensorRef | None
    version: str | None
    shared_groups: tuple[SharedGroup, ...]
    is_pruned: bool

    @property
    def taken_steps(self) -> float | None:
        """The optimizer's step, read from its tensor (4 or 8 bytes) if necessary."""
        return scalar(self.file, self.step)

    @property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """The parameter groups: each has one or more flat groups, which are numbered in order."""
        count = len(self.master_weights)
        if not self.inner.has("param_groups"):  # elastic_checkpoint
            return tuple(ParameterGroup((number,), None) for number in range(count))
        groups = self.inner.get("param_groups")
        found = []
        for group in groups.items():
            numbers = tuple(item.number() for item in group.need("params").items())
            settings = {key: value for key, value in group.table().items() if key != "params"}
            found.append(ParameterGroup(numbers, settings))
        if [number for group in found for number in group.flat_groups] != [*range(count)]:
            groups.fail("do not number the flat groups", f"{count} flat groups")
        return tuple(found)


def optimizer_states(file: TorchFile) -> OptimizerStates:
    """Parse an optimizer states file."""
    root = view(file, "optimizer states")
    return flat_optimizer(
        file, root.need("optimizer_state_dict"), root.get("ds_version").text_or(None)
    )


def flat_optimizer(file: TorchFile, root: PickleView, version: str | None) -> OptimizerStates:
    """Parse the state of an optimizer with flat groups, as ZeRO and BF16_Optimizer save it."""
    is_zero3 = root.has("fp32_flat_groups")
    key = "fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"
    inner_key = "optimizer_state_dict" if is_zero3 else "base_optimizer_state"
    inner = root.get(PRUNED if root.has(PRUNED) else inner_key)
    stage = root.get("zero_stage").number_or(None)
    if stage is not None and (stage == ZERO3) != is_zero3:
        root.fail(f"has the key {key!r}, which ZeRO-{stage} does not write")
    master_weights = tuple(item.tensor() for item in root.need(key).items())
    kept = tuple(kept_of(inner, number) for number in range(len(master_weights)))
    groups = inner.table().get("param_groups")  # FusedAdam counts in them (``fused_adam.py``)
    entries = [*(one.scalars for one in kept), *(groups if isinstance(groups, list) else ())]
    steps = [one.get("step") for one in entries if isinstance(one, dict)]
    return OptimizerStates(
        file=file,
        stage=stage,
        partition_counts=tuple(
            one.number() for one in root.need("partition_count").items_or_self()
        ),
        master_weights=master_weights,
        kept=kept,
        paddings=tuple(
            tuple(one.number() for one in group.items())
            for group in root.get("param_alignment_paddings").items()
        ),
        fragments=tuple(
            {
                name: fragment
                for name, entry in one.entries()
                if (fragment := _fragment(entry)) is not None
            }
            for one in root.get("param_slice_mappings").items()
        ),
        inner=inner,
        step=next((one for one in steps if type(one) is int or isinstance(one, TensorRef)), None),
        version=version or root.get("ds_version").text_or(None),
        shared_groups=tuple(
            SharedGroup(
                tuple(rank.number() for rank in group.need("partition_ranks").items()),
                group.get("partition_rank").number_or(None),
            )
            for group in root.get("ds_zero_partition_groups").items()
        ),
        is_pruned=root.has(PRUNED),
    )


def _fragment(entry: PickleView) -> tuple[int, int] | None:
    """Return start and numel of a ``fragment_address``; ``None`` if it is empty."""
    one = entry.value
    if not isinstance(one, Opaque) or one.callee != FRAGMENT:
        return None
    state = PickleView(entry.path, entry.where, one.state)
    start, numel = state.need("start").number(), state.need("numel").number()
    return (start, numel) if numel else None


def kept_of(inner: PickleView, number: int) -> Kept:
    """Return the optimizer state of a numbered parameter; empty for unknown forms.

    With ``elastic_checkpoint`` the state is a list, without parameter groups.

    Source: DeepSpeed 0.10 to 0.19, ``stage_1_and_2.py`` (``_get_base_optimizer_state``),
    ``stage3.py``, ``bf16_optimizer.py``.
    """
    by_number = inner.value.get("state") if isinstance(inner.value, dict) else inner.value
    if isinstance(by_number, list):
        by_number = dict(enumerate(by_number))
    own = by_number.get(number) if isinstance(by_number, dict) else None
    items = {str(key): one for key, one in own.items()} if isinstance(own, dict) else {}
    tensors = {
        name: one
        for name, one in items.items()
        if isinstance(one, TensorRef) and one.shape and not (name == "step" and one.numel == 1)
    }
    return Kept(tensors, {name: one for name, one in items.items() if name not in tensors})


def scalar(file: TorchFile, value: object) -> float | None:
    """Return a finite number, or the one in a tensor of one element (4 or 8 bytes are read)."""
    if isinstance(value, TensorRef) and value.numel == 1 and value.dtype in _SCALARS:
        (extent,) = file.source(value).extents(0, value.nbytes)
        raw = read_range(extent.path, extent.offset, extent.nbytes)
        found = float(struct.unpack(_SCALARS[value.dtype], raw)[0])
        return found if isfinite(found) else None
    return float(value) if type(value) is int and value.bit_length() < 64 else None
