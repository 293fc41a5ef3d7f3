"""What a universal checkpoint has beside trained weights: frozen ones and buffers, as they were.

They lie in the model files, in pieces where there are tensor ranks; a pipeline's lie in the files
of its layers, which ``zexport reshard`` lets go along and DeepSpeed's converter does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts.module_files import ModuleFile
from zexport.checkpoint.layouts.pipeline import tied_layer, tied_layers
from zexport.checkpoint.layouts.tensor_parallel import join_shards
from zexport.checkpoint.model_states import ModelStates
from zexport.errors import LayoutError
from zexport.ranges.copies import Replica


def rest_of_parts(
    models: Mapping[int, ModelStates], parts: Mapping[int, Inventory]
) -> tuple[tuple[StoredTensor, ...], tuple[Replica, ...]]:
    """Frozen weights and buffers of the model files of all model-parallel ranks.

    Buffers of one name must be equal; frozen weights are joined as trained ones would be.
    """
    names = untrained_names(parts.values())
    kept = {
        index: replace(part, tensors=tuple(one for one in part.tensors if one.name in names))
        for index, part in parts.items()
    }
    is_split = len(kept) > 1 and any(
        one.role is Role.FROZEN for part in kept.values() for one in part.tensors
    )
    if not is_split:
        return _alike(kept.values())
    joined = join_shards([models[index] for index in kept], [*kept.values()])
    replicas = tuple(one for one in joined.replicas if isinstance(one, Replica))
    return joined.tensors, replicas


def untrained_names(parts: Iterable[Inventory]) -> set[str]:
    """The names of what is not trained; a piece without an element says nothing of that."""
    tensors = chain.from_iterable(part.tensors for part in parts)
    return {
        tensor.name
        for tensor in tensors
        if tensor.role is Role.BUFFER or (tensor.role is Role.FROZEN and tensor.numel)
    }


def _alike(parts: Iterable[Inventory]) -> tuple[tuple[StoredTensor, ...], tuple[Replica, ...]]:
    rest: dict[str, StoredTensor] = {}
    replicas = []
    for tensor in (one for part in parts for one in part.tensors):
        first = rest.setdefault(tensor.name, tensor)
        if (first.shape, first.dtype, first.role) != (tensor.shape, tensor.dtype, tensor.role):
            raise LayoutError(
                f"two model-parallel ranks hold a different {tensor.name!r}",
                f"{tensor.dtype.torch_name} {list(tensor.shape)}",
                f"{first.dtype.torch_name} {list(first.shape)}",
            )
        if first is not tensor and first.source is not None and tensor.source is not None:
            replicas.append(Replica(tensor.name, first.source, tensor.source))
    return tuple(rest.values()), tuple(replicas)


def rest_of_layers(
    layers: Sequence[ModuleFile],
    models: Sequence[ModelStates],
    trained: Mapping[str, StoredTensor],
) -> Inventory:
    """Frozen weights and buffers of a pipeline, out of the files of its layers.

    ``models`` are the model states of all its stages, of every tensor rank of one after another.
    """
    buffers = {name for model in models for name in model.buffer_names}
    ranks = sorted({layer.tensor_rank for layer in layers})
    found = []
    for rank in ranks:
        shapes = chain.from_iterable(one.param_shapes for one in models[rank :: len(ranks)])
        numels = {name: prod(shape) for group in shapes for name, shape in group.items()}
        tied = tied_layers(numels, buffers)
        own = (layer for layer in layers if layer.tensor_rank == rank)
        tensors = (one for layer in own for one in _untrained_of(layer, trained, buffers, tied))
        found.append(Inventory(tuple(tensors), {}, ()))
    return found[0] if len(found) == 1 else join_shards([*models][: len(ranks)], found)


def _untrained_of(
    layer: ModuleFile,
    trained: Mapping[str, StoredTensor],
    buffers: set[str],
    tied: Mapping[str, Mapping[str, int | None]],
) -> Iterator[StoredTensor]:
    names = {f"{layer.layer}.{key}" for key in layer.tensors}
    if not names & (trained.keys() | buffers) and tied_layer(layer, tied) is not None:
        return
    for key, ref in layer.tensors.items():
        name = f"{layer.layer}.{key}"
        if name not in trained:
            role = Role.BUFFER if name in buffers else Role.FROZEN
            yield whole_tensor(layer.file, name, ref, role)
