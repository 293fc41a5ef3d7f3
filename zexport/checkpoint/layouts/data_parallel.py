"""From rank states to whole tensors: the layouts' arithmetic applied to real files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from zexport.checkpoint.contents import FlatData, Role, StoredTensor
from zexport.checkpoint.layouts import zero3, zero12
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import ModelStates, OptimizerStates
from zexport.checkpoint.tied_names import find_aliases, has_value
from zexport.checkpoint.wrapped import check_spelling, with_parameter_names
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError, ZexportError
from zexport.formats.pickles import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.copies import CastReplica, Replica
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Chain, Striped, Window

_WHOLE_NUMBERS = frozenset({DType.BOOL, DType.U8, DType.I8, DType.I16, DType.I32, DType.I64})


@dataclass(frozen=True, slots=True)
class Inventory:
    """Every tensor of a checkpoint, and the names that are not tensors of their own.

    Attributes:
        tensors: each tensor once.
        aliases: tied name to the name of the tensor that it is.
        left_out: names of the module whose values are in no file.
        replicas: second copies that must equal what is exported.
        flats: the flat data that the trained ones lie in, each once.
        notes: what the user should know of how values were chosen.
        problems: contradictions that a user may allow.
    """

    tensors: tuple[StoredTensor, ...]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    replicas: tuple[Replica | CastReplica, ...] = ()
    notes: tuple[str, ...] = ()
    flats: tuple[FlatData, ...] = ()
    problems: tuple[ZexportError, ...] = ()


def take_inventory(ranks: RankStates, model: ModelStates) -> Inventory:
    """The tensors of a checkpoint, by the layout of its stage.

    Raises:
        DamagedCheckpointError: lengths, shapes or names contradict each other.
    """
    model = with_parameter_names(model)
    try:
        flats: list[FlatData] = []
        tensors = [*_trainable(ranks, model, flats), *_frozen(ranks, model), *_buffers(model)]
        _check_names(tensors)
        known = {tensor.name for tensor in tensors}
        aliases = find_aliases(model, [one.name for one in tensors], is_zero3=ranks.is_zero3)
        rest = [name for name in model.module if name not in known and name not in aliases]
        whole = [name for name in rest if has_value(model.module[name], is_zero3=ranks.is_zero3)]
        if not ranks.is_zero3:
            check_spelling(model, whole)
        tensors += [_unlisted(ranks, model, name) for name in whole]
        copies = [] if ranks.is_zero3 else list(_copies(model, tensors, aliases))
    except LayoutError as error:
        raise damage_of(
            error, model.file.path.parent, "Copy all rank files of one save again"
        ) from error
    lost = [name for name in model.buffer_names if name not in model.module]
    left_out = (*lost, *(name for name in rest if name not in set(whole)))
    return Inventory(tuple(tensors), aliases, left_out, tuple(copies), flats=tuple(flats))


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


def rounded_copy(
    master: StoredTensor, file: TorchFile, copy: TensorRef, name: str | None = None
) -> Iterator[CastReplica]:
    """The module's copy of a master, if both are there and one is the other, rounded.

    Args:
        master: what is exported.
        file: the file that holds the copy.
        copy: the copy.
        name: what to call it, if not by the master's name.

    Raises:
        LayoutError: the two have different shapes, or the copy is of whole numbers.
    """
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
    if master.source is not None and copy.numel and (is_same or is_cast):
        yield CastReplica(
            name=name or master.name,
            path=file.path,
            kept=master.source,
            kept_dtype=master.dtype,
            other=file.source(copy),
            other_dtype=copy.dtype,
            names_it=False,
        )


def damage_of(error: LayoutError, folder: Path, hint: str) -> DamagedCheckpointError:
    """The damage that a contradiction in a layout's numbers means for the files in ``folder``."""
    return DamagedCheckpointError(
        error.problem, path=folder, found=error.found, expected=error.expected, hint=hint
    )


def _trainable(
    ranks: RankStates, model: ModelStates, flats: list[FlatData]
) -> Iterator[StoredTensor]:
    """The master weights, out of the flat groups, which are added to ``flats``.

    Without sources where ranks are missing.
    """
    world = range(ranks.world_size or 0)
    if not world or any(rank not in ranks.optimizer for rank in world):
        for shapes in model.param_shapes:
            for name, shape in shapes.items():
                yield StoredTensor(name, shape, _master_dtype(ranks), Role.TRAINABLE, None)
        return
    optimizers = [ranks.optimizer[rank] for rank in world]
    if ranks.is_zero3:
        yield from _striped(model, optimizers, flats)
    else:
        yield from _chained(model, optimizers, flats)


