"""No ZeRO: the model states file has everything, and the optimizer numbers its parameters.

Numbers get names by the optimizer's order, kind and shape, then by samples of the fp32 master
weights against module weights. Weights that are too alike keep the module's values.

Source: DeepSpeed 0.10 to 0.19, ``runtime/fp16/unfused_optimizer.py`` (``fp32_groups``),
``fused_optimizer.py`` (``fp32_groups_flat``), ``loss_scaler.py``, ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain, islice, zip_longest
from math import prod
from operator import attrgetter, itemgetter
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.boxes import Bound, InFile, chained, in_file
from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    Copy,
    Group,
    Parameter,
    Recorded,
    Role,
    by_role,
)
from zexport.checkpoint.zero.flat_groups import zero_cell
from zexport.checkpoint.zero.module_names import same_views
from zexport.checkpoint.zero.ranks import FROM_NODES, Ranks
from zexport.checkpoint.zero.records import (
    Kept,
    ModelStates,
    OptimizerStates,
    flat_optimizer,
    kept_of,
)
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.findings import FindingKind
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.torch_file import TorchFile
from zexport.ranges.compare import fingerprint
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import Window
from zexport.text import some

NAMED = "single_partition_of_fp32_groups"
UNFUSED, FUSED = "fp32_groups", "fp32_groups_flat"
ROUNDED = (DType.BF16, DType.F16)
_ADAM = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}

Place = tuple[int, int]
"""A parameter group and a position in it."""

Span = tuple[int, int]
"""First and last index of what a place may be; if they are equal, it is certain."""


class Entry(Struct, frozen=True):
    """A numbered parameter (fused: all of a group, flat), and what the optimizer keeps of it."""

    file: TorchFile
    master: TensorRef | None
    kept: Kept
    is_expert: bool

    @property
    def shape(self) -> Shape | None:
        """Its shape; ``None`` if the optimizer keeps nothing of it."""
        known = [*self.kept.tensors.values()] if self.master is None else [self.master]
        return known[0].shape if known else None

    def slots(self, offset: int = 0, shape: Shape | None = None) -> dict[str, Bound]:
        """Return the slots, master weights first, of a weight that begins at ``offset``."""
        found = {}
        for slot, ref in {MASTER: self.master, **self.kept.tensors}.items():
            if ref is not None and ref.shape == self.shape:
                size, numel = ref.dtype.itemsize, ref.numel if shape is None else prod(shape)
                source = Window(self.file.source(ref), offset * size, numel * size)
                found[slot] = Bound(ref.dtype, source)
        return found


class NumberedGroup(Struct, frozen=True):
    """A parameter group; ``inner`` is the state dict that numbers its parameters."""

    file: TorchFile
    inner: PickleView
    entries: tuple[Entry, ...]
    settings: Mapping[str, object]


def numbered_groups(optimizer: PickleView, file: TorchFile) -> list[NumberedGroup]:
    if optimizer.has(NAMED):
        raise IncompleteCheckpointError(
            "has the fp32 master weights of one data-parallel rank only",
            path=file.path,
            expected="all partitions, in *_optim_states.pt",
            hint=FROM_NODES,
        )
    key = FUSED if optimizer.has(FUSED) else UNFUSED
    inner = optimizer.need("optimizer_state_dict") if optimizer.has(key) else optimizer
    if inner is optimizer and not inner.has("param_groups"):
        return []
    groups, found = inner.need("param_groups").items(), list[NumberedGroup]()
    saved = [[one] if key == FUSED else one.items() for one in optimizer.get(key).items()]
    for at, group in enumerate(groups):
        numbers = [one.number() for one in group.need("params").items()]
        # Only groups that a run added later have no master weights.
        refs = [None] * len(numbers) if at >= len(saved) else [o.tensor() for o in saved[at]]
        if len(refs) != len(numbers) or not all(o is None or o.dtype.is_floating for o in refs):
            optimizer.fail(f"does not have the fp32 master weights of group {at}", f"{len(refs)}")
        settings = {name: value for name, value in group.table().items() if name != "params"}
        is_expert = settings.get("moe") is True  # is_moe_param_group, moe/utils.py
        entries = tuple(
            Entry(file, ref, kept_of(inner, number), is_expert)
            for ref, number in zip(refs, numbers, strict=True)
        )
        found.append(NumberedGroup(file, inner, entries, settings))
    if len(saved) > len(groups) or (inner is not optimizer and not saved):
        optimizer.fail("does not have the fp32 master weights of its param_groups")
    return found


def match_in_order(
    known: Sequence[Hashable], wanted: Mapping[Place, Hashable]
) -> dict[Place, Span]:
    """Return the span of indices in ``known`` that each place may have; empty if impossible.

    The places of a group are in the order of ``known``, which may contain more.
    """
    free, found = [*range(len(known))], dict[Place, Span]()
    for group in sorted({group for group, _ in wanted}):
        own = [at for at in wanted if at[0] == group]
        kinds = [wanted[at] for at in own]
        first = _earliest(known, free, kinds)
        last = _earliest(known, free[::-1], kinds[::-1])[::-1]
        if len(first) < len(own):
            return {}
        found |= dict(zip(own, zip(first, last, strict=True), strict=True))
        taken = {one for one, other in zip(first, last, strict=True) if one == other}
        free = [at for at in free if at not in taken]
    return found


def _earliest(
    known: Sequence[Hashable], free: Sequence[int], wanted: Sequence[Hashable]
) -> list[int]:
    """Return the earliest free index for each, in order; fewer if there are not enough."""
    left, found = iter(free), list[int]()
    for kind in wanted:
        found += islice((at for at in left if known[at] == kind), 1)
    return found


def _match(
    known: Sequence[Hashable], wanted: Mapping[Place, Hashable]
) -> Mapping[Place, Span | None]:
    """Return the same in order or, failing that, by kind; ``None`` for kinds with too few."""
    if in_order := match_in_order(known, wanted):
        return in_order
    counts, claims = Counter(known), Counter(wanted.values())
    first = {kind: at for at, kind in reversed([*enumerate(known)])}
    last = {kind: at for at, kind in enumerate(known)}
    return {
        at: (first[kind], last[kind]) if claims[kind] <= counts[kind] else None
        for at, kind in wanted.items()
    }


def _match_entries(
    entries: Mapping[Place, Entry],
    known: Sequence[Parameter],
    files: Sequence[TorchFile],
    experts: Collection[str],
) -> Mapping[Place, Span | None]:
    """Match entries to weights, which are in the module's order, by samples if necessary."""
    kinds = [(one.name in experts, one.shape) for one in known]
    wanted = {
        at: (one.is_expert, one.shape)
        for at, one in entries.items()
        if 0 not in (one.shape or ())  # is_optimized_parameter, runtime/utils.py
    }
    found = _match(kinds, wanted)
    bound = {at: entries[at].slots()[MASTER] for at in wanted if entries[at].master is not None}
    if len(_certain(found)) == len(wanted) or len(bound) < len(wanted):
        return found
    every = {one.path: one for one in (*files, *(one.file for one in entries.values()))}
    dtype = min((one.dtype for one in known), key=attrgetter("itemsize"), default=DType.F32)
    with SourceReader([*every.values()]) as reader:
        looks = [
            (kind, fingerprint(reader.read_into, one.source(), one.dtype, dtype))
            for kind, one in zip(kinds, known, strict=True)
        ]
        seen = {
            at: (wanted[at], fingerprint(reader.read_into, one.bind(), one.dtype, dtype))
            for at, one in bound.items()
        }
    return _match(looks, seen)


