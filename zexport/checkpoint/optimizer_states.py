"""Optimizer states, the dictionary of a ``*_optim_states.pt``, as a typed record.

Source of the keys: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_zero_checkpoint``),
``runtime/zero/stage3.py``, ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``
(``state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from zexport.checkpoint.model_states import ZERO3, ModelStates
from zexport.checkpoint.untrusted import Value
from zexport.formats.inert import FragmentAddress, TensorRef
from zexport.formats.torch_file import TorchFile

PRUNED = "pruned_optimizer_state"
"""Where ``zexport prune`` leaves what is not a tensor of the optimizer's state.

DeepSpeed looks for another name, and so refuses to go on from such a file.
"""


Fragments = Mapping[str, tuple[int, int]]
"""Name to the first element and the number of elements that a partition holds of a parameter."""


class GroupState(Struct, frozen=True):
    """What an optimizer keeps of one flat group, beside the masters: this rank's part of it.

    A tensor within another state, a dictionary as 8-bit optimizers have or a list, is named by
    both, with a dot between.

    Attributes:
        tensors: its state tensors by name, flat ones and others.
        scalars: its other states by name, tensors without a dimension among them, such as a step.
        within: the names of the tensors, with a dimension or none, that lie within another state.
        settings: those of its parameter group, a step that is counted there among them; nothing
            where they are not recorded (``elastic_checkpoint``).
    """

    tensors: Mapping[str, TensorRef]
    scalars: Mapping[str, object]
    settings: Mapping[str, object]
    within: tuple[str, ...] = ()


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
        is_pruned: whether the optimizer's states were removed.
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
    is_pruned: bool

    @property
    def inner(self) -> Value:
        """The state of the optimizer that ZeRO wraps; of ``elastic_checkpoint`` it is a list."""
        top = Value(self.file.path, "optimizer states", self.file.value)
        root = top.need("optimizer_state_dict")
        return root.get(inner_key(root))

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
    base = root.get(inner_key(root))
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
        is_pruned=root.has(PRUNED),
    )


def inner_key(root: Value) -> str:
    """The key of the state of the optimizer that ZeRO wraps."""
    if root.has(PRUNED):
        return PRUNED
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
    own = by_number.get(index) if isinstance(by_number, dict) else None
    found: dict[str, object] = {}
    within: list[str] = []
    for key, value in own.items() if isinstance(own, dict) else ():
        if inner := dict(_tensors_in(value, str(key))):
            found |= inner
            within += inner
        else:
            found[str(key)] = value
    refs = {name: one for name, one in found.items() if isinstance(one, TensorRef)}
    tensors = {name: ref for name, ref in refs.items() if _is_of_elements(name, ref)}
    return GroupState(
        tensors=tensors,
        scalars={name: one for name, one in found.items() if name not in tensors},
        settings=next(_settings(root.get("param_groups"), index), {}),
        within=tuple(within),
    )


def _is_of_elements(name: str, ref: TensorRef) -> bool:
    """Whether a state is of the weights' elements: a step is not, even as a list of one number."""
    return bool(ref.shape) and not (name == "step" and ref.numel == 1)


def _tensors_in(value: object, above: str) -> Iterator[tuple[str, TensorRef]]:
    """The tensors within a state, at any depth, by all names on the way to them."""
    waiting: list[tuple[str, object]] = [(above, value)]
    seen: set[int] = set()  # a list may hold itself
    while waiting:
        name, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, TensorRef) and name != above:
            yield name, one
        elif isinstance(one, dict):
            waiting += ((f"{name}.{key}", part) for key, part in one.items())
        elif isinstance(one, list | tuple):
            waiting += ((f"{name}.{number}", part) for number, part in enumerate(one))


def _settings(groups: object, index: int) -> Iterator[dict[str, object]]:
    """The settings of the parameter group that has the parameter of this number."""
    for group in groups if isinstance(groups, list) else ():
        params = group.get("params") if isinstance(group, dict) else None
        if isinstance(params, list) and index in params:
            yield {key: value for key, value in group.items() if key != "params"}


def _slices(mapping: Value) -> Fragments:
    return {
        name: (entry.value.start, entry.value.numel)
        for name, entry in mapping.entries()
        if isinstance(entry.value, FragmentAddress) and entry.value.numel
    }
