"""Can optimizer states be written for other ranks? If not, why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.state import (
    MASTER,
    Cell,
    Copy,
    Group,
    Parameter,
    RankValues,
    Recorded,
    Role,
    Structure,
    TrainingState,
)
from zexport.checkpoint.zero.expert_layers import autoep_weights, native_name
from zexport.checkpoint.zero.flat_groups import (
    MOMENTUM,
    SAME_RANKS,
    FlatGroup,
    InFlat,
    round_robin_order,
)
from zexport.checkpoint.zero.module_names import is_placeholder
from zexport.checkpoint.zero.ranks import Ranks, no_optimizer
from zexport.checkpoint.zero.records import Kept, ModelStates, OptimizerStates, scalar
from zexport.checkpoint.zero.stage0 import ROUNDED, numbered_groups, optimizer_of
from zexport.errors import IncompleteCheckpointError, UnsupportedError
from zexport.formats.pickle_values import Opaque, StorageRef, TensorRef
from zexport.formats.pickle_view import PickleView
from zexport.formats.torch_file import TorchFile
from zexport.formats.torch_writer import parts_of, tensors_in

_NEW_OPTIMIZER = "Start from an export's weights, with a new optimizer"

MEASURED = frozenset({"RMS"})
"""Scalars that each rank measures anew at every step, so that ranks may differ.

Source: transformers 5.23, ``optimization.py`` (``Adafactor.step``).
"""


OF_LAYOUT = frozenset(
    {
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "dp_world_size", "ds_config"),
    }
)
"""Keys of a model states file that depend on partitioning or config."""

_OF_EXPERTS = frozenset({"ds_autoep_layers", "autoep_layers", "universal_checkpoint_info"})


def reshardable(state: TrainingState) -> TrainingState:
    """Return the state with cells that can be partitioned again.

    Raises:
        ZexportError: optimizer states are missing, or cannot be written for other ranks.
    """
    if state.structure is Structure.UNIVERSAL:
        return state
    if state.pruned_files:
        path = state.location.tag_dir
        raise _no_states(path, "optimizer states were removed by zexport prune")
    cells = tuple(_reshardable_cell(cell, state.zero[cell.index]) for cell in state.cells)
    return replace(state, split=lambda: cells)


def _reshardable_cell(cell: Cell, ranks: Ranks) -> Cell:
    """Return a cell with each rank's own values, and copies of states that ranks have whole.

    A rank without a model states file has rank 0's values.
    """
    if ranks.is_zero0:
        file = cell.groups[0].scalars.file if cell.groups else ranks.first.file
        _check_numbered_states(cell, file)
        return cell
    if not any(ranks.first.param_shapes):
        raise UnsupportedError(
            "the order of weights in flat groups is not recorded, as in a pipeline without ZeRO",
            path=ranks.first.file.path,
            expected="param_shapes",
            hint="Resume with ZeRO stage 1, save, and reshard that checkpoint",
        )
    masters = (one.stored.get(MASTER) for one in cell.parameters.values())
    flats = {one.group.number: one.group for one in masters if isinstance(one, InFlat)}
    if (first := ranks.first_optimizer) is None:
        raise no_optimizer(ranks.folder, ranks.index)
    _check_groups(ranks, flats)
    groups = tuple(_groups(first, ranks.first, flats))
    copies = []
    for group in flats.values():
        for name, stored in group.whole_states(MOMENTUM).items():
            shape = group.shapes[name]
            kept = [Parameter(name, shape, Role.TRAINABLE, {MOMENTUM: one}) for one in stored]
            copies += [Copy(kept[0], other) for other in kept[1:]]
    return replace(cell, groups=groups, own=_own_values(ranks), copies=(*cell.copies, *copies))


def _groups(
    first: OptimizerStates, model: ModelStates, flats: Mapping[int, FlatGroup]
) -> Iterator[Group]:
    """Yield the parameter groups of a cell, with names in the order of the optimizer."""
    stacked = autoep_weights(model)
    for one in first.groups:
        own = [flats[number] for number in one.flat_groups if number in flats]
        names = [name for flat in own for name in flat.shapes]
        if first.stage in (1, 2) and model.is_round_robin and names:
            # BF16_Optimizer, which records no stage, does not deal parameters out.
            order = round_robin_order(len(names), len(own[0].owners))
            names = [name for _, name in sorted(zip(order, names, strict=True))]
        kept = first.kept[one.flat_groups[0]].scalars if one.flat_groups else {}
        yield Group(
            names=tuple(names),
            settings=None if one.settings is None else Recorded(first.file, one.settings),
            scalars=Recorded(first.file, kept),
            of_experts=any(name in stacked or native_name(name) for name in names),
        )


def _own_values(ranks: Ranks) -> tuple[RankValues, ...]:
    """Return client state and buffers that differ between ranks of a ZeRO-3 run, by rank.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``).
    """
    if not ranks.is_zero3:
        return ()
    models = [ranks.model.get(rank, ranks.first) for rank in range(len(ranks.owners))]
    client, buffers = _differing(map(_client_of, models)), _differing(map(_buffers_of, models))
    own = tuple(map(RankValues, client, buffers))
    return own if any(one.client.values or one.buffers.values for one in own) else ()


def _differing(recorded: Iterable[Recorded]) -> list[Recorded]:
    """Return each rank's values of the keys that have other values on another rank."""
    ranks = [*recorded]
    contents = [{k: _content(one.file, v) for k, v in one.values.items()} for one in ranks]
    first = contents[0]
    keys = sorted({k for own in contents for k in first | own if own.get(k) != first.get(k)})
    return [Recorded(o.file, {k: o.values[k] for k in keys if k in o.values}) for o in ranks]


