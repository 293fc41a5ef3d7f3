"""One model-parallel index of ZeRO-1, 2 or 3 as a state: its groups, and all that its files say."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.client_state import differing
from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts import zero12
from zexport.checkpoint.layouts.bind import MASTERS, FlatRun, bind
from zexport.checkpoint.layouts.zero import flat_runs, listed_frozen, owners_of, take_inventory
from zexport.checkpoint.model_states import ZERO3, ModelStates
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.optimizer_states import OptimizerStates, ParameterGroup
from zexport.checkpoint.ranks import RankStates, no_first_model, no_optimizer_files
from zexport.checkpoint.same_save import scalar_in
from zexport.checkpoint.untrusted import Value
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.formats.inert import Ordered, TensorRef
from zexport.ranges.computed import Zeros
from zexport.ranges.extents import Window
from zexport.ranges.replicas import Replica
from zexport.resharding.state import CellState, Group, ModuleEntry, Parameter, RankOwn, Recorded
from zexport.resharding.values import check_numbered
from zexport.weights.named import PEFT_PREFIX

_NO_WAY_ON = "without which the training cannot go on as it was"
MOMENTUM = "momentum_buffer"
MEASURED = frozenset({"RMS"})
"""Scalars that are measured of each partition, at every step anew, and so are each one's own.

Source: transformers 5.23, ``optimization.py`` (``Adafactor.step``).
"""


def is_by_parameter(settings: Recorded | None, state: str) -> bool:
    """Whether ZeRO-1/2 keeps a state of whole parameters on every rank that has part of them.

    So DeepSpeed's Muon does with the momentum of matrices (DeepSpeed 0.19.8,
    ``runtime/zero/stage_1_and_2.py``, ``get_flat_partition``).
    """
    return settings is not None and settings.values.get("use_muon") is True and state == MOMENTUM


CellFiles = tuple[ModelStates, list[OptimizerStates]]
"""The model states that name the weights, and all optimizer states in the order of ranks."""


def read_cell(index: int, ranks: RankStates) -> tuple[CellState, tuple[Replica, ...]]:
    """The state of one index, none of whose files is missing, and copies that must be equal."""
    model, owners = files = cell_files(index, ranks)
    named = with_parameter_names(model)
    state = without_groups(index, ranks, files, named, take_inventory(ranks, model))
    reader = GroupReader(owners, named, is_zero3=ranks.is_zero3)
    return replace(state, groups=reader.read()), tuple(reader.replicas)


def without_groups(
    index: int, ranks: RankStates, files: CellFiles, named: ModelStates, inventory: Inventory
) -> CellState:
    """The state of one index but for what is trained; ``named`` has the parameters' names."""
    model, owners = files
    first = owners[0]
    inner = Value(first.file.path, "optimizer states", first.file.value).mapping()
    return CellState(
        index=index,
        groups=(),
        frozen=frozen_table(ranks, named, inventory, len(owners)),
        module=tuple(module_entries(model, named, inventory, is_zero3=ranks.is_zero3)),
        aliases=inventory.aliases,
        model=said_by(model),
        optimizer=Recorded(first.file, inner),
        own=tuple(_own_of_ranks(ranks, model, len(owners))),
    )


def _own_of_ranks(ranks: RankStates, first: ModelStates, world_size: int) -> Iterator[RankOwn]:
    """Yield what each rank has differently; of a rank without a model file, what rank 0 has."""
    keys, buffers = differing(ranks)
    for rank in range(world_size) if keys or buffers else ():
        said = said_by(ranks.model.get(rank, first))
        module = Value(said.file.path, "module", said.values.get("module")).mapping_or_empty()
        yield RankOwn(
            Recorded(said.file, {key: said.values[key] for key in keys if key in said.values}),
            Recorded(said.file, {name: module[name] for name in buffers if name in module}),
        )


def said_by(model: ModelStates) -> Recorded:
    """All that a model file says."""
    said = Value(model.file.path, "model states", model.file.value).mapping()
    return Recorded(model.file, said)


def cell_files(index: int, ranks: RankStates) -> CellFiles:
    """The files of one index, of which none may be missing."""
    model = ranks.first_model
    if model is None:
        raise no_first_model(next(iter(ranks.optimizer.values())).file.path.parent, index)
    owners = [one for one in owners_of(ranks, ranks.world_size) if one is not None]
    if not any(model.param_shapes):
        raise UnsupportedError(
            "does not record in which order its weights lie in the flat groups, as a pipeline "
            "without ZeRO does not",
            path=model.file.path,
            expected="param_shapes",
            hint="Resume the run with ZeRO stage 1, save, and reshard that",
        )
    if not owners:
        raise no_optimizer_files(model.file.path.parent, index, model)
    return model, owners


