"""Expert parallelism (DeepSpeed-MoE, AutoEP): flat groups that only some ranks partition.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``,
``stage3.py``. The whole has experts under their numbers in the layer, cells as ranks number them.

Without ZeRO every expert-parallel rank has an optimizer file that numbers the dense weights, which
all ranks train, and the rank's own experts (``moe/utils.py``,
``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, FileKind, Parameter, Role, by_role
from zexport.checkpoint.zero.expert_layers import (
    ExpertLayers,
    autoep_layers,
    cut_experts,
    equal_shares,
    find_layers,
    join_experts,
    native_name,
    of_first,
    without_experts,
)
from zexport.checkpoint.zero.file_names import rank_file_name, read_rank_file
from zexport.checkpoint.zero.flat_groups import FlatGroup, check_group, flat_groups, zero_cell
from zexport.checkpoint.zero.pipeline import merge_stages
from zexport.checkpoint.zero.ranks import FROM_NODES, Ranks, TagFolder, check_grid
from zexport.checkpoint.zero.records import ModelStates, SharedGroup
from zexport.checkpoint.zero.stage0 import (
    ROUNDED,
    numbered_groups,
    optimizer_of,
    stored_weights,
    tied_by_values,
    with_optimizers,
)
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.formats.torch_file import TorchFile

_GROUP_NAME = re.compile(r"ep_size_(\d{1,6})", re.ASCII)
_LAYER = re.compile(r"\.deepspeed_moe\.|\.router\.|\.experts\.")


def read_experts(tag: TagFolder) -> tuple[Cell, Callable[[], tuple[Cell, ...]]]:
    """Return all tensors, and a function for the cells of all stages' expert-parallel ranks."""
    models = [*tag.models.values()]
    grid = models[0].grid
    is_folded = any(model.root.get("folding").value is not None for model in models)
    if is_folded or len(tag.ranks) > 1 or any(model.mp_world_size > 1 for model in models):
        if (
            is_folded or grid is None or grid.tensor_ranks > 1
        ):  # checkpoint/constants.py: with AutoTP
            raise UnsupportedError(
                "experts with tensor parallelism, or an unknown kind of model parallelism",
                path=tag.path,
                expected="pipeline stages, in checkpoint_parallel_dimensions",
                hint="Resume without tensor parallelism, with DeepSpeed 0.19 or later, and save",
            )
        check_grid(tag, grid.stages, "pipeline stages")
    stages = [(one, find_layers(tag, one)) for one in map(tag.ranks.__getitem__, tag.models)]
    cells = [_whole(tag, *stage) for stage in stages]
    whole = cells[0] if len(cells) == 1 else merge_stages(cells)
    every = (own for _, layers in stages for own in layers.files.values())
    whole = replace(whole, files=(*whole.files, *(one.file for own in every for one in own)))
    return whole, lambda: tuple(cell for stage in stages for cell in _split(tag, *stage))


