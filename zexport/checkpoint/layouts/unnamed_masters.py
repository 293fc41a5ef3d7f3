"""The fp32 masters of a ZeRO-0 optimizer, each brought to the name of its weight."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

from zexport.checkpoint.layouts.master_groups import (
    NAMED,
    UNFUSED,
    expert_flags,
    form_of,
    master_tensor,
    unnamed_masters,
)
from zexport.checkpoint.layouts.matching import (
    Span,
    is_tiled,
    match_in_order,
    match_unique,
    unlike_any,
)
from zexport.checkpoint.untrusted import Value
from zexport.errors import LayoutError
from zexport.formats.pickles import FragmentAddress, StorageRef, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.copies import fingerprint
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Chain, Window
from zexport.ranges.reader import SourceReader

_Item = TypeVar("_Item")
_Fingerprint = Callable[[ByteSource, DType], bytes]
_Look = tuple[Hashable, Hashable]
"""What is known of a tensor from metadata, and a digest of samples of its values."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as the module keeps it, in the element type that it trained in.

    Attributes:
        name, shape, dtype, source: what and where it is.
        view: the tensor of the model file that it is; ``None`` for one put together from several.
        of_experts: whether it belongs to an expert.
    """

    name: str
    shape: Shape
    dtype: DType
    source: ByteSource
    view: TensorRef | None = None
    of_experts: bool = False

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Master:
    """The fp32 values of one weight."""

    source: ByteSource
    dtype: DType


@dataclass(frozen=True, slots=True)
class Masters:
    """The masters that are some weight's beyond doubt.

    Attributes:
        found: by the weight's name.
        doubt: why others could not be told apart; empty where every master has found its weight.
        all_fit: whether there may be a weight for every master.
        unlike: weights that no master is like, where there are masters like no weight: one of the
            two is not of this save.
    """

    found: Mapping[str, Master]
    doubt: str = ""
    all_fit: bool = True
    unlike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one unnamed master stands for: a weight, or all that lie in one flat tensor.

    Attributes:
        kind: what is known of it from metadata.
        source: its values in the module.
        dtype: their element type.
        parts: the weights in it, with the element at which each begins.
    """

    kind: Hashable
    source: ByteSource
    dtype: DType
    parts: tuple[tuple[Weight, int], ...]


@dataclass(frozen=True, slots=True)
class _Unnamed:
    """One master without a name, and what is known of it from metadata."""

    kind: Hashable
    source: ByteSource
    dtype: DType


def find_masters(
    optimizer: Value, file: TorchFile, weights: Sequence[Weight], others: Sequence[TorchFile] = ()
) -> Masters:
    """The masters of ``weights``; none where the optimizer holds none.

    Args:
        optimizer: the optimizer's state.
        file: the file that it lies in.
        weights: the module's weights in the module's order, each once.
        others: further files that weights lie in.

    Raises:
        LayoutError: there are masters, and none is a weight's beyond doubt.
        DamagedCheckpointError: the optimizer is not what DeepSpeed writes.
    """
    floating = [weight for weight in weights if weight.dtype.is_floating and weight.numel]
    form = form_of(optimizer)
    if form == NAMED:
        return _named_masters(optimizer, file, {weight.name: weight for weight in floating})
    if form is None:
        return Masters({})
    by_flag = any(expert_flags(optimizer))
    if form == UNFUSED:
        units = [_weight_unit(weight, by_flag=by_flag) for weight in floating]
    else:
        of_experts = any(weight.of_experts for weight in floating)
        units = list(_laid_out(floating, by_flag=by_flag) if of_experts else _stored(floating))
    files = {one.path: one for one in (file, *others)}
    return _match(units, _groups(optimizer, file), tuple(files.values()))


def _groups(optimizer: Value, file: TorchFile) -> list[list[_Unnamed]]:
    """The masters of each parameter group.

    Those without elements are left out, as DeepSpeed 0.19 does itself (``runtime/utils.py``,
    ``is_optimized_parameter``).
    """
    groups = unnamed_masters(optimizer)
    flags = expert_flags(optimizer)
    flags = flags if any(flags) and len(flags) == len(groups) else [False] * len(groups)
    return [
        [_Unnamed((flag, one.shape), file.source(one), one.dtype) for one in group if one.numel]
        for flag, group in zip(flags, groups, strict=True)
    ]


