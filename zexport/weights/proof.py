"""Reading weights with proof: every element has its place, copies are equal, records are as saved.

The gravest kind of damage looks whole: rank files of another step, or exchanged ones, whose lengths
all fit. What shows it is that the checkpoint holds most weights twice.
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
from zexport.findings import Finding, FindingKind
from zexport.options import CheckMode
from zexport.plan.plan import ExportPlan, SourceFile
from zexport.printable import some
from zexport.ranges.extents import ByteSource, Places, paths_of
from zexport.ranges.ledger import Ledger, Ranges
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.ranges.replicas import CastReplica, Comparison, Replica, are_equal, compare_casts
from zexport.store.json import Natural

_NOBODY = ""
"""Whose a copy is that no tensor has the name of."""


class Accounting(Struct, frozen=True):
    """Elements of the flat partitions of all ranks, and of trained weights that lie elsewhere.

    Attributes:
        total: all of them, as the files have them.
        used: those of a tensor that is exported.
        padding: those that belong to no parameter, by the layout's arithmetic.
        replica: second copies, which are compared with what is exported.
        left_out: those of a tensor that is left out on purpose.
    """

    total: Natural
    used: Natural
    padding: Natural
    replica: Natural
    left_out: Natural

    @property
    def is_exact(self) -> bool:
        """Whether the parts make up the whole."""
        return self.total == self.used + self.padding + self.replica + self.left_out


def account(checkpoint: TrainingState, exported: Iterable[StoredTensor]) -> Accounting:
    """The account of an export of some of a checkpoint's tensors.

    The whole is counted on the files' side, from the lengths of the partitions; the parts on the
    other, from the shapes of tensors. That no element is used twice within the parts is what the
    layouts see to: parameters of a group lie one after another, and the tiles of a split tensor
    cover it once.
    """
    flats = _Places(checkpoint.flats)
    trained = {id(t.source): t for t in checkpoint.tensors if flats.count(t.source, t.role)}
    used = _reached((tensor.source for tensor in exported), trained.keys())
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
    if not result.is_exact:
        parts = result.used + result.padding + result.replica + result.left_out
        raise UnsupportedError(
            "holds trained elements that are not accounted for",
            path=checkpoint.location.tag_dir,
            found=f"{result.total} elements in the partitions",
            expected=f"{parts}: {result.used} used, {result.padding} padding, {result.replica} "
            f"second copies, {result.left_out} left out",
            hint="Report this layout; an export of it could lack weights without a sign",
        )
    return result


def _reached(sources: Iterable[ByteSource | None], known: Set[int]) -> set[int]:
    """Which of the sources that are known by identity these are, or are made of."""
    waiting: list[ByteSource] = [source for source in sources if source is not None]
    seen: set[int] = set()
    while waiting:
        source = waiting.pop()
        if id(source) not in seen:
            seen.add(id(source))
            if id(source) not in known:
                waiting.extend(source.constituents())
    return seen & known


class _Places(Places):
    """Where flat data lies, and whether sources are part of it."""

    def __init__(self, flats: Sequence[FlatData]) -> None:
        super().__init__(flat.source for flat in flats)
        self.itemsize = max((flat.dtype.itemsize for flat in flats), default=1)

    def hold(self, source: ByteSource | None) -> bool:
        """Whether a source begins in flat data; then it lies there as a whole."""
        if source is None or not source.nbytes:
            return False
        return self.find(next(iter(source.extents(0, 1)))) is not None

    def count(self, source: ByteSource | None, role: Role) -> bool:
        """Whether a tensor is accounted for: a trained one, or one in flat data."""
        return source is not None and (role is Role.TRAINABLE or self.hold(source))


class WeightReader(SourceReader):
    """Bytes of weights that are to be used; nobody reads such in another way.

    First ``compare`` holds second copies against each other, at last ``finish`` the records against
    their CRC-32. Where all of a checkpoint is read, ``account`` goes before.
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
        self._compared: Ledger | None = None

    @classmethod
    def of_plan(cls, plan: ExportPlan) -> Self:
        """What reads the sources of an export."""
        return cls(
            plan.sources,
            plan.replicas,
            gathered=plan.gathered,
            check=plan.check,
            allow=plan.allow,
        )

    def compare(self) -> tuple[Finding, ...]:
        """Hold the second copies against the first, piece by piece.

        Samples are read apart, so that a file of which nothing else is needed is not read whole for
        the sake of its CRC-32. What is compared whole has a ledger of its own: what a record is
        proven by are the bytes that are used, wherever both were read.
        """
        self._compared = self.new_ledger()
        whole = partial(self.read_into, ledger=self._compared)
        casts = [one for one in self._replicas if isinstance(one, CastReplica)]
        unnamed = [one for one in casts if one.names_it]
        if differences := compare_casts(unnamed, whole, full=True, expect=self.expect):
            raise _other_weight(differences)
        named = [one for one in casts if not one.names_it]
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
        problems = [_not_the_masters(differences, named)] if differences else []
        problems += [_diverged(unequal)] if unequal else []
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
        """What reads the same files and proves nothing: a look at some bytes costs no more."""
        return SourceReader(self._samples)

    @property
    def compared(self) -> dict[Path, Ranges]:
        """What was read to compare copies whole."""
        return {} if self._compared is None else self._compared.ranges()

    def take_compared(self, ranges: Iterable[Mapping[Path, Ranges]]) -> None:
        """Count the copies as compared: others did, and read this for it."""
        self._compared = self.new_ledger()
        for found in ranges:
            self._compared.add(found)

    def finish(self, seen: Ledger | None = None) -> dict[Path, str]:
        """As every ``SourceReader``'s; the copies must have been compared before."""
        if self._compared is None:
            raise AssertionError("weights were read and their copies not compared")
        self._ledger.add(self._compared.ranges())
        return super().finish(seen)


