"""The two dictionaries DeepSpeed pickles, model states and optimizer states, as typed records.

Source of the keys: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``,
``_save_zero_checkpoint``), ``runtime/zero/stage3.py``, ``runtime/zero/stage_1_and_2.py`` and
``runtime/bf16_optimizer.py`` (``state_dict``). ``client_state`` is merged into the top level of the
model states, so unknown keys are ignored there and known keys are checked before they are believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zexport.checkpoint.layouts.zero12 import Fragments
from zexport.checkpoint.untrusted import Value
from zexport.formats.pickles import FragmentAddress, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType, Shape

ZERO3 = 3
"""The stage that stripes parameters over the ranks."""


_CASTS = {"bf16": DType.BF16, "bfloat16": DType.BF16, "fp16": DType.F16}
"""Sections of the configuration that switch a cast of the module on; the second is an older name
of the first."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """What a ``*_model_states.pt`` says.

    Attributes:
        file: the file it was read from.
        module: the module's state dict; under ZeRO-3 its parameters are empty placeholders.
        buffer_names: names in ``module`` that are buffers.
        param_shapes: one dict per flat group, name to shape, in the order of the flat data.
        frozen_shapes: shapes of the frozen parameters; ``None`` where the key holds ``None``:
            frozen parameters are not recorded as such (ZeRO-1) or were left out (ZeRO-2, 3).
        frozen_fragments: the frozen parameters: whole (ZeRO-2) or this rank's stripe (ZeRO-3).
        shared_params: alias to stored name; only rank 0's is filled.
        global_steps: steps of the training.
        skipped_steps: how many of them the optimizer did not take, for an overflow.
        dp_world_size: number of data-parallel ranks.
        ds_version: version of DeepSpeed that wrote the file.
        ds_config: the DeepSpeed configuration of the run.
        lr_step: step of the learning-rate scheduler.
        has_optimizer: whether the optimizer is inside (ZeRO-0).
        has_experts: whether expert parameters live elsewhere (MoE, AutoEP).
        tensor_parallel: degree of tensor parallelism.
    """

    file: TorchFile
    module: Mapping[str, TensorRef]
    buffer_names: tuple[str, ...]
    param_shapes: tuple[Mapping[str, Shape], ...]
    frozen_shapes: Mapping[str, Shape] | None
    frozen_fragments: Mapping[str, TensorRef]
    shared_params: Mapping[str, str]
    global_steps: int | None
    skipped_steps: int
    dp_world_size: int | None
    ds_version: str | None
    ds_config: Mapping[str, object]
    lr_step: int | None
    has_optimizer: bool
    has_experts: bool
    tensor_parallel: int

    @property
    def is_round_robin(self) -> bool:
        """Whether ``param_slice_mappings`` are of another order than the data's.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py``.
        """
        zero = self.ds_config.get("zero_optimization")
        return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))

    @property
    def cast_dtype(self) -> DType | None:
        """The element type that the configuration has DeepSpeed cast the module to, if any.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_configure_distributed_model``).
        """
        for key, dtype in _CASTS.items():
            section = self.ds_config.get(key)
            if isinstance(section, dict) and section.get("enabled") is True:
                return dtype
        return None


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What a ``*_optim_states.pt`` says.

    Attributes:
        file: the file it was read from.
        stage: ZeRO stage; ``None`` for BF16_Optimizer, which does not record one.
        partition_counts: number of partitions per group (one number under ZeRO-3).
        flat_groups: the master weights of this rank, one 1-D tensor per flat group.
        alignment_paddings: per group, elements of padding after each parameter; empty where absent.
        slices: per group, what this rank's partition holds of which parameter; empty where absent.
            Parameters of which it holds no element are left out.
        step: the optimizer's step, or where to read it.
        ds_version: version of DeepSpeed that wrote the file.
        stripes_experts: whether groups are striped over different sets of ranks (AutoEP).
    """

    file: TorchFile
    stage: int | None
    partition_counts: tuple[int, ...]
    flat_groups: tuple[TensorRef, ...]
    alignment_paddings: tuple[tuple[int, ...], ...]
    slices: tuple[Fragments, ...]
    step: int | TensorRef | None
    ds_version: str | None
    stripes_experts: bool