def _certain(spans: Mapping[Place, Span | None]) -> dict[Place, int]:
    return {at: span[0] for at, span in spans.items() if span and span[0] == span[1]}


def with_optimizers(
    optimizers: Sequence[tuple[PickleView, TorchFile]],
    weights: Sequence[Parameter],
    files: Sequence[TorchFile],
    experts: Collection[str] = (),
) -> Cell:
    """Return a cell of module weights with the slots of all optimizers, one per stage."""
    stages = [own for root, file in optimizers if (own := numbered_groups(root, file))]
    groups = [[one for one in alike if one is not None] for alike in zip_longest(*stages)]
    entries = {
        (number, place): entry
        for number, own in enumerate(groups)
        for place, entry in enumerate(chain.from_iterable(group.entries for group in own))
    }
    marked = experts if any(one.is_expert for one in entries.values()) else ()
    usable = [one for one in weights if one.role is Role.TRAINABLE and one.dtype.is_floating]
    units = [(one, [one]) for one in usable if prod(one.shape)]
    if any(root.has(FUSED) for root, _ in optimizers):
        units = _flat_units([one for one, _ in units], experts, marked)
    known, tied = [one for one, _ in units], dict[Place, Place]()
    spans = _match_entries(entries, known, files, marked)
    if len(stages) > 1 and len(_certain(spans)) < len(spans):
        tied = _tied(entries)
        first_uses = {at: one for at, one in entries.items() if at not in tied}
        spans = _match_entries(first_uses, known, files, marked)
        _check_layers(first_uses, spans, known, is_tied=bool(tied))
    certain, names = _certain(spans), dict[Place, list[str]]()
    slots: dict[str, Mapping[str, Bound]] = {}
    for at, number in certain.items():
        offset, (_, run) = 0, units[number]
        names[at] = [one.name for one in run]
        for one in run:
            slots[one.name] = entries[at].slots(offset, one.shape)
            offset += prod(one.shape)
    has_masters = any(one.master is not None for one in entries.values())
    parameters: dict[str, Parameter] = {}
    for one in weights:
        role, stored = one.role, {**slots.get(one.name, {}), **one.stored}
        is_lone = not slots.get(one.name)
        if role is Role.TRAINABLE and slots and is_lone and len(certain) == len(spans):
            role = Role.FROZEN
        elif role is Role.TRAINABLE and one.dtype is DType.F32 and not has_masters:
            stored = {MASTER: one.stored[MODULE], **stored}
        parameters[one.name] = replace(one, role=role, stored=stored)
    found = []
    for number, group in enumerate(own[0] for own in groups):
        members = [name for at, own in names.items() if at[0] == number for name in own]
        scalars = Recorded(group.file, group.entries[0].kept.scalars if group.entries else {})
        of_experts = any(name in experts for name in members)
        found.append(Group((*members,), Recorded(group.file, group.settings), scalars, of_experts))
    copies = [
        Copy(*(replace(parameters[name], stored=entries[at].slots()) for at in (first, other)))
        for other, first in tied.items()
        for name in names.get(first, ())
    ]
    trained = [
        one for one in parameters.values() if one.role is Role.TRAINABLE and one.dtype in ROUNDED
    ]
    rounded = [one.name for one in trained if prod(one.shape) and not one.has(MASTER)]
    cell = Cell(
        parameters=by_role(parameters.values()),
        groups=tuple(found),
        copies=tuple(copies),
        matched=frozenset(slots if has_masters else ()),
    )
    if rounded:
        why = f"fp32 master weights are {'ambiguous' if has_masters else 'missing'}"
        text = f"ZeRO-0: weights are rounded as in the module, because {why}: {', '.join(rounded)}"
        cell = replace(cell, warnings=(text,))
    if lost := [entries[at] for at, span in spans.items() if span is None and entries[at].master]:
        problem = DamagedCheckpointError(
            f"{len(lost)} fp32 master weights match no weight of the module",
            path=lost[0].file.path,
            found=f"without master weights: {some(rounded) or 'none'}",
            hint="Copy all files of one checkpoint again",
            finding=FindingKind.CAST_MISMATCH,
        )
        cell = replace(cell, problems=(problem,))
    return cell


