"""Completing a folder whose parts are written: sources proved as a whole, and the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path

from blake3 import blake3
from isal.isal_zlib import crc32_combine
from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import OutputError
from zexport.export.plan import ExportPlan, FilePlan, TensorPlan
from zexport.filenames import MANIFEST_NAME
from zexport.findings import Finding, FindingKind
from zexport.ranges.casts import Statistics
from zexport.ranges.digests import digest_ranges
from zexport.ranges.dtypes import DType
from zexport.ranges.ledger import Ranges
from zexport.run.begin import Workplace, write_file, write_sides
from zexport.run.manifest import FileEntry, SourceEntry, TensorEntry, new_manifest
from zexport.run.part import FrameWriter
from zexport.run.pieces import TensorReader
from zexport.run.receipts import Receipt
from zexport.run.shares import Stretch, shares_of, whole
from zexport.store.address import Address
from zexport.store.files import changed_ns, open_output, writing
from zexport.store.folders import is_file, remove
from zexport.store.publish import put_last

_OVERFLOW = {
    DType.F32: FindingKind.FP32_OVERFLOW,
    DType.F16: FindingKind.FP16_OVERFLOW,
    DType.BF16: FindingKind.BF16_OVERFLOW,
}

_UNDERFLOW_SHARE = 100
"""One element in so many may vanish in float16: of ordinary weights one in a million does, and of
an embedding the rows that are hardly used."""

_ORDINARY = Statistics(all_zero=False)


class Finished(Struct, frozen=True):
    """A folder that lacks nothing but its name: everything in it, and what was remarkable."""

    files: Mapping[str, FileEntry]
    findings: tuple[Finding, ...]


def finish(work: Workplace, reader: TensorReader, findings: tuple[Finding, ...]) -> Finished:
    """Complete a folder, whoever wrote its parts.

    Every stretch has its receipt, what was read for them was what was saved, and ``findings`` go on
    from those before.
    """
    plan, folder = work.plan, work.folder
    begun = work.receipts.need_begun()
    files = {**begun.side_files, **write_sides(work, work.last_sides)}
    sides = [*files]
    tensors: dict[str, TensorEntry] = {}
    found = [*findings]
    stretches: dict[str, list[Stretch]] = {file.filename: [] for file in plan.shards}
    for one in chain.from_iterable(shares_of(plan, begun.parts)):
        stretches[one.file.filename].append(one)
    for filename, own in stretches.items():
        file, receipt = _whole_file(work, own)
        reader.take(receipt.ranges)
        files[filename] = FileEntry(file.nbytes, receipt.blake3)
        tensors |= {
            tensor.name: TensorEntry(tensor.dtype, tensor.shape, filename, digest)
            for tensor, digest in zip(file.tensors, receipt.tensor_digests(), strict=True)
        }
        for tensor in file.tensors if receipt.remarkable else ():
            if (seen := receipt.remarkable.get(tensor.name)) is not None:
                found += _findings(tensor, seen, plan.allow)
    findings = tuple(found)
    manifest = new_manifest(
        provenance=plan.provenance,
        sources=source_entries(plan, reader.finish()),
        tensors=tensors,
        files=dict(files),
        findings=findings,
    )
    if isinstance(folder, Address):  # there once its manifest is: nothing is to fail after that
        _check_sides(work, {name: files[name] for name in sides})
        for stretch in chain.from_iterable(stretches.values()):
            work.receipts.of(stretch)  # nobody has put another object in its place
        content = b"".join(manifest.lines())
        with writing(folder / MANIFEST_NAME):
            put_last(folder / MANIFEST_NAME, content, manifest.shards)
        files[MANIFEST_NAME] = FileEntry(len(content), blake3(content).hexdigest())
        return Finished(files, findings)
    if is_file(folder / MANIFEST_NAME):  # of one who was killed as it wrote that, or just after
        remove(folder / MANIFEST_NAME)
    files[MANIFEST_NAME] = write_file(folder / MANIFEST_NAME, manifest.lines())
    _check_sides(work, {name: files[name] for name in (*sides, MANIFEST_NAME)})
    return Finished(files, findings)


def _check_sides(work: Workplace, files: Mapping[str, FileEntry]) -> None:
    with work.checks() as checks:
        for filename, entry in files.items():
            checks.add_file(filename, entry)
        checks.wait()


def _whole_file(work: Workplace, stretches: Sequence[Stretch]) -> tuple[FilePlan, Receipt]:
    """A file and its receipt; one that several workers wrote is completed here.

    Tensors that two of them wrote parts of are read, since no digest of a whole follows from those
    of its parts.
    """
    file = stretches[0].file
    receipts = [work.receipts.of(stretch) for stretch in stretches]
    _check_unchanged(work, stretches, receipts)
    if stretches[0].is_whole:
        return file, receipts[0]
    path = work.folder / file.filename
    joined = _joined(stretches, receipts, path)
    with open_output(path, is_new=False) as output:
        frame = FrameWriter(output, file)
        for index, crc32 in enumerate(joined.crc32s):
            frame.passed(index, crc32)
        joined = replace(joined, blake3=frame.file_digest(joined.digests))
        output.sync()
    with work.checks() as checks:
        checks.add_frame(whole(file), joined)
        checks.wait()
    return file, joined


def _check_unchanged(
    work: Workplace, stretches: Sequence[Stretch], receipts: Sequence[Receipt]
) -> None:
    """Read a file again that was changed after the last of its receipts; refuse another content."""
    path = work.folder / stretches[0].file.filename
    noted = {receipt.changed_ns for receipt in receipts}
    if isinstance(path, Address) or changed_ns(path) in noted - {None}:  # objects do not change
        return
    with work.checks() as checks:
        if all(map(checks.holds, stretches, receipts)):
            return
    raise _changed(path)


def _changed(path: Path) -> OutputError:
    return OutputError(
        "was changed since it was written",
        path=path,
        hint="Run the same command again, with --part each of the parts: what differs is written "
        "again",
    )


def _joined(stretches: Sequence[Stretch], receipts: Sequence[Receipt], path: Path) -> Receipt:
    """What the receipts of a file's stretches say of the file."""
    digests: dict[str, bytes] = {}
    crc32s: dict[str, int] = {}
    remarkable: dict[str, Statistics] = {}
    cut: dict[str, None] = {}
    told = chain.from_iterable(
        zip(stretch.tensors, receipt.tensor_digests(), receipt.crc32s, strict=True)
        for stretch, receipt in zip(stretches, receipts, strict=True)
    )
    pieces = sorted(told, key=lambda one: one[0].offset)
    for tensor, digest, crc32 in pieces:
        name = tensor.name
        if name in digests:
            cut[name] = None
            crc32s[name] = crc32_combine(crc32s[name], crc32, tensor.nbytes)
        else:
            digests[name], crc32s[name] = bytes.fromhex(digest), crc32
    for stretch, receipt in zip(stretches, receipts, strict=True):
        for name in dict.fromkeys(tensor.name for tensor in stretch.tensors):
            seen = receipt.remarkable.get(name, _ORDINARY)
            remarkable[name] = remarkable[name] + seen if name in remarkable else seen
    tensors = stretches[0].file.tensors
    noted = [((t.offset, t.nbytes), digest) for t, digest, _ in pieces if t.name in cut]
    with writing(path):
        # What is read counts only where it is what the parts wrote: it is proved by nothing else.
        if digest_ranges(path, [place for place, _ in noted]) != tuple(d for _, d in noted):
            raise _changed(path)
        read = digest_ranges(path, [(t.offset, t.nbytes) for t in tensors if t.name in cut])
    digests |= zip(cut, map(bytes.fromhex, read), strict=True)  # both in file order
    return Receipt(
        b"".join(digests[tensor.name] for tensor in tensors),
        tuple(crc32s[tensor.name] for tensor in tensors),
        {name: seen for name, seen in remarkable.items() if seen.is_remarkable},
        _ranges(receipts),
    )