def _client_of(one: ModelStates) -> Recorded:
    kept = {k: v for k, v in one.root.table().items() if k not in OF_LAYOUT | _OF_EXPERTS}
    return Recorded(one.file, kept)


def _buffers_of(one: ModelStates) -> Recorded:
    """Return everything in the module except placeholders of parameters."""
    module = one.root.get("module").table().items()
    kept = {k: v for k, v in module if not (isinstance(v, TensorRef) and is_placeholder(v))}
    return Recorded(one.file, kept)


def _content(file: TorchFile, value: object) -> list[object]:
    """Return what equal values of two files have in common, with the CRC-32 of storages."""
    found, waiting, seen = list[object](), [value], set[int]()
    for one in waiting:  # grows; a value may contain itself
        if isinstance(one, StorageRef):
            found.append((one.nbytes, file.checksum(one)))
        elif isinstance(one, TensorRef):
            found += [one.dtype, one.shape, one.stride, one.offset]
            waiting.append(one.storage)
        elif not isinstance(one, dict | list | tuple | Opaque):
            found.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            parts = [*parts_of(one)]
            found.append((type(one), len(parts)))
            waiting += [part for pair in parts for part in pair]
    return found


def _check_groups(ranks: Ranks, flats: Mapping[int, FlatGroup]) -> None:
    """Raise unless all ranks' parameter groups can be merged and partitioned again.

    Args:
        flats: a cell's flat groups by number; those of experts belong to some ranks only.
    """
    model, owners = ranks.first, [one for one in ranks.owners if one is not None]
    first = owners[0]
    has_stepped = (model.steps or 0) > model.skipped_steps
    every = [(one, one.groups) for one in owners]
    for owner in owners:
        _check_numbered(owner.inner)
    for at, group in enumerate(first.groups):
        numbers, settings = group.flat_groups, group.settings or {}
        found = [(one, own[at].settings or {}) for one, own in every if at < len(own)]
        _check_equal(f"setting {{!r}} of parameter group {at}", found)
        sharing = {n: flats[n].there if n in flats else owners for n in numbers}
        if len({*map(len, sharing.values())}) > 1:
            problem = "a parameter group has experts and other weights"
            raise UnsupportedError(problem, path=first.file.path, hint=SAME_RANKS)
        of_ranks = [(one, one.kept[n]) for n, own in sharing.items() for one in own]
        is_due = has_stepped and "betas" in settings and of_ranks
        if is_due and not any(kept.tensors for _, kept in of_ranks):
            raise _no_states(first.file.path)
        for owner, kept in of_ranks:
            if within := _tensors_within(kept):
                problem = f"optimizer state {within[0]!r} is inside another"
                raise UnsupportedError(problem, path=owner.file.path, hint=SAME_RANKS)
        states = [
            (one, {**kept.scalars, **dict.fromkeys(kept.tensors, "a tensor")})
            for one, kept in of_ranks
        ]
        _check_equal(f"optimizer state {{!r}} of flat groups {[*numbers]}", states)