def _flat_units(
    weights: Sequence[Parameter], experts: Collection[str], marked: Collection[str]
) -> list[tuple[Parameter, list[Parameter]]]:
    """Return what may be flat groups, and their weights: views of one storage, in order.

    ``_save_moe_checkpoint`` clones every tensor; there a group has all dense weights, or all of the
    experts (``runtime/engine.py``).
    """
    runs, units = dict[Hashable, list[tuple[int, Parameter]]](), []
    for at, one in enumerate(weights):
        key: tuple[Hashable, int] = one.name in marked, at
        module = one.stored[MODULE]
        if not experts and isinstance(module, InFile):
            key = module.ref.storage, module.ref.offset
        runs.setdefault(key[0], []).append((key[1], one))
    for places in runs.values():
        run = [one for _, one in sorted(places, key=itemgetter(0))]
        shape, source = (sum(prod(one.shape) for one in run),), chained([o.source() for o in run])
        stored = {MODULE: Bound(run[0].dtype, source)}
        units.append((replace(run[0], shape=shape, stored=stored), run))
    return units


def _tied(entries: Mapping[Place, Entry]) -> dict[Place, Place]:
    """Return places of tied weights in later pipeline stages, with the place in the first.

    Nothing names a tied layer, but all stages that use it make the same steps: all slots are equal.
    Slots that are all zero prove nothing.
    """
    files = {one.file.path: one.file for one in entries.values()}
    alike = dict[Hashable, dict[Path, list[Place]]]()
    with SourceReader([*files.values()]) as reader:
        for at, one in entries.items():
            bound = [(own.bind(), own.dtype) for own in one.slots().values()]
            seen = [fingerprint(reader.read_into, own, dtype, dtype) for own, dtype in bound]
            zeros = [(Zeros(own.nbytes), dtype) for own, dtype in bound]
            if seen != [fingerprint(reader.read_into, own, dtype, dtype) for own, dtype in zeros]:
                stages = alike.setdefault((one.shape, *seen), {})
                stages.setdefault(one.file.path, []).append(at)
    once = [[own[0] for own in stages.values() if len(own) == 1] for stages in alike.values()]
    return {other: own[0] for own in once for other in own[1:]}


