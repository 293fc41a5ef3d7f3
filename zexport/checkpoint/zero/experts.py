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
from operator import itemgetter

from msgspec.structs import replace

from zexport.checkpoint.boxes import Bound
from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, FileKind, Parameter, Role, by_role
from zexport.checkpoint.zero.expert_layers import (
    ExpertLayers,
    autoep_layers,
    cut_experts,
    equal_shares,
    find_layers,
    join_experts,
    native_name,
    without_experts,
)
from zexport.checkpoint.zero.file_names import rank_file_name, read_rank_file
from zexport.checkpoint.zero.flat_groups import FlatGroup, check_group, flat_groups, zero_cell
from zexport.checkpoint.zero.pipeline import merge_stages
from zexport.checkpoint.zero.ranks import FROM_NODES, Ranks, TagFolder, check_grid, no_model
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
_OF_EXPERTS = re.compile(r"\.deepspeed_moe\.|\.experts\.")


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
    trained, flats = list[Parameter](), [*cell.flats]
    for shards in groups.values():
        for shard in shards:
            check_group(shard, model)
            flats += shard.flat_data()
        alike = zip(*(shard.parameters() for shard in shards), strict=True)
        for one in (one for own in alike for one in _joined(own, layers)):
            copy = layers.stored.get(one.name)
            if layers.stored and (copy is None or copy.shape != one.shape):
                raise LayoutError(
                    f"expert files lack trained {one.name!r}", "none", list(one.shape)
                )
            trained.append(
                one if copy is None else replace(one, stored={**one.stored, **copy.stored})
            )
    aliases = _aliases(model, layers, {one.name for one in trained})
    rest = layers.stored.keys() - aliases.keys() - {one.name for one in trained}
    untrained = [one for name, one in layers.stored.items() if name in rest]
    parameters = by_role([*cell.parameters.values(), *trained, *untrained])
    return replace(
        cell,
        parameters=parameters,
        aliases={**cell.aliases, **aliases},
        left_out=(*cell.left_out, *(name for name in layers.autoep if name not in parameters)),
        flats=tuple(flats),
    )


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
    for expert_rank in range(sizes[0]):
        shards = {number: own[expert_rank] for number, own in groups.items()}
        first = next((shard.owners[0] for shard in shards.values()), None)
        trained = [one for shard in shards.values() for one in shard.parameters()]
        yield replace(
            dense,
            parameters=by_role([*dense.parameters.values(), *trained]),
            states=ranks.model.get(owners.index(first) if first else 0, model),
            expert_rank=expert_rank,
            expert_ranks=sizes[0],
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


def _joined(alike: Sequence[Parameter], layers: ExpertLayers) -> list[Parameter]:
    """Return a local weight of all expert-parallel ranks under its name or names in the layer."""
    name, layer = alike[0].name, layers.autoep.get(alike[0].name)
    if layer is not None:
        return [join_experts(alike, layer)]
    native = native_name(name)
    shares = equal_shares(layers.native.get(native.prefix, 0) if native else 0, len(alike))
    if native is None or native.number >= len(shares[0]):
        raise LayoutError(f"expert files lack trained {name!r}", "none", "one per expert")
    names = [native.of(share[native.number]) for share in shares]
    return [replace(one, name=own) for own, one in zip(names, alike, strict=True)]


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


def zero0_experts_cell(tag: TagFolder, ranks: Ranks, layers: ExpertLayers) -> Cell:
    """Return the cell of one pipeline stage, with experts under their numbers in the layer."""
    files, (model, dense, experts) = _optimizer_files(tag, ranks), _stored(ranks, layers)
    cells = [with_optimizers([], [*dense, *experts], [])]
    if has_masters := any(one.dtype in ROUNDED for one in cells[0].parameters.values()):
        cells = _cells(ranks, layers, files)
    alike: dict[str, list[Parameter]] = {one.name: [] for one in (*dense, *experts)}
    roles: dict[str, set[Role]] = {}
    for one in (one for cell in cells for one in cell.parameters.values()):
        native = native_name(one.name)
        alike[one.name].append(one)
        roles.setdefault(native.of(0) if native else one.name, set()).add(one.role)
    is_partial = len({bool(cell.matched) for cell in cells}) > 1
    if is_partial or any(len(own) > 1 for own in roles.values()):
        raise IncompleteCheckpointError(
            "fp32 master weights of some experts, or on some ranks, are missing",
            path=tag.path,
            expected=f"{rank_file_name(FileKind.EXPERT_OPTIMIZER, 0)}, ... of all ranks",
            hint=FROM_NODES,
        )
    found, copies = {name: own[0] for name, own in alike.items()}, list[Copy]()
    for name, own in alike.items():
        if has_masters and name in layers.autoep:
            found[name] = join_experts(own, layers.autoep[name])
        elif own[0].has(MASTER):
            copies += [
                Copy(own[0], replace(one, stored={MASTER: one.stored[MASTER]})) for one in own[1:]
            ]
    tied, twins = tied_by_values([found[one.name] for one in dense], [model.file])
    copies += [Copy(found[owner], found[name]) for name, owner in tied.items()]
    found |= {name: replace(found[name], role=Role.TRAINABLE) for name in twins}
    warnings = [text for cell in cells for text in cell.warnings]
    if twins:
        warnings.append(
            "ZeRO-0: weights are rounded as in the module, because they may be tied to trained "
            f"weights or frozen copies of them: {', '.join(twins)}"
        )
    parameters = by_role(one for name, one in found.items() if name not in tied)
    aliases = {alias: name for alias, name in model.shared.items() if alias in model.module} | tied
    return Cell(
        parameters=parameters,
        groups=cells[0].groups,
        aliases=aliases,
        left_out=tuple(name for name in model.buffers if name not in model.module),
        matched=frozenset(tied).union(*(cell.matched for cell in cells)),
        copies=tuple(copies),
        files=(*ranks.files, *files.values()),
        states=model,
        index=ranks.index,
        warnings=tuple(dict.fromkeys(warnings)),
        problems=tuple(problem for cell in cells for problem in cell.problems),
    )


def split_zero0_experts(tag: TagFolder, ranks: Ranks, layers: ExpertLayers) -> Iterator[Cell]:
    """Yield a cell per expert-parallel rank, with experts as the rank numbers them.

    Dense weights and their states are the first rank's; those of the others are copies.
    """
    whole, files = zero0_experts_cell(tag, ranks, layers), _optimizer_files(tag, ranks)
    model, dense = ranks.first, dict[str, Parameter]()
    for rank, share in enumerate(_cells(ranks, layers, files)):
        local = {name: name for name in share.parameters}
        for native in filter(None, map(native_name, share.parameters)):
            each = layers.native[native.prefix] // len(files)
            local[native.of(native.number)] = native.of(native.number % each)
        found = {
            local[name]: replace(one, name=local[name])
            for name, one in share.parameters.items()
            if name not in whole.aliases
        }
        groups = tuple(replace(g, names=tuple(local[n] for n in g.names)) for g in share.groups)
        trained = [name for group in groups for name in group.names]
        frozen = [n for n, one in found.items() if one.role is Role.FROZEN and n in model.module]
        cell = replace(
            whole,
            parameters=found,
            groups=groups,
            frozen=None if layers.has_frozen(trained) else tuple(frozen),
            problems=share.problems,
            expert_rank=rank,
            expert_ranks=len(files),
        )
        own = {n: found[n] for group in groups if not group.of_experts for n in group.names}
        copies = tuple(Copy(dense[name], one) for name, one in own.items() if rank)
        dense = dense or own
        yield replace(cell, parameters=by_role((found | dense).values()), copies=copies)


def _optimizer_files(tag: TagFolder, ranks: Ranks) -> dict[int, TorchFile]:
    names = [one for one in tag.of_kind(FileKind.EXPERT_OPTIMIZER) if one.mp == ranks.index]
    return {one.rank: read_rank_file(one) for one in names}


def _stored(
    ranks: Ranks, layers: ExpertLayers
) -> tuple[ModelStates, list[Parameter], list[Parameter]]:
    model = without_experts(ranks.first, layers)
    experts = [
        o if o.role is Role.BUFFER else replace(o, role=Role.TRAINABLE)
        for o in layers.stored.values()
    ]
    return model, stored_weights(model, model.shared), experts


def _cells(ranks: Ranks, layers: ExpertLayers, files: Mapping[int, TorchFile]) -> list[Cell]:
    """Return a cell of what each expert-parallel rank trains."""
    sizes = {len(layer.held) for layer in layers.autoep.values()}
    for file in files.values():
        for group in numbered_groups(optimizer_of(file), file):
            match = _GROUP_NAME.fullmatch(str(group.settings.get("name")))
            sizes |= {int(match[1])} if match else set()
    count = max(sizes, default=max(files, default=0) + 1)
    missing = next((rank for rank in range(count) if rank not in files), count)
    if missing < count or len(files) > count:
        raise IncompleteCheckpointError(
            "optimizer files are not one per expert-parallel rank",
            path=ranks.folder,
            found=f"{len(files)}",
            expected=f"{count}, {rank_file_name(FileKind.EXPERT_OPTIMIZER, missing)}, ...",
            hint=FROM_NODES,
        )
    model, dense, experts = _stored(ranks, layers)
    every = [model.file, *(one.file for own in layers.files.values() for one in own)]
    shares = {prefix: equal_shares(number, count) for prefix, number in layers.native.items()}
    cells = []
    for rank in range(count):
        own = list[Parameter]()
        for one in experts:
            native = native_name(one.name)
            if native is not None:
                own += [one] if native.number in shares[native.prefix][rank] else []
                continue
            cut = cut_experts(one, layers.autoep[one.name].held[rank])
            own.append(replace(cut, stored={MODULE: Bound(cut.dtype, cut.source())}))
        optimizer = optimizer_of(files[rank]), files[rank]
        weights = _in_module_order(dense, own)
        cells.append(with_optimizers([optimizer], weights, every, {one.name for one in own}))
    return cells


def _in_module_order(dense: Sequence[Parameter], experts: Sequence[Parameter]) -> list[Parameter]:
    """Return dense weights and experts in one order: experts follow the gate of their layer.

    Source: DeepSpeed 0.19, ``moe/sharded_moe.py`` (``MOELayer``),
    ``module_inject/auto_ep_layer.py``.
    """
    marks, keyed = (".deepspeed_moe.", ".router."), [((at, 0), o) for at, o in enumerate(dense)]
    pairs = [(mark, at, o.name) for at, o in enumerate(dense) for mark in marks if mark in o.name]
    gates = {name.rpartition(mark)[0]: at for mark, at, name in pairs}
    for at, one in enumerate(experts, 1):
        gate = gates.get(_OF_EXPERTS.split(one.name)[0], len(dense))
        keyed.append(((gate, at), one))
    return [one for _, one in sorted(keyed, key=itemgetter(0))]
