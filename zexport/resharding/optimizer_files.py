"""What the optimizer files of a target hold: its flat groups, cut for each of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.checkpoint.contents import source_of
from zexport.checkpoint.layouts import zero3, zero12
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.model_states import ZERO3
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.inert import TensorLeaf
from zexport.ranges.computed import Stripe, Stripes, Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Chain, Window
from zexport.resharding.read_cells import is_by_parameter
from zexport.resharding.settings import TargetSettings
from zexport.resharding.state import CellState, Group, Parameter, Recorded
from zexport.resharding.values import loss_scaler, static_loss_scaler, with_leaves, written

_INNER = "optimizer_state_dict"
_AS_SAVED = "Reshard to the stage and settings that the checkpoint was saved with"


class Place(Struct, frozen=True):
    """A rank of the target: its number, and the ranks with the same experts, in their order."""

    rank: int
    sharing: Sequence[int]
    world_size: int

    def of(self, group: Group) -> tuple[int, int]:
        """Which partition of a group's flat data it has, and of how many."""
        if group.of_experts:
            return self.sharing.index(self.rank), len(self.sharing)
        return self.rank, self.world_size


class Cut(Struct, frozen=True):
    """The parameters of one flat group of the target, in its order, and every state of theirs.

    ``whole`` are the sources by state: all parameters end to end (ZeRO-1/2), or cut into stripes.
    """

    parameters: tuple[Parameter, ...]
    whole: Mapping[str, Stripes | Chain]
    dtypes: Mapping[str, DType]

    @property
    def numel(self) -> int:
        """Elements of the parameters."""
        return sum(prod(one.shape) for one in self.parameters)


class GroupCuts(Struct, frozen=True):
    """A parameter group and its flat groups: sub-groups under ZeRO-3, else one."""

    group: Group
    cuts: tuple[Cut, ...]


