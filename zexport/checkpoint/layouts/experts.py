"""Models with experts: every expert under its number in the whole layer, whoever held it.

DeepSpeed-MoE keeps an expert's weights as tensors of their own, AutoEP those of all experts of a
layer as one; beside the masters, expert files hold all of them in the module's element types, and
what is no master (frozen weights, buffers) nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.checkpoint.layouts.data_parallel import Inventory, damage_of, take_inventory
from zexport.checkpoint.layouts.expert_files import (
    copies_in_files,
    expert_aliases,
    frozen_twice,
    stored_experts,
)
from zexport.checkpoint.layouts.expert_groups import LocalParameter, local_parameters
from zexport.checkpoint.layouts.expert_layers import (
    ExpertLayers,
    expert_groups,
    find_layers,
    without_experts,
)
from zexport.checkpoint.layouts.expert_states import (
    AutoEpLayer,
    ExpertStates,
    parse_native,
)
from zexport.checkpoint.layouts.placement import expert_runs, uniform
from zexport.checkpoint.layouts.zero0_experts import take_unsharded_experts
from zexport.checkpoint.ranks import RankStates, is_zero0
from zexport.checkpoint.states import ModelStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.formats.torch_file import TorchFile
from zexport.ranges.extents import ByteSource, Chain, Window


def take_expert_inventory(
    ranks: RankStates,
    model: ModelStates,
    experts: Sequence[ExpertStates],
    optimizers: Mapping[int, TorchFile] | None = None,
) -> Inventory:
    """The tensors of a checkpoint with experts, numbered globally, of one model-parallel index.

    Args:
        ranks: the states of its ranks.
        model: the model states that names and shapes come from.
        experts: its expert files (none under ZeRO-3).
        optimizers: under ZeRO-0, its optimizer files by expert-parallel rank.

    Raises:
        DamagedCheckpointError: lengths, shapes, names or ranks contradict each other.
        IncompleteCheckpointError: expert files are missing.
        UnsupportedError: the experts are stored in a way that cannot be rebuilt exactly.
    """
    try:
        return _take(ranks, model, experts, optimizers or {})
    except LayoutError as error:
        raise damage_of(
            error, model.file.path.parent, "Copy all rank files of one save again"
        ) from error


def _take(
    ranks: RankStates,
    model: ModelStates,
    experts: Sequence[ExpertStates],
    optimizers: Mapping[int, TorchFile],
) -> Inventory:
    _refuse(model)
    ranks = replace(ranks, world_size=_world_size(ranks, model))
    layers = find_layers(ranks, model, experts)
    indices = expert_groups(model, layers)
    dense_ranks, dense_model = without_experts(ranks, model, layers, indices)
    if is_zero0(ranks):
        stored = list(stored_experts(model, layers, set()))
        unsharded = take_unsharded_experts(dense_model, stored, layers, optimizers)
        return replace(unsharded, tensors=_in_order(unsharded.tensors))
    dense = take_inventory(dense_ranks, dense_model)
    notes: list[str] = []
    flats = list(dense.flats)
    trained = list(_number(local_parameters(ranks, model, indices, notes, flats), layers))
    copies = list(copies_in_files(trained, layers))
    aliases = expert_aliases(model, layers, {tensor.name for tensor in trained})
    known = {tensor.name for tensor in trained} | aliases.keys()
    stored = list(stored_experts(model, layers, known))
    return Inventory(
        tensors=_in_order((*dense.tensors, *trained, *stored)),
        aliases={**dense.aliases, **aliases},
        left_out=(*dense.left_out, *_nowhere(layers, [*trained, *stored])),
        replicas=(*dense.replicas, *copies, *frozen_twice(model, layers, stored)),
        notes=(*dense.notes, *notes),
        flats=tuple(flats),
    )


def _world_size(ranks: RankStates, model: ModelStates) -> int | None:
    """The number of ranks; where experts alone are trained, no flat group is shared by all."""
    stated = model.dp_world_size
    return stated if stated == len(ranks.optimizer) else ranks.world_size


def _nowhere(layers: ExpertLayers, found: Iterable[StoredTensor]) -> list[str]:
    """Weights that AutoEP names and that no file holds: frozen experts under ZeRO-3."""
    known = {tensor.name for tensor in found}
    return [name for name in layers.autoep if name not in known]


def _refuse(model: ModelStates) -> None:
    if model.splits_experts:
        raise UnsupportedError(
            "holds experts that are split over tensor ranks as well",
            path=model.file.path,
            found="AutoEP folded with AutoTP",
            expected="expert parallelism without tensor parallelism",
            hint="Resume the run with autotp_size 1, save, and export that",
        )


def _in_order(tensors: Iterable[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Trainable ones first, then frozen ones, then buffers; each once."""
    roles = list(Role)
    ordered = sorted(tensors, key=lambda tensor: roles.index(tensor.role))
    seen: set[str] = set()
    for tensor in ordered:
        if tensor.name in seen:
            raise LayoutError(f"the name {tensor.name!r} stands for two tensors", "two", "one")
        seen.add(tensor.name)
    return tuple(ordered)


