"""The two dictionaries DeepSpeed pickles, model states and optimizer states, as typed records.

Source of the keys: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``,
``_save_zero_checkpoint``), ``runtime/zero/stage3.py``, ``runtime/zero/stage_1_and_2.py`` and
``runtime/bf16_optimizer.py`` (``state_dict``). ``client_state`` is merged into the top level of the
model states, so unknown keys are ignored there and known keys are checked before they are believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError
from zexport.formats.inert import FragmentAddress, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType, Shape

ZERO3 = 3
"""The stage that stripes parameters over the ranks."""

MAX_DEGREE = 65536
"""More ranks of one kind of model parallelism than any run has."""


Fragments = Mapping[str, tuple[int, int]]
"""Name to the first element and the number of elements that a partition holds of a parameter."""

_CASTS = {"bf16": DType.BF16, "bfloat16": DType.BF16, "fp16": DType.F16}
"""Sections of the configuration that switch a cast of the module on; the second is an older name
of the first."""


class Grid(Struct, frozen=True):
    """Degrees of model parallelism; index ``s * tensor + t`` is tensor rank ``t`` of stage ``s``.

    Source: DeepSpeed 0.19.8, ``runtime/pipe/topology.py`` (``ds_model_rank``: ranks of a replica in
    the order of the axes pipe, model).
    """

    stages: int
    tensor: int

    def index(self, stage: int, tensor_rank: int) -> int:
        """The model-parallel index that rank files carry."""
        return stage * self.tensor + tensor_rank


class ModelStates(Struct, frozen=True):
    """What a ``*_model_states.pt`` says.

    Attributes:
        module: the module's state dict; under ZeRO-3 its parameters are empty placeholders.
        param_shapes: one dict per flat group, name to shape, in the order of the flat data.
        frozen_shapes: shapes of the frozen parameters; ``None`` where the key holds ``None``:
            frozen parameters are not recorded as such (ZeRO-1) or were left out (ZeRO-2, 3).
        frozen_fragments: the frozen parameters: whole (ZeRO-2) or this rank's stripe (ZeRO-3).
        shared_params: alias to stored name; only rank 0's is filled.
        skipped_steps: how many steps the optimizer did not take, for an overflow.
        has_experts: whether expert parameters live elsewhere (MoE, AutoEP).
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
    has_experts: bool
    tensor_parallel: int

    @property
    def is_round_robin(self) -> bool:
        """Whether ``param_slice_mappings`` are of another order than the data's.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py``.
        """
        return bool(self.zero_options.get("round_robin_gradients"))

    @property
    def zero_options(self) -> Mapping[object, object]:
        """The section of the configuration that ZeRO has."""
        options = self.ds_config.get("zero_optimization")
        return options if isinstance(options, dict) else {}

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

    # What few layouts ask for is read when it is asked for, so that damage there harms no other.

    @property
    def grid(self) -> Grid | None:
        """The degrees of model parallelism, where they are recorded (DeepSpeed 0.19 and later)."""
        degrees = self._at("checkpoint_parallel_dimensions").mapping_or_empty()
        stages, tensor = degrees.get("pp_degree"), degrees.get("tp_degree")
        if type(stages) is not int or type(tensor) is not int:
            return None
        if not (0 < stages <= MAX_DEGREE and 0 < tensor <= MAX_DEGREE):
            raise DamagedCheckpointError(
                "records impossible degrees of parallelism",
                path=self.file.path,
                found=f"{stages} pipeline stages, {tensor} tensor ranks",
                expected=f"1 to {MAX_DEGREE} of each",
            )
        return Grid(stages, tensor)

    @property
    def num_experts(self) -> tuple[int, ...]:
        """The number of experts of every layer that has some, in the module's order."""
        return tuple(item.number() for item in self._at("num_experts").items_or_self())

    @property
    def autoep_layers(self) -> list[Value]:
        """What AutoEP records of each layer that it replaced; the key has an older name."""
        root = Value(self.file.path, "model states", self.file.value)
        key = "ds_autoep_layers" if root.has("ds_autoep_layers") else "autoep_layers"
        return root.get(key).items()

    @property
    def splits_experts(self) -> bool:
        """Whether experts and tensor ranks share their processes (AutoEP with AutoTP).

        Source: DeepSpeed 0.19, ``checkpoint/constants.py`` (``FOLDING_METADATA_KEY``).
        """
        return not self._at("folding").is_none

    @property
    def tensor_splits(self) -> Value:
        """The record of how tensors are split over tensor ranks (``universal_checkpoint_info``)."""
        return self._at("universal_checkpoint_info")

    @property
    def optimizer(self) -> Value:
        """The optimizer's state, which lies in the model file without ZeRO."""
        return self._at("optimizer")

    def _at(self, key: str) -> Value:
        return Value(self.file.path, "model states", self.file.value).get(key)


