"""Pipeline parallelism: stages have master weights, layer files the module (``<layer>.<name>``).

Source: DeepSpeed 0.10 to 0.19, ``runtime/pipe/module.py`` (``save_state_dict``: a second use of a
tied layer through a function of its own has no state dict), ``runtime/pipe/topology.py`` (index
``s * tensor + t`` is tensor rank ``t`` of stage ``s``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.boxes import InFile, in_file
from zexport.checkpoint.state import MODULE, Cell, Copy, FileKind, Parameter, Role, by_role, joined
from zexport.checkpoint.zero.file_names import rank_file_name, read_rank_file
from zexport.checkpoint.zero.flat_groups import check_module_weight, zero_cell
from zexport.checkpoint.zero.ranks import FROM_NODES, Ranks, TagFolder, check_grid
from zexport.checkpoint.zero.stage0 import by_slices, slice_sizes, with_optimizers
from zexport.checkpoint.zero.tensor_parallel import join_tensor_ranks
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import view
from zexport.formats.torch_file import TorchFile

TIED = "tied_modules."
"""Prefix of a tied layer's parameters; its key and the name in the layer follow."""


class Layer(Struct, frozen=True):
    """Weights and buffers of a layer, by their names in it."""

    number: int
    file: TorchFile
    tensors: Mapping[str, TensorRef]

    def named(self, prefix: str) -> dict[str, TensorRef]:
        """Return its tensors by their names in the model."""
        return {prefix + key: ref for key, ref in self.tensors.items()}


def read_layers(tag: TagFolder) -> dict[int, dict[int, Layer]]:
    """Return the layers of each tensor rank by number."""
    found: dict[int, dict[int, Layer]] = {}
    for name in tag.of_kind(FileKind.PIPELINE_LAYER):
        file, own = read_rank_file(name), found.setdefault(name.mp, {})
        if name.layer in own:
            raise LayoutError("two files of a layer", name.path.name, "files of one checkpoint")
        own[name.layer] = Layer(name.layer, file, view(file, "layer states").tensors())
    return found


def read_pipeline(tag: TagFolder) -> tuple[Cell, Callable[[], tuple[Cell, ...]]]:
    """Return all stages joined, and a function that returns the cell of each index."""
    layers = read_layers(tag)
    tensor = tag.grid.tensor_ranks
    check_grid(tag, tag.grid.stages * tensor, "pipeline stages")
    numbers = {number for own in layers.values() for number in own}
    ranks = [one for _, one in sorted(tag.ranks.items())]
    columns = [
        _column(ranks[t::tensor], layers.get(t, {}), numbers, t if tensor > 1 else None)
        for t in range(tensor)
    ]
    models = [one.first for one in ranks]
    cells = [
        join_tensor_ranks(models[stage * tensor : (stage + 1) * tensor], own)
        if tensor > 1
        else own[0]
        for stage, own in enumerate(zip(*columns, strict=True))
    ]

    def split() -> tuple[Cell, ...]:
        # Without param_shapes the order of weights in flat groups is unknown.
        return tuple(
            zero_cell(one) if any(one.first.param_shapes) else Cell({}, index=one.index)
            for one in ranks
        )

    return merge_stages(cells), split


def _column(
    ranks: Sequence[Ranks], layers: Mapping[int, Layer], numbers: Set[int], mp: int | None
) -> list[Cell]:
    """Return the stages of tensor rank ``mp`` with the tensors of layer files.

    ``numbers`` are all layers that have a file.
    """
    buffers = {name for one in ranks for name in one.first.buffers}
    sizes = {name: numel for one in ranks for name, numel in slice_sizes(one).items()}
    shapes = {
        name: ref.shape
        for layer in (layers.values() if sizes else ())
        for name, ref in layer.named(layer_prefix(layer, sizes, buffers)).items()
    }
    named = [one if any(one.first.param_shapes) else by_slices(one, shapes) for one in ranks]
    cells = [zero_cell(one) for one in named if one is not None]
    if len(cells) < len(named):
        cells = [_without_zero(ranks, layers, buffers)]
    known = {name: one for cell in reversed(cells) for name, one in cell.parameters.items()}
    stages = {
        int(number): stage
        for stage, cell in enumerate(cells)
        for name in (*cell.parameters, *(ranks[stage].first.buffers if cells[1:] else buffers))
        if (number := name.partition(".")[0]).isdecimal() and len(number) < 10
    }
    if missing := sorted({*numbers, *stages} - layers.keys()):
        raise IncompleteCheckpointError(
            f"{len(missing)} layer files are missing, which have buffers and frozen weights",
            path=ranks[0].folder,
            expected=rank_file_name(FileKind.PIPELINE_LAYER, mp=mp, layer=missing[0]),
            hint=FROM_NODES,
        )
    sizes = {name: prod(one.shape) for name, one in known.items()}
    stage, found = 0, [list[tuple[TorchFile, str, TensorRef]]() for _ in cells]
    for number, layer in sorted(layers.items()):
        stage, prefix = stages.get(number, stage), layer_prefix(layer, sizes, buffers)
        own = layer.named(prefix)
        found[stage] += ((layer.file, name, ref) for name, ref in own.items())
        # A layer may exclude weights from its state dict, and activation checkpointing's hook may
        # rename them (torch 2.13, checkpoint_wrapper.py): then it has one other for each.
        extra = own.keys() - known.keys() - buffers
        lost = [name for name in known if name.startswith(prefix) and name not in own]
        if extra and len(lost) > len(extra):
            problem = f"{layer.file.path.name} lacks weights of its layer"
            raise LayoutError(problem, sorted(extra)[:4], lost[:4])
    pairs = zip(cells, found, strict=True)
    return [_with_layers(cell, tensors, known, buffers) for cell, tensors in pairs]