def expert_sizes(tag: TagFolder) -> tuple[int, ...]:
    """Return the expert-parallel sizes that are recorded, or that follow from the names."""
    models = [*tag.models.values()]
    sizes = {len(layer.held) for model in models for layer in autoep_layers(model)}
    if ranks := [one.rank for one in tag.of_kind(FileKind.EXPERT_OPTIMIZER) if not sizes]:
        return (max(ranks) + 1,)
    local: dict[str, set[int]] = {}
    for native in filter(None, map(native_name, models[0].trained)):
        local.setdefault(native.prefix, set()).add(native.number)
    counts = zip(models[0].num_experts, local.values(), strict=False)
    return tuple(sorted(sizes | {count // len(own) for count, own in counts}))


def _read_stage(
    tag: TagFolder, ranks: Ranks, layers: ExpertLayers, *, needs_states: bool
) -> tuple[Cell, list[Cell]]:
    """Return the dense weights of one stage, and the experts of each expert-parallel rank.

    Experts have their numbers in the layer. Without ``needs_states``, optimizers without master
    weights are not read.
    """
    if ranks.is_zero0:
        return _numbered_stage(tag, ranks, layers, needs_states=needs_states)
    model, (dense, groups) = ranks.first, _flat_groups(ranks, layers)
    sizes = sorted({len(shards) for shards in groups.values()} or {1})
    if needs_states and len(sizes) > 1:
        raise UnsupportedError(
            "layers with several expert-parallel sizes cannot be resharded",
            path=model.file.path,
            found=f"{sizes}",
            hint="Resume the run with as many ranks as wrote it",
        )
    flats, shares = [*dense.flats], [Cell({}, states=model) for _ in range(sizes[-1])]
    for shards in groups.values():
        for shard in shards:
            check_group(shard, model)
            flats += shard.flat_data()
        for rank, share in enumerate(shares):
            number = rank % len(shards)
            shard, own = shards[number], dict(share.parameters)
            for one in shard.parameters():
                name = _name_in_layer(one.name, layers, number, len(shards))
                own[name] = replace(one, name=name)
            states = ranks.model.get(ranks.owners.index(shard.owners[0]), model)
            shares[rank] = replace(share, parameters=own, states=states)
    frozen = None if layers.has_frozen(model.trained) else dense.frozen
    return replace(dense, flats=tuple(flats), frozen=frozen), shares


def _whole(tag: TagFolder, ranks: Ranks, layers: ExpertLayers) -> Cell:
    """Return the cell of one stage, with experts under their numbers in the layer."""
    dense, shares = _read_stage(tag, ranks, layers, needs_states=False)
    experts: dict[str, list[Parameter]] = {}
    for one in chain.from_iterable(zip(*(own.parameters.values() for own in shares), strict=True)):
        experts.setdefault(one.name, []).append(one)
    parameters = dict(dense.parameters)
    for name in layers.stored if ranks.is_zero0 else experts:
        layer, one, copy = layers.autoep.get(name), experts[name][0], layers.stored.get(name)
        if layer is not None:
            one = join_experts(experts[name][: len(layer.held)], layer)
        if layers.stored and (copy is None or copy.shape != one.shape):
            raise LayoutError(f"expert files lack trained {name!r}", "none", list(one.shape))
        stored = {} if copy is None else copy.stored
        parameters[name] = replace(one, stored={**one.stored, **stored})
    aliases = _aliases(ranks.first, layers, parameters)
    rest = (name for name in layers.stored if name not in aliases and name not in parameters)
    parameters |= {name: layers.stored[name] for name in [*rest]}
    return replace(
        dense,
        parameters=by_role(parameters.values()),
        aliases={**dense.aliases, **aliases},
        left_out=(*dense.left_out, *(name for name in layers.autoep if name not in parameters)),
        matched=dense.matched.union(*(share.matched for share in shares)),
        copies=(*dense.copies, *(copy for share in shares for copy in share.copies)),
        problems=tuple(problem for share in shares for problem in share.problems),
    )


def _split(tag: TagFolder, ranks: Ranks, layers: ExpertLayers) -> Iterator[Cell]:
    """Yield the cell of each expert-parallel rank, with experts as the rank numbers them."""
    dense, shares = _read_stage(tag, ranks, layers, needs_states=True)
    for rank, share in enumerate(shares):
        local = {name: name for name in (*dense.parameters, *share.parameters)}
        for native in filter(None, map(native_name, share.parameters)):
            each = layers.native[native.prefix] // len(shares)
            local[native.of(native.number)] = native.of(native.number % each)
        own = [replace(one, name=local[name]) for name, one in share.parameters.items()]
        yield replace(
            dense,
            parameters=by_role([*dense.parameters.values(), *own]),
            groups=tuple(replace(g, names=tuple(local[n] for n in g.names)) for g in share.groups),
            copies=(*dense.copies, *share.copies),
            states=share.states,
            problems=share.problems,
            expert_rank=rank,
            expert_ranks=len(shares),
        )


def _flat_groups(ranks: Ranks, layers: ExpertLayers) -> tuple[Cell, dict[int, list[FlatGroup]]]:
    """Return the cell of dense weights; and flat groups of experts, per expert-parallel rank."""
    model, owners, first = ranks.first, ranks.owners, ranks.first_optimizer
    experts = {n: own for n, own in enumerate(model.param_shapes) if any(map(layers.has, own))}
    shared = [one.shared_groups if one and ranks.is_zero3 else () for one in owners]
    counts = [len(one.ranks) for one in next(filter(None, shared), ())]
    counts += first.partition_counts if first and not counts else ()
    is_blocks = model.config.get("use_data_before_expert_parallelism") is True
    groups: dict[int, list[FlatGroup]] = {}
    for number, shapes in experts.items() if first is not None else ():
        count = counts[number] if number < len(counts) else 0
        if count < 1 or len(owners) % count:
            raise LayoutError("partitions of experts do not divide the ranks", count, len(owners))
        sets = sharing_ranks(len(owners) // count, len(owners), is_blocks=is_blocks)
        due = {rank: SharedGroup(tuple(own), i) for own in sets for i, rank in enumerate(own)}
        for rank, one in due.items() if ranks.is_zero3 else ():
            if owners[rank] and shared[rank][number : number + 1] != (one,):
                raise LayoutError(
                    f"optimizer states of rank {rank} are those of another rank",
                    "another partition in ds_zero_partition_groups",
                    f"partition {one.part} of ranks {list(one.ranks)}",
                )
        sharing = [[owners[rank] for rank in own] if all(owners) else [first, None] for own in sets]
        groups[number] = [FlatGroup(number, shapes, own, ranks.is_zero3) for own in sharing]
    flat = flat_groups(model, owners, is_zero3=ranks.is_zero3)
    dense = [one for one in flat if one.number not in experts]
    return zero_cell(ranks, without_experts(model, layers), dense), groups


def sharing_ranks(ep_size: int, world: int, *, is_blocks: bool) -> list[range]:
    """Return the ranks of each expert-parallel rank (``utils/groups.py``): every nth, or blocks."""
    interleaved = [range(rank, world, ep_size) for rank in range(ep_size)]
    return equal_shares(world, ep_size) if is_blocks else interleaved


def _name_in_layer(name: str, layers: ExpertLayers, rank: int, count: int) -> str:
    """Return the name of a local weight of one of ``count`` ranks, with its number in the layer."""
    native = native_name(name)
    if name in layers.autoep or native is None:
        return name
    share = equal_shares(layers.native.get(native.prefix, 0), count)[rank]
    if native.number >= len(share):
        raise LayoutError(f"expert files lack trained {name!r}", "none", "one per expert")
    return native.of(share[native.number])


def _aliases(model: ModelStates, layers: ExpertLayers, known: Collection[str]) -> dict[str, str]:
    """Return alias to name for weights tied within an expert, repeated for all experts."""
    ties = [(native_name(alias), native_name(target)) for alias, target in model.shared.items()]
    return {
        one.of(number): other.of(number)
        for one, other in ties
        if one and other and (one.prefix, one.number) == (other.prefix, other.number)
        for number in range(layers.native.get(one.prefix, 0))
        if other.of(number) in known
    }


def _numbered_stage(
    tag: TagFolder, ranks: Ranks, layers: ExpertLayers, *, needs_states: bool
) -> tuple[Cell, list[Cell]]:
    """Return the stage of a run without ZeRO.

    Dense weights and their states are the first rank's; those of the others are copies.
    """
    model = without_experts(ranks.first, layers)
    weights, every = stored_weights(model, model.shared), [model.file]
    experts = [
        one if one.role is Role.BUFFER else replace(one, role=Role.TRAINABLE)
        for one in layers.stored.values()
    ]
    every += (one.file for own in layers.files.values() for one in own)
    names = [one for one in tag.of_kind(FileKind.EXPERT_OPTIMIZER) if one.mp == ranks.index]
    files = {one.rank: read_rank_file(one) for one in names}
    used = files if needs_states or any(o.dtype in ROUNDED for o in (*weights, *experts)) else None
    count, shares = _count_ranks(ranks, layers, used), list[Cell]()
    for rank in range(count):
        own = _share_of(experts, layers, rank, count)
        optimizers = [] if used is None else [(optimizer_of(used[rank]), used[rank])]
        order = _in_module_order(weights, own)
        shares.append(with_optimizers(optimizers, order, every, {one.name for one in own}))
    roles: dict[str, set[Role]] = {}
    for one in (one for share in shares for one in share.parameters.values()):
        roles.setdefault(of_first(one.name), set()).add(one.role)
    is_partial = len({bool(share.matched) for share in shares}) > 1
    if is_partial or any(len(own) > 1 for own in roles.values()):
        raise IncompleteCheckpointError(
            "fp32 master weights of some experts, or on some ranks, are missing",
            path=tag.path,
            expected=f"{rank_file_name(FileKind.EXPERT_OPTIMIZER, 0)}, ... of all ranks",
            hint=FROM_NODES,
        )
    first = {one.name: shares[0].parameters[one.name] for one in weights}
    tied, twins = tied_by_values(first.values(), [model.file])
    dense = {name: one for name, one in first.items() if name not in tied}
    dense |= {name: replace(first[name], role=Role.TRAINABLE) for name in twins}
    warnings = [text for share in shares for text in share.warnings]
    if twins:
        warnings.append(
            "ZeRO-0: weights are rounded as in the module, because they may be tied to trained "
            f"weights or frozen copies of them: {', '.join(twins)}"
        )
    frozen = tuple(name for name, one in dense.items() if one.role is Role.FROZEN)
    trained = (name for group in shares[0].groups for name in group.names)
    aliases = {alias: name for alias, name in model.shared.items() if alias in model.module} | tied
    cell = Cell(
        parameters=dense,
        aliases=aliases,
        left_out=tuple(name for name in model.buffers if name not in model.module),
        frozen=None if layers.has_frozen(trained) else frozen,
        matched=frozenset(tied),
        copies=tuple(Copy(first[owner], first[name]) for name, owner in tied.items()),
        files=(*ranks.files, *files.values()),
        states=model,
        index=ranks.index,
        warnings=tuple(dict.fromkeys(warnings)),
    )
    for rank, share in enumerate(shares):
        copies = [
            Copy(one, replace(other, stored={k: v for k, v in other.stored.items() if k != MODULE}))
            for one, other in ((one, share.parameters[name]) for name, one in first.items())
            if rank and used and other.has(MASTER)
        ]
        own = [one for name, one in share.parameters.items() if name not in first]
        shares[rank] = replace(
            share, parameters={one.name: one for one in own}, copies=tuple(copies), states=model
        )
    return cell, shares


def _count_ranks(ranks: Ranks, layers: ExpertLayers, files: Mapping[int, TorchFile] | None) -> int:
    """Return the expert-parallel size, which is the number of optimizer files if any are used."""
    sizes = {len(layer.held) for layer in layers.autoep.values()}
    for file in (files or {}).values():
        for group in numbered_groups(optimizer_of(file), file):
            match = _GROUP_NAME.fullmatch(str(group.settings.get("name")))
            sizes |= {int(match[1])} if match else set()
    count = max(sizes, default=max(files or {0}) + 1)
    if files is not None and files.keys() != {*range(count)}:
        missing = min({*range(count)} - files.keys(), default=count)
        raise IncompleteCheckpointError(
            "optimizer files are not one per expert-parallel rank",
            path=ranks.folder,
            found=f"{len(files)}",
            expected=f"{count}, {rank_file_name(FileKind.EXPERT_OPTIMIZER, missing)}, ...",
            hint=FROM_NODES,
        )
    return count


def _share_of(
    experts: Sequence[Parameter], layers: ExpertLayers, rank: int, count: int
) -> list[Parameter]:
    """Return the experts that one of ``count`` ranks trains."""
    shares = {prefix: equal_shares(number, count) for prefix, number in layers.native.items()}
    found = list[Parameter]()
    for one in experts:
        native = native_name(one.name)
        if native is None:
            found.append(cut_experts(one, layers.autoep[one.name].held[rank]))
        elif native.number in shares[native.prefix][rank]:
            found.append(one)
    return found


def _in_module_order(dense: Sequence[Parameter], experts: Sequence[Parameter]) -> list[Parameter]:
    """Return dense weights and experts in one order: experts follow the gate of their layer.

    Source: DeepSpeed 0.19, ``moe/sharded_moe.py`` (``MOELayer``),
    ``module_inject/auto_ep_layer.py``.
    """
    places = {one.name: at for at, one in enumerate(dense)}
    gates = {_LAYER.split(name)[0]: at for name, at in places.items() if _LAYER.search(name)}

    def place(one: Parameter) -> int:
        return places.get(one.name, gates.get(_LAYER.split(one.name)[0], len(dense)))

    return sorted([*dense, *experts], key=place)