def cuts_of(cell: CellState, settings: TargetSettings) -> tuple[GroupCuts, ...]:
    """The flat groups of every parameter group."""
    sets = [cell.expert_ranks if group.of_experts else 1 for group in cell.groups]
    return tuple(
        GroupCuts(group, tuple(_cuts(group, settings, settings.world_size // count)))
        for group, count in zip(cell.groups, sets, strict=True)
    )


def _cuts(group: Group, settings: TargetSettings, ranks: int) -> Iterator[Cut]:
    """The sub-groups of a parameter group under ZeRO-3; else all of it in one."""
    if settings.stage != ZERO3:
        yield _end_to_end(group, settings, ranks)
        return
    numels = [prod(one.shape) for one in group.parameters]
    for own in zero3.sub_groups(numels, ranks, settings.sub_group_size):
        if own:
            yield _striped(group.parameters[own.start : own.stop], ranks)


def _striped(parameters: Sequence[Parameter], world_size: int) -> Cut:
    whole, dtypes = {}, _dtypes(parameters)
    for state in dtypes:
        tensors = [one.tensors[state] for one in parameters]
        nbytes = (zero3.stripe_numel(t.numel, world_size) * t.dtype.itemsize for t in tensors)
        whole[state] = Stripes(tuple(map(source_of, tensors)), tuple(nbytes))
    return Cut(tuple(parameters), whole, dtypes)


def _end_to_end(group: Group, settings: TargetSettings, world_size: int) -> Cut:
    parameters = group.parameters
    if settings.is_dealt_out:
        order = zero12.dealt_out(len(parameters), world_size)
        parameters = tuple(parameters[index] for index in order)
    numel = sum(prod(one.shape) for one in parameters)
    padding = zero12.partition_numel(numel, world_size) * world_size - numel
    whole: dict[str, Stripes | Chain] = {}
    dtypes = _dtypes(parameters)
    for state in dtypes:
        sources: list[ByteSource] = [source_of(one.tensors[state]) for one in parameters]
        whole[state] = Chain((*sources, Zeros(padding * dtypes[state].itemsize)))
    return Cut(parameters, whole, dtypes)


def _dtypes(parameters: Sequence[Parameter]) -> dict[str, DType]:
    """The element type of every state; all parameters of a flat group have the same ones, alike."""
    first = parameters[0].tensors if parameters else {}
    found = {state: tensor.dtype for state, tensor in first.items()} or {MASTERS: DType.F32}
    for one in parameters:
        if one.tensors.keys() != found.keys():
            raise UnsupportedError(
                f"the optimizer keeps other states of {one.name!r} than of the rest of its group",
                found=", ".join(one.tensors),
                expected=", ".join(found),
                hint=_AS_SAVED,
            )
        for state, tensor in one.tensors.items():
            if tensor.dtype is not found[state]:
                raise UnsupportedError(
                    f"the state {state!r} is of several element types within one group",
                    found=f"{tensor.dtype.torch_name} of {one.name!r}",
                    expected=found[state].torch_name,
                    hint=_AS_SAVED,
                )
    return found


def flat_leaf(source: ByteSource, dtype: DType) -> TensorLeaf:
    """A run of elements as a tensor of one dimension."""
    return TensorLeaf((source.nbytes // dtype.itemsize,), dtype, source, dtype)


def optimizer_value(
    cell: CellState,
    groups: Sequence[GroupCuts],
    settings: TargetSettings,
    place: Place,
    dropped: Collection[str] = (),
) -> dict[object, object]:
    """All of one rank's optimizer file, without the keys that are ``dropped``."""
    said = cell.optimizer
    rest = written(said, (_INNER, *dropped))
    if "ds_config" in rest:
        rest["ds_config"] = settings.put_into(rest["ds_config"])
    own = _Partition(groups, settings, place, inner_of(said))
    return {_INNER: own.zero3() if settings.stage == ZERO3 else own.zero12()} | rest


def inner_of(said: Recorded) -> Recorded:
    """What an optimizer file says of ZeRO's own optimizer, with the version that wrote it."""
    inner = Value(said.file.path, "optimizer states", said.values).need(_INNER).mapping()
    return Recorded(said.file, {"ds_version": said.values.get("ds_version"), **inner})


def kept_of_run(said: Recorded, *, is_scaled: bool = True) -> dict[object, object]:
    """The loss scaler and clipping, where the source has them; clipping is else left to the run."""
    kept: dict[object, object] = {}
    scaler = loss_scaler(said) if is_scaled else None
    if scaler is not None:
        kept["loss_scaler"] = scaler
        kept |= {key: _number(said, key) for key in ("dynamic_loss_scale", "overflow")}
    if "clip_grad" in said.values:
        kept["clip_grad"] = _number(said, "clip_grad")
    return kept


def version_in(said: Recorded) -> str:
    """The version that wrote the source, without which stages 1 and 2 load nothing."""
    return Value(said.file.path, "optimizer states", said.values).get("ds_version").text()


def _number(said: Recorded, key: str) -> object:
    """A switch or a number that the source states; off where it does not."""
    value = said.values.get(key, False)
    if not isinstance(value, bool | int | float):
        Value(said.file.path, f"optimizer states[{key!r}]", value).fail("is no number")
    return value


class _Partition:
    """One rank's part of every flat group, as its optimizer saves it.

    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``_rigid_load_state_dict``),
    ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``
    (``_load_legacy_checkpoint``): what these read, and no more.
    """

    def __init__(
        self, groups: Sequence[GroupCuts], settings: TargetSettings, place: Place, said: Recorded
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._place = place
        self._said = said
        self._flat = [(one.group, cut) for one in groups for cut in one.cuts]

    def zero3(self) -> dict[object, object]:
        """Stripes of every sub-group; a loss scaler must be there."""
        shared = any(group.of_experts for group, _ in self._flat)
        return {
            "zero_stage": ZERO3,
            "loss_scaler": loss_scaler(self._said) or static_loss_scaler(),
            "dynamic_loss_scale": _number(self._said, "dynamic_loss_scale"),
            "overflow": _number(self._said, "overflow"),
            "partition_count": self._settings.world_size,
            **({"ds_zero_partition_groups": [*self._sharing()]} if shared else {}),
            "optimizer_state_dict": self._optimizer(),
            "fp32_flat_groups": [self._leaf(group, cut, MASTERS) for group, cut in self._flat],
        }

    def zero12(self) -> dict[object, object]:
        """Partitions of every group, without their padding unless BF16_Optimizer loads them."""
        is_padded = self._settings.is_bf16_optimizer
        paddings = [self._padding(*one) for one in self._flat]
        return {
            **self._kept(),
            "base_optimizer_state": self._optimizer(),
            "single_partition_of_fp32_groups": [
                self._leaf(group, cut, MASTERS, 0 if is_padded else lacking)
                for (group, cut), lacking in zip(self._flat, paddings, strict=True)
            ],
            "group_paddings": paddings,
            "partition_count": [self._place.of(group)[1] for group, _ in self._flat],
            "ds_version": version_in(self._said),
        }

    def _sharing(self) -> Iterator[dict[object, object]]:
        """Who shares each sub-group, as AutoEP's must be said, and is held against the run.

        Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``_zero3_partition_group_metadata``)
        and ``module_inject/auto_ep_layer.py`` (``ds_zero_placement_family``).
        """
        ranks = range(self._settings.world_size)
        for number, (group, _) in enumerate(self._flat):
            part, count = self._place.of(group)
            degree = len(ranks) // count
            yield {
                "sub_group": number,
                "partition_count": count,
                "partition_rank": part,
                "partition_ranks": [*(self._place.sharing if group.of_experts else ranks)],
                "families": ["autoep_expert" if group.of_experts else "replicated"],
                "group_names": [f"ep_size_{degree}" if group.of_experts else "replicated"],
            }

    def _padding(self, group: Group, cut: Cut) -> int:
        number, count = self._place.of(group)
        return zero12.padding_in(cut.numel, count, number)

    def _kept(self) -> dict[object, object]:
        """What is kept of the run beside tensors; BF16_Optimizer has neither stage nor scaler."""
        is_plain = not self._settings.is_bf16_optimizer
        kept: dict[object, object] = {"zero_stage": self._settings.stage} if is_plain else {}
        kept |= kept_of_run(self._said, is_scaled=is_plain)
        if info := self._said.values.get("universal_checkpoint_info"):
            kept["universal_checkpoint_info"] = with_leaves(info, self._said.file)
        return kept

    def _optimizer(self) -> dict[object, object]:
        """The state of the optimizer that ZeRO wraps; it numbers flat groups."""
        states = [self._state(group, cut) for group, cut in self._flat]
        numbers = iter(range(len(self._flat)))
        return {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": [
                {**self._settings_of(one.group), "params": [next(numbers) for _ in one.cuts]}
                for one in self._groups
            ],
        }

    def _settings_of(self, group: Group) -> dict[object, object]:
        said = group.settings
        if said is None:
            raise DamagedCheckpointError(
                "does not record the settings of the parameter groups",
                path=self._said.file.path,
                expected="param_groups",
                hint="Save again without elastic_checkpoint, or begin anew from an export",
            )
        return written(said)

    def _state(self, group: Group, cut: Cut) -> dict[object, object]:
        """What the optimizer keeps of one flat group; each has scalars of its own."""
        scalars = written(group.scalars)
        names = [name for name in cut.whole if name != MASTERS]
        if self._settings.stage == ZERO3:
            return scalars | {name: self._leaf(group, cut, name) for name in names}
        return scalars | {
            name: self._touching(group, cut, name)
            if is_by_parameter(group.settings, name)
            else self._leaf(group, cut, name)
            for name in names
        }

    def _leaf(self, group: Group, cut: Cut, state: str, lacking: int = 0) -> TensorLeaf:
        """This rank's part of one state of a flat group, ``lacking`` elements at its end."""
        dtype, whole = cut.dtypes[state], cut.whole[state]
        if isinstance(whole, Stripes):
            return flat_leaf(Stripe(whole, self._place.of(group)[0]), dtype)
        number, count = self._place.of(group)
        full = zero12.partition_numel(cut.numel, count)
        begin, numel = number * full, full - lacking
        return flat_leaf(Window(whole, begin * dtype.itemsize, numel * dtype.itemsize), dtype)

    def _touching(self, group: Group, cut: Cut, state: str) -> TensorLeaf:
        """The whole of every parameter that lies in the partition, in its order."""
        shapes = {one.name: one.shape for one in cut.parameters}
        number, count = self._place.of(group)
        full = zero12.partition_numel(cut.numel, count)
        places = zero12.place_parameters(shapes)
        held = zero12.fragments(places, full, number)
        whole = [source_of(one.tensors[state]) for one in cut.parameters if one.name in held]
        return flat_leaf(Chain(tuple(whole)), cut.dtypes[state])