def _check_layers(
    entries: Mapping[Place, Entry],
    spans: Mapping[Place, Span | None],
    known: Sequence[Parameter],
    *,
    is_tied: bool,
) -> None:
    """Raise if the layer files of a pipeline do not have all weights that are trained."""
    unmatched = [entries[at] for at, span in spans.items() if span is None]
    lost = any(
        one.master or (one.shape and {*one.kept.tensors, *one.kept.scalars} <= _ADAM)
        for one in unmatched  # other optimizers than Adam may keep states of other shapes
    )
    is_partial = is_tied and len(_certain(spans)) < len(known)
    if lost or is_partial or len(entries) > len(known):
        raise (IncompleteCheckpointError if unmatched else UnsupportedError)(
            "layer files or model states files of a pipeline lack trained weights",
            path=next(iter(entries.values())).file.path.parent,
            found=f"{len(known)} weights in layer files, {len(entries)} in optimizers",
            hint="Copy all files of one checkpoint again; with tied layers, save with ZeRO-1",
        )


def _named_in_model(ranks: Ranks) -> Mapping[int, OptimizerStates]:
    """Return the optimizer states files, or what the model states file has of rank 0."""
    root = ranks.first.root.get("optimizer")
    if ranks.optimizer or not root.has(NAMED):
        return ranks.optimizer
    return {0: flat_optimizer(ranks.first.file, root, None)}