def _without_zero(
    ranks: Sequence[Ranks], layers: Mapping[int, Layer], buffers: Collection[str]
) -> Cell:
    """Return all stages as one cell; their optimizers number the weights of the layer files."""
    weights = [
        in_file(layer.file, name, ref, Role.TRAINABLE)
        for number, layer in sorted(layers.items())
        for name, ref in layer.named(f"{number}.").items()
        if name not in buffers
    ]
    optimizers = [(one.first.root.get("optimizer"), one.first.file) for one in ranks]
    return replace(
        with_optimizers(optimizers, weights, [layer.file for layer in layers.values()]),
        left_out=tuple(buffers),
        files=tuple(file for one in ranks for file in one.files),
    )


def layer_prefix(layer: Layer, sizes: Mapping[str, int], buffers: Collection[str]) -> str:
    """Return the prefix of a layer's names: its number, or the tied layer that it first uses.

    A tied layer's file has no known name, but all its tensors with their sizes. One that has more
    may be either.
    """
    numbered = f"{layer.number}."
    if any(name in sizes or name in buffers for name in layer.named(numbered)):
        return numbered
    tied: dict[str, dict[str, int | None]] = {}
    for name, numel in {**dict.fromkeys(buffers), **sizes}.items():
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[rest] = numel
    own = {key: ref.numel for key, ref in layer.tensors.items()}
    found = [
        key
        for key, stored in tied.items()
        if all(name in own and numel in (None, own[name]) for name, numel in stored.items())
    ]
    if found and (len(found) > 1 or tied[found[0]].keys() != own.keys()):
        raise UnsupportedError(
            "may be a tied layer, or a frozen layer that looks like it",
            path=layer.file.path,
            hint="Save without frozen weights in or next to tied layers",
        )
    return f"{TIED}{found[0]}." if found else numbered


def _with_layers(
    cell: Cell,
    tensors: Sequence[tuple[TorchFile, str, TensorRef]],
    known: Mapping[str, Parameter],
    buffers: Collection[str],
) -> Cell:
    """Return a stage with the tensors of its layer files: module weights, buffers, frozen weights.

    Args:
        known: parameters of all stages.
    """
    parameters, copies = dict(cell.parameters), list(cell.copies)
    for file, name, ref in tensors:
        own = parameters.get(name, known.get(name))
        if own is None or name in buffers:
            one = in_file(file, name, ref, Role.BUFFER if name in buffers else Role.FROZEN)
            if (first := parameters.setdefault(name, one)) is not one:
                copies.append(Copy(first, one))
        elif own.stored.get(MODULE) != (stored := InFile(file, ref)):
            check_module_weight(own, ref)
            if name in parameters and not own.has(MODULE):
                parameters[name] = replace(own, stored={**own.stored, MODULE: stored})
            else:
                copies.append(Copy(own, replace(own, stored={MODULE: stored})))
    tied = {name for _, name, _ in tensors if name.startswith(TIED) and name in known}
    return replace(
        cell,
        parameters=by_role(parameters.values()),
        left_out=tuple(name for name in cell.left_out if name not in parameters),
        copies=tuple(copies),
        matched=cell.matched | tied,
        files=(*cell.files, *{file.path: file for file, _, _ in tensors}.values()),
    )


def merge_stages(cells: Sequence[Cell]) -> Cell:
    """Return all stages as one cell; tied layers of later stages become copies."""
    kept: dict[str, Parameter] = {}
    copies = list[Copy]()
    for one in (one for cell in cells for one in cell.parameters.values()):
        if (first := kept.setdefault(one.name, one)) is not one:
            copies.append(Copy(first, one))
            same = first.dtype is one.dtype and first.shape == one.shape
            if not (one.name.startswith(TIED) and same):
                raise LayoutError(f"two stages have the tensor {one.name!r}", one.shape, "one")
    merged = joined(cells)
    return replace(
        merged,
        parameters=by_role(kept.values()),
        left_out=tuple(name for name in merged.left_out if name not in kept),
        copies=(*merged.copies, *copies),
        index=0,
    )