def _number(parameters: Iterable[LocalParameter], layers: ExpertLayers) -> Iterator[StoredTensor]:
    """The parameters of all expert-parallel ranks under the names of the whole model."""
    for parameter in parameters:
        layer = layers.autoep.get(parameter.name)
        if layer is not None:
            yield _joined(parameter, layer)
        else:
            yield from _renumbered(parameter, layers)


def _renumbered(parameter: LocalParameter, layers: ExpertLayers) -> Iterator[StoredTensor]:
    """DeepSpeed-MoE: one tensor for each expert-parallel rank's expert of this local number."""
    name = parse_native(parameter.name)
    if name is None or name.prefix not in layers.native:
        raise LayoutError(f"no expert file holds {parameter.name!r}", "none", "one for each expert")
    shares = uniform(layers.native[name.prefix], len(parameter.sources))
    for share, source in zip(shares, parameter.sources, strict=True):
        if name.number >= len(share):
            raise LayoutError(
                f"{parameter.name!r} has a number that no expert of its rank has",
                name.number,
                f"less than {len(share)}",
            )
        yield StoredTensor(
            name.renumbered(share[name.number]),
            parameter.shape,
            parameter.dtype,
            Role.TRAINABLE,
            source,
        )


def _joined(parameter: LocalParameter, layer: AutoEpLayer) -> StoredTensor:
    """AutoEP: the experts of all ranks as one tensor, in the order of their numbers."""
    local, held = parameter.shape, layer.held
    if len(held) != len(parameter.sources):
        raise LayoutError(
            f"{parameter.name!r} is on more or fewer ranks than its layer says",
            f"{len(parameter.sources)} expert-parallel ranks",
            len(held),
        )
    if not local or any(len(experts) != local[0] for experts in held):
        raise UnsupportedError(
            f"holds unequal numbers of the experts of {parameter.name!r} on its ranks",
            found=f"{[len(experts) for experts in held]} experts in tensors of {list(local)}",
            expected="as many on every expert-parallel rank",
            hint="Save again with equal shares of the experts",
        )
    shape = (layer.num_experts, *local[1:])
    parts = _in_expert_order(parameter, layer)
    source = None if parts is None else Chain(parts)
    return StoredTensor(parameter.name, shape, parameter.dtype, Role.TRAINABLE, source)


def _in_expert_order(
    parameter: LocalParameter, layer: AutoEpLayer
) -> tuple[ByteSource, ...] | None:
    nbytes = prod(parameter.shape[1:]) * parameter.dtype.itemsize
    parts: list[ByteSource] = []
    for run in expert_runs(layer.held):
        source = parameter.sources[run.ep_rank]
        if source is None:
            return None
        parts.append(Window(source, run.position * nbytes, run.count * nbytes))
    return tuple(parts)