def frozen_table(
    ranks: RankStates, named: ModelStates, inventory: Inventory, world_size: int
) -> Mapping[str, StoredTensor] | None:
    """The table of frozen weights, which ZeRO-1 does not write.

    There, what the module holds beside trained weights and buffers is not trained: frozen, or
    without an element. Where that is nothing, the names tell whether a base may have been left out,
    as the Trainer does of peft's.
    """
    if named.frozen_shapes is not None:
        listed = listed_frozen(ranks, named, world_size)
        return {tensor.name: tensor for tensor in listed}
    trained = {name for shapes in named.param_shapes for name in shapes}
    modules = _module_paths(named)
    weights = [one for one in inventory.tensors if one.role is not Role.BUFFER]
    unlisted = {
        one.name: one
        for one in weights
        if one.name not in trained and (not modules or one.name.rpartition(".")[0] in modules)
    }
    is_adapted = all(name.startswith(PEFT_PREFIX) for name in trained)
    is_recorded = named.zero_options.get("stage") in (2, ZERO3)
    if is_recorded or (not unlisted and is_adapted):
        return None
    return unlisted


def _module_paths(model: ModelStates) -> Collection[object]:
    """Return the names of all modules, or nothing if they are not those of the parameters.

    Source: torch 2.13, ``nn/modules/module.py`` (``state_dict``: ``_metadata`` has every module).
    """
    module = Value(model.file.path, "model states", model.file.value).get("module").value
    attributes = module.attributes if isinstance(module, Ordered) else None
    paths = attributes.get("_metadata") if isinstance(attributes, dict) else None
    owners = {name.rpartition(".")[0] for shapes in model.param_shapes for name in shapes}
    return paths if isinstance(paths, dict) and owners <= paths.keys() else ()


def _parameters(
    model: ModelStates, inventory: Inventory, trained: Collection[str]
) -> Iterator[str]:
    """Yield the tensors that are parameters, not buffers or what modules add to the state dict.

    ZeRO-2 and 3 list frozen parameters. Under ZeRO-0 and 1, a tensor in no table is one if it lies
    directly in a module, under a usual name or in the type that DeepSpeed casts parameters to.
    """
    modules, is_listed = _module_paths(model), model.zero_options.get("stage") in (2, ZERO3)
    listed = {*trained, *((model.frozen_shapes or {}) if is_listed else ())}
    for tensor in inventory.tensors:
        path, _, own = tensor.name.rpartition(".")
        is_direct = not is_listed and (not modules or path in modules)
        is_usual = own in ("weight", "bias") or tensor.dtype is model.cast_dtype
        if tensor.role is not Role.BUFFER and (
            not tensor.numel or tensor.name in listed or (is_direct and is_usual)
        ):
            yield tensor.name


def module_entries(
    model: ModelStates,
    named: ModelStates,
    inventory: Inventory,
    *,
    is_zero3: bool,
    trained: Collection[str] = (),
) -> Iterator[ModuleEntry]:
    """Every tensor of the module's state dict, by the name that it has there."""
    stated = Value(model.file.path, "module", model.file.value).get("module").mapping_or_empty()
    names = [name for name, one in stated.items() if isinstance(one, TensorRef)]
    known = {tensor.name: tensor for tensor in inventory.tensors}
    trained = trained or {name for shapes in named.param_shapes for name in shapes}
    parameters = set() if is_zero3 else {*_parameters(named, inventory, trained)}
    for name, (own, ref) in zip(names, named.module.items(), strict=True):
        owner = inventory.aliases.get(own, own)
        tensor = known.get(owner)
        is_placeholder = is_zero3 and ref.shape == (0,)
        yield ModuleEntry(
            name=name,
            owner=owner,
            dtype=ref.dtype,
            value=tensor if is_placeholder else whole_tensor(model.file, own, ref, Role.BUFFER),
            is_parameter=is_placeholder if is_zero3 else owner in parameters,
        )


