"""The plan of a resharding: the source of every output byte."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType

from zexport.checkpoint.boxes import state_replicas
from zexport.checkpoint.resolve import Framework
from zexport.checkpoint.state import TrainingState, raise_problems
from zexport.errors import UnsafeError, UnsupportedError, UsageError, layout_of
from zexport.export.decide import CheckpointRecord, recorded_warnings
from zexport.export.manifest import Manifest
from zexport.export.plan import ExportPlan, FilePlan, Form, Origin, SideFile, SourceFile
from zexport.export.proof import Accounting, account
from zexport.export.summary import share_memory
from zexport.options import CheckMode, ReshardOptions, ResumeFormat
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, paths_of
from zexport.resharding.changes import batch_of, describe_batch_change, describe_config_changes
from zexport.resharding.folders import Beside, Ranks, beside
from zexport.resharding.loaders import HOW_TO_LOAD, check_loadable, lost_in_loading
from zexport.resharding.model_files import differing_keys, keeps_own
from zexport.resharding.native_files import native_files
from zexport.resharding.resumable import resumable
from zexport.resharding.settings import (
    Settings,
    TargetSettings,
    UniversalSettings,
    models_of,
    settle,
    settle_universal,
    source_config,
)
from zexport.resharding.universal_files import universal_files, whole_of
from zexport.resharding.values import records_of, unwritable
from zexport.storage.contents import read_json_object
from zexport.storage.json import values_of
from zexport.storage.location import place
from zexport.text import some

_BY_ORDER = (
    "optimizer states are numbered, and matched to weights in the model's order. If the optimizer "
    "was given another order, resume with ZeRO stage 1, save, and reshard that"
)


class ReshardProvenance(Struct, frozen=True):
    """What a resharding was made of.

    Attributes:
        checkpoint: the checkpoint that was resharded.
        settings: what the layout of rank files was decided by; null for a universal checkpoint.
        universal: what the form of a universal checkpoint was decided by; null for rank files.
        ds_config: the configuration that was given for it with ``--ds-config``; null without.
        dropped: keys of the client's state that were left out.
        accounting: where every element of the flat partitions went.
        warnings: those of planning, without the checkpoint's own; left out if there are none.
    """

    checkpoint: CheckpointRecord
    settings: TargetSettings | None
    universal: UniversalSettings | None
    ds_config: Mapping[str, object] | None
    dropped: tuple[str, ...]
    accounting: Accounting
    warnings: tuple[str, ...] | UnsetType = UNSET


def plan_reshard(
    checkpoint: TrainingState,
    out_dir: Path | str,
    options: ReshardOptions,
    decided: tuple[Settings, Mapping[str, object] | None] | None = None,
) -> ExportPlan:
    """Plan a resharding; nothing is written.

    ``decided``, recorded settings and DeepSpeed config, replaces what options say.
    """
    given: Mapping[str, object] | None
    if decided is None:
        settings, told = _settled(checkpoint, options)
        given = values_of(read_json_object(options.ds_config)) if options.ds_config else None
    else:
        (settings, given), told = decided, ()
    findings = raise_problems(checkpoint, options.allow)
    checkpoint = resumable(checkpoint)
    if not checkpoint.cells:
        raise UnsupportedError(
            "only DeepSpeed checkpoints can be resharded",
            path=checkpoint.location.tag_dir,
            found=checkpoint.layout,
            hint="Load it with the framework that saved it, which reshards on loading",
        )
    dropped = _dropped(checkpoint, options)
    files = _planned(checkpoint, settings, dropped)
    jobs, chunk_nbytes = share_memory(options, files)
    around = _around(checkpoint, settings, given)
    warned = (*told, *_lost(checkpoint, settings, dropped), *around.warnings)
    wholes = (checkpoint.whole,) if isinstance(settings, UniversalSettings) else ()
    replicas = (*checkpoint.replicas, *state_replicas((*checkpoint.cells, *wholes)))
    provenance = ReshardProvenance(
        checkpoint=CheckpointRecord.of(checkpoint),
        settings=settings if isinstance(settings, TargetSettings) else None,
        universal=settings if isinstance(settings, UniversalSettings) else None,
        ds_config=given,
        dropped=dropped,
        accounting=account(checkpoint, checkpoint.tensors),
        warnings=recorded_warnings(warned),
    )
    return ExportPlan(
        out_dir=place(out_dir),
        origin=Origin.of(checkpoint),
        form=Form((), "checkpoint", weights_only=False),
        shards=files,
        side_files=around.files,
        sources=_sources(checkpoint, replicas, files),
        replicas=replicas,
        check=options.check,
        allow=options.allow,
        findings=findings,
        provenance=values_of(provenance),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *warned),
        notes=(*checkpoint.notes, *around.notes),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def _settled(
    checkpoint: TrainingState, options: ReshardOptions
) -> tuple[Settings, tuple[str, ...]]:
    if options.format is ResumeFormat.UNIVERSAL:
        return settle_universal(checkpoint, options)
    if options.for_deepspeed is not None:
        raise UsageError(
            "--for-deepspeed is only for universal checkpoints; every version loads rank files",
            hint="Leave it out, or add --format universal",
        )
    return settle(checkpoint, options)


def _planned(
    checkpoint: TrainingState, settings: Settings, dropped: Collection[str]
) -> tuple[FilePlan, ...]:
    """Return all files; name the key of what cannot be written safely besides client state.

    This may be a module's extra state, or the state of a user's own scheduler.
    """
    tag = checkpoint.location.tag
    try:
        with layout_of(checkpoint.location.tag_dir):
            if isinstance(settings, TargetSettings):
                return tuple(native_files(checkpoint, settings, tag, dropped))
            whole = whole_of(checkpoint)
            check_loadable(checkpoint.cells, settings)
            return tuple(universal_files(checkpoint, whole, settings, tag, dropped))
    except UnsafeError as error:
        if error.path is not None:
            raise
        said = [one for cell in checkpoint.cells for one in records_of(cell)]
        refused = [(one.file.path, key) for one in said for key in unwritable(one, one.values)]
        path, key = next((one for one in refused if one[1] not in dropped), (None, "a file"))
        raise UnsafeError(
            f"{error.problem}, in {key!r}",
            path=path,
            found=error.found,
            expected=error.expected,
            hint="Resume with as many ranks, or from an export's weights, with a new optimizer",
        ) from error


def recorded_settings(provenance: Mapping[str, object]) -> Settings:
    """Return the settings that a plan or manifest records."""
    if provenance["settings"] is None:
        return msgspec.convert(provenance.get("universal"), UniversalSettings)
    return msgspec.convert(provenance["settings"], TargetSettings)


def plan_again(
    checkpoint: TrainingState,
    out_dir: Path,
    manifest: Manifest,
    settings: Settings,
    check: CheckMode,
) -> ExportPlan:
    """Return the plan by which a resharded folder was written, from its manifest."""
    options = ReshardOptions(
        drop_client_state=bool(manifest.provenance.get("dropped")),
        allow=frozenset(one.kind for one in manifest.findings if one.accepted),
        check=check,
    )
    given = msgspec.convert(manifest.provenance.get("ds_config"), dict[str, object] | None)
    return plan_reshard(checkpoint, out_dir, options, (settings, given))


def _around(
    checkpoint: TrainingState, settings: Settings, given: Mapping[str, object] | None
) -> Beside:
    """Return the other files of the folder, with warnings and notes on what changes for the run."""
    location, before = checkpoint.location, _ranks_before(checkpoint)
    models = (checkpoint.ranks or before) // before
    config, typed = source_config(checkpoint), given
    warnings, notes = list[str](), list[str]()
    if checkpoint.stage == 0 and checkpoint.module_dtype is DType.F32:
        notes.append(_BY_ORDER)
    if given is not None:
        is_complete = location.framework is Framework.DEEPSPEED
        warnings += describe_config_changes(given, config, is_complete=is_complete)
    if isinstance(settings, UniversalSettings):
        ranks, stage, latest = Ranks(before * models, None), None, "latest_universal"
        notes.append(HOW_TO_LOAD)
    else:
        ranks = Ranks(before * models, settings.world_size * models)
        stage, latest = settings.stage, "latest"
        typed = None if given is None else settings.typed(given, config)
        source = batch_of(config, before)
        for warns, text in describe_batch_change(source, settings.world_size, given):
            (warnings if warns else notes).append(text)
    steps = checkpoint.global_steps
    taken = None if steps is None else steps - checkpoint.skipped_steps
    found = beside(location, ranks, stage, taken, typed)
    return Beside(
        files=(*found.files, SideFile(latest, location.tag.encode())),
        warnings=(*found.warnings, *warnings),
        notes=(*found.notes, *notes),
    )


def _ranks_before(checkpoint: TrainingState) -> int:
    """Return the data-parallel ranks that trained; a universal checkpoint has no files of them."""
    if checkpoint.world_size is not None:
        return checkpoint.world_size
    models = models_of(checkpoint)
    return next((one.dp_world_size for one in models if one.dp_world_size), 1)


def _dropped(checkpoint: TrainingState, options: ReshardOptions) -> tuple[str, ...]:
    """Return the keys of client state that cannot be written, if they may be left out."""
    files = [said for cell in checkpoint.cells for said in records_of(cell)]
    files += [own.client for cell in checkpoint.cells for own in cell.own]
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
    checkpoint: TrainingState,
    replicas: Iterable[Replica | CastReplica],
    files: Iterable[FilePlan],
) -> tuple[SourceFile, ...]:
    """Return the files that the plan reads."""
    written: list[ByteSource] = [tensor.source for file in files for tensor in file.tensors]
    read = paths_of([*written, *(copy for one in replicas for copy in (one.kept, one.other))])
    opened = (file for cell in (checkpoint.whole, *checkpoint.cells) for file in cell.files)
    known = {file.path: file for file in (*checkpoint.torch_files, *opened)}
    return tuple(SourceFile.of(file) for path, file in known.items() if path in read)


def _lost(checkpoint: TrainingState, settings: Settings, dropped: tuple[str, ...]) -> Iterator[str]:
    """Yield warnings about what the target does not have, or DeepSpeed does not load."""
    if dropped:
        yield f"left out, as it cannot be written safely: client state {', '.join(dropped)}"
    cells = (cell for cell in checkpoint.cells if not keeps_own(cell, settings))
    if differing := dict.fromkeys(str(key) for cell in cells for key in differing_keys(cell)):
        yield (
            f"client state and buffers differ between ranks ({some([*differing], 8)}): every rank "
            "gets those of rank 0, except for ZeRO-3 with as many ranks as before"
        )
    if isinstance(settings, UniversalSettings):
        yield from lost_in_loading(checkpoint, settings)
