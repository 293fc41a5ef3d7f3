"""The fp32 masters of an optimizer without ZeRO, each brought to the name of its weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from zexport.checkpoint.layouts.master_matching import Master, Masters, Run, Weight, match
from zexport.checkpoint.optimizer_states import optimizer_in
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError
from zexport.formats.inert import FragmentAddress, StorageRef, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Chain, Window
from zexport.ranges.reader import SourceReader
from zexport.ranges.replicas import fingerprint

NAMED = "single_partition_of_fp32_groups"
"""Flat partitions with the names of what is in them: BF16_Optimizer's."""

UNFUSED = "fp32_groups"
"""A master for each parameter, without its name."""

FUSED = "fp32_groups_flat"
"""A flat master for each group, without the names of what is in it."""


def find_masters(
    file: TorchFile, weights: Sequence[Weight], others: Sequence[TorchFile] = ()
) -> Masters:
    """The masters that a file's optimizer holds of ``weights``; none where it holds none."""
    floating = [weight for weight in weights if weight.dtype.is_floating and weight.numel]
    optimizer = optimizer_in(file)
    form = form_of(optimizer)
    if form is None:
        return Masters({})
    try:
        if form == NAMED:
            return _named_masters(optimizer, file, {weight.name: weight for weight in floating})
        groups = _groups(optimizer, file)
        units = list(_units(floating, form, by_flag=any(expert_flags(optimizer))))
        files = {one.path: one for one in (file, *others)}
        return match(units, groups, partial(_sample, [*files.values()]))
    except LayoutError as error:
        raise UnsupportedError(
            f"holds fp32 masters that cannot be told apart: {error.problem}",
            path=file.path,
            found=error.found,
            expected=error.expected,
            hint="Resume the run with ZeRO stage 1, save, and export that; for the 16-bit weights "
            "alone, take the file's 'module'",
        ) from error


def _sample(files: Sequence[TorchFile], runs: Iterable[Run], seen_as: DType) -> list[bytes]:
    """Digests of a few kilobytes of each run, in the type of the module's weights.

    They propose names. What is read under a name is held against the weight, element by element.
    """
    with SourceReader(files) as reader:
        return [fingerprint(reader.read_into, run.source, run.dtype, seen_as) for run in runs]


def form_of(optimizer: Value) -> str | None:
    """The key under which an optimizer's state keeps masters; ``None`` where it keeps none."""
    return next((key for key in (NAMED, UNFUSED, FUSED) if optimizer.has(key)), None)


def unnamed_masters(optimizer: Value) -> list[list[TensorRef]]:
    """The masters of each parameter group that have no names; a fused group has one."""
    form = form_of(optimizer)
    if form not in (UNFUSED, FUSED):
        return []
    masters = [
        [_master_tensor(item) for item in (group.items() if form == UNFUSED else [group])]
        for group in optimizer.get(form).items()
    ]
    _check_counts(optimizer, masters)
    return masters


def _master_tensor(item: Value) -> TensorRef:
    """The tensor of masters that ``item`` must be, of floating-point numbers.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/fp16/`` and ``runtime/bf16_optimizer.py``: ``float()``
    of the weights.
    """
    tensor = item.tensor()
    if not tensor.dtype.is_floating:
        item.fail("is of a type that no masters have", tensor.dtype.torch_name)
    return tensor


def _check_counts(optimizer: Value, groups: Sequence[Sequence[TensorRef]]) -> None:
    """Refuse a group with fewer or more masters than it has parameters in the inner optimizer.

    These are its masters (DeepSpeed 0.10 to 0.19, ``runtime/fp16/unfused_optimizer.py`` and
    ``fused_optimizer.py``, ``__init__``). Only groups that a run added later have none.
    """
    counts = [group.get("params") for group in _inner_groups(optimizer)]
    if len(counts) < len(groups):
        return
    for number, (params, masters) in enumerate(zip(counts, groups or [[]], strict=False)):
        if isinstance(params, list) and len(params) != len(masters):
            raise DamagedCheckpointError(
                f"does not have an fp32 master for every parameter of group {number}",
                path=optimizer.path,
                found=len(masters),
                expected=f"{len(params)}, as its param_groups say",
                hint="Copy the file again from where it was written",
            )


