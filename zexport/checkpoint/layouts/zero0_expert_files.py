"""Whether the optimizer files of a ZeRO-0 run with experts are all there, and of one run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zexport.checkpoint.layouts.expert_layers import ExpertLayers
from zexport.checkpoint.layouts.expert_states import parse_native
from zexport.checkpoint.layouts.master_matching import Master, Masters, Weight
from zexport.checkpoint.layouts.unnamed_masters import form_of, unnamed_masters
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.states import ModelStates, optimizer_in
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError, UnsupportedError
from zexport.formats.torch_file import TorchFile

_GROUP_NAME = re.compile(r"ep_size_(\d{1,6})", re.ASCII)
_ONE_SAVE = "Copy all files of one save again"


@dataclass(frozen=True, slots=True)
class Share:
    """One expert-parallel rank: its optimizer file, its own experts' weights, all its masters."""

    file: TorchFile
    experts: Sequence[Weight]
    masters: Masters


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
