"""From the stages of a pipeline, and its layer files, to whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts.pipeline_masters import (
    TIED,
    StageMasters,
    layer_of,
    model_of,
    take_masters,
    tie_unnamed,
)
from zexport.checkpoint.layouts.tensor_parallel import join_shards
from zexport.checkpoint.layouts.zero import by_role, commonest_dtype, rounded_copy
from zexport.checkpoint.layouts.zero0 import rounded_note
from zexport.checkpoint.layouts.zero0_pipeline import check_weights_are_there
from zexport.checkpoint.model_states import Grid, ModuleFile, read_module_files
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.ranks import Save, check_cells
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.ranges.dtypes import Shape
from zexport.ranges.replicas import CastReplica, Replica

_SHOWN = 8
_SHOWN_SHAPES = 4


class _Known(Struct, frozen=True):
    """What the stages of one tensor rank name: masters, of the first stage that has them; buffers.

    For each tied layer, its tensors and how many elements they have (``None`` for buffers).
    """

    masters: Mapping[str, StoredTensor]
    buffers: frozenset[str]
    tied: Mapping[str, Mapping[str, int | None]]


def join_stages(save: Save) -> Inventory:
    """The whole tensors of a pipeline, under the names its module has: ``<layer>.<name>``.

    A tied layer's tensors are exported once, from the first stage that has them, and returned as
    replicas for every other. What has no master comes from the layer files: buffers, frozen
    weights, and without ZeRO all weights of an fp32 run.
    """
    layers = read_module_files(save.of_kind(RankFileKind.PIPELINE_LAYER))
    grid = _grid(save, layers)
    what = "pipeline stages" if grid.tensor == 1 else "model-parallel ranks"
    check_cells(save, grid.stages * grid.tensor, what)
    ranks = range(grid.tensor)
    columns = [_column(save, grid, layers, rank) for rank in ranks]
    stages = [
        shards[0]
        if grid.tensor == 1
        else join_shards([model_of(save.cells[grid.index(stage, rank)]) for rank in ranks], shards)
        for stage, shards in enumerate(zip(*columns, strict=True))
    ]
    weights = [tensor for layer in layers for tensor in layer.tensors.values()]
    return replace(
        merge_stages(stages),
        files=tuple(layer.file for layer in layers),
        module_dtype=commonest_dtype(weights),
    )


def _grid(save: Save, layers: Sequence[ModuleFile]) -> Grid:
    """The recorded degrees, or what follows from layer files and model-parallel world size."""
    models = [*save.models.values()]
    if not models or not layers:
        lacking = RankFileKind.PIPELINE_LAYER if models else RankFileKind.MODEL
        raise IncompleteCheckpointError(
            "lacks the layer files of its pipeline" if models else "lacks all model files",
            path=save.tag_dir,
            expected=rank_file_name(lacking) + ("" if models else " and the like"),
            hint="Copy them from the nodes that wrote them",
        )
    recorded = models[0].grid
    tensor = max(layer.tensor_rank for layer in layers) + 1
    if recorded is None and models[0].tensor_parallel % tensor:
        raise UnsupportedError(
            "does not say how its ranks form pipeline stages and tensor ranks",
            path=save.tag_dir,
            found=f"{models[0].tensor_parallel} model-parallel ranks, {tensor} of them in layers",
            hint="Resume it with DeepSpeed 0.19 or later, save once more, and export that",
        )
    return recorded or Grid(models[0].tensor_parallel // tensor, tensor)


def _column(
    save: Save, grid: Grid, layers: Sequence[ModuleFile], tensor_rank: int
) -> list[Inventory]:
    """The inventories of every stage of one tensor rank."""
    own = {layer.layer: layer for layer in layers if layer.tensor_rank == tensor_rank}
    column = [
        take_masters(save.cells[grid.index(stage, tensor_rank)], own)
        for stage in range(grid.stages)
    ]
    named = {layer_of(name) for cell in column for name in cell.names} - {None}
    everywhere = {layer.layer for layer in layers} | {layer for layer in named if layer is not None}
    if missing := sorted(everywhere - set(own)):
        shard = tensor_rank if grid.tensor > 1 else None
        names = (
            rank_file_name(RankFileKind.PIPELINE_LAYER, layer=layer, tensor_rank=shard)
            for layer in missing[:_SHOWN]
        )
        raise IncompleteCheckpointError(
            f"lacks {len(missing)} layer files, which hold buffers and frozen weights",
            path=save.tag_dir,
            found=f"{len(own)} layer files",
            expected=", ".join(names),
            hint="Copy them from the nodes that wrote them",
        )
    stepped = [cell.model for cell in column if cell.weights_are_masters]
    check_weights_are_there(save.tag_dir, stepped, [*own.values()])
    column = tie_unnamed(column, own.values())
    homes, known = _homes(column, own), _known(column)
    return [
        _complete(cell, [own[n] for n in sorted(own) if homes[n] == stage], known)
        for stage, cell in enumerate(column)
    ]


def _homes(column: Sequence[StageMasters], layers: Iterable[int]) -> dict[int, int]:
    """The stage of every layer; one that nothing names lies with the named layer before it."""
    named: dict[int, int] = {}
    for stage, cell in enumerate(column):
        for name in cell.names:
            if (layer := layer_of(name)) is not None and named.setdefault(layer, stage) != stage:
                raise LayoutError(f"two stages have layer {layer}", [named[layer], stage], "one")
    homes: dict[int, int] = {}
    stage = 0
    for layer in sorted(layers):
        stage = named.get(layer, stage)
        homes[layer] = stage
    return homes


def _known(column: Sequence[StageMasters]) -> _Known:
    masters = {one.name: one for cell in reversed(column) for one in cell.masters.tensors}
    buffers = frozenset(name for cell in column for name in cell.model.buffer_names)
    numels = {name: tensor.numel for name, tensor in masters.items()}
    return _Known(masters, buffers, tied_layers(numels, buffers))


def tied_layers(
    masters: Mapping[str, int], buffers: Iterable[str]
) -> dict[str, dict[str, int | None]]:
    """For each tied layer, its tensors and how many elements they have (``None`` for buffers)."""
    numels: dict[str, int | None] = {**dict.fromkeys(buffers), **masters}
    tied: dict[str, dict[str, int | None]] = {}
    for name, numel in numels.items():
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[rest] = numel
    return tied


def _complete(cell: StageMasters, layers: Iterable[ModuleFile], known: _Known) -> Inventory:
    """A stage's masters, and what its layer files hold beside them."""
    tensors, notes = list(cell.masters.tensors), list(cell.masters.notes)
    copies: list[Replica | CastReplica] = []
    weights = Role.TRAINABLE if cell.weights_are_masters or cell.doubt else Role.FROZEN
    for layer in layers:
        prefix = f"{layer.layer}."
        _check_holds_trained(layer, known)
        names = {prefix + key for key in layer.tensors}
        is_named = names & (known.buffers | known.masters.keys())
        tied = None if is_named else tied_layer(layer, known.tied)
        if tied is not None:
            prefix = f"{TIED}{tied}."
            notes.append(f"{layer.file.path.name} is taken for the tied layer {tied!r}")
        for key in layer.tensors:
            name = prefix + key
            role = Role.BUFFER if name in known.buffers else weights
            if name not in known.masters:
                tensors.append(whole_tensor(layer.file, name, layer.tensors[key], role))
                continue
            # Where the name is a guess, nothing else may say that the two are of one layer.
            is_guess = tied is not None or cell.are_unnamed
            own = rounded_copy(known.masters[name], layer.file, layer.tensors[key])
            copies += (replace(copy, names_it=is_guess) for copy in own)
    unique, replicas = _unique(tensors)
    rounded = {
        one.name: one.dtype
        for one in unique
        if one.role is Role.TRAINABLE and one.name not in known.masters
    }
    warnings = (rounded_note(cell.doubt, rounded),) if cell.doubt and rounded else ()
    return Inventory(
        tensors=unique,
        aliases=cell.masters.aliases,
        left_out=cell.masters.left_out or cell.model.buffer_names,
        replicas=(*cell.masters.replicas, *replicas, *copies),
        warnings=(*cell.masters.warnings, *warnings),
        notes=tuple(notes),
        flats=cell.masters.flats,
    )


