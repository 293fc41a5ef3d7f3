"""Optimizer states files of a target: its flat groups, partitioned over its ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.state import MASTER, Cell, Group, Parameter, Recorded
from zexport.checkpoint.zero.flat_groups import (
    flat_partition_numel,
    is_per_parameter,
    partition_numel,
    round_robin_order,
)
from zexport.checkpoint.zero.records import ZERO3
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.pickle_values import TensorLeaf
from zexport.formats.pickle_view import PickleView
from zexport.ranges.computed import Stripe, Stripes, Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Chain, Window
from zexport.resharding.settings import TargetSettings
from zexport.resharding.values import (
    loss_scaler,
    records_of,
    slots_of,
    source_of,
    static_loss_scaler,
    with_leaves,
    written,
)

_INNER = "optimizer_state_dict"


class Place(Struct, frozen=True):
    """A rank of the target, and the ranks with the same experts, in order."""

    rank: int
    sharing: Sequence[int]
    world_size: int

    def of(self, group: Group) -> tuple[int, int]:
        """Return which partition of a group the rank has, and how many there are."""
        if group.of_experts:
            return self.sharing.index(self.rank), len(self.sharing)
        return self.rank, self.world_size


class FlatTarget(Struct, frozen=True):
    """A flat group of the target: a parameter group, or under ZeRO-3 a sub-group of one.

    ``whole`` has all parameters of each slot: end to end (ZeRO-1/2), or cut into stripes.
    """

    group: Group
    parameters: tuple[Parameter, ...]
    numel: int
    whole: Mapping[str, Stripes | Chain]
    dtypes: Mapping[str, DType]


def flatten(cell: Cell, settings: TargetSettings) -> list[FlatTarget]:
    """Return the flat groups of all parameter groups."""
    found, path = list[FlatTarget](), records_of(cell)[1].file.path
    for group in cell.groups:
        parameters = tuple(cell.parameters[name] for name in group.names)
        ranks = settings.world_size // (cell.expert_ranks if group.of_experts else 1)
        if settings.is_dealt_out:
            order = round_robin_order(len(parameters), ranks)
            parameters = tuple(parameters[index] for index in order)
        runs = [range(len(parameters))]
        if settings.stage == ZERO3:
            partitions = [partition_numel(prod(one.shape), ranks) for one in parameters]
            runs = [run for run in _sub_groups(partitions, settings.sub_group_size) if run]
        for run in runs:
            own = parameters[run.start : run.stop]
            found.append(_flat_target(group, own, ranks, settings.stage, path))
    return found


def _sub_groups(partitions: Sequence[int], size: int) -> list[range]:
    """Return which parameters, with partitions of so many elements, are a sub-group of ZeRO-3.

    A sub-group is full once a rank's partitions reach ``size`` elements. Source: DeepSpeed 0.10 to
    0.19, ``runtime/zero/stage3.py`` (``_create_fp16_sub_groups``).
    """
    if size >= sum(partitions):
        return [range(len(partitions))]
    found, begin, held = [], 0, 0
    for index, numel in enumerate(partitions):
        held += numel
        if held >= size or index == len(partitions) - 1:
            found.append(range(begin, index + 1))
            begin, held = index + 1, 0
    return found


def _flat_target(
    group: Group, parameters: tuple[Parameter, ...], ranks: int, stage: int, path: Path
) -> FlatTarget:
    """Return the parameters as a flat group for so many ranks."""
    numels, dtypes = [prod(one.shape) for one in parameters], _dtypes(parameters, path)
    padding = flat_partition_numel(sum(numels), ranks) * ranks - sum(numels)
    whole: dict[str, Stripes | Chain] = {}
    for slot, dtype in dtypes.items():
        size, sources = dtype.itemsize, tuple(source_of(one, slot) for one in parameters)
        if stage == ZERO3:
            stripes = tuple(partition_numel(numel, ranks) * size for numel in numels)
            whole[slot] = Stripes(sources, stripes)
        else:
            whole[slot] = Chain((*sources, Zeros(padding * size)))
    return FlatTarget(group, parameters, sum(numels), whole, dtypes)


def _dtypes(parameters: Sequence[Parameter], path: Path) -> dict[str, DType]:
    """Return the dtype of every slot; all parameters of a flat group have the same."""
    found = slots_of(parameters[0]) if parameters else {MASTER: DType.F32}
    for one in parameters:
        if (own := slots_of(one)) != found:
            states, expected = (
                ", ".join(f"{slot} {dtype.torch_name}" for slot, dtype in slots.items())
                for slots in (own, found)
            )
            raise UnsupportedError(
                f"optimizer states of {one.name!r} differ from those of its group",
                path=path,
                found=states,
                expected=expected,
                hint="Reshard to the stage and settings that the checkpoint was saved with",
            )
    return found


def flat_leaf(source: ByteSource, dtype: DType) -> TensorLeaf:
    """Return elements as a 1-D tensor."""
    return TensorLeaf((source.nbytes // dtype.itemsize,), dtype, source, dtype)


def optimizer_value(
    cell: Cell,
    groups: Sequence[FlatTarget],
    settings: TargetSettings,
    place: Place,
    dropped: Collection[str] = (),
) -> dict[object, object]:
    """Return one rank's optimizer states, without the keys that are ``dropped``."""
    _, said = records_of(cell)
    rest = written(said, (_INNER, *dropped))
    if "ds_config" in rest:
        rest["ds_config"] = settings.put_into(rest["ds_config"])
    own = _Partition(cell, groups, settings, place, inner_of(said))
    return {_INNER: own.zero3() if settings.stage == ZERO3 else own.zero12()} | rest