def _weight_unit(weight: Weight, *, by_flag: bool) -> _Unit:
    kind = (by_flag and weight.of_experts, weight.shape)
    return _Unit(kind, weight.source, weight.dtype, ((weight, 0),))


def _stored(weights: Iterable[Weight]) -> Iterator[_Unit]:
    """The storages that weights share without a gap, as the fused optimizer's flat groups are."""
    by_storage: dict[StorageRef, list[tuple[Weight, TensorRef]]] = {}
    for weight in weights:
        if weight.view is not None:
            by_storage.setdefault(weight.view.storage, []).append((weight, weight.view))
    for storage, held in by_storage.items():
        held.sort(key=lambda item: item[1].offset)
        if is_tiled([(view.offset, view.numel) for _, view in held], storage.numel):
            yield _laid_end_to_end([weight for weight, _ in held], of_experts=False)


def _laid_out(weights: Sequence[Weight], *, by_flag: bool) -> Iterator[_Unit]:
    """The fused optimizer's flat groups of a model with experts, whose files do not share storages.

    Source: DeepSpeed 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint`` clones every tensor) and
    ``runtime/fp16/fused_optimizer.py`` (a group's weights are laid end to end in their order).
    """
    for of_experts in (False, True) if by_flag else (None,):
        chosen = [one for one in weights if of_experts in (None, one.of_experts)]
        if len({one.dtype for one in chosen}) == 1:
            yield _laid_end_to_end(chosen, of_experts=bool(of_experts))


def _laid_end_to_end(weights: Sequence[Weight], *, of_experts: bool) -> _Unit:
    parts, numel = [], 0
    for weight in weights:
        parts.append((weight, numel))
        numel += weight.numel
    source = Chain(tuple(weight.source for weight in weights))
    return _Unit((of_experts, (numel,)), source, weights[0].dtype, tuple(parts))


def _match(
    units: Sequence[_Unit], groups: Sequence[Sequence[_Unnamed]], files: Sequence[TorchFile]
) -> Masters:
    """By kind and order; by samples where these leave a doubt; else what is like nothing else."""
    masters = _flat(groups)
    misfit: LayoutError | None = None
    try:
        spans = match_in_order([u.kind for u in units], [[m.kind for m in g] for g in groups])
    except LayoutError as error:
        misfit, spans = error, []
    if not misfit and all(span.is_certain for span in _flat(spans)):
        return Masters(_pair(units, masters, _flat(spans)))
    with SourceReader(files) as reader:
        sampled, samples = _with_samples(units, groups, partial(fingerprint, reader))
    if misfit is not None:
        return _match_unordered(units, masters, (sampled, _flat(samples)), misfit)
    spans = match_in_order(sampled, samples)
    doubt = _ambiguity(units, _flat(spans))
    found = _pair(units, masters, _flat(spans))
    if not found and masters:
        raise LayoutError(doubt, "weights that are alike", "weights that differ")
    return Masters(found, doubt)


def _match_unordered(
    units: Sequence[_Unit],
    masters: Sequence[_Unnamed],
    looks: tuple[Sequence[_Look], Sequence[_Look]],
    misfit: LayoutError,
) -> Masters:
    """By samples alone; a weight and a master of one kind, each like nothing, are a contradiction.

    Args:
        units: what masters may stand for.
        masters: all of them.
        looks: the kinds and samples of both.
        misfit: why their order does not help.
    """
    spans = match_unique(*looks)
    found = _pair(units, masters, spans)
    if not found and masters:
        raise misfit
    if None not in spans:
        return Masters(found, all_fit=False)
    places: dict[_Look, list[int]] = {}
    for at, look in enumerate(looks[0]):
        places.setdefault(look, []).append(at)
    like = [Span(places[look][0], places[look][-1]) for look in looks[1] if look in places]
    alike = _ambiguity(units, like) if len(like) == len(masters) else ""
    doubt = alike or f"{misfit.problem} ({misfit.found})"
    unlike = tuple(weight.name for at in unlike_any(*looks) for weight, _ in units[at].parts)
    return Masters(found, doubt, all_fit=False, unlike=unlike)


