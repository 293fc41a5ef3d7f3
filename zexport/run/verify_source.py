"""An export held against its checkpoint: every tensor made again, and its digest compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from blake3 import blake3

from zexport.plan.plan import ExportPlan, TensorPlan
from zexport.ranges.ledger import Ledger
from zexport.run.finish import source_entries
from zexport.run.manifest import Manifest, SourceEntry, TensorEntry
from zexport.run.pieces import Buffers, FileReader, TensorReader, convert, pieces
from zexport.run.verify_report import Problem
from zexport.weights.proof import WeightReader


def source_problems(
    plan: ExportPlan, manifest: Manifest, on_bytes: Callable[[int], None]
) -> list[Problem]:
    """Where an export is not what the checkpoint gives, every tensor of which is made again."""
    planned = {tensor.name: tensor for shard in plan.shards for tensor in shard.tensors}
    problems = [
        Problem("", name, "is in the checkpoint but not in the export")
        for name in sorted(planned.keys() - manifest.tensors.keys())
    ] + [
        Problem("", name, "is in the export but not in the checkpoint")
        for name in sorted(manifest.tensors.keys() - planned.keys())
    ]
    with WeightReader.of_plan(plan) as files:
        files.compare()
        reader = FileReader(files)
        ledger = reader.new_ledger()
        for tensor, digest in _digests_from_source(plan, reader, ledger):
            entry = manifest.tensors.get(tensor.name)
            difference = _difference(tensor, digest, entry) if entry is not None else ""
            if entry is not None and difference:
                problems.append(Problem(entry.shard, tensor.name, difference))
            on_bytes(tensor.nbytes)
        reader.take(ledger.ranges())
        read = source_entries(plan, reader.finish())
    return problems or _source_file_problems(read, manifest)


def _source_file_problems(read: Iterable[SourceEntry], manifest: Manifest) -> list[Problem]:
    """Where the files that were read are not those that the manifest lists, though the tensors are.

    A file of another modification time is the same file, if its bytes are: it may have been copied.
    """
    found = {entry.path: entry for entry in read}
    listed = {entry.path: entry for entry in manifest.sources}
    problems = [
        Problem("", "", f"source {path} was not read for the export")
        for path in found.keys() - listed
    ] + [Problem("", "", f"source {path} is not read any more") for path in listed.keys() - found]
    for path in sorted(found.keys() & listed.keys()):
        now, then = found[path], listed[path]
        if (now.nbytes, now.blake3) != (then.nbytes, then.blake3):
            problems.append(Problem("", "", f"source {path} is not what was read for the export"))
    return problems


def _difference(tensor: TensorPlan, digest: str, entry: TensorEntry) -> str:
    if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
        return "has another shape or dtype in the checkpoint"
    return "" if entry.blake3 == digest else "has other values in the checkpoint"


def _digests_from_source(
    plan: ExportPlan, reader: TensorReader, ledger: Ledger
) -> Iterator[tuple[TensorPlan, str]]:
    """Every tensor of a plan with the digest of what it would be written as."""
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

    with ThreadPoolExecutor(plan.jobs) as workers:
        for shard in plan.shards:
            yield from zip(shard.tensors, workers.map(digest_of, shard.tensors), strict=True)
