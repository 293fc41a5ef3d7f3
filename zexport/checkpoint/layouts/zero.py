"""ZeRO-1, 2 and 3: the tensors of a run of data parallelism, out of the files of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts import zero3, zero12
from zexport.checkpoint.layouts.bind import MASTERS, Bound, FlatRun, bind, check_one_type
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.module_names import (
    check_spelling,
    find_aliases,
    has_value,
    with_parameter_names,
)
from zexport.checkpoint.optimizer_states import OptimizerStates
from zexport.checkpoint.ranks import RankStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Chain, Window
from zexport.ranges.replicas import CastReplica

_WHOLE_NUMBERS = frozenset({DType.BOOL, *(one for one in DType if one.value[0] in "IU")})


def take_inventory(ranks: RankStates, model: ModelStates) -> Inventory:
    """The tensors of a checkpoint, by the layout of its stage."""
    model = with_parameter_names(model)
    owners = owners_of(ranks, ranks.world_size)
    trained = bind_trained(owners, model, is_zero3=ranks.is_zero3)
    return with_untrained(trained, ranks, model, ranks.world_size)


def owners_of(ranks: RankStates, world_size: int | None) -> list[OptimizerStates | None]:
    """Who shares the flat runs of dense weights: all ranks, with ``None`` for a missing one."""
    return [ranks.optimizer.get(rank) for rank in range(world_size or 0)]


def bind_trained(
    owners: Sequence[OptimizerStates | None],
    model: ModelStates,
    *,
    is_zero3: bool,
    shapes: Sequence[Mapping[str, Shape]] | None = None,
    others: Collection[int] = (),
    state: str = MASTERS,
) -> list[Bound]:
    """The trained tensors of all flat groups, out of the masters or another state."""
    found = []
    for run in flat_runs(owners, shapes or model.param_shapes, others, is_zero3=is_zero3):
        found.append(bind(run, owners, is_zero3=is_zero3, state=state, module=model.module))
        if not is_zero3 and not model.is_round_robin:
            _check_records(run, owners)
    if state == MASTERS:
        check_one_type(bound.flat.dtype for bound in found if bound.flat is not None)
    return found


def flat_runs(
    owners: Sequence[OptimizerStates | None],
    shapes: Sequence[Mapping[str, Shape]],
    others: Collection[int],
    *,
    is_zero3: bool,
) -> list[FlatRun]:
    """A run for each flat group.

    Under ZeRO-3 all are one where a file cuts its data into other groups than ``param_shapes``.
    """
    there = [states for states in owners if states is not None]
    uneven = [states for states in there if len(states.flat_groups) != len(shapes)]
    own = [index for index in range(len(shapes)) if index not in others]
    if uneven and is_zero3:
        count = max(len(states.flat_groups) for states in there)
        groups = tuple(index for index in range(count) if index not in others)
        return [FlatRun(groups, tuple(shapes[index] for index in own))]
    if uneven and len(there) == len(owners):
        raise LayoutError(
            "the parameter groups of the model file are not those of the optimizer files",
            f"{len(uneven[0].flat_groups)} flat groups in {uneven[0].file.path.name}",
            f"{len(shapes)}, one for each dictionary of param_shapes",
        )
    return [flat_run(index, shapes[index], there) for index in own]


def flat_run(index: int, shapes: Mapping[str, Shape], there: Sequence[OptimizerStates]) -> FlatRun:
    """The run of one flat group, padded between its tensors as the first file says."""
    paddings = there[0].alignment_paddings if there else ()
    return FlatRun((index,), (shapes,), paddings[index] if index < len(paddings) else ())


def _check_records(run: FlatRun, owners: Sequence[OptimizerStates | None]) -> None:
    """Hold what every rank records of its partition of a flat group against the places in it."""
    (index,) = run.groups
    there = [states for states in owners if states is not None and index < len(states.slices)]
    if there and len(there) == len(owners):
        full = there[0].flat_groups[index].numel
        zero12.check_fragments(run.places(), full, [states.slices[index] for states in there])


def with_untrained(
    trained: Sequence[Bound], ranks: RankStates, model: ModelStates, world_size: int | None
) -> Inventory:
    """The trained tensors, and with them all else that the model files have."""
    tensors = [tensor for bound in trained for tensor in bound.tensors]
    masters = tensors[0].dtype if tensors else DType.F32
    by_name = {tensor.name: tensor for tensor in tensors}
    frozen = [*listed_frozen(ranks, model, world_size or 0)]
    copies = [*_frozen_late(by_name, frozen)]
    tensors += [tensor for tensor in frozen if tensor.name not in by_name]
    tensors += stored_buffers(model)
    check_names(tensors)
    known = {tensor.name for tensor in tensors}
    aliases = find_aliases(model, [one.name for one in tensors], is_zero3=ranks.is_zero3)
    rest = [name for name in model.module if name not in known and name not in aliases]
    whole = [name for name in rest if has_value(model.module[name], is_zero3=ranks.is_zero3)]
    if not ranks.is_zero3:
        check_spelling(model, whole)
    tensors += [_unlisted(masters, model, name) for name in whole]
    copies += [] if ranks.is_zero3 else _copies(model, tensors, aliases)
    lost = [name for name in model.buffer_names if name not in model.module]
    return Inventory(
        tensors=tuple(tensors),
        aliases=aliases,
        left_out=(*lost, *(name for name in rest if name not in set(whole))),
        replicas=tuple(copies),
        flats=tuple(bound.flat for bound in trained if bound.flat is not None),
    )


def _copies(
    model: ModelStates, tensors: Iterable[StoredTensor], aliases: Mapping[str, str]
) -> Iterator[CastReplica]:
    """The weights that the module trained with, beside their masters.

    Tied names are the same view; where one is not, it has to hold the same values. AutoEP ties
    names itself, of which one may be stale.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py`` and
    ``runtime/bf16_optimizer.py``: after each step the masters are copied into the module's weights.
    """
    for tensor in tensors:
        if tensor.role is Role.TRAINABLE and tensor.name in model.module:
            yield from rounded_copy(tensor, model.file, model.module[tensor.name])
    masters = {tensor.name: tensor for tensor in tensors if tensor.role is Role.TRAINABLE}
    for alias, name in aliases.items() if not model.has_experts else ():
        copy = model.module.get(alias)
        if copy is not None and name in masters and copy != model.module.get(name):
            yield from rounded_copy(masters[name], model.file, copy, alias)


def _frozen_late(
    masters: Mapping[str, StoredTensor], frozen: Iterable[StoredTensor]
) -> Iterator[CastReplica]:
    """What the table of frozen weights has of those that were trained before: rounded masters.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_get_zero_frozen_param_attributes``):
    the table has what requires no gradient at the save, the flat groups what did at the start.
    """
    for copy in frozen:
        if copy.name in masters:
            yield from _rounded(masters[copy.name], copy)


def rounded_copy(
    master: StoredTensor, file: TorchFile, copy: TensorRef, name: str | None = None
) -> Iterator[CastReplica]:
    """The module's copy of a master, if both are there and one is the other, rounded."""
    yield from _rounded(master, whole_tensor(file, name or master.name, copy, Role.FROZEN))