def inner_of(said: Recorded) -> Recorded:
    """Return what an optimizer states file says of ZeRO's own optimizer, with its version."""
    inner = PickleView(said.file.path, "optimizer states", said.values).need(_INNER).mapping()
    return Recorded(said.file, {"ds_version": said.values.get("ds_version"), **inner})


def kept_of_run(said: Recorded, *, is_scaled: bool = True) -> dict[object, object]:
    """Return loss scaler and clipping; clipping is left to the run if the source has none."""
    kept: dict[object, object] = {}
    scaler = loss_scaler(said) if is_scaled else None
    if scaler is not None:
        kept["loss_scaler"] = scaler
        kept |= {key: _number(said, key) for key in ("dynamic_loss_scale", "overflow")}
    if "clip_grad" in said.values:
        kept["clip_grad"] = _number(said, "clip_grad")
    return kept


def version_in(said: Recorded) -> str:
    """Return the version that wrote the source, without which ZeRO-1/2 loads nothing."""
    return PickleView(said.file.path, "optimizer states", said.values).get("ds_version").text()


def _number(said: Recorded, key: str) -> object:
    """Return a recorded number or switch; off if there is none."""
    value = said.values.get(key, False)
    if not isinstance(value, bool | int | float):
        PickleView(said.file.path, f"optimizer states[{key!r}]", value).fail("is not a number")
    return value


