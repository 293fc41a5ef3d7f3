"""What model-parallel ranks hold in pieces, as the whole parameters of a universal checkpoint.

Source: DeepSpeed 0.14.5 to 0.19.8, ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``), which
gives every parameter a folder whatever stage has it, and ``checkpoint/universal_checkpoint.py``
(``load_hp_checkpoint_state``), by which a run of the same degrees cuts its own pieces again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.contents import Parallelism, StoredTensor, source_of
from zexport.checkpoint.layouts.splits import Splits, join_alike, read_all_splits
from zexport.checkpoint.layouts.tensor_parallel import cut_shard, lay_shards
from zexport.checkpoint.model_states import ModelStates
from zexport.errors import LayoutError, UnsupportedError
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import Shape
from zexport.ranges.extents import Chain, Window
from zexport.ranges.replicas import Replica
from zexport.resharding.expert_shares import join_experts
from zexport.resharding.state import CellState, Group, Parameter, TrainingState

_AUTOTP = "autotp_unsupported_parameter_patterns"
"""A key that AutoTP's records alone have; its runs know by themselves how they are split."""


class Whole(Struct, frozen=True):
    """The parameters of all ranks, whole; the groups of all stages in one place are one.

    ``told`` has by parameter what its files say beside its elements, ``replicas`` are second
    copies, which must be equal.
    """

    groups: tuple[Group, ...]
    told: Mapping[str, Mapping[object, object]]
    replicas: tuple[Replica, ...] = ()


def join_cells(
    state: TrainingState, models: Mapping[int, ModelStates], degrees: Parallelism
) -> Whole:
    """The whole parameters of a training.

    Raises:
        UnsupportedError: its stages' groups are not alike, or a parameter or an expert is split in
            a way that no universal checkpoint of zexport's can tell.
    """
    _check_cells(state)
    grid = models[state.cells[0].index].grid  # which a universal source's degrees do not tell
    tensor = grid.tensor if grid is not None and len(models) > 1 else degrees.tensor_ranks
    count = tensor * state.cells[0].expert_ranks
    columns = [state.cells[at : at + count] for at in range(0, len(state.cells), count)]
    parts = [_join_column(ranks, models) for ranks in columns]
    groups, copies = _merged([one.groups for one in parts])
    return Whole(
        groups=groups,
        told={name: one for part in parts for name, one in part.told.items()},
        replicas=(*chain.from_iterable(part.replicas for part in parts), *copies),
    )


def _join_column(ranks: Sequence[CellState], models: Mapping[int, ModelStates]) -> Whole:
    """The parameters of one stage, of its tensor ranks or its expert-parallel ranks."""
    if any(group.of_experts for group in ranks[0].groups):
        return Whole(*join_experts(ranks, models[ranks[0].index]))
    if len(ranks) == 1:
        return Whole(ranks[0].groups, {})
    joiner = _Joiner(ranks, [models[one.index] for one in ranks])
    return Whole(joiner.groups(), joiner.told, tuple(joiner.replicas))


def _check_cells(state: TrainingState) -> None:
    folder = state.cells[0].model.file.path.parent
    settings = [[g.settings and g.settings.values for g in one.groups] for one in state.cells]
    if any(one != settings[0] for one in settings):
        raise UnsupportedError(
            "has other parameter groups on some model-parallel ranks, and a universal checkpoint "
            "has the settings of one for all",
            path=folder,
            found=" and ".join(f"{count} groups" for count in sorted({*map(len, settings)})),
            expected="the same groups on each",
            hint="Reshard to rank files with --world-size",
        )


def _merged(stages: Sequence[Sequence[Group]]) -> tuple[tuple[Group, ...], list[Replica]]:
    """The groups of all stages, and the copies that later stages have of tied layers."""
    kept: dict[str, Parameter] = {}
    copies: list[Replica] = []
    groups = []
    for alike in zip(*stages, strict=True):
        own = []
        for one in chain.from_iterable(group.parameters for group in alike):
            first = kept.setdefault(one.name, one)
            if first is one:
                own.append(one)
            else:
                copies += _copies(first, one)
        groups.append(replace(alike[0], parameters=tuple(own)))
    return tuple(groups), copies


def _copies(first: Parameter, other: Parameter) -> Iterator[Replica]:
    for state, tensor in first.tensors.items():
        sources = source_of(tensor), source_of(other.tensors[state])
        yield Replica(f"{first.name} ({state})", *sources)