class GroupState(Struct, frozen=True):
    """What an optimizer keeps of one flat group, beside the masters: this rank's part of it.

    A state within another dictionary, as 8-bit optimizers have, is named by both, with a dot
    between.

    Attributes:
        tensors: its state tensors by name, flat ones and others.
        scalars: its other states by name, tensors without a dimension among them, such as a step.
        settings: those of its parameter group, a step that is counted there among them; nothing
            where they are not recorded (``elastic_checkpoint``).
    """

    tensors: Mapping[str, TensorRef]
    scalars: Mapping[str, object]
    settings: Mapping[str, object]


class ParameterGroup(Struct, frozen=True):
    """One parameter group: its flat groups, and its settings; ``None`` where none are recorded."""

    flat_groups: tuple[int, ...]
    settings: Mapping[str, object] | None


class SharedGroup(Struct, frozen=True):
    """The ranks that share a flat group of ZeRO-3 under AutoEP, in order, and whose part it is."""

    ranks: tuple[int, ...]
    part: int | None


class OptimizerStates(Struct, frozen=True):
    """What a ``*_optim_states.pt`` says; tuples have an entry for each flat group, or are empty.

    Attributes:
        stage: ZeRO stage; ``None`` for BF16_Optimizer, which does not record one.
        partition_counts: number of partitions per group (one number under ZeRO-3).
        flat_groups: the master weights of this rank, one 1-D tensor per flat group.
        group_states: per flat group, what else the optimizer keeps of it.
        alignment_paddings: per group, elements of padding after each parameter.
        slices: per group, what this rank's partition holds of which parameter; those of which it
            holds no element are left out.
        step: the optimizer's step, or where to read it.
        stripes_experts: whether groups are striped over different sets of ranks (AutoEP).
    """

    file: TorchFile
    stage: int | None
    partition_counts: tuple[int, ...]
    flat_groups: tuple[TensorRef, ...]
    group_states: tuple[GroupState, ...]
    alignment_paddings: tuple[tuple[int, ...], ...]
    slices: tuple[Fragments, ...]
    step: int | TensorRef | None
    ds_version: str | None
    stripes_experts: bool

    @property
    def inner(self) -> Value:
        """The state of the optimizer that ZeRO wraps; of ``elastic_checkpoint`` it is a list."""
        top = Value(self.file.path, "optimizer states", self.file.value)
        root = top.need("optimizer_state_dict")
        return root.get(_inner_key(root))

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Every parameter group, of which ZeRO-3 may cut several flat ones; they make up all."""
        count = len(self.flat_groups)
        if not self.inner.has("param_groups"):
            return tuple(ParameterGroup((index,), None) for index in range(count))
        groups = self.inner.get("param_groups")
        found = []
        for group in groups.items():
            numbers = tuple(item.number() for item in group.need("params").items())
            settings = {
                key: one for key, one in group.mapping_or_empty().items() if key != "params"
            }
            found.append(ParameterGroup(numbers, settings))
        if [number for group in found for number in group.flat_groups] != [*range(count)]:
            groups.fail("do not number the flat groups", f"{count} flat groups")
        return tuple(found)

    @property
    def shared_groups(self) -> tuple[SharedGroup, ...]:
        """Who shares each flat group of ZeRO-3 under AutoEP (``ds_zero_partition_groups``)."""
        top = Value(self.file.path, "optimizer states", self.file.value)
        groups = top.need("optimizer_state_dict").get("ds_zero_partition_groups")
        return tuple(
            SharedGroup(
                ranks=tuple(rank.number() for rank in group.need("partition_ranks").items()),
                part=group.get("partition_rank").number_or_none(),
            )
            for group in groups.items()
        )


def read_model_states(file: TorchFile) -> ModelStates:
    """The typed record of a model states file."""
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
    """The typed record of an optimizer states file."""
    top = Value(file.path, "optimizer states", file.value)
    return _optimizer_states(file, top.need("optimizer_state_dict"), top.get("ds_version"))


def read_inner_states(model: ModelStates) -> OptimizerStates:
    """The record of BF16_Optimizer's state, which a run without ZeRO saves in the model file."""
    return _optimizer_states(model.file, model.optimizer, model.optimizer.get("ds_version"))