def _check_holds_trained(layer: ModuleFile, known: _Known) -> None:
    """Refuse a layer file that has other weights in the place of those that its layer trains.

    A layer file is the state dict of the very module whose parameters ``param_shapes`` names
    (DeepSpeed 0.10 to 0.19, ``runtime/pipe/module.py``), so the names are the same. Two things may
    differ without harm: a layer may keep weights out of its state dict, and a wrapper's hook may
    rename them (torch 2.13, ``checkpoint_wrapper.py``). Each then has one of its shape here.
    """
    prefix = f"{layer.layer}."
    shapes = {prefix + key: tensor.shape for key, tensor in layer.tensors.items()}
    named = known.buffers | known.masters.keys()
    surplus = {name: shape for name, shape in shapes.items() if name not in named}
    trained = {name: one.shape for name, one in known.masters.items() if name.startswith(prefix)}
    lacking = {name: shape for name, shape in trained.items() if name not in shapes}
    if surplus and Counter(lacking.values()) - Counter(surplus.values()):
        raise DamagedCheckpointError(
            f"lacks weights that layer {layer.layer} trains, and holds others",
            path=layer.file.path,
            found=_shown(prefix, surplus),
            expected=_shown(prefix, lacking),
            hint="Copy this layer file of the same save again",
        )