class ProvenWeights:
    """Weights of a checkpoint, all of whose trained elements are accounted for.

    They are read together, or one at a time as they are asked for; then it is remembered what was
    compared.
    """

    def __init__(self, checkpoint: TrainingState, tensors: Sequence[StoredTensor]) -> None:
        account(checkpoint, tensors)
        self._files = {file.path: SourceFile.of(file) for file in checkpoint.torch_files}
        self._replicas = checkpoint.replicas
        self._seen = Ledger({path: file.members for path, file in self._files.items()})
        self._lock = Lock()
        self._unseen: dict[str, list[Replica | CastReplica]] = {}
        used = {tensor.name for tensor in tensors}
        for replica in checkpoint.replicas:
            name = checkpoint.aliases.get(replica.name, replica.name)
            self._unseen.setdefault(name if name in used else _NOBODY, []).append(replica)

    @contextmanager
    def reading(self, tensor: StoredTensor | None = None) -> Iterator[WeightReader]:
        """What reads all of the tensors, or only one of them.

        With one, its copies are compared when it is read for the first time, and those that no
        tensor has the name of (such as of single experts of a stack) with the first of all.
        """
        if tensor is None:
            with WeightReader(self._files.values(), self._replicas) as reader:
                reader.compare()
                yield reader
                reader.finish()
            return
        owners = (_NOBODY, tensor.name)
        copies = [copy for owner in owners for copy in self._unseen.get(owner, ())]
        read = [source_of(tensor), *(held for copy in copies for held in (copy.kept, copy.other))]
        with WeightReader((self._files[path] for path in paths_of(read)), copies) as reader:
            reader.compare()
            yield reader
            with self._lock:
                reader.finish(self._seen)
        for owner in owners:
            self._unseen.pop(owner, None)


def _cast_finding(kind: FindingKind, difference: Comparison, allow: Set[FindingKind]) -> Finding:
    replica = difference.replica
    detail = f"of {difference.compared} compared with {replica.path.name}"
    return Finding(kind, replica.name, difference.count, detail, accepted=kind in allow)


def _other_weight(differences: Sequence[Comparison]) -> DamagedCheckpointError:
    """Masters that have no names, and were taken for weights that they are not."""
    first = differences[0]
    dtype = first.replica.other_dtype.torch_name
    return DamagedCheckpointError(
        f"the fp32 master of {first.replica.name!r} does not belong to the module's weight",
        path=first.replica.path,
        found=f"element {first.first} is another when rounded to {dtype}"
        + (f"; {len(differences) - 1} more weights differ" if len(differences) > 1 else ""),
        expected="the module's weight to be the master, rounded",
        hint="Parameters may have been given to the optimizer in another order than the model's, "
        "or weights changed after the last step: load the file's 'module' instead",
    )


def _not_the_masters(
    differences: Sequence[Comparison], compared: Sequence[CastReplica]
) -> DamagedCheckpointError:
    """Masters that are not those of the weights that the module was saved with."""
    files = sorted({one.path.name for one in differences})
    every = {path.name for path in paths_of(one.kept for one in compared)}
    dtypes = sorted({one.replica.other_dtype.torch_name for one in differences})
    return DamagedCheckpointError(
        "holds other weights than the masters in the optimizer files, rounded",
        path=differences[0].replica.path,
        found=f"{len(differences)} of {len(compared)} weights differ, in what "
        f"{some(files, 8)} hold{'s' if len(files) == 1 else ''}: "
        f"{some([_told(one) for one in differences], 8)}",
        expected=f"each weight to be its master as {' or '.join(dtypes)}",
        hint=_diagnosis(differences, is_everywhere=len(every) > 1 and set(files) == every),
        finding=FindingKind.CAST_MISMATCH,
    )


def _told(difference: Comparison) -> str:
    return f"{difference.replica.name} ({difference.count} of {difference.compared} compared)"


def _diagnosis(differences: Sequence[Comparison], *, is_everywhere: bool) -> str:
    """What such differences come from, and what to do."""
    if max(one.largest for one in differences) == 1:
        cause = "The values differ in the last place alone, as if rounded in another way"
    elif is_everywhere:
        cause = "The model file and the optimizer files seem to be of different steps or runs"
    else:
        cause = "The files named may be of another step, or exchanged among ranks"
    return f"{cause}. {differences[0].replica.advice}"


def _diverged(differing: Sequence[Replica]) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "holds other values than the rank whose copy would be exported",
        path=next(iter(differing[0].other.extents(0, 1))).path,
        found=f"{some(list(dict.fromkeys(replica.name for replica in differing)), 8)} differ",
        expected="equal copies on every rank",
        hint="Copy the rank files of one save again; if they are whole, the ranks had diverged",
        finding=FindingKind.REPLICA_MISMATCH,
    )