@dataclass
class GroupReader:
    """The groups of one model-parallel index; copies of states that must be equal are collected.

    ``owners`` are the optimizer states of all ranks, in their order; ``sharing``, by the number of
    a flat group that some ranks alone share, these ranks' states.
    """

    owners: Sequence[OptimizerStates]
    model: ModelStates
    is_zero3: bool
    sharing: Mapping[int, Sequence[OptimizerStates]] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        shapes = self.model.param_shapes
        self._runs = flat_runs(self.owners, shapes, (), is_zero3=self.is_zero3)

    def read(self) -> tuple[Group, ...]:
        """Every group, whole."""
        first = self.owners[0]
        if first.inner.is_none:
            raise no_states(first.file.path, _NO_WAY_ON)
        if len(self._runs) != len(first.flat_groups):
            raise UnsupportedError(
                "cuts its flat data otherwise than param_shapes, so that groups cannot be told",
                path=first.file.path,
                found=f"{len(first.flat_groups)} flat groups",
                hint="Resume the run as it was, save again, and reshard that",
            )
        groups = first.parameter_groups
        for owner in self.owners:
            check_numbered(owner.file, owner.inner)
        for owner in self.owners[1:]:
            for number, pair in enumerate(zip(groups, owner.parameter_groups, strict=False)):
                self._check_settings(number, owner, *(one.settings or {} for one in pair))
        return tuple(map(self._group, groups))

    def _check_settings(
        self,
        number: int,
        owner: OptimizerStates,
        first: Mapping[str, object],
        own: Mapping[str, object],
    ) -> None:
        """Refuse a setting that the optimizer works out on each rank, as Prodigy does ``d``."""
        for name in [] if own == first else sorted({*first, *own}, key=str):
            expected = _told(self.owners[0], first.get(name))
            if (found := _told(owner, own.get(name))) != expected:
                raise UnsupportedError(
                    f"the optimizer has another {name!r} in parameter group {number} than on the "
                    "first rank",
                    path=owner.file.path,
                    found=found,
                    expected=expected,
                    hint="Resume with as many ranks, or from an export's weights, with a new "
                    "optimizer",
                )

    def _group(self, group: ParameterGroup) -> Group:
        first = self.owners[0]
        settings = None if group.settings is None else Recorded(first.file, group.settings)
        numbers = group.flat_groups
        own = self._owners_of(numbers[0]) if numbers else self.owners
        if len({number in self.sharing for number in numbers}) > 1:
            raise UnsupportedError(
                "has experts and other weights in one parameter group",
                path=first.file.path,
                found=f"flat groups {numbers[0]} to {numbers[-1]} in one",
                expected="a group of their own, as DeepSpeed needs it",
                hint="Resume the run with as many ranks as wrote it",
            )
        self._check_moments(group)
        return Group(
            parameters=tuple(
                one for number in numbers for one in self._parameters(number, settings)
            ),
            settings=settings,
            scalars=self._scalars(own[0], numbers),
            of_experts=any(number in self.sharing for number in numbers),
        )

    def _scalars(self, first: OptimizerStates, numbers: Sequence[int]) -> Recorded:
        """What the optimizer keeps of the group as a whole, which each partition of it states."""
        kept = first.group_states[numbers[0]].scalars if numbers else {}
        for number in numbers:
            for owner in self._owners_of(number):
                own = owner.group_states[number].scalars
                for name in sorted({**kept, **own}.keys() - MEASURED):
                    expected = _told(first, kept.get(name))
                    if (found := _told(owner, own.get(name))) != expected:
                        raise UnsupportedError(
                            f"the optimizer keeps another {name!r} of flat group {number} than "
                            "of the rest of its parameter group",
                            path=owner.file.path,
                            found=found,
                            expected=f"{expected}, as in {first.file.path.name} of flat group "
                            f"{numbers[0]}",
                            hint="Where the optimizer works it out of what one rank holds, resume "
                            "with as many ranks; else copy all rank files of one save again",
                        )
        return Recorded(first.file, kept)

    def _owners_of(self, number: int) -> Sequence[OptimizerStates]:
        """Who shares a flat group, in the order of their partitions."""
        return self.sharing.get(number, self.owners)

    def _check_moments(self, group: ParameterGroup) -> None:
        """Refuse an optimizer with betas that keeps no averages although it has taken steps."""
        first = self.owners[0]
        held = [first.group_states[number].tensors for number in group.flat_groups]
        has_stepped = (self.model.global_steps or 0) > self.model.skipped_steps
        due = has_stepped and "betas" in (group.settings or {})
        if due and held and not any(held):
            raise no_states(first.file.path, _NO_WAY_ON)

    def _parameters(self, number: int, settings: Recorded | None) -> list[Parameter]:
        """The parameters of one flat group."""
        run = self._runs[number]
        tensors = {state: self._whole(run, state, settings) for state in self._states(number)}
        placed = [
            Parameter(name, shape, {state: whole[index] for state, whole in tensors.items()})
            for index, (name, shape) in enumerate(run)
        ]
        if not (self.model.is_round_robin and self.owners[0].stage in (1, 2)):
            return placed
        order = zero12.dealt_out(len(placed), len(self._owners_of(number)))
        return [one for _, one in sorted(zip(order, placed, strict=True), key=lambda pair: pair[0])]

    def _states(self, number: int) -> Iterator[str]:
        """The masters and every state; all ranks have the same of one group."""
        owners = self._owners_of(number)
        names = [one.group_states[number].tensors.keys() for one in owners]
        for owner, own in zip(owners, names, strict=True):
            if own != names[0]:
                first = next(rank for rank, one in enumerate(self.owners) if one is owners[0])
                raise DamagedCheckpointError(
                    f"has other optimizer states of flat group {number} than rank {first}",
                    path=owner.file.path,
                    found=", ".join(own) or "none",
                    expected=", ".join(names[0]) or "none",
                    hint="Copy all rank files of one save again",
                )
        if within := sorted({one for own in owners for one in own.group_states[number].within}):
            raise UnsupportedError(
                f"the optimizer's state {within[0]!r} lies within another, as blocks do that begin "
                "anew on every rank, and cannot be cut for other ranks",
                path=owners[0].file.path,
                hint="Resume with as many ranks, or from an export's weights, with a new optimizer",
            )
        yield MASTERS
        yield from names[0]

    def _whole(
        self, run: FlatRun, state: str, settings: Recorded | None
    ) -> tuple[StoredTensor, ...]:
        """One state of all parameters of a run."""
        owners = self._owners_of(run.groups[0])
        if is_by_parameter(settings, state) and not self.is_zero3:
            return tuple(self._by_parameter(run, state))
        try:
            return bind(run, owners, is_zero3=self.is_zero3, state=state).tensors
        except LayoutError as cause:
            if state == MASTERS:
                raise
            raise UnsupportedError(
                f"the optimizer's state {state!r} cannot be cut for other ranks",
                path=owners[0].file.path,
                found=f"{cause.problem}: {cause.found}",
                expected=cause.expected,
                hint="Resume with as many ranks, or from an export's weights, with a new optimizer",
            ) from cause

    def _by_parameter(self, run: FlatRun, state: str) -> Iterator[StoredTensor]:
        """A state of which every rank has the whole of each parameter that it has part of."""
        places = run.places()
        used = places[-1].offset + places[-1].numel if places else 0
        (number,) = run.groups
        owners = self._owners_of(number)
        full = zero12.partition_numel(used, len(owners))
        found: dict[str, StoredTensor] = {}
        for rank, owner in enumerate(owners):
            part = owner.group_states[number].tensors[state]
            held = zero12.fragments(places, full, rank)
            source, size, offset = owner.file.source(part), part.dtype.itemsize, 0
            for place in places:
                if place.name not in held:
                    continue
                own = Window(source, offset * size, place.numel * size)
                offset += place.numel
                whole = StoredTensor(place.name, place.shape, part.dtype, Role.TRAINABLE, own)
                kept = found.setdefault(place.name, whole)
                if kept.source is not None and kept is not whole:
                    self.replicas.append(Replica(f"{place.name} ({state})", kept.source, own))
            if offset != part.numel:
                raise DamagedCheckpointError(
                    f"the optimizer's state {state!r} is not of the parameters in the partition",
                    path=owner.file.path,
                    found=f"{part.numel} elements",
                    expected=f"{offset}",
                    hint="Copy all rank files of one save again",
                )
        for place in places:
            none = StoredTensor(place.name, place.shape, part.dtype, Role.TRAINABLE, Zeros(0))
            yield found.get(place.name, none)


def _told(states: OptimizerStates, scalar: object) -> object:
    """A scalar to be compared and shown: of a number and of a tensor of it, the number."""
    if isinstance(scalar, TensorRef):
        scalar = scalar_in(states.file, scalar)
    if isinstance(scalar, float):
        return int(scalar) if scalar.is_integer() else f"{scalar!r}"  # one NaN is as another
    if scalar is None or isinstance(scalar, int | str):
        return scalar
    return Value(states.file.path, "", {type(scalar).__name__: scalar}).plain_values()


def no_states(path: Path, why: str) -> IncompleteCheckpointError:
    """The refusal of what holds weights and no optimizer to go on with."""
    return IncompleteCheckpointError(
        f"lacks the states of the optimizer, {why}",
        path=path,
        expected="moments beside the master weights",
        hint="Reshard a checkpoint that has them, or begin anew from an export's weights",
    )
