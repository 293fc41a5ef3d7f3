"""Read weights with proof: every element used once, replicas equal, checksums complete.

The worst damage looks intact: rank files of another step, or of another rank, fit in every length.
Only the second copy that a checkpoint has of most weights exposes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Self

from msgspec import Struct

from zexport.checkpoint.state import FlatData, Role, StoredTensor, TrainingState, source_of
from zexport.errors import DamagedCheckpointError, UnsupportedError, raise_all
from zexport.export.plan import ExportPlan, SourceFile, TensorPlan
from zexport.findings import Finding, FindingKind, Findings
from zexport.options import CheckMode
from zexport.ranges.compare import CastReplica, Comparison, Replica, are_equal, compare_casts
from zexport.ranges.coverage import Coverage, Ranges
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.ranges.source import ByteSource, ExtentIndex
from zexport.storage.json import Natural
from zexport.text import some


class Accounting(Struct, frozen=True):
    """Coverage: elements of all partitions, and of trained weights outside of them.

    Attributes:
        total: all elements, counted from the files.
        used: elements of exported tensors.
        padding: elements that belong to no parameter.
        replica: elements of replicas, which are compared with what is exported.
        left_out: elements of tensors that are left out on purpose.
    """

    total: Natural
    used: Natural
    padding: Natural
    replica: Natural
    left_out: Natural


def account(checkpoint: TrainingState, exported: Iterable[StoredTensor]) -> Accounting:
    """Return the coverage of an export of some of a checkpoint's tensors.

    The total comes from the lengths of partitions, its parts from the shapes of tensors. Layouts
    ensure that no element is used twice: parameters of a group follow each other, and the boxes of
    a split tensor cover it once.

    Raises:
        UnsupportedError: an element belongs to no parameter.
    """
    flats = _FlatRanges(checkpoint.flats)
    counted = [t for t in checkpoint.tensors if t.role is Role.TRAINABLE or flats.hold(t.source)]
    trained = {id(source_of(t)): t for t in counted if t.source is not None}
    used = _reached((source_of(t) for t in exported if t.source is not None), trained.keys())
    elsewhere = sum(t.numel for t in trained.values() if not flats.hold(t.source))
    result = Accounting(
        total=sum(flat.numel for flat in checkpoint.flats) + elsewhere,
        used=sum(tensor.numel for key, tensor in trained.items() if key in used),
        padding=sum(flat.padding for flat in checkpoint.flats),
        replica=sum(
            replica.other.nbytes // flats.itemsize
            for replica in checkpoint.replicas
            if flats.hold(replica.other)
        ),
        left_out=sum(tensor.numel for key, tensor in trained.items() if key not in used),
    )
    parts = result.used + result.padding + result.replica + result.left_out
    if parts != result.total:
        raise UnsupportedError(
            "trained elements belong to no parameter; an export could silently lose weights",
            path=checkpoint.location.tag_dir,
            found=f"{result.total} elements in the partitions",
            expected=f"{parts}: {result.used} used, {result.padding} padding, {result.replica} "
            f"replicas, {result.left_out} left out",
            hint="Report this layout",
        )
    return result


def _reached(sources: Iterable[ByteSource], known: Set[int]) -> set[int]:
    """Return the ids in ``known`` of these sources and their constituents."""
    waiting = [*sources]
    seen: set[int] = set()
    while waiting:
        source = waiting.pop()
        if id(source) not in seen:
            seen.add(id(source))
            if id(source) not in known:
                waiting.extend(source.constituents())
    return seen & known


class _FlatRanges(ExtentIndex):
    """The byte ranges of flat data, and whether they contain a source."""

    def __init__(self, flats: Sequence[FlatData]) -> None:
        super().__init__(flat.source for flat in flats)
        self.itemsize = max((flat.dtype.itemsize for flat in flats), default=1)

    def hold(self, source: ByteSource | None) -> bool:
        if source is None or not source.nbytes or not self.ranges:
            return False
        return self.find(next(iter(source.extents(0, 1)))) is not None


class WeightReader(SourceReader):
    """The only reader of weights that are used.

    Call ``compare`` first, which compares replicas, and ``finish`` last, which completes the
    checksums of records. To read a whole checkpoint, call ``account`` before.
    """

    def __init__(
        self,
        files: Iterable[ReadableFile],
        replicas: Iterable[Replica | CastReplica],
        *,
        gathered: Sequence[CastReplica] = (),
        check: CheckMode = CheckMode.SAMPLED,
        allow: Set[FindingKind] = frozenset(),
    ) -> None:
        files = tuple(files)
        super().__init__(files)
        self._samples = [SourceFile(file.path, file.version, ()) for file in files]
        self._replicas = tuple(replicas)
        self._gathered = gathered
        self._check = check
        self._allow = allow
        self._compared: Coverage | None = None

    @classmethod
    def of_plan(cls, plan: ExportPlan) -> Self:
        return cls(
            plan.sources,
            plan.replicas,
            gathered=plan.gathered,
            check=plan.check,
            allow=plan.allow,
        )

    def prepare(self) -> None:
        """Get ready to read tensors, once replicas are compared."""

    def read_tensor(
        self, tensor: TensorPlan, start: int, buffer: memoryview, coverage: Coverage
    ) -> None:
        """Fill ``buffer`` with a tensor's stored bytes from ``start``."""
        self.read_into(tensor.source, start, buffer, coverage)

    def compare(self) -> Findings:
        """Compare all replicas; return a finding for each difference that the user accepts.

        Samples are read separately, so that a file that is only sampled is not read whole for its
        checksums. Full comparisons have their own coverage: a record is proven by the bytes that
        are used, if both were read.

        Raises:
            DamagedCheckpointError: replicas differ, and no ``--allow`` accepts that.
        """
        self._compared = self.new_coverage()
        whole = partial(self.read_into, coverage=self._compared)
        casts = [one for one in self._replicas if isinstance(one, CastReplica)]
        unnamed = [one for one in casts if one.is_matched_by_value]
        if differences := compare_casts(unnamed, whole, full=True, expect=self.expect):
            raise _unnamed_mismatch(differences)
        named = [one for one in casts if not one.is_matched_by_value]
        full = self._check is CheckMode.FULL
        with self.samples() as samples:
            read, expect = (whole, self.expect) if full else (samples.read_into, samples.expect)
            differences = compare_casts(named, read, full=full, expect=expect)
            gathered = compare_casts(
                self._gathered, samples.read_into, full=full, expect=samples.expect
            )
        unequal = [
            one
            for one in self._replicas
            if isinstance(one, Replica) and not are_equal(whole, one.kept, one.other)
        ]
        problems = [_cast_mismatch(differences, named)] if differences else []
        problems += [_replica_mismatch(unequal)] if unequal else []
        refused = [problem for problem in problems if problem.finding not in self._allow]
        if refused:
            raise_all(refused, refused[0].path)
        return (
            *(_cast_finding(FindingKind.CAST_MISMATCH, one, self._allow) for one in differences),
            *(_cast_finding(FindingKind.GATHERED_MISMATCH, one, self._allow) for one in gathered),
            *(
                Finding(FindingKind.REPLICA_MISMATCH, name, 0, accepted=True)
                for name in dict.fromkeys(one.name for one in unequal)
            ),
        )

    def samples(self) -> SourceReader:
        """Return a reader of the same files that proves nothing."""
        return SourceReader(self._samples)

    @property
    def compared(self) -> dict[Path, Ranges]:
        return {} if self._compared is None else self._compared.ranges()

    def take_compared(self, ranges: Mapping[Path, Ranges]) -> None:
        """Count the replicas as compared by another worker, which read these ranges."""
        self._compared = self.new_coverage()
        self._compared.add(ranges)

    def finish(self, seen: Coverage | None = None) -> dict[Path, str]:
        """Complete the checksums, after ``compare``."""
        if self._compared is None:
            raise AssertionError("weights were read and their copies not compared")
        self._coverage.add(self._compared.ranges())
        return super().finish(seen)