def expert_flags(optimizer: Value) -> list[bool]:
    """Which parameter groups are of experts, where the run has told DeepSpeed.

    Source: DeepSpeed 0.10 to 0.19, ``moe/utils.py`` (``is_moe_param_group``).
    """
    return [group.get("moe") is True for group in _inner_groups(optimizer)]


def _inner_groups(optimizer: Value) -> list[Mapping[str, object]]:
    state = optimizer.get("optimizer_state_dict")
    groups = state.get("param_groups").items() if state.has("param_groups") else []
    return [group.mapping_or_empty() for group in groups]


def _groups(optimizer: Value, file: TorchFile) -> list[list[Run]]:
    """The masters of each parameter group.

    Those without elements are left out, as DeepSpeed 0.19 does itself (``runtime/utils.py``,
    ``is_optimized_parameter``).
    """
    groups = unnamed_masters(optimizer)
    flags = expert_flags(optimizer)
    flags = flags if any(flags) and len(flags) == len(groups) else [False] * len(groups)
    return [
        [Run((flag, one.shape), file.source(one), one.dtype) for one in group if one.numel]
        for flag, group in zip(flags, groups, strict=True)
    ]


def _units(weights: Sequence[Weight], form: str, *, by_flag: bool) -> Iterator[Run]:
    """What masters of this form stand for: single weights, or all of a flat group."""
    if form == UNFUSED:
        for one in weights:
            yield Run((by_flag and one.of_experts, one.shape), one.source, one.dtype, ((one, 0),))
    elif any(weight.of_experts for weight in weights):
        yield from _laid_out(weights, by_flag=by_flag)
    else:
        yield from _stored(weights)


def _stored(weights: Iterable[Weight]) -> Iterator[Run]:
    """The storages that weights share without a gap, as the fused optimizer's flat groups are."""
    by_storage: dict[StorageRef, list[tuple[Weight, TensorRef]]] = {}
    for weight in weights:
        if weight.view is not None:
            by_storage.setdefault(weight.view.storage, []).append((weight, weight.view))
    for storage, held in by_storage.items():
        held.sort(key=lambda item: item[1].offset)
        if is_tiled([(view.offset, view.numel) for _, view in held], storage.numel):
            yield _laid_end_to_end([weight for weight, _ in held], of_experts=False)


def _laid_out(weights: Sequence[Weight], *, by_flag: bool) -> Iterator[Run]:
    """The fused optimizer's flat groups of a model with experts, whose files do not share storages.

    Source: DeepSpeed 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint`` clones every tensor) and
    ``runtime/fp16/fused_optimizer.py`` (a group's weights are laid end to end in their order).
    """
    for of_experts in (False, True) if by_flag else (None,):
        chosen = [one for one in weights if of_experts in (None, one.of_experts)]
        if len({one.dtype for one in chosen}) == 1:
            yield _laid_end_to_end(chosen, of_experts=bool(of_experts))


def _laid_end_to_end(weights: Sequence[Weight], *, of_experts: bool) -> Run:
    parts, numel = [], 0
    for weight in weights:
        parts.append((weight, numel))
        numel += weight.numel
    source = Chain(tuple(weight.source for weight in weights))
    return Run((of_experts, (numel,)), source, weights[0].dtype, tuple(parts))


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
        tensor = _master_tensor(flat)
        source, itemsize = file.source(tensor), tensor.dtype.itemsize
        for name, entry in mapping.entries():
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


def is_tiled(views: Sequence[tuple[int, int]], numel: int) -> bool:
    """Whether views, as (offset, numel) pairs, cover a storage of ``numel`` elements once each."""
    ordered = sorted(view for view in views if view[1])
    ends = [0, *(offset + count for offset, count in ordered)]
    return [offset for offset, _ in ordered] == ends[:-1] and ends[-1] == numel
