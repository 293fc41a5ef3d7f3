"""Running a plan: from nothing to a complete, checked folder, or to nothing again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zexport.findings import Finding
from zexport.plan.plan import ExportPlan
from zexport.run.commit import staged_folder
from zexport.run.conclusions import findings_of, manifest_nbytes, manifest_of
from zexport.run.convert import FileReader, TensorReader
from zexport.run.journal import Journal
from zexport.run.manifest import MANIFEST_NAME, FileEntry
from zexport.run.readback import Checks, Meter, Phase, Progress, VerifyMode
from zexport.run.results import ShardResult
from zexport.run.side_files import side_content, side_nbytes, write_file
from zexport.run.writer import reserve_shards, write_shards
from zexport.store.disk import check_space, sync_path, writing
from zexport.store.json import Json
from zexport.weights.proof import WeightReader

__all__ = [
    "ExportReport",
    "Finding",
    "Phase",
    "Progress",
    "TensorReader",
    "VerifyMode",
    "run_plan",
]

REPORT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    Attributes:
        out_dir: the folder that now exists.
        files: its files, sorted, the manifest among them.
        tensors: how many tensors it holds.
        nbytes_read: bytes read from the checkpoint.
        nbytes_written: bytes of all its files.
        seconds: how long it took.
        findings: what was remarkable about the values.
        warnings: the plan's, and what could not be cleared away after a replacement.
        verified: how it was read again.
        resumed: the shards that a stopped export had finished, read again and taken over.
    """

    out_dir: Path
    files: tuple[str, ...]
    tensors: int
    nbytes_read: int
    nbytes_written: int
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    verified: VerifyMode
    resumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """The report as JSON values, with a ``schema`` number."""
        return {
            "schema": REPORT_SCHEMA,
            "out_dir": str(self.out_dir),
            "files": list(self.files),
            "tensors": self.tensors,
            "nbytes_read": self.nbytes_read,
            "nbytes_written": self.nbytes_written,
            "seconds": self.seconds,
            "findings": [asdict(finding) for finding in self.findings],
            "warnings": list(self.warnings),
            "verified": self.verified.value,
            "resumed": list(self.resumed),
        }


def run_plan(
    plan: ExportPlan,
    *,
    reader: TensorReader | None = None,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: Callable[[Progress], None] | None = None,
) -> ExportReport:
    """Make the plan's output folder, complete, checked and on the disk, or nothing at all.

    What a stopped export of the same plan had finished is read again and taken over; the folder is
    the same, byte for byte, as if it had not been stopped.

    Args:
        plan: what to do; its sources must be as they were when it was made.
        reader: where the stored bytes come from; the plan's sources where none is given.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step, from one thread at a time, but not always from the same one.

    Raises:
        OutputError: the folder cannot be made.
        CheckpointError: a source cannot be read, is damaged, or was changed.
        VerificationError: what was written is not what was meant.
    """
    began = time.monotonic()
    warnings = list(plan.warnings)
    with ExitStack() as stack:
        sources = stack.enter_context(WeightReader.of_plan(plan))
        reader = FileReader(sources) if reader is None else reader
        paths = [source.path for source in plan.sources]
        paths += [side.origin for side in plan.side_files if side.origin is not None]
        folder = stack.enter_context(
            staged_folder(
                plan.out_dir, overwrite=plan.overwrite, sources=paths, warn=warnings.append
            )
        )
        work = _Work(plan, folder, reader, verify, Meter(verify, progress))
        work.take_over()
        work.prepare()
        work.compare(sources)
        work.write()
    return ExportReport(
        out_dir=plan.out_dir,
        files=tuple(sorted(work.files)),
        tensors=sum(len(shard.tensors) for shard in work.shards.values()),
        nbytes_read=reader.nbytes_read,
        nbytes_written=sum(entry.nbytes for entry in work.files.values()),
        seconds=time.monotonic() - began,
        findings=work.findings,
        warnings=tuple(warnings),
        verified=verify,
        resumed=work.resumed,
    )


