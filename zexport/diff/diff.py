"""Two model folders compared tensor by tensor, streamed, in memory that does not grow with them.

Model folders hold nothing twice that could be compared: what proves one is ``zexport verify``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.state import StoredTensor
from zexport.diff.folder import ModelWeights, has_rank_files, open_weights
from zexport.diff.roundings import Side
from zexport.diff.settings import Setting, of_models
from zexport.diff.streaming import Pair, sums_of
from zexport.diff.tensor import Outcome, PairValues, TensorDiff
from zexport.diff.values import PairSums
from zexport.diff.verdict import Cause, Verdict, judge
from zexport.errors import UsageError
from zexport.export.progress import Meter, Progress
from zexport.model.hub_cache import model_folder
from zexport.options import ExportOptions
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader
from zexport.storage.files import real
from zexport.storage.json import Natural
from zexport.storage.location import place
from zexport.text import brief

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


class TensorDiffs(Struct, frozen=True):
    """The tensors of two sides, the worst first, and the bytes read to compare them."""

    tensors: tuple[TensorDiff, ...] = ()
    nbytes_read: int = 0


_NO_STATES = TensorDiffs()


def diff_models(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """Compare the weights of two model folders, tensor by tensor.

    Tied weights are compared even if the two sides store them under different names. Memory does
    not grow with the models.

    Args:
        a: a model folder or safetensors file, such as an export, or the Hub id of a cached model.
        b: the same, such as the base model.
        jobs: worker threads; by default one per core, up to 4.
        progress: called at every step.

    Raises:
        CheckpointError: a side has no safetensors weights, or they cannot be read.
        UnsafeError: an index names a file outside its folder.
        UnsupportedError: zexport does not know a dtype.
    """
    jobs = ExportOptions().jobs if jobs is None else jobs
    if jobs < 1:
        raise UsageError("jobs are too few", found=jobs, expected="1 or more")
    a, b = (model_folder(place(side)) for side in (a, b))
    a_weights, b_weights = open_weights(a), open_weights(b)
    adapters = (a_weights.is_adapter, b_weights.is_adapter)
    settings = tuple(of_models(a, b, are_adapters=all(adapters)))
    found = diff_tensors(a_weights, b_weights, jobs=jobs, progress=progress)
    compared = _compared(a_weights, b_weights)
    has_more = has_rank_files(a) or has_rank_files(b)
    if has_more:
        compared += "; --states compares the rank files beside it"
    report = make_report((a, b), compared, found, settings=settings, adapters=adapters)
    if has_more and report.verdict.cause is Cause.NONE:
        sentence = f"{report.verdict.sentence}; the rank files beside were not compared"
        return replace(report, verdict=Verdict(Cause.NONE, sentence))
    return report


def _compared(a: ModelWeights, b: ModelWeights) -> str:
    """Which files were compared."""
    files = a.words if a.words == b.words else f"{a.words} of A, {b.words} of B"
    if {real(one.path) for one in a.files} == {real(one.path) for one in b.files}:
        return f"{files} (A and B are the same files: nothing was compared with anything else)"
    return files


def diff_tensors(
    a: ModelWeights,
    b: ModelWeights,
    *,
    jobs: int,
    progress: Callable[[Progress], None] | None = None,
) -> TensorDiffs:
    """How the tensors of two sides differ, wherever they are stored."""
    pairs, a_alone, b_alone = _paired(a, b)
    meter = Meter(progress, to_verify=sum(pair.nbytes for pair in pairs))
    files = {file.path: file for file in (*a.files, *b.files)}
    with SourceReader(files.values()) as reader:
        alike = (pair for pair in pairs if pair.numel > 0 or pair.a.shape == pair.b.shape)
        sums = sums_of(alike, reader, jobs, meter.verified)
        reader.finish()
        nbytes_read = reader.nbytes_read
    found = (
        *(_of_pair(pair, sums.get(pair)) for pair in pairs),
        *(TensorDiff(Outcome.ONLY_IN_A, t.name, None, t.dtype, None, t.shape) for t in a_alone),
        *(
            TensorDiff(Outcome.ONLY_IN_B, None, t.name, None, t.dtype, None, t.shape)
            for t in b_alone
        ),
    )
    return TensorDiffs(tuple(sorted(found, key=_order)), nbytes_read)


def make_report(
    paths: tuple[Path, Path],
    compared: str,
    weights: TensorDiffs,
    states: TensorDiffs = _NO_STATES,
    *,
    settings: tuple[Setting, ...] = (),
    adapters: tuple[bool, bool] = (False, False),
) -> DiffReport:
    """Return the report on weights, optimizer states and settings; modules are of the weights."""
    tensors = (*weights.tensors, *states.tensors)
    outcomes = Counter(tensor.outcome for tensor in tensors)
    return DiffReport(
        a=paths[0],
        b=paths[1],
        compared=compared,
        verdict=judge(
            weights.tensors, states.tensors, are_set_otherwise=bool(settings), adapters=adapters
        ),
        settings=settings,
        counts=Counts(**{outcome.value: outcomes[outcome] for outcome in Outcome}),
        modules=_by_module(weights.tensors),
        nbytes_read=weights.nbytes_read + states.nbytes_read,
        tensors=tensors,
    )


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


def _of_pair(pair: Pair, sums: PairSums | None) -> TensorDiff:
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
    return TensorDiff(
        outcome,
        a.name,
        b.name,
        a.dtype,
        b.dtype,
        a.shape,
        b.shape,
        rounding=rounding,
        values=None if sums is None else PairValues.of(sums, a.shape, is_complex=is_complex),
    )


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
