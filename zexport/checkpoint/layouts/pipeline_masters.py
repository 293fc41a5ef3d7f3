"""Where a pipeline stage keeps its masters: in flat groups, or in the weights themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, StoredTensor
from zexport.checkpoint.layouts.master_matching import Weight
from zexport.checkpoint.layouts.unnamed_masters import find_masters
from zexport.checkpoint.layouts.zero import bind_trained, take_inventory, with_untrained
from zexport.checkpoint.layouts.zero0 import stored_weights
from zexport.checkpoint.model_states import ModelStates, ModuleFile
from zexport.checkpoint.optimizer_states import OptimizerStates, read_inner_states
from zexport.checkpoint.rank_files import name_ranks
from zexport.checkpoint.ranks import RankStates
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.ranges.dtypes import Shape
from zexport.ranges.replicas import Replica

TIED = "tied_modules."
"""How the name of a tied layer's parameter begins; its key and its name in the layer follow."""


class StageMasters(Struct, frozen=True):
    """One stage (of one tensor rank), with the masters that its optimizer holds.

    Attributes:
        weights_are_masters: whether there are none because the weights are stepped themselves.
        doubt: why further masters could not be told to be some weight's; empty where all could.
        are_unnamed: whether masters got their names by being like a layer file's weights.
    """

    model: ModelStates
    masters: Inventory
    weights_are_masters: bool = False
    doubt: str = ""
    are_unnamed: bool = False

    @property
    def names(self) -> set[str]:
        """The full names of its masters and buffers."""
        return {tensor.name for tensor in self.masters.tensors} | set(self.model.buffer_names)


def model_of(ranks: RankStates) -> ModelStates:
    """The model states of a cell that is known to have some."""
    model = ranks.first_model
    if model is None:
        raise AssertionError("check_cells lets no cell without a model file pass")
    return model


def take_masters(ranks: RankStates, layers: Mapping[int, ModuleFile]) -> StageMasters:
    """A stage's masters: by ``param_shapes``, or without ZeRO by what else there is."""
    model = model_of(ranks)
    if model.param_shapes:
        return StageMasters(model, take_inventory(ranks, model))
    if not ranks.optimizer:
        optimizer = model.optimizer
        if optimizer.is_none or optimizer.has("param_groups"):
            return StageMasters(model, Inventory((), {}, ()), weights_are_masters=True)
        if optimizer.has("fp32_groups") or optimizer.has("fp32_groups_flat"):
            return _take_unnamed(model, layers)
        owners = [_inner_optimizer(model)]
    else:
        owners = _all_optimizers(ranks)
    shapes = list(_shapes_by_slices(owners, layers))
    trained = bind_trained(owners, model, is_zero3=False, shapes=shapes)
    return StageMasters(model, with_untrained(trained, ranks, model, len(owners)))


def _take_unnamed(model: ModelStates, layers: Mapping[int, ModuleFile]) -> StageMasters:
    """A stage's masters without names, matched with the weights of all layer files.

    Source: DeepSpeed 0.19, ``runtime/fp16/unfused_optimizer.py`` and ``fused_optimizer.py``.
    """
    weights = [
        Weight(f"{layer.layer}.{key}", one.shape, one.dtype, layer.file.source(one), one)
        for _, layer in sorted(layers.items())
        for key, one in layer.tensors.items()
        if f"{layer.layer}.{key}" not in model.buffer_names
    ]
    files = tuple(layer.file for layer in layers.values())
    masters = find_masters(model.file, weights, files)
    if not masters.all_fit:
        raise IncompleteCheckpointError(
            "holds fp32 masters of a pipeline that are of no weight in its layer files",
            path=model.file.path,
            found=masters.doubt,
            expected="a weight for every master",
            hint="Copy all layer files of one save; with tied layers, save with ZeRO-1",
        )
    tensors = tuple(one for one in stored_weights(weights, masters) if one.name in masters.found)
    inventory = Inventory(tensors, {}, ())
    return StageMasters(model, inventory, doubt=masters.doubt, are_unnamed=True)


def tie_unnamed(column: Sequence[StageMasters], layers: Iterable[ModuleFile]) -> list[StageMasters]:
    """The stages, each master in the first that has it; in later ones it becomes a replica.

    Masters without names that are like the weight of an earlier stage are a tied layer's, which
    every stage that uses it steps. The tied layer's key is in no file: its weights keep the names
    of the layer whose file holds them.
    """
    owners: dict[str, StoredTensor] = {}
    result: list[StageMasters] = []
    for cell in column:
        own = {one.name: one for one in cell.masters.tensors if cell.are_unnamed}
        twice = [name for name in own if name in owners]
        if twice:
            _check_all_have_masters(column, layers, cell, twice[0])
        result.append(_without(cell, twice, owners) if twice else cell)
        owners = own | owners
    return result


