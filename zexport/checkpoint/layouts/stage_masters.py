"""Where a pipeline stage keeps its masters: in flat groups, or in the weights themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from zexport.checkpoint.contents import StoredTensor
from zexport.checkpoint.layouts.data_parallel import Inventory, take_inventory
from zexport.checkpoint.layouts.layer_files import TIED, LayerFile, layer_of
from zexport.checkpoint.layouts.matching import Weight
from zexport.checkpoint.layouts.stage_slices import order_slices
from zexport.checkpoint.layouts.unnamed_masters import find_masters
from zexport.checkpoint.layouts.zero0 import stored_weights
from zexport.checkpoint.rank_files import name_ranks
from zexport.checkpoint.ranks import RankStates
from zexport.checkpoint.states import ModelStates, read_inner_states
from zexport.errors import IncompleteCheckpointError, UnsupportedError
from zexport.ranges.copies import Replica
from zexport.ranges.dtypes import Shape


@dataclass(frozen=True, slots=True)
class StageMasters:
    """One stage (of one tensor rank), with the masters that its optimizer holds.

    Attributes:
        model: its model states.
        masters: tensors out of the flat groups.
        weights_are_masters: whether there are none because the weights are stepped themselves.
        doubt: why further masters could not be told to be some weight's; empty where all could.
        are_unnamed: whether masters got their names by being like a layer file's weights.
    """

    model: ModelStates
    masters: Inventory
    weights_are_masters: bool
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


def take_masters(ranks: RankStates, layers: Mapping[int, LayerFile]) -> StageMasters:
    """A stage's masters: by ``param_shapes``, or without ZeRO by what else there is.

    Raises:
        UnsupportedError: there are masters, and nothing names them.
        IncompleteCheckpointError: files are missing that would name them.
        DamagedCheckpointError, LayoutError: files contradict each other.
    """
    model = model_of(ranks)
    if model.param_shapes:
        return StageMasters(model, take_inventory(ranks, model), weights_are_masters=False)
    if not ranks.optimizer:
        optimizer = model.optimizer
        if optimizer.is_none or optimizer.has("param_groups"):
            return StageMasters(model, Inventory((), {}, ()), weights_are_masters=True)
        if optimizer.has("fp32_groups") or optimizer.has("fp32_groups_flat"):
            return _take_unnamed(model, layers)
        ranks = _with_inner_optimizer(ranks, model)
    model = replace(model, param_shapes=tuple(_shapes_by_slices(ranks, layers)))
    return StageMasters(model, take_inventory(ranks, model), weights_are_masters=False)


def _take_unnamed(model: ModelStates, layers: Mapping[int, LayerFile]) -> StageMasters:
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
    return StageMasters(
        model,
        Inventory(tensors, {}, ()),
        weights_are_masters=False,
        doubt=masters.doubt,
        are_unnamed=True,
    )


def tie_unnamed(column: Sequence[StageMasters], layers: Iterable[LayerFile]) -> list[StageMasters]:
    """The stages, each master in the first that has it; in later ones it becomes a replica.

    Masters without names that are like the weight of an earlier stage are a tied layer's, which
    every stage that uses it steps. The tied layer's key is in no file: its weights keep the names
    of the layer whose file holds them.

    Raises:
        UnsupportedError: other weights have no master, so that files may have been exchanged.
    """
    owners: dict[str, StoredTensor] = {}
    result: list[StageMasters] = []
    for cell in column:
        own = cell.masters.tensors if cell.are_unnamed else ()
        twice = [tensor for tensor in own if tensor.name in owners]
        if twice:
            _check_all_have_masters(column, layers, cell, twice[0].name)
            cell = replace(cell, masters=_without(cell.masters, twice, owners))  # noqa: PLW2901
        owners |= {tensor.name: tensor for tensor in own if tensor.name not in owners}
        result.append(cell)
    return result


def _without(
    masters: Inventory, twice: Sequence[StoredTensor], owners: Mapping[str, StoredTensor]
) -> Inventory:
    names = {tensor.name for tensor in twice}
    copies = [
        Replica(one.name, kept, one.source)
        for one in twice
        if (kept := owners[one.name].source) is not None and one.source is not None
    ]
    return replace(
        masters,
        tensors=tuple(one for one in masters.tensors if one.name not in names),
        replicas=(*masters.replicas, *copies),
        notes=(
            *masters.notes,
            f"{', '.join(sorted(names))}: of a tied layer, whose key in the model is in no file",
        ),
    )


def _check_all_have_masters(
    column: Iterable[StageMasters], layers: Iterable[LayerFile], cell: StageMasters, name: str
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


def check_weights_are_there(
    tag_dir: Path, column: Iterable[StageMasters], layers: Mapping[int, LayerFile]
) -> None:
    """Refuse layer files that hold fewer weights than are stepped, where nothing names these.

    Raises:
        UnsupportedError: there are fewer; tied layers without a file of their own look the same.
        DamagedCheckpointError: there are fewer of one shape.
    """
    column = [cell for cell in column if cell.weights_are_masters]
    stepped = sum(_stepped(cell.model) for cell in column)
    buffers = {name for cell in column for name in cell.model.buffer_names}
    shapes = Counter(
        tensor.shape
        for layer in layers.values()
        for key, tensor in layer.tensors.items()
        if f"{layer.layer}.{key}" not in buffers
    )
    held = shapes.total()
    if held < stepped and held + _tied_uses(column, layers) != stepped:
        raise UnsupportedError(
            "holds fewer weights than its optimizers step: a layer file is missing, or a tied "
            "layer has none of its own, and nothing says which",
            path=tag_dir,
            found=f"{held} weights in {len(layers)} layer files",
            expected=stepped,
            hint="Copy all layer files again; with tied layers, save with ZeRO-1",
        )

    if column:
        _check_shapes(tag_dir, [cell.model for cell in column], shapes)


def _check_shapes(tag_dir: Path, stages: Sequence[ModelStates], held: Counter[Shape]) -> None:
    from zexport.checkpoint.layouts.stepped_weights import check_shapes  # noqa: PLC0415

    check_shapes(tag_dir, stages, held)


def _tied_uses(column: Iterable[StageMasters], layers: Mapping[int, LayerFile]) -> int:
    from zexport.checkpoint.layouts.stepped_weights import count_uses_without_file  # noqa: PLC0415

    return count_uses_without_file([cell.model for cell in column], [*layers.values()])


def _stepped(model: ModelStates) -> int:
    optimizer = model.optimizer
    groups = [] if optimizer.is_none else optimizer.need("param_groups").items()
    return sum(len(group.need("params").items()) for group in groups)


def _with_inner_optimizer(ranks: RankStates, model: ModelStates) -> RankStates:
    """The rank states with BF16_Optimizer's, which a run without ZeRO saves in the model file.

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
    return replace(ranks, optimizer={0: states}, world_size=world_size)


def _shapes_by_slices(
    ranks: RankStates, layers: Mapping[int, LayerFile]
) -> Iterator[Mapping[str, Shape]]:
    """What ``param_shapes`` would be: names from the slices, shapes from the layer files."""
    states = [ranks.optimizer[rank] for rank in sorted(ranks.optimizer)]
    if ranks.missing_ranks:
        raise IncompleteCheckpointError(
            f"lacks optimizer files, of {name_ranks(ranks.missing_ranks)}, which have names",
            path=states[0].file.path.parent,
            found=f"{len(states)} of {ranks.world_size} ranks",
            hint="Copy them from the nodes that wrote them",
        )
    for group, flat in enumerate(states[0].flat_groups):
        slices = [state.slices[group] for state in states if group < len(state.slices)]
        numels = order_slices(slices, flat.numel)
        yield {name: _shape_of(name, numel, layers) for name, numel in numels.items()}


def _shape_of(name: str, numel: int, layers: Mapping[int, LayerFile]) -> Shape:
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