def read_model_states(file: TorchFile) -> ModelStates:
    """The typed record of a model states file.

    Raises:
        DamagedCheckpointError: a key is missing or holds something else than DeepSpeed writes.
        UnsafeError: a value that is needed is hidden behind a call.
    """
    root = Value(file.path, "model states", file.value)
    frozen = root.get("frozen_param_shapes")
    module = root.get("module")
    return ModelStates(
        file=file,
        module={} if module.is_none else module.tensors(),
        buffer_names=tuple(item.text() for item in root.get("buffer_names").items()),
        param_shapes=()
        if _saved_without_masters(root)
        else tuple(group.shapes() for group in root.get("param_shapes").items()),
        frozen_shapes=None
        if frozen.is_none and root.has("frozen_param_shapes")
        else frozen.shapes(),
        frozen_fragments=root.get("frozen_param_fragments").tensors(),
        shared_params={
            alias: name.text() for alias, name in root.get("shared_params").entries().items()
        },
        global_steps=root.get("global_steps").number_or_none(),
        skipped_steps=root.get("skipped_steps").number_or_none() or 0,
        dp_world_size=root.get("dp_world_size").number_or_none(),
        ds_version=root.get("ds_version").text_or_none(),
        ds_config=root.get("ds_config").mapping_or_empty(),
        lr_step=root.get("lr_scheduler").lr_step(),
        has_optimizer=not root.get("optimizer").is_none,
        has_experts=not (
            root.get("ds_autoep_layers").is_empty and root.get("num_experts").is_empty
        ),
        tensor_parallel=root.get("mp_world_size").number_or_none() or 1,
    )


def _saved_without_masters(root: Value) -> bool:
    """Whether the run kept its masters out of every file, although ``param_shapes`` names them.

    That is so for bf16 without ZeRO in DeepSpeed 0.17 (``runtime/engine.py``: with DDP_BFLOAT16
    ``_save_checkpoint`` leaves the optimizer to optimizer files, which ``_configure_checkpointing``
    has no rank write). BF16_Optimizer, which has such files, needs fp32 gradients or a pipeline.
    """
    config = Value(root.path, "ds_config", root.get("ds_config").mapping_or_empty())
    stage = config.get("zero_optimization").mapping_or_empty().get("stage", 0)
    gradients = config.get("data_types").mapping_or_empty().get("grad_accum_dtype")
    version = root.get("ds_version").text_or_none() or ""
    return (
        version.startswith(("0.17.", "0.18."))
        and config.get("bf16").mapping_or_empty().get("enabled") is True
        and stage == 0
        and gradients in (None, "bf16", "bfloat16")
        and root.get("optimizer").is_none
        and not root.get("module").is_none
        and root.get("num_experts").is_empty
    )


def read_optimizer_states(file: TorchFile) -> OptimizerStates:
    """The typed record of an optimizer states file.

    Raises:
        DamagedCheckpointError: a key is missing or holds something else than DeepSpeed writes.
        UnsafeError: a value that is needed is hidden behind a call.
    """
    top = Value(file.path, "optimizer states", file.value)
    root = top.need("optimizer_state_dict")
    key = "fp32_flat_groups" if root.has("fp32_flat_groups") else "single_partition_of_fp32_groups"
    stage = root.get("zero_stage").number_or_none()
    if stage is not None and (stage == ZERO3) != (key == "fp32_flat_groups"):
        root.fail(f"holds {key!r}, which ZeRO-{stage} does not write")
    counts = root.need("partition_count")
    base = root.get("optimizer_state_dict" if key == "fp32_flat_groups" else "base_optimizer_state")
    return OptimizerStates(
        file=file,
        stage=stage,
        partition_counts=tuple(item.number() for item in counts.items_or_self()),
        flat_groups=tuple(_flat_group(item) for item in root.need(key).items()),
        alignment_paddings=tuple(
            tuple(padding.number() for padding in group.items())
            for group in root.get("param_alignment_paddings").items()
        ),
        slices=tuple(_slices(mapping) for mapping in root.get("param_slice_mappings").items()),
        step=base.first_step(),
        ds_version=top.get("ds_version").text_or_none() or root.get("ds_version").text_or_none(),
        stripes_experts=root.has("ds_zero_partition_groups"),
    )


def _flat_group(item: Value) -> TensorRef:
    """A flat group, whose elements lie one after another: a slice of a flat buffer, or a copy.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
    ``runtime/bf16_optimizer.py``: every one is narrowed from a flattened buffer.
    """
    group = item.tensor()
    if group.numel and not group.is_dense:
        item.fail("is not one run of elements", f"strides {group.stride} of shape {group.shape}")
    return group


def _slices(mapping: Value) -> Fragments:
    return {
        name: (entry.value.start, entry.value.numel)
        for name, entry in mapping.entries().items()
        if isinstance(entry.value, FragmentAddress) and entry.value.numel
    }