def by_slices(ranks: Ranks, shapes: Mapping[str, Shape]) -> Ranks | None:
    """Return the ranks with ``param_shapes`` rebuilt from the slices that BF16_Optimizer records.

    With them it is read as ZeRO-1. ``None`` if there are no slices, or not of all partitions.
    """
    optimizer = _named_in_model(ranks)
    owners = [one for _, one in sorted(optimizer.items())]
    if not owners or max(owners[0].partition_counts, default=0) != len(owners):
        return None
    groups = []
    for slices in zip_longest(*(one.fragments for one in owners), fillvalue={}):
        places = [place for own in slices for place in sorted(own.items(), key=itemgetter(1))]
        if missing := [name for name, _ in places if name not in shapes]:
            raise LayoutError("fp32 master weights are of no weight", missing[0], "a weight")
        groups.append({name: shapes[name] for name, _ in places})
    model = replace(ranks.first, param_shapes=tuple(groups))
    return replace(ranks, model={0: model}, optimizer=optimizer, world_size=len(optimizer))


def slice_sizes(ranks: Ranks) -> dict[str, int]:
    """Return the number of elements of every parameter that BF16_Optimizer's slices name."""
    sizes: Counter[str] = Counter()
    for fragments in (own for one in _named_in_model(ranks).values() for own in one.fragments):
        sizes.update({name: numel for name, (_, numel) in fragments.items()})
    return sizes


def stored_weights(model: ModelStates, aliases: Collection[str]) -> list[Parameter]:
    return [
        in_file(model.file, n, ref, Role.BUFFER if n in model.buffers else Role.TRAINABLE)
        for n, ref in model.module.items()
        if n not in aliases
    ]


def zero0_cell(ranks: Ranks) -> Cell:
    model = ranks.first
    named = by_slices(ranks, {name: ref.shape for name, ref in model.module.items()})
    if named is not None:
        return zero_cell(named)
    aliases = same_views(model.module, dict.fromkeys([*model.buffers, *model.module]))
    weights = stored_weights(model, aliases)
    cell = with_optimizers([(optimizer_of(model.file), model.file)], weights, [model.file])
    return replace(
        cell,
        aliases=aliases,
        left_out=tuple(name for name in model.buffers if name not in model.module),
        frozen=tuple(n for n, one in cell.parameters.items() if one.role is Role.FROZEN),
        files=ranks.files,
        states=model,
        index=ranks.index,
    )


def optimizer_of(file: TorchFile) -> PickleView:
    return view(file, "states").get("optimizer")


def tied_by_values(
    weights: Iterable[Parameter], files: Sequence[TorchFile]
) -> tuple[dict[str, str], list[str]]:
    """Return matrices without master weights that equal one with some, by samples: tied weights.

    The save of a model with experts clones every tensor, and without ZeRO ``shared_params`` is
    empty. The second list has those in a module without any master weights: they may be frozen
    copies (a reference model), which may differ by less than 16 bits show.
    """
    weights, modules = [*weights], dict[str, list[bool]]()
    for one in weights:
        for end in (at for at, char in enumerate(one.name) if char == "."):
            modules.setdefault(one.name[: end + 1], []).append(one.has(MASTER))
    frozen = tuple(name for name, own in modules.items() if len(own) > 1 and not any(own))
    matrices = [one for one in weights if len(one.shape) > 1 and one.dtype.is_floating]
    matrices.sort(key=attrgetter("value_slot"))  # MASTER is first
    shapes = {one.shape for one in matrices if one.value_slot == MODULE}
    owners, tied = dict[Hashable, str](), dict[str, str]()
    with SourceReader(files) as reader:
        for one in (one for one in matrices if one.shape in shapes):
            dtype, source = one.dtype_of(MODULE), one.source(MODULE)
            look = one.shape, dtype, fingerprint(reader.read_into, source, dtype, dtype)
            if one.value_slot == MASTER:
                owners.setdefault(look, one.name)
            elif look in owners:
                tied[one.name] = owners[look]
    twins = [name for name in tied if name.startswith(frozen)]
    return {name: one for name, one in tied.items() if name not in twins}, twins
