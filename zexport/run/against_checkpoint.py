"""Tensors made again from their sources: is a folder that is there what a plan gives?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

from blake3 import blake3
from msgspec import Struct

from zexport import __version__
from zexport.errors import VerificationError
from zexport.export.plan import ExportPlan, TensorPlan
from zexport.export.proof import WeightReader
from zexport.filenames import MANIFEST_NAME
from zexport.ranges.ahead import announced, in_order
from zexport.ranges.ledger import Ledger
from zexport.run.begin import entry_of
from zexport.run.finish import source_entries
from zexport.run.manifest import FileEntry, Manifest, SourceEntry, is_as_written, read_manifest
from zexport.run.output_files import is_safetensors
from zexport.run.pieces import Buffers, FileReader, TensorReader, convert, pieces
from zexport.run.progress import Meter
from zexport.run.shares import Share, shares_of
from zexport.store.contents import read_range
from zexport.store.files import reading, version
from zexport.store.folders import exists, is_file
from zexport.store.json import values_of


def digests_from_source(
    plan: ExportPlan, tensors: Sequence[TensorPlan], reader: TensorReader, ledger: Ledger
) -> Iterator[tuple[TensorPlan, str]]:
    """Tensors of a plan, in order, each with the digest of what it would be written as."""
    cut = partial(pieces, chunk_nbytes=plan.chunk_nbytes)
    pool: SimpleQueue[Buffers] = SimpleQueue()
    for _ in range(plan.jobs):
        pool.put(Buffers(plan.chunk_nbytes))

    def digest_of(tensor: TensorPlan) -> str:
        buffers = pool.get()
        try:
            digest = blake3()
            for piece in cut(tensor):
                out = buffers.out[: piece.nbytes]
                convert(piece, reader, buffers.stored, out, ledger)
                digest.update(out)
            return digest.hexdigest()
        finally:
            pool.put(buffers)

    ahead = announced(tensors, lambda tensor: tensor.nbytes, cut, reader.expect)
    with ThreadPoolExecutor(plan.jobs) as workers:
        yield from in_order(workers, digest_of, ahead, ahead=2 * plan.jobs)


class Problem(Struct, frozen=True):
    """One contradiction.

    Attributes:
        file: name of the file within the output folder; empty where it has none.
        tensor: name of the tensor in the output; empty where it has none.
        problem: what is wrong, without a full stop.
    """

    file: str
    tensor: str
    problem: str


class HeldAgainst(Struct, frozen=True):
    """Where an export is not what the checkpoint gives, and what that comes to, in words.

    Nothing is concluded where the checkpoint's files are those that were read for the export.
    """

    problems: Sequence[Problem]
    conclusion: str = ""


def hold_against(
    plan: ExportPlan, manifest: Manifest, on_bytes: Callable[[int], None]
) -> HeldAgainst:
    """An export held against the checkpoint, every tensor of which is made again."""
    planned = {tensor.name: tensor for shard in plan.shards for tensor in shard.tensors}
    values = "has other values in the checkpoint"
    if manifest.provenance.get("from_base"):
        values += ", or in the base"
    problems = [
        Problem("", name, "is in the checkpoint but not in the export")
        for name in sorted(planned.keys() - manifest.tensors.keys())
    ]
    problems += [
        Problem("", name, "is in the export but not in the checkpoint")
        for name in sorted(manifest.tensors.keys() - planned.keys())
    ]
    with WeightReader.of_plan(plan) as files:
        files.compare()
        reader = FileReader(files)
        ledger = reader.new_ledger()
        tensors = [tensor for shard in plan.shards for tensor in shard.tensors]
        for tensor, digest in digests_from_source(plan, tensors, reader, ledger):
            entry = manifest.tensors.get(tensor.name)
            if entry is not None and (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                other = "has another shape or dtype in the checkpoint"
                problems.append(Problem(entry.shard, tensor.name, other))
            elif entry is not None and entry.blake3 != digest:
                problems.append(Problem(entry.shard, tensor.name, values))
            on_bytes(tensor.nbytes)
        reader.take(ledger.ranges())
        read = source_entries(plan, reader.finish())
    again = {name for path, name in plan.source_names.items() if path in plan.pruned}
    others = [*_source_file_problems(read, manifest, again)]
    unit = "pieces" if plan.form.is_checkpoint else "tensors"
    known = planned.keys() | manifest.tensors.keys()
    conclusion = _conclusion(len(problems), len(known), unit) if others else ""
    return HeldAgainst(problems or others, conclusion)


def _conclusion(differing: int, count: int, unit: str) -> str:
    """What is the matter where the files are not those that the export was made from."""
    if not differing:
        return (
            f"All {count:,} {unit} are equal; only the files that they lie in are others than "
            "those that were read for the export, as those of a resharded checkpoint are"
        )
    if 2 * differing <= count:
        return ""
    return (
        f"{differing:,} of {count:,} {unit} differ, and so do the files that they lie in: this is "
        "another checkpoint than the one that the export was made from, of another run or step"
    )


def frame_problems(out_dir: Path, plan: ExportPlan) -> Iterator[Problem]:
    """Files of ranks that say something else beside their tensors than the checkpoint does."""
    for file in plan.shards:
        path = out_dir / file.filename
        if not is_safetensors(file.filename) and is_file(path):
            ways = (file.frame.pieces([number] * len(file.tensors)) for number in (0, 1))
            known = (one for one, other in zip(*ways, strict=True) if one == other)
            if any(read_range(path, offset, len(data)) != data for offset, data in known):
                told = "has other settings, or other values that are no tensors, in the checkpoint"
                yield Problem(file.filename, "", told)


def _source_file_problems(
    read: Iterable[SourceEntry], manifest: Manifest, again: Set[str]
) -> Iterator[Problem]:
    """Where the files that were read are not those that the manifest lists, though the tensors are.

    A file of another modification time is the same file, if its bytes are: it may have been copied.
    Those that were written ``again``, without the optimizer's states, are known by their tensors.
    """
    found = {entry.path: entry for entry in read}
    listed = {entry.path: entry for entry in manifest.sources}
    for path in found.keys() - listed:
        yield Problem("", "", f"source {path} was not read for the export")
    for path in listed.keys() - found:
        yield Problem("", "", f"source {path} is not read any more")
    for path in sorted((found.keys() & listed.keys()) - again):
        now, then = found[path], listed[path]
        if (now.nbytes, now.blake3) != (then.nbytes, then.blake3):
            yield Problem("", "", f"source {path} is not what was read for the export")


def looks_made(plan: ExportPlan, folder: Path) -> bool:
    """Whether a folder is an export that says of itself what the plan says; no tensor is read."""
    try:
        with reading(folder, VerificationError):
            return (
                exists(folder / MANIFEST_NAME)
                and _told(manifest := read_manifest(folder), plan) == _planned(plan)
                and is_as_written(folder)
                and all(_is_there(folder / name, one) for name, one in manifest.files.items())
            )
    except VerificationError:
        return False


def holds_share(
    folder: Path, plan: ExportPlan, share: Share, reader: TensorReader, meter: Meter
) -> bool:
    """Whether a folder that looks made has the tensors that this worker would write for it.

    They are made again: two checkpoints may have files of the same names, sizes and times.
    """
    manifest = read_manifest(folder)
    own = shares_of(plan, share.count)[share.number - 1]
    touched = {tensor.name for stretch in own for tensor in stretch.tensors}
    every = chain.from_iterable(stretch.file.tensors for stretch in own)
    tensors = [tensor for tensor in every if tensor.name in touched]
    meter.expect(to_write=0, left=sum(tensor.nbytes for tensor in tensors))
    for tensor, digest in digests_from_source(plan, tensors, reader, reader.new_ledger()):
        if manifest.tensors[tensor.name].blake3 != digest:
            return False
        meter.compared(tensor.nbytes)
    return True


def _told(manifest: Manifest, plan: ExportPlan) -> tuple[object, ...]:
    """All that a manifest says before a tensor is read; files of tensors count by their size."""
    of_tensors = {file.filename for file in plan.shards}
    return (
        manifest.zexport_version,
        manifest.provenance,
        {(one.path, one.nbytes, one.mtime_ns) for one in manifest.sources},
        {n: one.nbytes if n in of_tensors else one for n, one in manifest.files.items()},
        {name: (one.dtype, one.shape, one.shard) for name, one in manifest.tensors.items()},
    )


def _planned(plan: ExportPlan) -> tuple[object, ...]:
    """The same, of the manifest that a plan gives."""
    files: dict[str, object] = {file.filename: file.nbytes for file in plan.shards}
    return (
        __version__,
        values_of(plan.provenance),
        {(one.path, one.nbytes, one.mtime_ns) for one in source_entries(plan, {})},
        files | {side.filename: entry_of(side) for side in plan.side_files},
        {
            tensor.name: (tensor.dtype, tensor.shape, file.filename)
            for file in plan.shards
            for tensor in file.tensors
        },
    )


def _is_there(path: Path, entry: FileEntry) -> bool:
    return is_file(path) and version(path).nbytes == entry.nbytes