class _Work:
    """A folder on its way from empty, or from what a stopped export left, to complete."""

    def __init__(
        self,
        plan: ExportPlan,
        folder: Path,
        reader: TensorReader,
        verify: VerifyMode,
        meter: Meter,
    ) -> None:
        self.files: dict[str, FileEntry] = {}
        self.shards: dict[str, ShardResult] = {}
        self.resumed: tuple[str, ...] = ()
        self.findings = plan.findings
        self._plan = plan
        self._folder = folder
        self._reader = reader
        self._verify = verify
        self._meter = meter
        self._journal = Journal(folder, plan)
        self._planned = {shard.filename: shard for shard in plan.shards}

    def take_over(self) -> None:
        """Read again the shards that the journal notes; what does not hold is cleared away."""
        noted = [(s, found) for s in self._plan.shards if (found := self._journal.find(s))]
        nbytes = {shard.filename: shard.data_nbytes for shard in self._plan.shards}
        left = sum(nbytes[shard.filename] for shard, _ in noted)
        self._meter.expect(to_write=sum(nbytes.values()) - left, left=left)
        with Checks(self._folder, self._verify, self._meter) as checks:
            for shard, written in noted:
                if checks.holds(shard, written):
                    self._count(written)
                    self._meter.resumed(shard.data_nbytes)
        self.resumed = tuple(self.shards)
        self._journal.keep_only(set(self.resumed))

    def prepare(self) -> None:
        """Take all the room that is needed, and write the small files; then the rest can go well.

        Raises:
            OutputError: there is no room, or a file cannot be made.
            CheckpointError: a file to copy cannot be read.
        """
        rest = self._rest()
        sides = sum(map(side_nbytes, self._plan.side_files))
        nbytes = sum(shard.nbytes for shard in rest.shards) + sides + manifest_nbytes(self._plan)
        check_space(self._folder, nbytes)
        for side in self._plan.side_files:
            path = self._folder / side.filename
            self.files[side.filename] = write_file(path, side_content(side))
        reserve_shards(rest, self._folder)
        with writing(self._folder):
            sync_path(self._folder)
        self._meter.expect(to_write=sum(shard.data_nbytes for shard in rest.shards))

    def compare(self, sources: WeightReader) -> None:
        """Hold second copies in the checkpoint against what is exported."""
        if found := sources.compare():
            names = {t.stored_name: t.name for shard in self._plan.shards for t in shard.tensors}
            self.findings += tuple(
                replace(one, tensor=names.get(one.tensor, one.tensor)) for one in found
            )

    def write(self) -> None:
        """Write and check every file that is not there yet."""
        with Checks(self._folder, self._verify, self._meter) as checks:

            def on_shard(shard: ShardResult) -> None:
                self._count(shard)
                checks.add_shard(self._planned[shard.filename], shard)

            write_shards(
                self._rest(),
                self._folder,
                self._reader,
                on_bytes=self._meter.written,
                on_shard=on_shard,
                on_disk=lambda shard: self._journal.add(self._planned[shard.filename], shard),
            )
            digests = self._reader.finish()
            self.findings += findings_of(self._plan, self.shards)
            manifest = manifest_of(
                self._plan, self.shards, self.files, sources=digests, findings=self.findings
            )
            path = self._folder / MANIFEST_NAME
            self.files[MANIFEST_NAME] = write_file(path, manifest.lines())
            for filename in self.files.keys() - self.shards.keys():
                checks.add_file(filename, self.files[filename])
            checks.wait()

    def _rest(self) -> ExportPlan:
        """The plan of the shards that are not there yet."""
        rest = tuple(s for s in self._plan.shards if s.filename not in self.shards)
        return replace(self._plan, shards=rest)

    def _count(self, shard: ShardResult) -> None:
        self.shards[shard.filename] = replace(shard, ranges={})  # there may be very many
        self.files[shard.filename] = FileEntry(shard.nbytes, shard.blake3)
        self._reader.take(shard.ranges)
