"""The plan of a resharding: from what a checkpoint holds to the origin of every output byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.problems import raise_problems
from zexport.decide import CheckpointRecord
from zexport.errors import UnsafeError, UsageError
from zexport.options import ReshardOptions, ResumeFormat
from zexport.plan.plan import ExportPlan, FilePlan, Form, Origin, SideFile, SourceFile
from zexport.plan.summary import share_memory
from zexport.ranges.extents import ByteSource, paths_of
from zexport.resume.native import native_files
from zexport.resume.read import read_state
from zexport.resume.settings import TargetSettings, settle
from zexport.resume.state import TrainingState
from zexport.resume.values import unwritable
from zexport.store.folders import local_path
from zexport.store.json import JsonObject, values_of
from zexport.weights.accounting import Accounting, account


class ReshardProvenance(Struct, frozen=True):
    """What a resharding was made of.

    Attributes:
        checkpoint: the checkpoint that was resharded.
        settings: what the layout of the result was decided by.
        dropped: keys of the client's state that were left out.
        accounting: where every element of the flat partitions went.
    """

    checkpoint: CheckpointRecord
    settings: TargetSettings
    dropped: tuple[str, ...]
    accounting: Accounting


def plan_reshard(
    checkpoint: ZeroCheckpoint, out_dir: Path | str, options: ReshardOptions
) -> ExportPlan:
    """The whole plan of a resharding; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks what a training goes on from.
        UnsupportedError: a state cannot be cut for other ranks.
        UnsafeError: a value to be carried cannot be written safely.
        UsageError: an option cannot be meant.
    """
    if options.format is not ResumeFormat.NATIVE:
        raise UsageError("--format cannot be universal yet", expected="native")
    settings, told = settle(checkpoint, options)
    findings = raise_problems(checkpoint, options.allow)
    state = read_state(checkpoint)
    dropped = _dropped(state, options)
    files = tuple(native_files(state, settings, checkpoint.location.tag, dropped))
    jobs, chunk_nbytes = share_memory(options, files)
    return ExportPlan(
        out_dir=local_path(out_dir),
        origin=Origin.of(checkpoint),
        form=Form((), "checkpoint", weights_only=False),
        shards=files,
        side_files=(SideFile("latest", checkpoint.location.tag.encode()),),
        sources=_sources(checkpoint, state, files),
        replicas=(*checkpoint.replicas, *state.replicas),
        check=options.check,
        allow=options.allow,
        findings=findings,
        provenance=_provenance(checkpoint, settings, dropped),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *told, *_told(state, dropped)),
        notes=checkpoint.notes,
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def _dropped(state: TrainingState, options: ReshardOptions) -> tuple[str, ...]:
    """The client's keys that cannot be written, where they may be left out."""
    files = [said for cell in state.cells for said in (cell.model, cell.optimizer)]
    found = {key: (said, error) for said in files for key, error in unwritable(said).items()}
    if found and not options.drop_client_state:
        key, (said, error) = next(iter(found.items()))
        raise UnsafeError(
            f"holds client state {key!r} that is made by code, and is not written again",
            path=said.file.path,
            found=error.found,
            expected=error.expected,
            hint="Leave such out with --drop-client-state",
        ) from error
    return tuple(found)


def _sources(
    checkpoint: ZeroCheckpoint, state: TrainingState, files: Iterable[FilePlan]
) -> tuple[SourceFile, ...]:
    """The files that the plan reads."""
    written: list[ByteSource] = [tensor.source for file in files for tensor in file.tensors]
    replicas = (*checkpoint.replicas, *state.replicas)
    files_there = (*checkpoint.torch_files, *state.files)
    read = paths_of([*written, *(copy for one in replicas for copy in (one.kept, one.other))])
    return tuple(SourceFile.of(file) for file in files_there if file.path in read)


def _provenance(
    checkpoint: ZeroCheckpoint, settings: TargetSettings, dropped: tuple[str, ...]
) -> JsonObject:
    return values_of(
        ReshardProvenance(
            checkpoint=CheckpointRecord.of(checkpoint),
            settings=settings,
            dropped=dropped,
            accounting=account(checkpoint, checkpoint.tensors),
        )
    )


def _told(state: TrainingState, dropped: tuple[str, ...]) -> Iterator[str]:
    """What the target will not have, or have otherwise."""
    if dropped:
        yield f"left out, as it cannot be written safely: client state {', '.join(dropped)}"
    names = {name for cell in state.cells for group in cell.groups for name in group.scalars.values}
    if per_partition := sorted(names - {"step"}):
        yield (
            f"the optimizer keeps {', '.join(per_partition)} of each rank's partition by itself: "
            "rank 0's are taken, and later updates depend on the number of ranks"
        )