def _without(
    cell: StageMasters, twice: Sequence[str], owners: Mapping[str, StoredTensor]
) -> StageMasters:
    """The stage with replicas in the place of masters that an earlier stage has."""
    copies = [
        Replica(one.name, kept, one.source)
        for one in cell.masters.tensors
        if one.name in twice and (kept := owners[one.name].source) and one.source
    ]
    note = f"{', '.join(sorted(twice))}: of a tied layer, whose key in the model is in no file"
    masters = replace(
        cell.masters,
        tensors=tuple(one for one in cell.masters.tensors if one.name not in twice),
        replicas=(*cell.masters.replicas, *copies),
        notes=(*cell.masters.notes, note),
    )
    return replace(cell, masters=masters)


def _check_all_have_masters(
    column: Iterable[StageMasters], layers: Iterable[ModuleFile], cell: StageMasters, name: str
) -> None:
    known = {known for one in column for known in one.names}
    every = {f"{layer.layer}.{key}" for layer in layers for key in layer.tensors}
    if lacking := sorted(every - known):
        raise UnsupportedError(
            f"keeps the fp32 master of {name!r} although an earlier stage does, without names",
            path=cell.model.file.path,
            found=f"no master of {lacking[0]!r}",
            expected="masters of all weights, once in every stage that uses them",
            hint="Copy the model files of all stages again; if they are whole, save with ZeRO-1, "
            "which names tied layers",
        )


def _inner_optimizer(model: ModelStates) -> OptimizerStates:
    """BF16_Optimizer's states, which a run without ZeRO saves in the model file.

    That file is written by the first data-parallel rank and has its partition alone.
    """
    states = read_inner_states(model)
    world_size = max(states.partition_counts, default=1)
    if world_size != 1:
        raise IncompleteCheckpointError(
            "holds the masters of one data-parallel rank alone",
            path=model.file.path,
            found="partition 0",
            expected=f"{world_size} partitions, in optimizer files of their own",
            hint="Copy all *_optim_states.pt, or save with ZeRO-1",
        )
    return states


def _all_optimizers(ranks: RankStates) -> list[OptimizerStates]:
    """The states of all ranks, in order."""
    states = [ranks.optimizer[rank] for rank in sorted(ranks.optimizer)]
    if ranks.missing_ranks:
        raise IncompleteCheckpointError(
            f"lacks optimizer files, of {name_ranks(ranks.missing_ranks)}, which have names",
            path=states[0].file.path.parent,
            found=f"{len(states)} of {ranks.world_size} ranks",
            hint="Copy them from the nodes that wrote them",
        )
    return states


def _shapes_by_slices(
    states: Sequence[OptimizerStates], layers: Mapping[int, ModuleFile]
) -> Iterator[Mapping[str, Shape]]:
    """What ``param_shapes`` would be: names from the slices, shapes from the layer files."""
    for group, flat in enumerate(states[0].flat_groups):
        slices = [state.slices[group] for state in states if group < len(state.slices)]
        numels = order_slices(slices, flat.numel)
        yield {name: _shape_of(name, numel, layers) for name, numel in numels.items()}


def order_slices(
    partitions: Sequence[Mapping[str, tuple[int, int]]], partition_numel: int
) -> dict[str, int]:
    """Every parameter of a flat group and its number of elements, in the order of the flat data.

    Source: DeepSpeed 0.19.8, ``runtime/bf16_optimizer.py`` (``_create_param_mapping``): each rank
    records, for every parameter that reaches into its partition, where in it its part begins and
    how many elements it has.
    """
    numels: dict[str, int] = {}
    end, last = 0, None
    for rank, slices in enumerate(partitions):
        for name, (start, numel) in sorted(slices.items(), key=lambda item: item[1]):
            begins = rank * partition_numel + start
            fits = min(start, numel) >= 0 and start + numel <= partition_numel
            if not fits or begins != end or (name in numels and name != last):
                raise LayoutError(
                    f"rank {rank}'s slice of {name!r} does not follow the one before it",
                    f"elements {begins} to {begins + numel}",
                    f"a slice of its partition from element {end} on",
                )
            numels[name] = numels.get(name, 0) + numel
            end, last = begins + numel, name
    return numels


def _shape_of(name: str, numel: int, layers: Mapping[int, ModuleFile]) -> Shape:
    """A parameter's shape, from its layer file; a tied one's from any layer that can be it."""
    number = layer_of(name)
    key = (name.removeprefix(TIED) if number is None else name).partition(".")[2]
    held_by = layers.values() if number is None else [layers[n] for n in (number,) if n in layers]
    shapes = {layer.tensors[key].shape for layer in held_by if key in layer.tensors}
    shapes = {shape for shape in shapes if prod(shape) == numel}
    if len(shapes) != 1:
        raise UnsupportedError(
            f"does not record the shape of {name!r}, as it would with ZeRO",
            path=next((layer.file.path.parent for layer in layers.values()), None),
            found=f"{len(shapes)} shapes of {numel} elements in the layer files",
            expected="one",
            hint="Copy all layer files, or save with ZeRO-1",
        )
    return shapes.pop()


def layer_of(name: str) -> int | None:
    """The layer that a full name belongs to; ``None`` for a tied layer's."""
    head = name.partition(".")[0]
    return int(head) if head.isascii() and head.isdecimal() else None