class _Partition(Struct, frozen=True):
    """One rank's partition of every flat group, as the optimizer saves it.

    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``_rigid_load_state_dict``),
    ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``
    (``_load_legacy_checkpoint``): what these read, and no more.
    """

    cell: Cell
    flat: Sequence[FlatTarget]
    settings: TargetSettings
    place: Place
    said: Recorded

    def zero3(self) -> dict[object, object]:
        """Return the partition of every sub-group; a loss scaler must be there."""
        shared = any(flat.group.of_experts for flat in self.flat)
        return {
            "zero_stage": ZERO3,
            "loss_scaler": loss_scaler(self.said) or static_loss_scaler(),
            "dynamic_loss_scale": _number(self.said, "dynamic_loss_scale"),
            "overflow": _number(self.said, "overflow"),
            "partition_count": self.settings.world_size,
            **({"ds_zero_partition_groups": [*self._sharing()]} if shared else {}),
            "optimizer_state_dict": self._optimizer(),
            "fp32_flat_groups": [self._leaf(flat, MASTER) for flat in self.flat],
        }

    def zero12(self) -> dict[object, object]:
        """Return the partition of every group, without padding unless BF16_Optimizer loads it.

        BF16_Optimizer has neither stage nor scaler.
        """
        is_plain = not self.settings.is_bf16_optimizer
        paddings = [self._padding(flat) for flat in self.flat]
        kept: dict[object, object] = {"zero_stage": self.settings.stage} if is_plain else {}
        kept |= kept_of_run(self.said, is_scaled=is_plain)
        if info := self.said.values.get("universal_checkpoint_info"):
            kept["universal_checkpoint_info"] = with_leaves(info, self.said.file)
        return {
            **kept,
            "base_optimizer_state": self._optimizer(),
            "single_partition_of_fp32_groups": [
                self._leaf(flat, MASTER, padding if is_plain else 0)
                for flat, padding in zip(self.flat, paddings, strict=True)
            ],
            "group_paddings": paddings,
            "partition_count": [self.place.of(flat.group)[1] for flat in self.flat],
            "ds_version": version_in(self.said),
        }

    def _sharing(self) -> Iterator[dict[object, object]]:
        """Yield who partitions each sub-group, which AutoEP compares with the run.

        Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``_zero3_partition_group_metadata``)
        and ``module_inject/auto_ep_layer.py`` (``ds_zero_placement_family``).
        """
        ranks = range(self.settings.world_size)
        for number, group in enumerate(flat.group for flat in self.flat):
            part, count = self.place.of(group)
            ep_size = len(ranks) // count
            yield {
                "sub_group": number,
                "partition_count": count,
                "partition_rank": part,
                "partition_ranks": [*(self.place.sharing if group.of_experts else ranks)],
                "families": ["autoep_expert" if group.of_experts else "replicated"],
                "group_names": [f"ep_size_{ep_size}" if group.of_experts else "replicated"],
            }

    def _padding(self, flat: FlatTarget) -> int:
        """Return the padding elements in the partition; a small group has many."""
        number, count = self.place.of(flat.group)
        full = flat_partition_numel(flat.numel, count)
        return min(full, max(0, (number + 1) * full - flat.numel))

    def _optimizer(self) -> dict[object, object]:
        """Return the state of the wrapped optimizer, which numbers flat groups."""
        states = {number: self._state(flat) for number, flat in enumerate(self.flat)}
        groups = []
        for group in self.cell.groups:
            if group.settings is None:
                raise DamagedCheckpointError(
                    "settings of the parameter groups are not recorded",
                    path=self.said.file.path,
                    expected="param_groups",
                    hint="Save again without elastic_checkpoint, or start anew from an export",
                )
            own = [number for number, flat in enumerate(self.flat) if flat.group is group]
            groups.append({**written(group.settings), "params": own})
        return {
            "state": {number: state for number, state in states.items() if state},
            "param_groups": groups,
        }

    def _state(self, flat: FlatTarget) -> dict[object, object]:
        """Return the optimizer states of one flat group, with scalars of its own."""
        settings = {} if flat.group.settings is None else flat.group.settings.values
        found = written(flat.group.scalars)
        for slot in (one for one in flat.whole if one != MASTER):
            is_whole = self.settings.stage != ZERO3 and is_per_parameter(settings, slot)
            found[slot] = self._touching(flat, slot) if is_whole else self._leaf(flat, slot)
        return found

    def _leaf(self, flat: FlatTarget, slot: str, padding: int = 0) -> TensorLeaf:
        """Return the partition of one slot, without its last ``padding`` elements."""
        dtype, whole = flat.dtypes[slot], flat.whole[slot]
        number, count = self.place.of(flat.group)
        if isinstance(whole, Stripes):
            return flat_leaf(Stripe(whole, number), dtype)
        full, size = flat_partition_numel(flat.numel, count), dtype.itemsize
        return flat_leaf(Window(whole, number * full * size, (full - padding) * size), dtype)

    def _touching(self, flat: FlatTarget, slot: str) -> TensorLeaf:
        """Return one slot of every parameter that is partly in the partition, whole."""
        number, count = self.place.of(flat.group)
        full = flat_partition_numel(flat.numel, count)
        found, offset = [], 0
        for one in flat.parameters:
            end = offset + prod(one.shape)
            if max(offset, number * full) < min(end, (number + 1) * full):
                found.append(source_of(one, slot))
            offset = end
        return flat_leaf(Chain(tuple(found)), flat.dtypes[slot])
