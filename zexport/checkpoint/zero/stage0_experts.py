"""Experts without ZeRO: an optimizer file per expert-parallel rank, with numbered parameters.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``) and
``moe/utils.py`` (``split_params_into_different_moe_groups_for_optimizer``): every file has the
dense weights, which all ranks train, and the rank's own experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from msgspec.structs import replace

from zexport.checkpoint.boxes import Sources
from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    Copy,
    FileKind,
    Parameter,
    Role,
    by_role,
)
from zexport.checkpoint.zero.expert_layers import (
    ExpertLayers,
    cut_experts,
    equal_shares,
    join_experts,
    native_name,
    without_experts,
)
from zexport.checkpoint.zero.file_names import rank_file_name, read_rank_file
from zexport.checkpoint.zero.ranks import FROM_NODES, Ranks, TagFolder
from zexport.checkpoint.zero.records import ModelStates
from zexport.checkpoint.zero.stage0 import (
    ROUNDED,
    numbered_groups,
    optimizer_of,
    stored_weights,
    tied_by_values,
    with_optimizers,
)
from zexport.errors import IncompleteCheckpointError
from zexport.formats.torch_file import TorchFile

_GROUP_NAME = re.compile(r"ep_size_(\d{1,6})", re.ASCII)
_OF_EXPERTS = re.compile(r"\.deepspeed_moe\.|\.experts\.")


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
            copies += [Copy(own[0], replace(one, held=one.held[:1])) for one in own[1:]]
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
    """Return the optimizer files of expert-parallel ranks."""
    names = [one for one in tag.of_kind(FileKind.EXPERT_OPTIMIZER) if one.mp == ranks.index]
    return {one.rank: read_rank_file(one) for one in names}


def _stored(
    ranks: Ranks, layers: ExpertLayers
) -> tuple[ModelStates, list[Parameter], list[Parameter]]:
    """Return the model without experts, its weights and buffers, and those of all experts."""
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
            own.append(replace(cut, held=(Sources(MODULE, cut.dtype, cut.source()),)))
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