class ProvenWeights:
    """Weights of a checkpoint with full coverage, read together or one at a time."""

    def __init__(self, checkpoint: TrainingState, tensors: Sequence[StoredTensor]) -> None:
        account(checkpoint, tensors)
        self._files = [SourceFile.of(file) for file in checkpoint.torch_files]
        self._replicas = checkpoint.replicas
        self._seen = Coverage({file.path: file.records for file in self._files})
        self._lock = Lock()

    @contextmanager
    def reading(self, *, is_whole: bool = True) -> Iterator[WeightReader]:
        """Yield a reader of all tensors, or of one; the first reader compares replicas."""
        with WeightReader(self._files, self._replicas) as reader:
            reader.compare()
            yield reader
            with self._lock:
                reader.finish(None if is_whole else self._seen)
                self._replicas = ()


def _cast_finding(kind: FindingKind, difference: Comparison, allow: Set[FindingKind]) -> Finding:
    replica = difference.replica
    detail = f"of {difference.compared} compared with {replica.path.name}"
    return Finding(kind, replica.name, difference.count, detail, accepted=kind in allow)


def _unnamed_mismatch(differences: Sequence[Comparison]) -> DamagedCheckpointError:
    first = differences[0]
    return DamagedCheckpointError(
        f"fp32 master weights of {first.replica.name!r} do not match its module weights",
        path=first.replica.path,
        found=f"another value at element {first.first}; {len(differences) - 1} more weights differ",
        expected="the fp32 master weights, rounded",
        hint="The optimizer may have another parameter order, or weights changed after the last "
        "step: load 'module' of this file instead",
    )


def _cast_mismatch(
    differences: Sequence[Comparison], compared: Sequence[CastReplica]
) -> DamagedCheckpointError:
    files = sorted({one.path.name for one in differences})
    dtypes = sorted({one.replica.other_dtype.torch_name for one in differences})
    names = [f"{one.replica.name} ({one.count} of {one.compared} compared)" for one in differences]
    return DamagedCheckpointError(
        "module weights are not the fp32 master weights, rounded",
        path=differences[0].replica.path,
        found=f"{len(names)} of {len(compared)} differ in {some(files, 8)}: {some(names, 8)}",
        expected=f"fp32 master weights rounded to {' or '.join(dtypes)}",
        hint="These files may be of another step or rank. " + differences[0].replica.advice,
        finding=FindingKind.CAST_MISMATCH,
    )


def _replica_mismatch(differing: Sequence[Replica]) -> DamagedCheckpointError:
    first = differing[0]
    kept, other = (next(iter(one.extents(0, 1))).path for one in (first.kept, first.other))
    return DamagedCheckpointError(
        "replicas differ between ranks",
        path=other,
        found=f"{some(list(dict.fromkeys(replica.name for replica in differing)), 8)} differ",
        expected=f"values equal to those in {kept.name}, and on every rank",
        hint="Copy all rank files of one checkpoint again; if that changes nothing, the ranks "
        "diverged in training",
        finding=FindingKind.REPLICA_MISMATCH,
    )