def _rounded(master: StoredTensor, copy: StoredTensor) -> Iterator[CastReplica]:
    if copy.shape != master.shape:
        raise LayoutError(f"{master.name!r} has two shapes", list(copy.shape), list(master.shape))
    if copy.numel and copy.dtype in _WHOLE_NUMBERS:
        raise LayoutError(
            f"the module holds {master.name!r}, which was trained, in whole numbers",
            copy.dtype.torch_name,
            "a floating-point type, as gradients need",
        )
    is_same = copy.dtype is master.dtype
    is_cast = copy.dtype.is_floating and copy.dtype.itemsize != master.dtype.itemsize
    if master.source is None or copy.source is None or not copy.numel:
        return
    if is_same or is_cast:
        yield CastReplica(
            name=copy.name,
            path=next(copy.source.extents(0, 1)).path,
            kept=master.source,
            kept_dtype=master.dtype,
            other=copy.source,
            other_dtype=copy.dtype,
            names_it=False,
        )


def listed_frozen(ranks: RankStates, model: ModelStates, world_size: int) -> Iterator[StoredTensor]:
    """Frozen parameters that are recorded as such: whole (ZeRO-2) or in stripes (ZeRO-3)."""
    for name, shape in (model.frozen_shapes or {}).items():
        if name not in model.frozen_fragments:
            raise LayoutError(
                f"the frozen parameter {name!r} has a shape but no values", "no fragment", "one"
            )
        dtype = model.frozen_fragments[name].dtype
        if not dtype.is_floating and name in model.module and model.module[name].dtype.is_floating:
            raise _quantized(model, name, dtype)
        source = (
            _frozen_stripes(ranks, name, shape, world_size)
            if ranks.is_zero3
            else _frozen_whole(model, name, shape)
        )
        yield StoredTensor(name, shape, dtype, Role.FROZEN, source)


