"""ZeRO-0 with experts: one file of masters for each expert-parallel rank, none of them named.

``expp_rank_E_mp_rank_MM_optim_states.pt`` holds the masters of what rank ``E`` trained: the dense
weights, as every such file does, and its own experts. The weights themselves lie in the model file
and in the expert files, in the module's element types.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``) and
``moe/utils.py`` (``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, source_of
from zexport.checkpoint.layouts.expert_layers import (
    ExpertLayers,
    in_expert_order,
    parse_native,
    stack_slices,
)
from zexport.checkpoint.layouts.expert_placement import uniform
from zexport.checkpoint.layouts.master_matching import Master, Masters, Weight
from zexport.checkpoint.layouts.unnamed_masters import find_masters, form_of, unnamed_masters
from zexport.checkpoint.layouts.zero0 import (
    casts,
    contradictions,
    inventory_of,
    tied_by_values,
    weights_of,
)
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.optimizer_states import optimizer_in
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, UnsupportedError
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Chain, paths_of
from zexport.ranges.replicas import CastReplica, Replica

_GROUP_NAME = re.compile(r"ep_size_(\d{1,6})", re.ASCII)
_ONE_SAVE = "Copy all files of one save again"


def take_unsharded_experts(
    dense: ModelStates,
    stored: Sequence[StoredTensor],
    layers: ExpertLayers,
    optimizers: Mapping[int, TorchFile],
) -> Inventory:
    """The tensors of a ZeRO-0 checkpoint with experts."""
    named_twice = _named_twice(dense)
    weights, experts = _weights(dense), _experts(stored)
    shares: list[Share] = []
    if any(weight.dtype in (DType.BF16, DType.F16) for weight in (*weights, *experts)):
        check_files_are_there(dense, layers, optimizers)
        check_one_form(optimizers)
        shares = _shares(dense, layers, optimizers, weights, experts)
        check_dense_masters(dense, weights, shares)
    first = shares[0].masters.found if shares else {}  # which the others' dense ones must equal
    dense_found = {one.name: first[one.name] for one in weights if one.name in first}
    found = {**dense_found, **_by_whole_name(shares, layers)}
    check_evenly_trained(dense, layers, optimizers, experts, found)
    tied, twins = tied_by_values(weights, found, dense.file)
    equal = tuple(casts(weights, {name: found[tied[name]] for name in tied}, dense.file))
    weights = [weight for weight in weights if weight.name not in tied]
    doubts = dict.fromkeys(one.masters.doubt for one in shares if one.masters.doubt)
    if twins:
        doubts[f"it may be a frozen copy of another or tied to it ({', '.join(twins)})"] = None
    masters = Masters(found, "; ".join(doubts))
    buffers = [one for one in stored if one.role is Role.BUFFER]
    return replace(
        inventory_of(dense, [*weights, *experts], masters, buffers),
        aliases={**named_twice, **tied},
        replicas=(*equal, *_dense_copies(weights, shares), *_casts(weights, shares)),
        problems=tuple(found for one in shares for found in contradictions(one.masters, one.file)),
    )


def shares_of(
    dense: ModelStates,
    stored: Sequence[StoredTensor],
    layers: ExpertLayers,
    optimizers: Mapping[int, TorchFile],
) -> list[Share]:
    """What every expert-parallel rank trained, and the masters that its file has of it."""
    check_files_are_there(dense, layers, optimizers)
    return _shares(dense, layers, optimizers, _weights(dense), _experts(stored))


def _named_twice(dense: ModelStates) -> dict[str, str]:
    return {n: t for n, t in dense.shared_params.items() if n in dense.module}


def _weights(dense: ModelStates) -> list[Weight]:
    """All that is dense and no buffer, each weight once."""
    own = dense.module.keys() - _named_twice(dense).keys() - set(dense.buffer_names)
    return weights_of(dense, {n: t for n, t in dense.module.items() if n in own})


def _experts(stored: Iterable[StoredTensor]) -> list[Weight]:
    return [
        Weight(one.name, one.shape, one.dtype, source_of(one), of_experts=True)
        for one in stored
        if one.role is not Role.BUFFER
    ]


def _shares(
    dense: ModelStates,
    layers: ExpertLayers,
    optimizers: Mapping[int, TorchFile],
    weights: Sequence[Weight],
    experts: Sequence[Weight],
) -> list[Share]:
    files = [states.file for every in layers.files.values() for states in every]
    by_name = {weight.name: weight for weight in experts}
    shares = []
    for ep_rank, optimizer in sorted(optimizers.items()):
        own = list(_local_experts(layers, ep_rank, len(optimizers), by_name))
        ordered = _as_in_the_module(weights, own)
        read = paths_of(weight.source for weight in own)
        others = [file for file in files if file.path in read]
        masters = find_masters(optimizer, ordered, (dense.file, *others))
        shares.append(Share(optimizer, own, masters, ordered))
    return shares


def _local_experts(
    layers: ExpertLayers, ep_rank: int, ep_size: int, by_name: Mapping[str, Weight]
) -> Iterator[Weight]:
    """The weights of the experts that one rank trained, in the order of its module."""
    fused = {layer.number: layer for layer in layers.autoep.values()}
    for number, files in layers.files.items():
        if number in fused:
            held = [files[expert] for expert in fused[number].held[ep_rank]]
            names = [name for name, layer in layers.autoep.items() if layer.number == number]
            for name in names:
                yield Weight(name, *stack_slices(name, held), of_experts=True)
        else:
            for expert in uniform(len(files), ep_size)[ep_rank]:
                yield from (by_name[name] for name in files[expert].tensors if name in by_name)


def _as_in_the_module(dense: Sequence[Weight], experts: Sequence[Weight]) -> list[Weight]:
    """Dense weights and experts in one order: experts follow the gate of their layer.

    Source: DeepSpeed 0.19, ``moe/sharded_moe.py`` (``MOELayer``) and
    ``module_inject/auto_ep_layer.py``: the gate is set before the experts, all else after them.
    """
    gates = {}
    for place, weight in enumerate(dense):
        for mark in (".deepspeed_moe.", ".router."):
            if mark in weight.name:
                gates[weight.name.rpartition(mark)[0]] = place
    keyed = [((place, 0), weight) for place, weight in enumerate(dense)]
    for place, weight in enumerate(experts):
        mark = ".experts." if parse_native(weight.name) is None else ".deepspeed_moe."
        layer = weight.name.rpartition(mark)[0]
        keyed.append(((gates.get(layer, len(dense)), 1 + place), weight))
    return [weight for _, weight in sorted(keyed, key=lambda item: item[0])]


def _by_whole_name(shares: Sequence[Share], layers: ExpertLayers) -> dict[str, Master]:
    """The experts' masters of all ranks; those that AutoEP keeps as one, joined into one."""
    found: dict[str, Master] = {}
    for share in shares:
        own = {weight.name for weight in share.experts} - layers.autoep.keys()
        found |= {name: one for name, one in share.masters.found.items() if name in own}
    for name, layer in layers.autoep.items():
        masters = [share.masters.found[name] for share in shares if name in share.masters.found]
        if masters and len(masters) == len(shares):
            parts = in_expert_order([master.source for master in masters], layer)
            found[name] = Master(Chain(tuple(parts)), masters[0].dtype)
    return found