class Parts(Struct, frozen=True):
    """How one tensor rank's part is cut out of a whole parameter."""

    records: tuple[Splits, ...]
    shards: Mapping[str, Sequence[Shape]]
    rank: int

    @classmethod
    def of(cls, models: Sequence[ModelStates], rank: int) -> Parts:
        """By the model states of a stage's tensor ranks."""
        shapes = [{n: s for own in model.param_shapes for n, s in own.items()} for model in models]
        names = _all_names(shapes)
        return cls(read_all_splits(models), _shards(names, shapes, models), rank)

    def cut(self, whole: StoredTensor) -> StoredTensor:
        """This rank's part; a vocabulary's padding, which no file has, is zeros."""
        name, size = whole.name, whole.dtype.itemsize
        joined = join_alike(self.records, name, self.shards)
        shard, source = self.shards[name][self.rank], source_of(whole)
        lacking = (prod(joined.shape) - whole.numel) * size
        if self.records[0].without_padding(name, joined.shape) != whole.shape:
            raise LayoutError(
                f"{name!r} has another shape than its record says", whole.shape, joined.shape
            )
        source = Chain((source, Zeros(lacking))) if lacking else source
        part = cut_shard(joined, source, shard, self.rank, size)
        return StoredTensor(name, shard, whole.dtype, whole.role, part)


def _shards(
    names: Iterable[str], shapes: Sequence[Mapping[str, Shape]], models: Sequence[ModelStates]
) -> dict[str, list[Shape]]:
    """The shape of every rank's part; one without an element is in the module alone."""
    return {
        name: [
            own[name] if name in own else model.module[name].shape
            for own, model in zip(shapes, models, strict=True)
        ]
        for name in names
    }


class _Joiner:
    """The tensor ranks of one stage; what loaders must be told, and copies, are collected."""

    def __init__(self, ranks: Sequence[CellState], models: Sequence[ModelStates]) -> None:
        self.told: dict[str, Mapping[object, object]] = {}
        self.replicas: list[Replica] = []
        self._ranks = ranks
        self._records = read_all_splits(models)
        own = [{one.name: one for one in cell.parameters()} for cell in ranks]
        self._parts = {name: [of.get(name) for of in own] for name in _all_names(own)}
        shapes = [{name: one.shape for name, one in of.items()} for of in own]
        self._shards = _shards(self._parts, shapes, models)

    def groups(self) -> tuple[Group, ...]:
        """Every group; a rank that has no element of a parameter does not name it in its own."""
        found = []
        for number, group in enumerate(self._ranks[0].groups):
            names = _all_names(
                [one.name for one in c.groups[number].parameters] for c in self._ranks
            )
            found.append(replace(group, parameters=tuple(map(self._whole, names))))
        return tuple(found)

    def _whole(self, name: str) -> Parameter:
        parts, shards = self._parts[name], self._shards[name]
        joined = join_alike(self._records, name, self._shards)
        record = self._records[0]
        self.told[name] = _told_of(record, name)
        shape = record.without_padding(name, joined.shape)
        first = next(one for one in parts if one is not None)
        tensors = {}
        for state, tensor in first.tensors.items():
            sources = [Zeros(0) if p is None else source_of(p.tensors[state]) for p in parts]
            whole, copies = lay_shards(joined, sources, shards, tensor.dtype.itemsize)
            kept = Window(whole, 0, prod(shape) * tensor.dtype.itemsize)
            tensors[state] = StoredTensor(name, shape, tensor.dtype, tensor.role, kept)
            self.replicas += (Replica(f"{name} ({state})", *pair) for pair in copies)
        return Parameter(name, shape, tensors)


def _all_names(of_ranks: Iterable[Iterable[str]]) -> list[str]:
    """The names of all ranks, in the order of the one that has most."""
    ranks = [[*one] for one in of_ranks]
    longest = max(ranks, key=len)
    return [*dict.fromkeys(chain(longest, *ranks))]


def _told_of(record: Splits, name: str) -> Mapping[object, object]:
    """What a file says of how a parameter is to be cut, for runs that do not know it themselves."""
    if record.sub_params.get(name) is not None and not record.record.has(_AUTOTP):
        raise UnsupportedError(
            f"has the fused parameter {name!r}, of which a universal checkpoint tells in an object "
            "of DeepSpeed's own that zexport does not write",
            path=record.record.path,
            hint="Reshard to rank files with --world-size, or convert it with ds_to_universal",
        )
    told: dict[object, object] = {"cat_dim": 1 if record.rows.get(name) else 0}
    if record.halves.get(name):
        told["param_n_sub_params"] = 2
    if record.vocabulary.get(name):
        told["vocab_tensor"] = True
    return told