def _quantized(model: ModelStates, name: str, dtype: DType) -> UnsupportedError:
    """Why int8 stripes are no weights: their scales are not saved.

    Source: DeepSpeed 0.19, ``runtime/zero/partition_parameters.py`` (``ds_quant_scale``).
    """
    return UnsupportedError(
        f"holds the frozen parameter {name!r} in quantized form, without its scales",
        path=model.file.path,
        found=dtype.torch_name,
        expected=model.module[name].dtype.torch_name,
        hint="Save again without zero_quantized_nontrainable_weights",
    )


def _frozen_whole(model: ModelStates, name: str, shape: Shape) -> ByteSource:
    fragment = model.frozen_fragments[name]
    if fragment.shape != shape:
        raise LayoutError(f"the frozen parameter {name!r} has two shapes", fragment.shape, shape)
    return model.file.source(fragment)


def _frozen_stripes(
    ranks: RankStates, name: str, shape: Shape, world_size: int
) -> ByteSource | None:
    """The stripes of all ranks end to end, cut to the parameter; ``None`` if a rank is missing."""
    if not world_size or any(rank not in ranks.model for rank in range(world_size)):
        return None
    numel, dtype = prod(shape), ranks.model[0].frozen_fragments[name].dtype
    stripe = zero3.stripe_numel(numel, world_size)
    parts: list[ByteSource] = []
    for rank in range(world_size):
        states = ranks.model[rank]
        fragment = states.frozen_fragments.get(name)
        if fragment is None or (fragment.numel, fragment.dtype) != (stripe, dtype):
            raise LayoutError(
                f"rank {rank}'s stripe of the frozen parameter {name!r} is not like the others",
                f"{fragment.numel} elements of {fragment.dtype.torch_name}" if fragment else "none",
                f"{stripe} of {dtype.torch_name}, a {world_size}th of {numel} rounded up",
            )
        parts.append(states.file.source(fragment))
    return Window(Chain(tuple(parts)), 0, numel * dtype.itemsize)


def stored_buffers(model: ModelStates) -> Iterator[StoredTensor]:
    """Persistent buffers, which every model file holds whole."""
    for name in model.buffer_names:
        if name in model.module:
            yield whole_tensor(model.file, name, model.module[name], Role.BUFFER)


def _unlisted(masters: DType, model: ModelStates, name: str) -> StoredTensor:
    """What no table names under ZeRO-1: frozen, or trained and without an element.

    Source: DeepSpeed 0.19, ``runtime/utils.py``, ``is_optimized_parameter``: a parameter without
    elements is in no group. A tensor-parallel rank has such where there are fewer heads than ranks.
    """
    whole = whole_tensor(model.file, name, model.module[name], Role.FROZEN)
    if whole.numel or not whole.dtype.is_floating:
        return whole
    return replace(whole, role=Role.TRAINABLE, dtype=masters, module_dtype=whole.dtype)


def by_role(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Trainable ones first, then frozen ones, then buffers."""
    roles = list(Role)
    return sorted(tensors, key=lambda tensor: roles.index(tensor.role))


def check_names(tensors: Iterable[StoredTensor]) -> None:
    """Refuse a name that stands for two tensors."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise LayoutError(f"the name {tensor.name!r} stands for two tensors", "two", "one")
        seen.add(tensor.name)


def module_dtype(model: ModelStates) -> DType | None:
    """The element type most floating parameters of the module have (placeholders keep theirs)."""
    buffers = set(model.buffer_names)
    return commonest_dtype(t for name, t in model.module.items() if name not in buffers)


def commonest_dtype(tensors: Iterable[TensorRef]) -> DType | None:
    """The element type most of the floating tensors have; ``None`` if none is floating."""
    counted = Counter(tensor.dtype for tensor in tensors if tensor.dtype.is_floating)
    return counted.most_common(1)[0][0] if counted else None
