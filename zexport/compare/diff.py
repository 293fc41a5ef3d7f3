"""Two model folders compared tensor by tensor, streamed, in memory that does not grow with them.

Model folders hold nothing twice that could be compared: what proves one is ``zexport verify``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import Struct, structs

from zexport.checkpoint.state import StoredTensor
from zexport.compare.folder import ModelWeights, has_rank_files, open_weights
from zexport.compare.roundings import Side
from zexport.compare.settings import Setting, of_models
from zexport.compare.streaming import Pair, sums_of
from zexport.compare.suspects import Found, SecondLook
from zexport.compare.tensor import Kind, Outcome, PairValues, TensorDiff, kind_of
from zexport.compare.values import PairSums
from zexport.compare.verdict import Cause, Verdict, judge
from zexport.printable import brief
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader
from zexport.run.progress import Progress, Teller
from zexport.store.folders import real
from zexport.store.json import Natural

_LAYER = re.compile(r"(.*?\.\d+)\.")


class Counts(Struct, frozen=True):
    """Tensors by outcome.

    Attributes:
        equal: the same shape, element type and bytes.
        cast_equal: one is the other rounded to an element type.
        different: other values.
        shape: another shape; the rows that both have are compared.
        only_in_a: in A alone.
        only_in_b: in B alone.
    """

    equal: Natural
    cast_equal: Natural
    different: Natural
    shape: Natural
    only_in_a: Natural
    only_in_b: Natural


class ModuleDiff(Struct, frozen=True):
    """The tensors of one layer, or of one module that is in none.

    Attributes:
        name: the layer with its number, or the tensor's name less its last part.
        tensors: how many of them were compared.
        unequal: how many of those are not the same, byte for byte.
        relative_norm: norm of all their differences over the norm of A; ``None`` where A is zero.
    """

    name: str
    tensors: Natural
    unequal: Natural
    relative_norm: float | None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Every tensor of two model folders, the worst first.

    Attributes:
        a: the first folder or file, as it was given.
        b: the second.
        compared: what of both was compared, in words.
        verdict: what follows from all that is seen.
        settings: what both say otherwise beside their tensors.
        counts: tensors by outcome.
        modules: what differs by module, the farthest apart first.
        nbytes_read: bytes read of both.
        tensors: the tensors that are not equal, the worst first; with `--all` every one.
    """

    a: Path
    b: Path
    compared: str
    verdict: Verdict
    settings: tuple[Setting, ...]
    counts: Counts
    modules: tuple[ModuleDiff, ...]
    nbytes_read: Natural
    tensors: tuple[TensorDiff, ...]

    __repr__ = brief

    def count(self, outcome: Outcome) -> int:
        """How many tensors have this outcome."""
        return int(getattr(self.counts, outcome.value))


