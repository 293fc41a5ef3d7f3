"""Expert parallelism (DeepSpeed-MoE, AutoEP): flat groups that only some ranks partition.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``,
``stage3.py``. The whole has experts under their numbers in the layer, cells as ranks number them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from zexport.checkpoint.state import Cell, FileKind, Parameter, by_role
from zexport.checkpoint.zero.cell import check_group, flat_groups, with_groups, zero_cell
from zexport.checkpoint.zero.expert_layers import (
    ExpertLayers,
    autoep_layers,
    equal_shares,
    find_layers,
    join_experts,
    native_name,
    without_experts,
)
from zexport.checkpoint.zero.flat_groups import FlatGroup
from zexport.checkpoint.zero.pipeline import merge_stages
from zexport.checkpoint.zero.ranks import Ranks, TagFolder, check_grid, no_model
from zexport.checkpoint.zero.records import ModelStates, SharedGroup
from zexport.checkpoint.zero.stage0_experts import split_zero0_experts, zero0_experts_cell
from zexport.errors import LayoutError, UnsupportedError


def read_experts(tag: TagFolder) -> tuple[Cell, Callable[[], tuple[Cell, ...]]]:
    """Return all tensors, and a function for the cells of all stages' expert-parallel ranks."""
    models = [*tag.models.values()]
    if not models:
        raise no_model(tag.path)
    grid = models[0].grid
    is_folded = any(model.root.get("folding").value is not None for model in models)
    if is_folded or len(tag.ranks) > 1 or any(model.mp_world_size > 1 for model in models):
        if is_folded or grid is None or grid.tensor > 1:  # checkpoint/constants.py: with AutoTP
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


def _whole(tag: TagFolder, ranks: Ranks, layers: ExpertLayers) -> Cell:
    """Return the cell of one stage, with experts under their numbers in the layer."""
    if ranks.is_zero0:
        return zero0_experts_cell(tag, ranks, layers)
    model, (cell, groups) = ranks.first, _flat_groups(ranks, layers)
    names = {number: [*shapes] for number, shapes in enumerate(model.param_shapes)}
    trained, flats = list[Parameter](), [*cell.flats]
    for number, shards in groups.items():
        for shard in shards:
            check_group(shard, model)
            flats += shard.flat_data()
        alike = zip(*(shard.parameters() for shard in shards), strict=True)
        joined = [one for own in alike for one in _joined(own, layers)]
        names[number] = [one.name for one in joined]
        for one in joined:
            copy = layers.stored.get(one.name)
            if layers.stored and (copy is None or copy.shape != one.shape):
                raise LayoutError(f"no expert file has {one.name!r}", "none", list(one.shape))
            trained.append(one if copy is None else replace(one, held=(*one.held, *copy.held)))
    aliases = _aliases(model, layers, {one.name for one in trained})
    rest = layers.stored.keys() - aliases.keys() - {one.name for one in trained}
    untrained = [one for name, one in layers.stored.items() if name in rest]
    parameters = by_role([*cell.parameters.values(), *trained, *untrained])
    cell = replace(
        cell,
        parameters=parameters,
        aliases={**cell.aliases, **aliases},
        left_out=(*cell.left_out, *(name for name in layers.autoep if name not in parameters)),
        flats=tuple(flats),
    )
    partitions = {number: len(shards[0].owners) for number, shards in groups.items()}
    return with_groups(cell, ranks, names, partitions, groups)


def _split(tag: TagFolder, ranks: Ranks, layers: ExpertLayers) -> Iterator[Cell]:
    """Yield the cells of one stage: dense groups are the same, groups of experts each rank's."""
    if ranks.is_zero0:
        yield from split_zero0_experts(tag, ranks, layers)
        return
    model, owners = ranks.first, [one for one in ranks.owners if one is not None]
    dense, groups = _flat_groups(ranks, layers)
    sizes = sorted({len(shards) for shards in groups.values()} or {1})
    if len(sizes) > 1:
        raise UnsupportedError(
            "layers with several expert-parallel sizes cannot be resharded",
            path=model.file.path,
            found=f"{sizes}",
            hint="Resume the run with as many ranks as wrote it",
        )
    if layers.has_frozen(model.trained):
        dense = replace(dense, frozen=None)
    names = {number: [*shapes] for number, shapes in enumerate(model.param_shapes)}
    partitions = {number: len(shards[0].owners) for number, shards in groups.items()}
    for expert_rank in range(sizes[0]):
        shards = {number: own[expert_rank] for number, own in groups.items()}
        first = next((shard.owners[0] for shard in shards.values()), None)
        root = ranks.model.get(owners.index(first) if first else 0, model)
        trained = [one for shard in shards.values() for one in shard.parameters()]
        cell = replace(
            dense,
            parameters=by_role([*dense.parameters.values(), *trained]),
            states=root,
            expert_rank=expert_rank,
            expert_ranks=sizes[0],
        )
        yield with_groups(cell, ranks, names, partitions, groups)


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


def _joined(alike: Sequence[Parameter], layers: ExpertLayers) -> list[Parameter]:
    """Return a local weight of all expert-parallel ranks under its name or names in the layer."""
    name, layer = alike[0].name, layers.autoep.get(alike[0].name)
    if layer is not None:
        return [join_experts(alike, layer)]
    native = native_name(name)
    shares = equal_shares(layers.native.get(native.prefix, 0) if native else 0, len(alike))
    if native is None or native.number >= len(shares[0]):
        raise LayoutError(f"no expert file has {name!r}", "none", "one per expert")
    names = [native.of(share[native.number]) for share in shares]
    return [replace(one, name=own) for own, one in zip(names, alike, strict=True)]


def _aliases(model: ModelStates, layers: ExpertLayers, known: Collection[str]) -> dict[str, str]:
    """Return names that are tied within an expert, for all experts of the layer."""
    ties = [(native_name(alias), native_name(target)) for alias, target in model.shared.items()]
    return {
        one.of(number): other.of(number)
        for one, other in ties
        if one and other and (one.prefix, one.number) == (other.prefix, other.number)
        for number in range(layers.native.get(one.prefix, 0))
        if other.of(number) in known
    }