def optimizer_in(file: TorchFile) -> Value:
    """The optimizer's state in a file of whole states, which a run without ZeRO has."""
    return Value(file.path, "states", file.value).get("optimizer")


def _optimizer_states(file: TorchFile, root: Value, version: Value) -> OptimizerStates:
    key = "fp32_flat_groups" if root.has("fp32_flat_groups") else "single_partition_of_fp32_groups"
    stage = root.get("zero_stage").number_or_none()
    if stage is not None and (stage == ZERO3) != (key == "fp32_flat_groups"):
        root.fail(f"holds {key!r}, which ZeRO-{stage} does not write")
    counts = root.need("partition_count")
    base = root.get(_inner_key(root))
    flat_groups = tuple(_flat_group(item) for item in root.need(key).items())
    return OptimizerStates(
        file=file,
        stage=stage,
        partition_counts=tuple(item.number() for item in counts.items_or_self()),
        flat_groups=flat_groups,
        group_states=tuple(group_state(base.value, index) for index in range(len(flat_groups))),
        alignment_paddings=tuple(
            tuple(padding.number() for padding in group.items())
            for group in root.get("param_alignment_paddings").items()
        ),
        slices=tuple(_slices(mapping) for mapping in root.get("param_slice_mappings").items()),
        step=base.first_step(),
        ds_version=version.text_or_none() or root.get("ds_version").text_or_none(),
        stripes_experts=root.has("ds_zero_partition_groups"),
    )


def _inner_key(root: Value) -> str:
    return "optimizer_state_dict" if root.has("fp32_flat_groups") else "base_optimizer_state"


def _flat_group(item: Value) -> TensorRef:
    """A flat group, whose elements lie one after another: a slice of a flat buffer, or a copy.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
    ``runtime/bf16_optimizer.py``: every one is narrowed from a flattened buffer.
    """
    group = item.tensor()
    if group.numel and not group.is_dense:
        item.fail("is not one run of elements", f"strides {group.stride} of shape {group.shape}")
    return group


def group_state(base: object, index: int) -> GroupState:
    """What the optimizer keeps of one flat group; nothing where it is in a form that none writes.

    A flat group is one parameter of the inner optimizer, under its number. With
    ``elastic_checkpoint`` there is a list of states alone, without the parameter groups' settings.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py``
    (``_get_base_optimizer_state``), ``runtime/zero/stage3.py`` and ``runtime/bf16_optimizer.py``.
    """
    root = base if isinstance(base, dict) else {"state": base}
    by_number = root.get("state")
    if isinstance(by_number, list):
        by_number = dict(enumerate(by_number))
    found = dict(_states(by_number.get(index) if isinstance(by_number, dict) else None))
    tensors = {name: one for name, one in found.items() if isinstance(one, TensorRef) and one.shape}
    return GroupState(
        tensors=tensors,
        scalars={name: one for name, one in found.items() if name not in tensors},
        settings=next(_settings(root.get("param_groups"), index), {}),
    )


def _states(state: object, above: str = "") -> Iterator[tuple[str, object]]:
    """The states of one parameter by name, those within another dictionary by both names."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, dict) and not above:
            yield from _states(value, f"{name}.")
        elif isinstance(name, str):
            yield above + name, value


def _settings(groups: object, index: int) -> Iterator[dict[str, object]]:
    """The settings of the parameter group that has the parameter of this number."""
    for group in groups if isinstance(groups, list) else ():
        params = group.get("params") if isinstance(group, dict) else None
        if isinstance(params, list) and index in params:
            yield {key: value for key, value in group.items() if key != "params"}


def _slices(mapping: Value) -> Fragments:
    return {
        name: (entry.value.start, entry.value.numel)
        for name, entry in mapping.entries().items()
        if isinstance(entry.value, FragmentAddress) and entry.value.numel
    }
