"""The plan of a resharding: from what a checkpoint holds to the origin of every output byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.problems import raise_problems
from zexport.decide import CheckpointRecord
from zexport.errors import UnsafeError, UsageError
from zexport.options import CheckMode, ReshardOptions, ResumeFormat
from zexport.plan.plan import ExportPlan, FilePlan, Form, Origin, SideFile, SourceFile
from zexport.plan.summary import share_memory
from zexport.ranges.extents import ByteSource, paths_of
from zexport.resume.batch import batch_of, told_of_batch
from zexport.resume.folders import Beside, Ranks, beside, told_of_resuming
from zexport.resume.native import native_files
from zexport.resume.read import read_state
from zexport.resume.settings import TargetSettings, settle, source_config
from zexport.resume.state import TrainingState
from zexport.resume.values import unwritable
from zexport.run.manifest import Manifest
from zexport.store.folders import local_path
from zexport.store.json import JsonObject, read_json_object, values_of
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
    checkpoint: ZeroCheckpoint,
    out_dir: Path | str,
    options: ReshardOptions,
    recorded: TargetSettings | None = None,
) -> ExportPlan:
    """The whole plan of a resharding; nothing is written.

    ``recorded`` are the settings of one that was made, to be planned again.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks what a training goes on from.
        UnsupportedError: a state cannot be cut for other ranks.
        UnsafeError: a value to be carried cannot be written safely.
        UsageError: an option cannot be meant.
    """
    if options.format is not ResumeFormat.NATIVE:
        raise UsageError("--format cannot be universal yet", expected="native")
    settings, told = settle(checkpoint, options) if recorded is None else (recorded, ())
    findings = raise_problems(checkpoint, options.allow)
    state = read_state(checkpoint)
    dropped = _dropped(state, options)
    files = tuple(native_files(state, settings, checkpoint.location.tag, dropped))
    jobs, chunk_nbytes = share_memory(options, files)
    around = _around(checkpoint, settings, options)
    return ExportPlan(
        out_dir=local_path(out_dir),
        origin=Origin.of(checkpoint),
        form=Form((), "checkpoint", weights_only=False),
        shards=files,
        side_files=around.files,
        sources=_sources(checkpoint, state, files),
        replicas=(*checkpoint.replicas, *state.replicas),
        check=options.check,
        allow=options.allow,
        findings=findings,
        provenance=_provenance(checkpoint, settings, dropped),
        warnings=(
            *checkpoint.newer,
            *checkpoint.warnings,
            *told,
            *_told(state, dropped),
            *around.warnings,
        ),
        notes=(*checkpoint.notes, *around.notes),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def recorded_settings(provenance: Mapping[str, object]) -> TargetSettings:
    """What a plan or a manifest says of the layout.

    Raises:
        ValueError: no resharding can have these.
    """
    return msgspec.convert(provenance["settings"], TargetSettings)


def plan_again(
    checkpoint: ZeroCheckpoint,
    out_dir: Path,
    manifest: Manifest,
    settings: TargetSettings,
    check: CheckMode,
) -> ExportPlan:
    """The plan that a resharded folder was made by, by its manifest."""
    options = ReshardOptions(
        drop_client_state=bool(manifest.provenance.get("dropped")),
        allow=frozenset(one.kind for one in manifest.findings if one.accepted),
        check=check,
    )
    return plan_reshard(checkpoint, out_dir, options, settings)


def _around(
    checkpoint: ZeroCheckpoint, settings: TargetSettings, options: ReshardOptions
) -> Beside:
    """What completes the folder, and what other ranks mean for the run."""
    location, before = checkpoint.location, checkpoint.world_size or 1
    models = (checkpoint.ranks or before) // before
    ranks = Ranks(before * models, settings.world_size * models)
    given = read_json_object(options.ds_config) if options.ds_config else None
    found = beside(location, ranks, settings.stage, checkpoint.global_steps, given)
    target = batch_of(given or {}, settings.world_size)
    batches = batch_of(source_config(checkpoint), before), target
    told = tuple(told_of_batch(batches[0], settings.world_size, batches[1]))
    return Beside(
        files=(*found.files, SideFile("latest", location.tag.encode())),
        warnings=(*found.warnings, *(text for warns, text in told if warns)),
        notes=(
            *found.notes,
            *(text for warns, text in told if not warns),
            *told_of_resuming(location.framework, ranks),
        ),
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