def _shown(prefix: str, shapes: Mapping[str, Shape]) -> str:
    first = [
        f"{name.removeprefix(prefix)} {list(shapes[name])}"
        for name in sorted(shapes)[:_SHOWN_SHAPES]
    ]
    return ", ".join(first) + (", ..." if len(shapes) > _SHOWN_SHAPES else "")


def tied_layer(layer: ModuleFile, tied: Mapping[str, Mapping[str, int | None]]) -> str | None:
    """The tied layer that a layer file without any known name is a copy of, if it is one.

    A layer that has all of a tied one's tensors and more may be either: it is refused.
    """
    own = {key: prod(tensor.shape) for key, tensor in layer.tensors.items()}
    found = [
        key
        for key, numels in tied.items()
        if all(name in own and numel in (None, own[name]) for name, numel in numels.items())
    ]
    if not found:
        return None
    if len(found) > 1 or tied[found[0]].keys() != own.keys():
        raise UnsupportedError(
            "may be a copy of a tied layer, or a frozen layer that looks like it",
            path=layer.file.path,
            found=", ".join(sorted(own)),
            expected=f"the tensors of {' or '.join(found)}, or others",
            hint="Save without frozen weights in or beside tied layers",
        )
    return found[0]


def merge_stages(stages: Sequence[Inventory]) -> Inventory:
    """One inventory of all stages; trainable tensors first, then frozen ones and buffers."""
    joined = Inventory.joined(stages)
    unique, replicas = _unique(by_role(joined.tensors))
    known = {tensor.name for tensor in unique}
    return replace(
        joined,
        tensors=unique,
        left_out=tuple(name for name in joined.left_out if name not in known),
        replicas=(*joined.replicas, *replicas),
    )


def _unique(
    tensors: Iterable[StoredTensor],
) -> tuple[tuple[StoredTensor, ...], tuple[Replica, ...]]:
    """Each tensor once; the copies of a tied layer's become replicas."""
    kept: dict[str, StoredTensor] = {}
    replicas: list[Replica] = []
    for tensor in tensors:
        first = kept.setdefault(tensor.name, tensor)
        if first is tensor:
            continue
        if not tensor.name.startswith(TIED):
            raise LayoutError(f"two stages have the tensor {tensor.name!r}", "two", "one")
        if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
            raise LayoutError(f"the stages' {tensor.name!r} differ", tensor.shape, first.shape)
        if first.source is not None and tensor.source is not None:
            replicas.append(Replica(tensor.name, first.source, tensor.source))
    return tuple(kept.values()), tuple(replicas)