def _ranges(receipts: Iterable[Receipt]) -> dict[Path, Ranges]:
    """What was read for all of them."""
    found: dict[Path, Ranges] = {}
    for receipt in receipts:
        for path, ranges in receipt.ranges.items():
            found.setdefault(path, Ranges()).extend(ranges)
    return found


def source_entries(plan: ExportPlan, digests: Mapping[Path, str]) -> list[SourceEntry]:
    """The files that were read, by their names in the plan."""
    names = plan.source_names
    return [
        SourceEntry(
            names[source.path],
            source.version.nbytes,
            source.version.mtime_ns,
            digests.get(source.path),
        )
        for source in plan.sources
    ]


def _findings(tensor: TensorPlan, seen: Statistics, allow: Set[FindingKind]) -> Iterator[Finding]:
    counts = {FindingKind.NAN: seen.nan, FindingKind.INF: seen.inf}
    if seen.overflow:
        counts[_OVERFLOW[tensor.dtype]] = seen.overflow
    if seen.underflow * _UNDERFLOW_SHARE > tensor.numel:
        counts[FindingKind.FP16_UNDERFLOW] = seen.underflow
    if seen.all_zero:
        counts[FindingKind.ALL_ZERO] = tensor.numel
    for kind, count in counts.items():
        if count:
            yield Finding(kind, tensor.name, count, accepted=kind in allow)