def _dense_copies(weights: Iterable[Weight], shares: Sequence[Share]) -> Iterator[Replica]:
    """The dense masters, which every expert-parallel rank has."""
    for weight in weights:
        masters = [s.masters.found[weight.name] for s in shares if weight.name in s.masters.found]
        for other in masters[1:]:
            yield Replica(weight.name, masters[0].source, other.source)


def _casts(weights: Sequence[Weight], shares: Sequence[Share]) -> Iterator[CastReplica]:
    for index, share in enumerate(shares):
        compared = [*weights, *share.experts] if index == 0 else share.experts
        yield from casts(compared, share.masters.found, share.file)


class Share(Struct, frozen=True):
    """One expert-parallel rank: its optimizer file, its own experts' weights, all its masters.

    ``weights`` are dense ones and its own experts', in the order of its module.
    """

    file: TorchFile
    experts: Sequence[Weight]
    masters: Masters
    weights: Sequence[Weight] = ()


def check_files_are_there(
    dense: ModelStates, layers: ExpertLayers, optimizers: Mapping[int, TorchFile]
) -> None:
    """As many files as expert-parallel ranks."""
    sizes = _known_sizes(layers, optimizers)
    if len(sizes) > 1:
        raise UnsupportedError(
            "keeps the fp32 masters of experts that are dealt out in several ways, without names",
            path=dense.file.path.parent,
            found=f"expert-parallel sizes {', '.join(map(str, sorted(sizes)))}",
            expected="one size",
            hint="Resume the run with ZeRO stage 1, save, and export that",
        )
    expected = max(sizes, default=max(optimizers, default=0) + 1)
    missing = next((rank for rank in range(expected) if rank not in optimizers), None)
    if missing is not None or len(optimizers) != expected:
        raise IncompleteCheckpointError(
            "lacks optimizer files of expert-parallel ranks, which hold the fp32 masters"
            if missing is not None
            else "has optimizer files of more expert-parallel ranks than there are",
            path=dense.file.path.parent,
            found=f"{len(optimizers)} of {expected}",
            expected=rank_file_name(RankFileKind.EXPERT_OPTIMIZER, missing or 0),
            hint="Copy all files of one save from the nodes that wrote them",
        )


