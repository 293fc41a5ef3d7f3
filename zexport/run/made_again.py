"""Tensors made again from their sources: is a folder that is there what a plan gives?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

from blake3 import blake3

from zexport import __version__
from zexport.errors import VerificationError
from zexport.plan.plan import ExportPlan, TensorPlan
from zexport.ranges.ahead import announced, in_order
from zexport.ranges.ledger import Ledger
from zexport.run.begin import entry_of
from zexport.run.finish import source_entries
from zexport.run.manifest import MANIFEST_NAME, FileEntry, Manifest, is_as_written, read_manifest
from zexport.run.pieces import Buffers, TensorReader, convert, pieces
from zexport.run.progress import Meter
from zexport.run.shares import Share, shares_of
from zexport.store.files import reading, version
from zexport.store.folders import exists, is_file
from zexport.store.json import values_of


def digests_from_source(
    plan: ExportPlan, tensors: Sequence[TensorPlan], reader: TensorReader, ledger: Ledger
) -> Iterator[tuple[TensorPlan, str]]:
    """Tensors of a plan, in order, each with the digest of what it would be written as."""
    pool: SimpleQueue[Buffers] = SimpleQueue()
    for _ in range(plan.jobs):
        pool.put(Buffers(plan.chunk_nbytes))

    def digest_of(tensor: TensorPlan) -> str:
        buffers = pool.get()
        try:
            digest = blake3()
            for piece in pieces(tensor, plan.chunk_nbytes):
                out = buffers.out[: piece.nbytes]
                convert(piece, reader, buffers.stored, out, ledger)
                digest.update(out)
            return digest.hexdigest()
        finally:
            pool.put(buffers)

    def expect(batch: Sequence[TensorPlan]) -> None:
        reader.expect(piece for tensor in batch for piece in pieces(tensor, plan.chunk_nbytes))

    ahead = announced(tensors, lambda tensor: tensor.nbytes, expect)
    with ThreadPoolExecutor(plan.jobs) as workers:
        yield from in_order(workers, digest_of, ahead, ahead=2 * plan.jobs)


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
