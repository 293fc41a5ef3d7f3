"""ZeRO-1, 2 and 3: the cell of one model-parallel index, with its flat groups.

ZeRO-3 (DeepSpeed 0.10 to 0.19, ``runtime/zero/partition_parameters.py``, ``_partition_param``, and
``stage3.py``, ``_set_fp32_optimizer_param_groups``): partition ``d`` of a parameter of ``n``
elements has elements ``d * k`` to ``(d + 1) * k``, ``k = ceil(n / world_size)``; a rank's flat data
is its partitions of all parameters in the order of ``param_shapes``.
ZeRO-1/2 (``stage_1_and_2.py``, ``_get_groups_without_padding``, and ``bf16_optimizer.py``): the
parameters of a group end to end, padded to a multiple of ``2 * world_size`` elements and cut into
equal partitions. Master weights are saved without the padding at the end, BF16_Optimizer's and all
optimizer states with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.boxes import Bound, InFile, in_file
from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, FlatData, Parameter, Recorded, Role
from zexport.checkpoint.zero.module_names import check_spelling, find_aliases, is_placeholder
from zexport.checkpoint.zero.ranks import Ranks
from zexport.checkpoint.zero.records import ZERO3, Fragments, ModelStates, OptimizerStates, Shapes
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.formats.pickle_values import StorageRef, TensorRef
from zexport.formats.pickle_view import view
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Chain, Partitioned, Window

MOMENTUM = "momentum_buffer"
SAME_RANKS = (
    "Resume with the same number of ranks, or from an export's weights with a new optimizer"
)

_ALIGNMENT = 2
"""A partition's number of elements is a multiple of this (``nccl_start_alignment_factor``)."""

_NONE = TensorRef(DType.F32, (0,), (1,), 0, StorageRef(DType.F32, 4, "", "cpu", 0))
"""In place of an optimizer state that a rank does not have."""


