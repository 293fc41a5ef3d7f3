"""What the expert files alone hold: frozen weights and buffers of experts, and their tied names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from math import prod

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.checkpoint.layouts.expert_layers import ExpertLayers
from zexport.checkpoint.layouts.expert_states import AutoEpLayer, parse_native
from zexport.checkpoint.layouts.zero import rounded_copy
from zexport.checkpoint.states import ModelStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.formats.pickles import TensorRef
from zexport.ranges.copies import CastReplica, Replica
from zexport.ranges.extents import ByteSource, Chain, Window


def copies_in_files(trained: Iterable[StoredTensor], layers: ExpertLayers) -> Iterator[CastReplica]:
    """The same weights in the expert files, as the module trained with them."""
    held = {
        name: (states.file, tensor)
        for files in layers.files.values()
        for states in files
        for name, tensor in states.tensors.items()
    }
    for tensor in trained:
        layer = layers.autoep.get(tensor.name)
        if layer is not None and layer.number not in layers.files:
            continue
        for name, part in [(tensor.name, tensor)] if layer is None else _slices(tensor):
            if name not in held or held[name][1].shape != part.shape:
                raise LayoutError(
                    f"the expert file of {name!r} does not hold what the flat groups hold",
                    held[name][1].shape if name in held else "no such weight",
                    part.shape,
                )
            yield from rounded_copy(part, *held[name], name)


def _slices(tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The experts one by one, under the names of their files: there may be any number of them."""
    for number in range(tensor.shape[0]):
        yield f"{tensor.name}.{number}", _slice(tensor, number)


def _slice(tensor: StoredTensor, expert: int) -> StoredTensor:
    """One expert's part of a tensor that holds all of them, as a tensor of its own."""
    shape = tensor.shape[1:]
    nbytes = prod(shape) * tensor.dtype.itemsize
    source = tensor.source and Window(tensor.source, expert * nbytes, nbytes)
    return replace(tensor, shape=shape, source=source)


def stored_experts(
    model: ModelStates, layers: ExpertLayers, known: Set[str]
) -> Iterator[StoredTensor]:
    """The weights and buffers of experts that no optimizer trained: all but ``known``.

    Those of DeepSpeed-MoE are alike in all files of a layer: ``find_layers`` lets no other pass.
    """
    for name, layer in layers.autoep.items():
        if name not in known and layer.number in layers.files:
            yield _stacked(name, layer, layers)
    stacked = {layer.number for layer in layers.autoep.values()}
    for number, files in layers.files.items():
        for states in files if number not in stacked else ():
            for name, tensor in states.tensors.items():
                if name not in known:
                    source = states.file.source(tensor)
                    role = _role(name, model)
                    yield StoredTensor(name, tensor.shape, tensor.dtype, role, source)


def _role(name: str, model: ModelStates) -> Role:
    """``buffer_names`` mentions the experts of rank 0 alone, and all experts are built alike."""
    parsed = parse_native(name)
    local = parsed.renumbered(0) if parsed is not None else name
    return Role.BUFFER if local in model.buffer_names else Role.FROZEN


def _stacked(name: str, layer: AutoEpLayer, layers: ExpertLayers) -> StoredTensor:
    """A frozen weight of all experts of an AutoEP layer, one slice out of each file."""
    slices: list[tuple[TensorRef, ByteSource]] = []
    for states in layers.files[layer.number]:
        tensor = states.tensors.get(f"{name}.{states.expert}")
        if tensor is None:
            raise LayoutError(
                f"{states.file.path.name} lacks its part of {name!r}", "no such weight", "one"
            )
        slices.append((tensor, states.file.source(tensor)))
    kinds = {(tensor.shape, tensor.dtype) for tensor, _ in slices}
    if len(kinds) != 1:
        raise LayoutError(f"the experts of {name!r} are not alike", sorted(map(str, kinds)), "one")
    ((shape, dtype),) = kinds
    source = Chain(tuple(part for _, part in slices))
    return StoredTensor(name, (len(slices), *shape), dtype, Role.FROZEN, source)


def expert_aliases(model: ModelStates, layers: ExpertLayers, known: Set[str]) -> dict[str, str]:
    """Names within an expert that are tied to ``known`` ones, for all experts of the layer."""
    aliases: dict[str, str] = {}
    for alias, target in model.shared_params.items():
        one, other = parse_native(alias), parse_native(target)
        if one is None and other is None:
            continue
        if one is None or other is None or (one.prefix, one.number) != (other.prefix, other.number):
            raise UnsupportedError(
                f"ties {alias!r} to {target!r} across experts",
                path=model.file.path,
                expected="ties within one expert",
                hint="Give each expert weights of its own and save again",
            )
        for number in range(layers.native.get(one.prefix, 0)):
            if other.renumbered(number) in known:
                aliases[one.renumbered(number)] = other.renumbered(number)
    return aliases


def frozen_twice(
    model: ModelStates, layers: ExpertLayers, stored: Iterable[StoredTensor]
) -> Iterator[Replica]:
    """The first rank's frozen experts, which the model file holds as well (ZeRO-2)."""
    for tensor in stored:
        fragment = model.frozen_fragments.get(tensor.name)
        if fragment is None or tensor.source is None:
            continue
        kept, layer = tensor.source, layers.autoep.get(tensor.name)
        if layer is not None:
            files = layers.files[layer.number]
            names = [(files[expert], f"{tensor.name}.{expert}") for expert in layer.held[0]]
            kept = Chain(tuple(one.file.source(one.tensors[name]) for one, name in names))
        other = model.file.source(fragment)
        if other.nbytes != kept.nbytes:
            raise LayoutError(
                f"the frozen weight {tensor.name!r} has two sizes", other.nbytes, kept.nbytes
            )
        yield Replica(tensor.name, kept, other)
