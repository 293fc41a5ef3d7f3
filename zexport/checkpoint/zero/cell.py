"""One model-parallel index with ZeRO-1, 2 or 3: from its rank files to a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from msgspec.structs import replace

from zexport.checkpoint.boxes import As, InFiles, Sources, in_file
from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, Parameter, Recorded, Role
from zexport.checkpoint.zero.flat_groups import FlatGroup, partition_numel
from zexport.checkpoint.zero.module_names import check_spelling, find_aliases, is_placeholder
from zexport.checkpoint.zero.ranks import Ranks
from zexport.checkpoint.zero.records import ZERO3, ModelStates, OptimizerStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import view
from zexport.ranges.dtypes import DType
from zexport.ranges.source import Chain, Window

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
    """Return a flat group per dictionary of ``param_shapes``."""
    shapes = model.param_shapes
    for one in owners:
        if one is not None and len(one.masters) != len(shapes):
            raise LayoutError(
                "parameter groups of model states and optimizer states differ",
                f"{len(one.masters)} flat groups in {one.file.path.name}",
                f"{len(shapes)}, one per dictionary of param_shapes",
            )
    return [FlatGroup(number, own, owners, is_zero3) for number, own in enumerate(shapes)]


def check_group(group: FlatGroup, model: ModelStates) -> None:
    """Compare a group's lengths, and what ranks record of their partitions, with the shapes."""
    if group.is_complete:
        group.whole(MASTER)
        if not group.is_zero3 and not model.is_round_robin:
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
    parameters = {one.name: one for one in trained}
    for one in trained if not is_zero3 else ():
        if (ref := module.get(one.name)) is not None:
            check_module_weight(one, ref)
            held = (*one.held, InFiles({MODULE: (model.file, ref)}))
            parameters[one.name] = replace(one, held=held)
    frozen = {one.name: one for one in listed_frozen(ranks, model)}
    buffers = [
        in_file(model.file, name, module[name], Role.BUFFER)
        for name in model.buffers
        if name in module
    ]
    # Weights that are frozen after the optimizer was made are in both tables.
    late = {n for n, one in frozen.items() if n in parameters and parameters[n].shape == one.shape}
    named = [*trained, *(one for n, one in frozen.items() if n not in late), *buffers]
    if twice := [n for n, count in Counter(one.name for one in named).items() if count > 1]:
        raise LayoutError(f"two tensors have the name {twice[0]!r}", "two", "one")
    for name in late:
        held = (*parameters[name].held, *frozen[name].held)
        frozen[name] = replace(parameters[name], held=held)
    parameters |= {**frozen, **{one.name: one for one in buffers}}
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
            empty = As(MASTER, one.held[0], trained[0].dtype if trained else DType.F32)
            one = Parameter(name, ref.shape, Role.TRAINABLE, (empty,), ref.dtype)
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
        left_out=(*missing, *(name for name in rest if name not in {*whole})),
        frozen=None if table is None else tuple(table),
        copies=tuple(copies),
        files=ranks.files,
        states=model,
        optimizer=None
        if first is None
        else Recorded(first.file, view(first.file, "optimizer states").mapping()),
        index=ranks.index,
    )


def listed_frozen(ranks: Ranks, model: ModelStates) -> Iterator[Parameter]:
    """Yield frozen weights of the table: whole (ZeRO-2), or in partitions (ZeRO-3)."""
    world_size = ranks.world_size or 0
    models = [ranks.model[rank] for rank in range(world_size) if rank in ranks.model]
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
        numel, found = partition_numel(prod(shape), max(world_size, 1)), []
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
        is_complete = world_size > 0 and len(found) == world_size
        held = Sources(MODULE, ref.dtype, whole if is_complete else None)
        yield Parameter(name, shape, Role.FROZEN, (held,))