def _known_sizes(layers: ExpertLayers, optimizers: Mapping[int, TorchFile]) -> set[int]:
    """The expert-parallel sizes that AutoEP records, or that parameter groups are named after."""
    sizes = {len(layer.held) for layer in layers.autoep.values()}
    for file in optimizers.values():
        optimizer = optimizer_in(file)
        key = "optimizer_state_dict"
        groups = optimizer.get(key).get("param_groups").items() if optimizer.has(key) else ()
        for group in groups:
            name = group.mapping_or_empty().get("name")
            match = _GROUP_NAME.fullmatch(name) if isinstance(name, str) else None
            sizes |= {int(match[1])} if match else set()
    return sizes


def check_one_form(optimizers: Mapping[int, TorchFile]) -> None:
    """Refuse files that keep masters in different forms, or some none: those of several runs.

    All ranks of a run have the same class of optimizer (DeepSpeed 0.10 to 0.19,
    ``runtime/engine.py``, ``_configure_optimizer``), and its class alone decides on the form.
    """
    forms = {file.path: form_of(optimizer_in(file)) for file in optimizers.values()}
    usual = Counter(form for form in forms.values() if form is not None).most_common(1)
    odd = next((path for path, form in forms.items() if usual and form != usual[0][0]), None)
    if odd is not None:
        raise DamagedCheckpointError(
            "keeps fp32 masters otherwise than the other expert-parallel ranks",
            path=odd,
            found=forms[odd] or "no masters",
            expected=usual[0][0],
            hint=_ONE_SAVE,
        )


def check_dense_masters(
    dense: ModelStates, weights: Sequence[Weight], shares: Sequence[Share]
) -> None:
    """Refuse ranks that disagree on which dense weights are trained, and masters of lost weights.

    Every rank steps the same dense weights. Where a rank's masters have all found their weights, a
    weight without one has none. A model file without any dense weight leaves room for as many
    elements as the rank's own experts have.
    """
    for share in () if weights else shares:
        numel = sum(
            one.numel for group in unnamed_masters(optimizer_in(share.file)) for one in group
        )
        if numel > (room := sum(one.numel for one in share.experts)):
            raise DamagedCheckpointError(
                "has no weights beside the experts', although there are fp32 masters of some",
                path=dense.file.path,
                found=f"{numel} elements of masters in {share.file.path.name}",
                expected=f"{room} or fewer, as its experts have",
                hint=_ONE_SAVE,
            )
    for weight in weights:
        if not any(weight.name in share.masters.found for share in shares):
            continue
        for share in shares:
            if weight.name not in share.masters.found and not share.masters.doubt:
                raise DamagedCheckpointError(
                    f"lacks the fp32 master of {weight.name!r}, which another rank has",
                    path=share.file.path,
                    found=f"masters of {len(share.masters.found)} weights",
                    expected="those of the same dense weights on every expert-parallel rank",
                    hint=_ONE_SAVE,
                )


def check_evenly_trained(
    dense: ModelStates,
    layers: ExpertLayers,
    optimizers: Mapping[int, TorchFile],
    experts: Iterable[Weight],
    found: Mapping[str, Master],
) -> None:
    """Where nothing tells how many files there should be: all experts of a layer are trained alike.

    Else the masters of some lie in a file that is not here.
    """
    if not found or _known_sizes(layers, optimizers):
        return
    first: dict[str, str] = {}
    for weight in experts:
        native = parse_native(weight.name)
        alike = native.renumbered(0) if native is not None else weight.name
        other = first.setdefault(alike, weight.name)
        if (other in found) != (weight.name in found):
            raise IncompleteCheckpointError(
                f"holds the fp32 master of only one of {other!r} and {weight.name!r}",
                path=dense.file.path.parent,
                found=f"{len(optimizers)} files expp_rank_*_optim_states.pt",
                expected="one for each expert-parallel rank",
                hint="Copy them from the nodes that wrote them",
            )
