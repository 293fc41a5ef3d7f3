"""How AutoEP's names for a layer with experts relate to those of the Hugging Face model before it.

Source: DeepSpeed 0.19, ``moe/ep_repack.py`` and ``module_inject/auto_ep_layer.py``: ``w1`` and
``w3`` are the halves of ``gate_up_proj``, ``w2`` is ``down_proj``, the router was ``gate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

from zexport.checkpoint.state import StoredTensor
from zexport.errors import DamagedCheckpointError
from zexport.model.config import ConfigFile
from zexport.model.fit import ModelNames
from zexport.model.names import Learner
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.dtypes import Shape
from zexport.ranges.mosaic import Mosaic, Tile, row_major
from zexport.weights.named import Weights

_EXPERTS = ".experts."
_DIMENSIONS = 3  # expert, output, input


def with_hub_experts(
    stored: Weights, config: ConfigFile | None, learner: Learner, options: ExportOptions
) -> Weights:
    """The weights with AutoEP's experts as the Hugging Face model has them, if it is one."""
    if options.layout is NameLayout.MEMORY or not _layers(stored, "w1"):
        return stored
    fused = fuse_experts(stored)
    names = learner.names(config, dict(fused.shapes))
    if not isinstance(names, ModelNames):
        return stored
    fused = with_original_names(fused, names.shapes)
    is_known = fused.renamed(options.renames).shapes.keys() <= names.shapes.keys()
    return fused if is_known else stored


def fuse_experts(stored: Weights) -> Weights:
    """The weights under the names and in the shapes of the Hugging Face model.

    A layer is one of AutoEP's where ``experts.w1``, ``w2`` and ``w3`` lie side by side; everything
    else stays as it is. The router's second name, if it has one, becomes its only one.
    """
    tensors = stored.tensors
    renamed: dict[str, str] = {}
    fused: dict[str, tuple[StoredTensor, ...]] = {}
    for layer in _layers(stored, "w1"):
        parts = [tensors.get(f"{layer}{_EXPERTS}{weight}") for weight in ("w1", "w2", "w3")]
        w1, w2, w3 = parts
        if w1 is None or w2 is None or w3 is None:
            continue
        renamed |= _router_names(layer, tensors, stored.aliases)
        down = replace(w2, name=f"{layer}{_EXPERTS}down_proj")
        fused[w1.name] = (_gate_up(layer, w1, w3), down)
        fused[w2.name] = fused[w3.name] = ()
    moved = chain.from_iterable(
        fused.get(name, (replace(tensor, name=renamed.get(name, name)),))
        for name, tensor in tensors.items()
    )
    aliases = {
        alias: renamed.get(name, name)
        for alias, name in stored.aliases.items()
        if name not in renamed
    }
    return Weights({tensor.name: tensor for tensor in moved}, aliases, stored.left_out)


def with_original_names(stored: Weights, original: Mapping[str, Shape]) -> Weights:
    """The fused weights with the names that AutoEP changed beside the experts brought back.

    AutoEP sets the other children of a layer under names of its own (``shared_experts`` for
    ``shared_expert``) and writes down none of the old ones, so the model itself must tell: a child
    that the model does not know gets the name of the one child of that layer that is not stored and
    has the same weights in the same shapes; a tensor likewise.
    """
    renamed: dict[str, str] = {}
    for layer in _layers(stored, "gate_up_proj"):
        own = {n: t.shape for n, t in stored.tensors.items() if n.startswith(f"{layer}.")}
        for key in (_child, _last):
            found = {n: shape for n, shape in own.items() if renamed.get(n, n) not in original}
            taken = {renamed.get(name, name) for name in own}
            wanted = {n: s for n, s in original.items() if n.startswith(f"{layer}.")}
            free = {name: shape for name, shape in wanted.items() if name not in taken}
            renamed |= _paired(found, free, len(layer) + 1, key)
    moved = (replace(t, name=renamed.get(n, n)) for n, t in stored.tensors.items())
    aliases = {alias: renamed.get(name, name) for alias, name in stored.aliases.items()}
    return Weights({tensor.name: tensor for tensor in moved}, aliases, stored.left_out)


def _layers(stored: Weights, weight: str) -> list[str]:
    """The names of the layers with experts that have this weight."""
    end = f"{_EXPERTS}{weight}"
    return [name.removesuffix(end) for name in stored.tensors if name.endswith(end)]


def _child(name: str) -> tuple[str, str]:
    """The child of the layer that a name within it begins with, and the rest."""
    child, _, rest = name.partition(".")
    return child, rest


def _last(name: str) -> tuple[str, str]:
    """All but the last component of a name as one, and the last."""
    before, _, last = name.rpartition(".")
    return f"{before}/{last}", last


def _paired(
    stored: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    start: int,
    key: Callable[[str], tuple[str, str]],
) -> dict[str, str]:
    """Stored name to wanted name, where one group of each alone has the same rests and shapes.

    ``start`` is the length of the layer's name and its dot; ``key`` splits what follows.
    """
    groups: tuple[dict[str, dict[str, str]], ...] = ({}, {})
    for names, by_key in zip((stored, wanted), groups, strict=True):
        for name in names:
            group, rest = key(name[start:])
            by_key.setdefault(group, {})[rest] = name
    kinds = [
        {group: frozenset((r, names[n]) for r, n in held.items()) for group, held in one.items()}
        for names, one in zip((stored, wanted), groups, strict=True)
    ]
    pairs: dict[str, str] = {}
    for group, kind in kinds[0].items():
        like = [other for other, known in kinds[1].items() if known == kind]
        if len(like) == 1 and list(kinds[0].values()).count(kind) == 1:
            held = groups[1][like[0]]
            pairs |= {name: held[rest] for rest, name in groups[0][group].items()}
    return pairs


def _router_names(
    layer: str, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]
) -> dict[str, str]:
    """New names of a router's weights: the child that it was is its other name, or ``gate``."""
    prefix = f"{layer}.router."
    own = [name for name in tensors if name.startswith(prefix)]
    others = {
        alias.removeprefix(f"{layer}.").partition(".")[0]
        for alias, name in aliases.items()
        if name in own and alias.startswith(f"{layer}.")
    }
    child = others.pop() if len(others) == 1 else "gate"
    return {
        name: f"{layer}.{child}." + name.removeprefix(prefix).removeprefix("gate.") for name in own
    }


def _gate_up(layer: str, gate: StoredTensor, up: StoredTensor) -> StoredTensor:
    """Both weights as one, the rows of ``gate`` before those of ``up`` in every expert."""
    if (gate.shape, gate.dtype, gate.role) != (up.shape, up.dtype, up.role) or len(
        gate.shape
    ) != _DIMENSIONS:
        raise DamagedCheckpointError(
            f"the weights {gate.name!r} and {up.name!r} do not fit each other",
            found=f"{list(gate.shape)} and {list(up.shape)}",
            expected="the same three dimensions and element type",
        )
    experts, rows, columns = gate.shape
    shape = (experts, 2 * rows, columns)
    source = None
    if gate.source is not None and up.source is not None:
        strides = row_major(gate.shape)
        tiles = (
            Tile((0, 0, 0), gate.shape, gate.source, 0, strides),
            Tile((0, rows, 0), up.shape, up.source, 0, strides),
        )
        source = Mosaic(shape, gate.dtype.itemsize, tiles)
    return StoredTensor(f"{layer}{_EXPERTS}gate_up_proj", shape, gate.dtype, gate.role, source)