def _striped(
    model: ModelStates, optimizers: list[OptimizerStates], all_flats: list[FlatData]
) -> Iterator[StoredTensor]:
    """ZeRO-3: stripe ``d`` of every parameter from rank ``d``."""
    dtype = _flat_dtype(optimizers)
    flats = tuple(
        Chain(tuple(states.file.source(group) for group in states.flat_groups))
        for states in optimizers
    )
    zero3.check_flat_numels(model.param_shapes, [flat.nbytes // dtype.itemsize for flat in flats])
    if all(len(states.flat_groups) == len(model.param_shapes) for states in optimizers):
        for index, shapes in enumerate(model.param_shapes):
            numels = [states.flat_groups[index].numel for states in optimizers]
            zero3.check_flat_numels([shapes], numels)
    parameters = list(zero3.stripe_parameters(model.param_shapes, len(flats)))
    all_flats.append(FlatData(Chain(flats), dtype, zero3.padding_numel(parameters, len(flats))))
    for parameter in parameters:
        source = Striped(
            flats,
            offset=parameter.offset * dtype.itemsize,
            stripe_nbytes=parameter.stripe_numel * dtype.itemsize,
            nbytes=parameter.numel * dtype.itemsize,
        )
        name, own = parameter.name, _dtype_in_module(model, parameter.name)
        yield StoredTensor(name, parameter.shape, dtype, Role.TRAINABLE, source, module_dtype=own)


def _dtype_in_module(model: ModelStates, name: str) -> DType | None:
    return model.module[name].dtype if name in model.module else None


def _chained(
    model: ModelStates, optimizers: list[OptimizerStates], flats: list[FlatData]
) -> Iterator[StoredTensor]:
    """ZeRO-1/2: a window of each group's partitions laid end to end."""
    dtype = _flat_dtype(optimizers)
    for states in optimizers:
        if len(states.flat_groups) != len(model.param_shapes):
            raise LayoutError(
                "the parameter groups of the model file are not those of the optimizer files",
                f"{len(states.flat_groups)} flat groups in {states.file.path.name}",
                f"{len(model.param_shapes)}, one for each dictionary of param_shapes",
            )
    for index, shapes in enumerate(model.param_shapes):
        groups = [states.flat_groups[index] for states in optimizers]
        all_paddings = optimizers[0].alignment_paddings
        paddings = all_paddings[index] if index < len(all_paddings) else ()
        zero12.check_partitions(shapes, [group.numel for group in groups], paddings=paddings)
        chain = Chain(
            tuple(states.file.source(g) for states, g in zip(optimizers, groups, strict=True))
        )
        parameters = list(zero12.place_parameters(shapes, paddings))
        if not model.is_round_robin and all(index < len(one.slices) for one in optimizers):
            recorded = [one.slices[index] for one in optimizers]
            zero12.check_fragments(parameters, groups[0].numel, recorded)
        numel = chain.nbytes // dtype.itemsize
        flats.append(FlatData(chain, dtype, zero12.padding_numel(parameters, numel)))
        for parameter in parameters:
            source = Window(
                chain, parameter.offset * dtype.itemsize, parameter.numel * dtype.itemsize
            )
            name, own = parameter.name, _dtype_in_module(model, parameter.name)
            yield StoredTensor(
                name, parameter.shape, dtype, Role.TRAINABLE, source, module_dtype=own
            )


def _frozen(ranks: RankStates, model: ModelStates) -> Iterator[StoredTensor]:
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
            _frozen_stripes(ranks, name, shape)
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


def _frozen_whole(model: ModelStates, name: str, shape: tuple[int, ...]) -> ByteSource:
    fragment = model.frozen_fragments[name]
    if fragment.shape != shape:
        raise LayoutError(f"the frozen parameter {name!r} has two shapes", fragment.shape, shape)
    return model.file.source(fragment)


def _frozen_stripes(ranks: RankStates, name: str, shape: tuple[int, ...]) -> ByteSource | None:
    """The stripes of all ranks end to end, cut to the parameter; ``None`` if a rank is missing."""
    world_size = ranks.world_size or 0
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


def _buffers(model: ModelStates) -> Iterator[StoredTensor]:
    """Persistent buffers, which every model file holds whole."""
    for name in model.buffer_names:
        if name in model.module:
            yield _whole(model, name, Role.BUFFER)


def _whole(model: ModelStates, name: str, role: Role) -> StoredTensor:
    """A tensor that the module's state dict holds whole."""
    tensor = model.module[name]
    return StoredTensor(name, tensor.shape, tensor.dtype, role, model.file.source(tensor))


def _unlisted(ranks: RankStates, model: ModelStates, name: str) -> StoredTensor:
    """What no table names under ZeRO-1: frozen, or trained and without an element.

    Source: DeepSpeed 0.19, ``runtime/utils.py``, ``is_optimized_parameter``: a parameter without
    elements is in no group. A tensor-parallel rank has such where there are fewer heads than ranks.
    """
    whole = _whole(model, name, Role.FROZEN)
    if whole.numel or not whole.dtype.is_floating:
        return whole
    return replace(whole, role=Role.TRAINABLE, dtype=_master_dtype(ranks), module_dtype=whole.dtype)


def _check_names(tensors: list[StoredTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise LayoutError(f"the name {tensor.name!r} stands for two tensors", "two", "one")
        seen.add(tensor.name)


def _flat_dtype(optimizers: list[OptimizerStates]) -> DType:
    """The one floating element type of all flat groups."""
    found = {group.dtype for states in optimizers for group in states.flat_groups}
    if len(found) > 1 or not all(dtype.is_floating for dtype in found):
        raise LayoutError(
            "the flat groups are not of one floating-point type",
            ", ".join(sorted(dtype.torch_name for dtype in found)),
            "float32 throughout",
        )
    return next(iter(found), DType.F32)


def _master_dtype(ranks: RankStates) -> DType:
    groups = [g for states in ranks.optimizer.values() for g in states.flat_groups]
    return groups[0].dtype if groups else DType.F32


def module_dtype(model: ModelStates) -> DType | None:
    """The element type most floating parameters of the module have (placeholders keep theirs)."""
    buffers = set(model.buffer_names)
    return commonest_dtype(t for name, t in model.module.items() if name not in buffers)


def commonest_dtype(tensors: Iterable[TensorRef]) -> DType | None:
    """The element type most of the floating tensors have; ``None`` if none is floating."""
    counted = Counter(tensor.dtype for tensor in tensors if tensor.dtype.is_floating)
    return counted.most_common(1)[0][0] if counted else None