def partition_numel(numel: int, world_size: int) -> int:
    """Return the partition size of a ZeRO-3 parameter: ceil(numel / world_size)."""
    return -(-numel // world_size)


def flat_partition_numel(numel: int, world_size: int) -> int:
    """Return the partition size of a ZeRO-1/2 group of ``numel`` elements, padding included."""
    return -(-numel // (_ALIGNMENT * world_size)) * _ALIGNMENT


def round_robin_order(count: int, world_size: int) -> list[int]:
    """Return the order of ``count`` parameters in the flat data with ``round_robin_gradients``.

    Source: DeepSpeed 0.10 to 0.19, ``stage_1_and_2.py`` (``_round_robin_reorder``).
    """
    return [index for rank in range(world_size) for index in range(rank, count, world_size)]


def is_per_parameter(settings: Mapping[str, object] | None, slot: str) -> bool:
    """Whether ZeRO-1/2 ranks have a state whole for each parameter in their partition.

    DeepSpeed's Muon does so for the momentum of matrices (0.19.8, ``stage_1_and_2.py``,
    ``get_flat_partition``).
    """
    return slot == MOMENTUM and (settings or {}).get("use_muon") is True


@dataclass(eq=False)
class FlatGroup:
    """A flat group: its parameters, and the optimizer states of the ranks that partition it.

    ``owners`` are in the order of their partitions; ``None`` for a missing file, without which
    names and shapes are still known.
    """

    number: int
    shapes: Shapes
    owners: Sequence[OptimizerStates | None]
    is_zero3: bool
    _bound: dict[str, Chain] = field(default_factory=dict)

    @cached_property
    def there(self) -> list[OptimizerStates]:
        """Optimizer states that are not missing."""
        return [one for one in self.owners if one is not None]

    @property
    def is_complete(self) -> bool:
        return bool(self.there) and len(self.there) == len(self.owners)

    @cached_property
    def slots(self) -> Mapping[str, DType]:
        """Master weights and all optimizer states of the first rank."""
        if not self.there:
            return {MASTER: DType.F32}
        states = self.there[0].kept[self.number].tensors
        dtypes = {name: ref.dtype for name, ref in states.items()}
        return {MASTER: self.there[0].master_weights[self.number].dtype, **dtypes}

    @cached_property
    def layout(self) -> tuple[dict[str, int], int]:
        """First element of each parameter, and the elements used: of every rank, or of all."""
        recorded = self.there[0].paddings
        paddings = recorded[self.number] if self.number < len(recorded) else ()
        if paddings and (len(paddings) != len(self.shapes) or min(paddings) < 0):
            raise LayoutError(
                "param_alignment_paddings does not fit param_shapes",
                list(paddings),
                f"{len(self.shapes)} numbers, 0 or more",
            )
        offsets, end, ranks = {}, 0, len(self.owners)
        for (name, shape), padding in zip(self.shapes.items(), paddings or repeat(0), strict=False):
            offsets[name] = end
            end += partition_numel(prod(shape), ranks) if self.is_zero3 else prod(shape) + padding
        return offsets, end

    def parameters(self, module: Mapping[str, TensorRef] | None = None) -> list[Parameter]:
        """Return its parameters in order, with the dtypes that ``module`` has them in."""
        dtypes, slots = {name: ref.dtype for name, ref in (module or {}).items()}, self.slots
        return [
            Parameter(
                name,
                shape,
                Role.TRAINABLE,
                {slot: InFlat(self, name, slot, dtype) for slot, dtype in slots.items()},
                dtypes.get(name),
            )
            for name, shape in self.shapes.items()
        ]

    def flat_data(self) -> Iterator[FlatData]:
        """Yield the master weights of all ranks; nothing if a file is missing."""
        if self.is_complete:
            source, dtype = self.whole(MASTER), self.slots[MASTER]
            used = sum(map(prod, self.shapes.values()))
            yield FlatData(source, dtype, source.nbytes // dtype.itemsize - used)

    def whole(self, slot: str) -> Chain:
        """Return the partitions of one slot in order, with checked lengths.

        Raises:
            LayoutError: master weights do not fit the shapes.
            UnsupportedError: an optimizer state does not fit the shapes.
        """
        if slot in self._bound:
            return self._bound[slot]
        if not self.is_complete:
            raise IncompleteCheckpointError(
                "optimizer states files are missing",
                found=f"{len(self.there)} of {len(self.owners)} ranks",
                hint="Copy them from the nodes that wrote them",
            )
        found = [
            one.master_weights[self.number]
            if slot == MASTER
            else one.kept[self.number].tensors.get(slot, _NONE)
            for one in self.there
        ]
        try:
            check_one_dtype(ref.dtype for ref in found)
            self._check_lengths(slot, [ref.numel for ref in found])
        except LayoutError as error:
            if slot == MASTER:
                raise
            raise UnsupportedError(
                f"optimizer state {slot!r} is not per weight element and cannot be resharded",
                path=self.there[0].file.path,
                found=f"{error.problem}: {error.found}",
                expected=error.expected,
                hint=SAME_RANKS,
            ) from error
        pairs = zip(self.there, found, strict=True)
        self._bound[slot] = Chain(tuple(one.file.source(ref) for one, ref in pairs))
        return self._bound[slot]

    def _check_lengths(self, slot: str, numels: Sequence[int]) -> None:
        """Compare the lengths of all ranks' partitions with the shapes."""
        _, used = self.layout
        full, alignment = used if self.is_zero3 else numels[0], _ALIGNMENT * len(numels)
        padded = -(-used // alignment) * alignment
        fits = self.is_zero3 or used <= full * len(numels) <= padded
        for rank, numel in enumerate(numels):
            least = full if self.is_zero3 else min(full, max(0, used - rank * full))
            if not (fits and least <= numel <= full):
                raise LayoutError(
                    f"partitions of flat group {self.number} ({slot}) do not add up to its "
                    "parameters",
                    f"{numel} elements on rank {rank}",
                    f"{least} to {full}, {used} in all" if fits else f"{used} on all ranks",
                )

    def fragments(self, partition: int) -> Fragments:
        """Return the parameters of one partition of ZeRO-1/2: first element and number."""
        full = self.there[0].master_weights[self.number].numel
        begin, end = partition * full, (partition + 1) * full
        spans = {
            name: (max(offset, begin), min(offset + prod(self.shapes[name]), end))
            for name, offset in self.layout[0].items()
        }
        return {
            n: (first - begin, last - first) for n, (first, last) in spans.items() if first < last
        }

    def check_fragments(self) -> None:
        """Raise if a rank records another partition than the shapes give.

        It shows swapped rank files and parameters in another order, which lengths do not.
        """
        every = [own for one in self.there for own in one.fragments[self.number : self.number + 1]]
        for rank, found in enumerate(every if len(every) == len(self.owners) else ()):
            expected = self.fragments(rank)
            if any(every) and found != expected:
                name = next(n for n in {**expected, **found} if found.get(n) != expected.get(n))
                raise LayoutError(
                    f"{self.there[rank].file.path.name} has the partition of another rank",
                    f"{name!r} at {found.get(name)} in its param_slice_mappings",
                    f"{expected.get(name)}, first element and length, by param_shapes",
                )

    def whole_states(self, slot: str) -> dict[str, list[Bound]]:
        """Return every stored copy of a per-parameter state; none for other states."""
        if slot != MOMENTUM or self.is_zero3 or slot not in self.slots:
            return {}
        own = (one for one in self.there[0].groups if self.number in one.flat_groups)
        if not any(is_per_parameter(one.settings, slot) for one in own):
            return {}
        found: dict[str, list[Bound]] = {name: [] for name in self.shapes}
        for rank, owner in enumerate(self.there):
            ref, offset = owner.kept[self.number].tensors.get(slot, _NONE), 0
            for name in self.fragments(rank):
                nbytes = prod(self.shapes[name]) * ref.dtype.itemsize
                source = Window(owner.file.source(ref), offset, nbytes)
                found[name].append(Bound(ref.dtype, source))
                offset += nbytes
            if offset != ref.nbytes:
                raise DamagedCheckpointError(
                    f"optimizer state {slot!r} does not fit the parameters of the partition",
                    path=owner.file.path,
                    found=f"{ref.nbytes} bytes",
                    expected=f"{offset}",
                    hint="Copy all rank files of one checkpoint again",
                )
        return found


def check_one_dtype(dtypes: Iterable[DType]) -> None:
    """Raise unless flat groups have one floating-point dtype."""
    found = set(dtypes)
    if len(found) > 1 or not all(dtype.is_floating for dtype in found):
        raise LayoutError(
            "flat groups do not have one floating-point dtype",
            ", ".join(sorted(dtype.torch_name for dtype in found)),
            "float32",
        )


class InFlat(Struct, frozen=True):
    """A slot of a parameter in a flat group."""

    group: FlatGroup
    name: str
    slot: str
    dtype: DType

    def bind(self) -> ByteSource:
        """Return a partition of every rank (ZeRO-3), or a window of all partitions end to end."""
        group, size = self.group, self.dtype.itemsize
        if states := group.whole_states(self.slot):
            return states[self.name][0].bind() if states[self.name] else Zeros(0)
        whole, numel = group.whole(self.slot), prod(group.shapes[self.name])
        offset = group.layout[0][self.name] * size
        if group.is_zero3:
            partition = partition_numel(numel, len(whole.parts)) * size
            return Partitioned(whole.parts, offset, partition, numel * size)
        return Window(whole, offset, numel * size)


_WHOLE_NUMBERS = frozenset({DType.BOOL, *(one for one in DType if one.value[0] in "IU")})


def zero_cell(
    ranks: Ranks, model: ModelStates | None = None, groups: Sequence[FlatGroup] | None = None
) -> Cell:
    """Return the cell of one model-parallel index.

    Args:
        model, groups: of dense weights only, if there are experts.
    """
    model = model or ranks.first
    if groups is None:
        groups = flat_groups(model, ranks.owners, is_zero3=ranks.is_zero3)
    for group in groups:
        check_group(group, model)
    trained = [one for group in groups for one in group.parameters(model.module)]
    cell = with_untrained(ranks, model, trained)
    return replace(cell, flats=tuple(flat for group in groups for flat in group.flat_data()))


def flat_groups(
    model: ModelStates, owners: Sequence[OptimizerStates | None], *, is_zero3: bool
) -> list[FlatGroup]:
    shapes = model.param_shapes
    for one in owners:
        if one is not None and len(one.master_weights) != len(shapes):
            raise LayoutError(
                "parameter groups of model states and optimizer states differ",
                f"{len(one.master_weights)} flat groups in {one.file.path.name}",
                f"{len(shapes)}, one per dictionary of param_shapes",
            )
    return [FlatGroup(number, own, owners, is_zero3) for number, own in enumerate(shapes)]


def check_group(group: FlatGroup, model: ModelStates) -> None:
    """Compare a group's lengths, and what ranks record of their partitions, with the shapes."""
    if group.is_complete:
        group.whole(MASTER)
        if not model.is_round_robin:
            group.check_fragments()


def check_module_weight(one: Parameter, ref: TensorRef) -> None:
    """Raise if a tensor cannot be the rounded copy of a trained parameter."""
    if ref.shape != one.shape or (ref.numel and ref.dtype in _WHOLE_NUMBERS):
        raise LayoutError(
            f"module weight of {one.name!r} is not a rounded copy of its master weights",
            f"{list(ref.shape)} of {ref.dtype.torch_name}",
            f"{list(one.shape)} of a floating-point dtype",
        )


def with_untrained(ranks: Ranks, model: ModelStates, trained: Sequence[Parameter]) -> Cell:
    """Return the cell of trained parameters and everything else in the model states files.

    ``trained`` have their master weights only; ``model`` has the parameters' names. ZeRO-1/2 rounds
    the module weights after each step (DeepSpeed 0.10 to 0.19, ``stage_1_and_2.py`` and
    ``bf16_optimizer.py``).
    """
    is_zero3, module = ranks.is_zero3, model.module
    named = [n for n in model.buffers if n in module]
    buffers = (in_file(model.file, name, module[name], Role.BUFFER) for name in named)
    parameters: dict[str, Parameter] = {}
    for one in (*trained, *listed_frozen(ranks, model), *buffers):
        own, ref, stored = parameters.get(one.name), module.get(one.name), one.stored
        if own is not None:
            # Weights that are frozen after the optimizer was made are in both tables.
            if (own.role, one.role, own.shape) != (Role.TRAINABLE, Role.FROZEN, one.shape):
                raise LayoutError(f"two tensors have the name {one.name!r}", "two", "one")
            stored = {**stored, **own.stored}
        elif one.role is Role.TRAINABLE and ref is not None and not is_zero3:
            check_module_weight(one, ref)
            stored = {**stored, MODULE: InFile(model.file, ref)}
        parameters[one.name] = replace(own or one, stored=stored)
    aliases = find_aliases(model, [*parameters], is_zero3=is_zero3)
    rest = [name for name in module if name not in parameters and name not in aliases]
    whole = [name for name in rest if not (is_zero3 and is_placeholder(module[name]))]
    if not is_zero3:
        check_spelling(model, whole)
    for name in whole:
        ref, one = module[name], in_file(model.file, name, module[name], Role.FROZEN)
        if not ref.numel and ref.dtype.is_floating:
            # No group has a parameter without elements, which a tensor-parallel rank has if there
            # are fewer heads than ranks (DeepSpeed 0.19, utils.py, is_optimized_parameter).
            empty = Bound(next((one.dtype for one in trained), DType.F32), Zeros(0))
            one = Parameter(name, ref.shape, Role.TRAINABLE, {MASTER: empty}, ref.dtype)
        parameters[name] = one
    copies = []
    for alias, name in aliases.items() if not (is_zero3 or model.has_experts) else ():
        ref, one = module.get(alias), parameters[name]  # AutoEP's own ties may be stale
        if one.role is Role.TRAINABLE and ref is not None and ref != module.get(name):
            check_module_weight(one, ref)
            copies.append(Copy(one, in_file(model.file, alias, ref, one.role)))
    missing = [name for name in model.buffers if name not in module]
    # ZeRO-1 writes no table of frozen weights. Without any, names show whether a base may have been
    # excluded, as the Trainer does for PEFT.
    table, names = model.frozen_shapes, model.trained
    is_adapted = all(name.startswith("base_model.model.") for name in names)
    if table is None and model.zero_config.get("stage") not in (2, ZERO3):
        unlisted = (n for n, one in parameters.items() if one.role is not Role.BUFFER)
        table = {n: () for n in unlisted if n not in names} or (None if is_adapted else {})
    first = ranks.first_optimizer
    return Cell(
        parameters=parameters,
        aliases=aliases,
        left_out=(*missing, *(name for name in rest if name not in parameters)),
        frozen=None if table is None else tuple(table),
        copies=tuple(copies),
        states=model,
        optimizer=None
        if first is None
        else Recorded(first.file, view(first.file, "optimizer states").mapping()),
        index=ranks.index,
    )


def listed_frozen(ranks: Ranks, model: ModelStates) -> Iterator[Parameter]:
    """Yield frozen weights of the table: whole (ZeRO-2), or in partitions (ZeRO-3)."""
    count = ranks.world_size
    models = [ranks.model[rank] for rank in range(count or 0) if rank in ranks.model]
    for name, shape in (model.frozen_shapes or {}).items():
        ref, module = model.frozen.get(name), model.module.get(name)
        if ref is None or not (ranks.is_zero3 or ref.shape == shape):
            raise LayoutError(f"frozen weight {name!r} has two shapes", ref and ref.shape, shape)
        if not ref.dtype.is_floating and module is not None and module.dtype.is_floating:
            raise UnsupportedError(  # partition_parameters.py, ds_quant_scale: scales are not saved
                f"frozen weight {name!r} is quantized and has no scales",
                path=model.file.path,
                found=ref.dtype.torch_name,
                expected=module.dtype.torch_name,
                hint="Save again without zero_quantized_nontrainable_weights",
            )
        if not ranks.is_zero3:
            yield in_file(model.file, name, ref, Role.FROZEN)
            continue
        numel, found = partition_numel(prod(shape), count or 1), []
        for one in models:
            own = one.frozen.get(name)
            if own is None or (own.numel, own.dtype) != (numel, ref.dtype):
                raise LayoutError(
                    f"partition of frozen weight {name!r} in {one.file.path.name} has the wrong "
                    "length or dtype",
                    f"{own.numel} elements of {own.dtype.torch_name}" if own else "none",
                    f"{numel} of {ref.dtype.torch_name}",
                )
            found.append(one.file.source(own))
        whole = Window(Chain(tuple(found)), 0, prod(shape) * ref.dtype.itemsize)
        stored = Bound(ref.dtype, whole if len(found) == count else None)
        yield Parameter(name, shape, Role.FROZEN, {MODULE: stored})