def diff_weights(
    a: Path,
    b: Path,
    *,
    jobs: int,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """How the weights of two model folders differ; see ``zexport.api.compare.diff_models``."""
    weights = open_weights(a), open_weights(b)
    are_adapters = all(side.is_adapter for side in weights)
    settings = tuple(of_models(a, b, are_adapters=are_adapters))
    return with_settings(diff_tensors((a, b), weights, jobs=jobs, progress=progress), settings)


def with_settings(report: DiffReport, settings: tuple[Setting, ...]) -> DiffReport:
    """The report with what differs beside the tensors, which its verdict then tells of."""
    if not settings:
        return report
    told = f"{report.verdict.sentence}; what is set beside the tensors differs"
    verdict = structs.replace(report.verdict, sentence=told)
    kinds = [(one.a, one.b) for one in settings if one.about.endswith(" model_type")]
    if kinds and verdict.cause is not Cause.NONE:
        told = f"Cannot tell: A and B are models of two types, {' and '.join(kinds[0])}"
        verdict = Verdict(Cause.UNKNOWN, told)
    if verdict.cause is Cause.NONE:
        verdict = Verdict(Cause.UNKNOWN, "Every tensor is equal; what is set beside them differs")
    return replace(report, settings=settings, verdict=verdict)


def diff_tensors(
    paths: tuple[Path, Path],
    weights: tuple[ModelWeights, ModelWeights],
    *,
    jobs: int,
    progress: Callable[[Progress], None] | None = None,
    later: Side | None = None,
) -> DiffReport:
    """How the tensors of two sides differ, wherever they lie; of checkpoints, one is later."""
    a_weights, b_weights = weights
    pairs, a_alone, b_alone = _paired(a_weights, b_weights)
    told = Teller(progress, sum(pair.nbytes for pair in pairs))
    files = {file.path: file for file in (*a_weights.files, *b_weights.files)}
    with SourceReader(files.values()) as reader:
        alike = (pair for pair in pairs if pair.numel > 0 or pair.a.shape == pair.b.shape)
        sums = sums_of(alike, reader, jobs, told.add)
        first = {pair: _judged(pair, sums.get(pair)) for pair in pairs}
        look = SecondLook(sums, reader, jobs)
        found = [*_looked_at(first, look), *_alone(a_alone, b_alone, look)]
        reader.finish()
        nbytes_read = reader.nbytes_read
    tensors = tuple(sorted(found, key=_order))
    adapters = (a_weights.is_adapter, b_weights.is_adapter)
    verdict = judge(tensors, adapters, _exported(a_weights, b_weights), later)
    if verdict.cause is Cause.NONE and _has_more(a_weights, b_weights):
        sentence = f"{verdict.sentence}; the rank files beside were not compared"
        verdict = structs.replace(verdict, sentence=sentence)
    return DiffReport(
        a=paths[0],
        b=paths[1],
        compared=_compared(a_weights, b_weights),
        verdict=verdict,
        settings=(),
        counts=Counts(**{o.value: sum(t.outcome is o for t in tensors) for o in Outcome}),
        modules=_by_module(tensors),
        nbytes_read=nbytes_read,
        tensors=tensors,
    )


def _compared(a: ModelWeights, b: ModelWeights) -> str:
    """Which files, and which lie beside them and were not read."""
    files = a.words if a.words == b.words else f"{a.words} of A, {b.words} of B"
    if {real(one.path) for one in a.files} == {real(one.path) for one in b.files}:
        files += " (A and B are the same files: nothing was compared with anything else)"
    if _has_more(a, b):
        return f"{files}; --states compares the rank files beside it"
    return files


def _has_more(a: ModelWeights, b: ModelWeights) -> bool:
    """Whether what was compared lies beside rank files, whose masters may differ all the same."""
    return has_rank_files(a.path) or has_rank_files(b.path)


def _exported(a: ModelWeights, b: ModelWeights) -> Side | None:
    """The side that is an export, where one alone is."""
    if a.is_export == b.is_export:
        return None
    return Side.A if a.is_export else Side.B


def _paired(
    a: ModelWeights, b: ModelWeights
) -> tuple[list[Pair], list[StoredTensor], list[StoredTensor]]:
    """What there is on both sides, ties taken into account, and what is on one side alone."""
    shared = a.tensors.keys() & b.tensors.keys()
    pairs = [Pair(a.tensors[name], b.tensors[name]) for name in a.tensors if name in shared]
    a_names, b_names = (sorted(side.tensors.keys() - shared) for side in (a, b))
    ties = {**a.learn_ties(), **b.learn_ties()} if a_names or b_names else {}
    of_a = [(a.tensors[name], _partner(name, b, ties)) for name in a_names]
    of_b = [(b.tensors[name], _partner(name, a, ties)) for name in b_names]
    pairs += [Pair(one, partner) for one, partner in of_a if partner]
    pairs += [Pair(partner, one) for one, partner in of_b if partner]
    a_alone, b_alone = ([one for one, partner in side if not partner] for side in (of_a, of_b))
    return list(dict.fromkeys(pairs)), a_alone, b_alone


def _partner(name: str, other: ModelWeights, ties: Mapping[str, str]) -> StoredTensor | None:
    """The tensor of the other side that is tied to this name, if there is one."""
    source = ties.get(name, name)
    members = (source, *(alias for alias, root in ties.items() if root == source))
    return next((other.tensors[m] for m in members if m in other.tensors), None)


def _judged(pair: Pair, sums: PairSums | None) -> TensorDiff:
    a, b = pair.a, pair.b
    rounding = None
    if a.shape != b.shape:
        outcome = Outcome.SHAPE
    elif sums is not None and (sums.unequal or a.dtype is not b.dtype):
        rounding = next((r for r in pair.roundings if r in sums.roundings), None)
        if a.dtype is b.dtype and sums.is_constant(Side.A) is not sums.is_constant(Side.B):
            rounding = None  # whatever is near one number rounds to it
        outcome = Outcome.DIFFERENT if rounding is None else Outcome.CAST_EQUAL
    else:
        outcome = Outcome.EQUAL
    is_complex = DType.C64 in (a.dtype, b.dtype)
    tensor = TensorDiff(
        outcome,
        a.name,
        b.name,
        a.dtype,
        b.dtype,
        a.shape,
        b.shape,
        kind=Kind.RESHAPED,
        rounding=rounding,
        values=None if sums is None else PairValues.of(sums, a.shape, is_complex=is_complex),
    )
    if sums is None or outcome is Outcome.SHAPE:
        return tensor
    kind, side = kind_of(tensor, sums)
    return replace(tensor, kind=kind, side=side)


def _looked_at(found: Found, look: SecondLook) -> Iterator[TensorDiff]:
    """Every pair's difference, those that were suspects after a second look."""
    exchanged: Mapping[Pair, str] = dict(look.exchanged(found))
    own = {pair.a.name for pair in found if pair.is_of_one_name}
    for pair, tensor in found.items():
        if pair in exchanged:
            yield replace(tensor, kind=Kind.EXCHANGED, side=None, partner=exchanged[pair])
            continue
        kind, side = look.at(pair, tensor)
        if kind is Kind.UNRELATED and not pair.is_of_one_name and {pair.a.name, pair.b.name} & own:
            kind, side = Kind.UNTIED, Side.A if pair.a.name in own else Side.B
        yield replace(tensor, kind=kind, side=side)


def _alone(
    a_alone: Sequence[StoredTensor], b_alone: Sequence[StoredTensor], look: SecondLook
) -> Iterator[TensorDiff]:
    """What is on one side alone by its name, with its other name where the other side has it."""
    there = dict(look.renamed(a_alone, b_alone))
    back = {b: a for a, b in there.items()}
    for one in a_alone:
        partner = there.get(one.name)
        only = TensorDiff(Outcome.ONLY_IN_A, one.name, None, a_dtype=one.dtype, a_shape=one.shape)
        kind = Kind.RENAMED if partner else Kind.MISSING
        yield replace(only, kind=kind, side=Side.A, partner=partner)
    for one in b_alone:
        partner = back.get(one.name)
        only = TensorDiff(Outcome.ONLY_IN_B, None, one.name, b_dtype=one.dtype, b_shape=one.shape)
        kind = Kind.RENAMED if partner else Kind.MISSING
        yield replace(only, kind=kind, side=Side.B, partner=partner)


_WORST_FIRST = (
    Outcome.ONLY_IN_A,
    Outcome.ONLY_IN_B,
    Outcome.SHAPE,
    Outcome.DIFFERENT,
    Outcome.CAST_EQUAL,
    Outcome.EQUAL,
)


def _order(tensor: TensorDiff) -> tuple[int, int, float, str]:
    """Worst first: values by NaN and infinities in one alone, then by the relative difference."""
    values, rank = tensor.values, _WORST_FIRST.index(tensor.outcome)
    if values is None:
        return rank, 0, 0.0, tensor.name
    relative = math.inf if values.relative_norm is None else values.relative_norm
    return rank, -(values.nan_in_one + values.inf_in_one), -relative, tensor.name


def _by_module(tensors: Iterable[TensorDiff]) -> tuple[ModuleDiff, ...]:
    """The modules of the tensors that were compared, those that differ most first."""
    groups: dict[str, list[TensorDiff]] = {}
    for tensor in tensors:
        if tensor.values is not None:
            groups.setdefault(_module_of(tensor.name), []).append(tensor)
    found = [_module(name, group) for name, group in groups.items()]
    return tuple(sorted(found, key=_farthest_first))


def _module_of(name: str) -> str:
    """The layer that a tensor is in, or else its name less the last part."""
    layer = _LAYER.match(name)
    return layer[1] if layer else name.rpartition(".")[0] or name


def _module(name: str, tensors: Sequence[TensorDiff]) -> ModuleDiff:
    values = [tensor.values for tensor in tensors if tensor.values is not None]
    norm = math.hypot(*(one.norm or 0.0 for one in values))
    apart = math.hypot(*((one.relative_norm or 0.0) * (one.norm or 0.0) for one in values))
    return ModuleDiff(
        name=name,
        tensors=len(tensors),
        unequal=sum(tensor.outcome is not Outcome.EQUAL for tensor in tensors),
        relative_norm=apart / norm if norm else None,
    )


def _farthest_first(module: ModuleDiff) -> tuple[float, bool, str]:
    return -(module.relative_norm or 0.0), not module.unequal, module.name