def _ambiguity(units: Sequence[_Unit], spans: Iterable[Span]) -> str:
    """Which weights look like one master, where some do."""
    for span in spans:
        if not span.is_certain:
            one, other = (units[at].parts[0][0].name for at in (span.first, span.last))
            return f"several weights look like one fp32 master ({one!r} and {other!r} alike)"
    return ""


def _pair(
    units: Sequence[_Unit], masters: Sequence[_Unnamed], spans: Iterable[Span | None]
) -> dict[str, Master]:
    """The masters whose unit is certain, cut into the masters of its weights."""
    found: dict[str, Master] = {}
    for span, master in zip(spans, masters, strict=True):
        if span is None or not span.is_certain:
            continue
        parts, itemsize = units[span.first].parts, master.dtype.itemsize
        for weight, offset in parts:
            window = Window(master.source, offset * itemsize, weight.numel * itemsize)
            source = master.source if len(parts) == 1 else window
            found[weight.name] = Master(source, master.dtype)
    return found


def _with_samples(
    units: Sequence[_Unit], groups: Sequence[Sequence[_Unnamed]], read: Callable[..., bytes]
) -> tuple[list[_Look], list[list[_Look]]]:
    """The kinds with samples of the values in them: a few kilobytes of each tensor."""
    dtypes = {unit.dtype for unit in units}
    if len(dtypes) > 1:
        raise LayoutError(
            "the module's weights are of several types",
            ", ".join(sorted(dtype.torch_name for dtype in dtypes)),
            "one",
        )
    seen_as = next(iter(dtypes), DType.F32)
    return (
        [(unit.kind, read(unit.source, unit.dtype, seen_as)) for unit in units],
        [[(one.kind, read(one.source, one.dtype, seen_as)) for one in group] for group in groups],
    )


def _named_masters(optimizer: Value, file: TorchFile, weights: Mapping[str, Weight]) -> Masters:
    """The masters of BF16_Optimizer, whose dictionary names them.

    Source: DeepSpeed 0.19, ``runtime/bf16_optimizer.py`` (``state_dict``): the partition of the
    rank that saved, which is all of a group only where there is one rank.
    """
    found: dict[str, Master] = {}
    cut = False
    flats = optimizer.need(NAMED).items()
    mappings = optimizer.need("param_slice_mappings").items()
    for flat, mapping in zip(flats, mappings, strict=False):
        tensor = master_tensor(flat)
        source, itemsize = file.source(tensor), tensor.dtype.itemsize
        for name, entry in mapping.entries().items():
            place = entry.value
            if not isinstance(place, FragmentAddress):
                entry.fail("is not a fragment_address")
            expected = weights[name].numel if name in weights else 0
            if place.numel > expected or place.start + place.numel > tensor.numel:
                raise LayoutError(
                    f"the fp32 master of {name!r} does not fit",
                    f"elements {place.start} to {place.start + place.numel} of {tensor.numel}",
                    f"{expected} elements" if expected else "a weight of that name",
                )
            cut |= place.numel < expected
            if place.numel == expected:
                window = Window(source, place.start * itemsize, place.numel * itemsize)
                found[name] = Master(window, tensor.dtype)
    if weights and not found:
        raise LayoutError("no fp32 master is all there", "parts of some", "whole masters")
    counts = optimizer.get("partition_count").items()
    whole = all(count.number_or_none() == 1 for count in counts)
    partial = cut or (not whole and len(found) < len(weights))
    return Masters(found, "the optimizer's other partitions were not saved" if partial else "")


def _flat(groups: Iterable[Sequence[_Item]]) -> list[_Item]:
    return [item for group in groups for item in group]