def _tensors_within(kept: Kept) -> list[str]:
    """Return names of tensors inside other values (8-bit optimizers, lists), joined by dots."""
    values = {key: one for key, one in kept.scalars.items() if not isinstance(one, TensorRef)}
    return [name.replace("/", ".") for name, _ in tensors_in(values, TensorRef)]


def _check_equal(what: str, found: Sequence[tuple[OptimizerStates, Mapping[str, object]]]) -> None:
    """Raise if a value differs, such as one that Prodigy computes on each rank."""
    for owner, own in found:
        first, due = found[0]
        for name in sorted({**due, **own}.keys() - MEASURED):
            pair = [(first.file, due.get(name)), (owner.file, own.get(name))]
            if _content(*pair[0]) != _content(*pair[1]):
                shown = [scalar(*one) if isinstance(one[1], TensorRef) else one[1] for one in pair]
                raise UnsupportedError(
                    f"{what.format(name)} differs between ranks",
                    path=owner.file.path,
                    found=shown[1],
                    expected=f"{shown[0]}, as in {first.file.path.name}",
                    hint="If the optimizer computes it on each rank, resume with the same number "
                    "of ranks; else copy all rank files of one checkpoint again",
                )


def _check_numbered(inner: PickleView) -> None:
    """Raise if an optimizer has other keys than numbered states and parameter groups.

    torch's ``Optimizer.state_dict`` copies other keys of its state, and wrappers add their own.
    """
    own = inner.table()
    found = [key for key in own if key not in ("state", "param_groups")]
    if found := [*found, *PickleView(inner.path, "state", own.get("state")).table()]:
        raise UnsupportedError(
            f"optimizer state {found[0]!r} is not per-parameter and cannot be resharded",
            path=inner.path,
            hint=SAME_RANKS,
        )


def _no_states(
    path: Path, problem: str = "optimizer states are missing"
) -> IncompleteCheckpointError:
    hint = "Reshard a checkpoint that has them, or start from an export's weights"
    return IncompleteCheckpointError(problem, path=path, hint=hint)


def _check_numbered_states(cell: Cell, file: TorchFile) -> None:
    """Raise unless the states of an optimizer without ZeRO can be partitioned."""
    groups = numbered_groups(optimizer_of(file), file)
    entries = [one for group in groups for one in group.entries]
    is_rounded = any(
        one.dtype in ROUNDED and one.role is not Role.BUFFER for one in cell.parameters.values()
    )
    if not groups or (is_rounded and all(one.master is None for one in entries)):
        raise IncompleteCheckpointError(
            "there are no optimizer states of each parameter, or no fp32 master weights",
            path=file.path,
            hint=_NEW_OPTIMIZER,
        )
    _check_numbered(groups[0].inner)
    due = sum(prod(one.shape or (1,)) for one in entries)
    named = sum(prod(one.shape) for one in cell.trained())
    if named != due or cell.problems:
        raise UnsupportedError(
            f"numbered optimizer states match no weight: {due - named} of {due} elements",
            path=file.path,
            hint="Resume the run with ZeRO stage 1, save, and reshard that checkpoint",
        )
    for group in groups:
        scalars = [
            {key: _content(file, one) for key, one in entry.kept.scalars.items()}
            for entry in group.entries
        ]
        odd = [name for entry in group.entries for name in _tensors_within(entry.kept)]
        for entry, own in zip(group.entries, scalars, strict=True):
            odd += [k for k, ref in entry.kept.tensors.items() if ref.shape != entry.shape]
            odd += [k for k in scalars[0] | own if own.get(k) != scalars[0].get(k)]
        if odd:
            raise UnsupportedError(
                f"optimizer state {odd[0]!r} is not per weight element, or differs within a "
                "parameter group, and cannot be resharded",
                path=file.path,
                hint=_NEW_OPTIMIZER,
            )
