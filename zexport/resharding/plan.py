"""The plan of a resharding: from what a checkpoint holds to the origin of every output byte."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from zexport.checkpoint.contents import ZeroCheckpoint, raise_problems
from zexport.checkpoint.location import Framework
from zexport.checkpoint.ranks import models_of
from zexport.decide import CheckpointRecord, recorded_warnings
from zexport.errors import UnsafeError, UsageError
from zexport.options import CheckMode, ReshardOptions, ResumeFormat
from zexport.plan.plan import ExportPlan, FilePlan, Form, Origin, SideFile, SourceFile
from zexport.plan.summary import share_memory
from zexport.printable import some
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, paths_of
from zexport.resharding.changes import batch_of, told_of_batch, told_of_given
from zexport.resharding.folders import Beside, Ranks, beside, told_of_resuming
from zexport.resharding.loaders import check_loadable, lost_in_loading, told_of_loading
from zexport.resharding.model_files import keeps_own
from zexport.resharding.native_files import native_files
from zexport.resharding.read import read_state
from zexport.resharding.read_cells import MEASURED
from zexport.resharding.settings import (
    Settings,
    TargetSettings,
    UniversalSettings,
    settle,
    settle_universal,
    source_config,
)
from zexport.resharding.state import TrainingState
from zexport.resharding.universal_files import universal_files
from zexport.resharding.values import unwritable
from zexport.resharding.whole import join_cells
from zexport.run.manifest import Manifest
from zexport.store.address import place
from zexport.store.contents import read_json_object
from zexport.store.json import JsonObject, values_of
from zexport.weights.proof import Accounting, account

_BY_ORDER = (
    "the optimizer's states are numbered, and are taken to be of the weights in the model's order: "
    "where the optimizer was given them in another, resume the run with ZeRO stage 1, save, and "
    "reshard that"
)
_BY_NORMS = frozenset({*MEASURED, "variance"})
"""What those optimizers keep whose steps go by norms of a partition (torch's Adafactor, too)."""


class ReshardProvenance(Struct, frozen=True):
    """What a resharding was made of.

    Attributes:
        checkpoint: the checkpoint that was resharded.
        settings: what the layout of rank files was decided by; null for a universal checkpoint.
        universal: what the form of a universal checkpoint was decided by; null for rank files.
        ds_config: the configuration that was given for it with ``--ds-config``; null without.
        dropped: keys of the client's state that were left out.
        accounting: where every element of the flat partitions went.
        warnings: what was told when it was made, beside the checkpoint's own; only where there was
            anything.
    """

    checkpoint: CheckpointRecord
    settings: TargetSettings | None
    universal: UniversalSettings | None
    ds_config: Mapping[str, object] | None
    dropped: tuple[str, ...]
    accounting: Accounting
    warnings: tuple[str, ...] | UnsetType = UNSET


class Decided(Struct, frozen=True):
    """What a resharding that was made was decided by, to be planned again."""

    settings: Settings
    ds_config: Mapping[str, object] | None


def plan_reshard(
    checkpoint: ZeroCheckpoint,
    out_dir: Path | str,
    options: ReshardOptions,
    decided: Decided | None = None,
) -> ExportPlan:
    """The whole plan of a resharding; nothing is written.

    ``decided`` is what one that was made was decided by, in place of what options say.
    """
    given: Mapping[str, object] | None
    if decided is None:
        settings, told = _settled(checkpoint, options)
        given = values_of(read_json_object(options.ds_config)) if options.ds_config else None
    else:
        settings, told, given = decided.settings, (), decided.ds_config
    findings = raise_problems(checkpoint, options.allow)
    state = read_state(checkpoint)
    dropped = _dropped(state, options)
    state, files = _planned(checkpoint, state, settings, dropped)
    jobs, chunk_nbytes = share_memory(options, files)
    around = _around(checkpoint, settings, options, given, state)
    warned = (*told, *_told(state, settings, dropped), *around.warnings)
    return ExportPlan(
        out_dir=place(out_dir),
        origin=Origin.of(checkpoint),
        form=Form((), "checkpoint", weights_only=False),
        shards=files,
        side_files=around.files,
        sources=_sources(checkpoint, state, files),
        replicas=(*checkpoint.replicas, *state.replicas),
        check=options.check,
        allow=options.allow,
        findings=findings,
        provenance=_provenance(checkpoint, settings, given, dropped, warned),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *warned),
        notes=(*checkpoint.notes, *around.notes),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def _settled(
    checkpoint: ZeroCheckpoint, options: ReshardOptions
) -> tuple[Settings, tuple[str, ...]]:
    if options.format is ResumeFormat.UNIVERSAL:
        return settle_universal(checkpoint, options)
    if options.for_deepspeed is not None:
        raise UsageError(
            "--for-deepspeed is of universal checkpoints alone: every version loads rank files",
            hint="Leave it out, or add --format universal",
        )
    return settle(checkpoint, options)


def _planned(
    checkpoint: ZeroCheckpoint, state: TrainingState, settings: Settings, dropped: Collection[str]
) -> tuple[TrainingState, tuple[FilePlan, ...]]:
    """The files, and the state with all copies that must be equal for them."""
    tag = checkpoint.location.tag
    if isinstance(settings, TargetSettings):
        return state, _written(state, native_files(state, settings, tag, dropped), dropped)
    whole = join_cells(state, models_of(checkpoint.cells), checkpoint.parallelism)
    check_loadable(state.cells, settings)
    state = replace(state, replicas=(*state.replicas, *whole.replicas))
    return state, _written(state, universal_files(state, whole, settings, tag, dropped), dropped)


def _written(
    state: TrainingState, files: Iterable[FilePlan], dropped: Collection[str]
) -> tuple[FilePlan, ...]:
    """All files; what cannot be written safely, outside of the client's state, is told by its key.

    Such is the extra state of a module, or a scheduler's of a user's own.
    """
    try:
        return tuple(files)
    except UnsafeError as error:
        if error.path is not None:
            raise
        said = [one for cell in state.cells for one in (cell.model, cell.optimizer)]
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
    """What a plan or a manifest says of the layout."""
    if provenance["settings"] is None:
        return msgspec.convert(provenance.get("universal"), UniversalSettings)
    return msgspec.convert(provenance["settings"], TargetSettings)


def plan_again(
    checkpoint: ZeroCheckpoint,
    out_dir: Path,
    manifest: Manifest,
    settings: Settings,
    check: CheckMode,
) -> ExportPlan:
    """The plan that a resharded folder was made by, by its manifest."""
    options = ReshardOptions(
        drop_client_state=bool(manifest.provenance.get("dropped")),
        allow=frozenset(one.kind for one in manifest.findings if one.accepted),
        check=check,
    )
    given = msgspec.convert(manifest.provenance.get("ds_config"), dict[str, object] | None)
    return plan_reshard(checkpoint, out_dir, options, Decided(settings, given))


def _around(
    checkpoint: ZeroCheckpoint,
    settings: Settings,
    options: ReshardOptions,
    given: Mapping[str, object] | None,
    state: TrainingState,
) -> Beside:
    """What completes the folder, and what other ranks mean for the run."""
    location, before = checkpoint.location, _ranks_before(checkpoint)
    models = (checkpoint.ranks or before) // before
    typed: Mapping[str, object] | None = given
    config, groups = source_config(checkpoint), state.cells[0].groups
    is_whole = location.framework is Framework.DEEPSPEED
    told: tuple[tuple[bool, str], ...] = ()
    if checkpoint.stage == 0 and checkpoint.module_dtype is DType.F32:
        told = ((False, _BY_ORDER),)
    if given is not None:
        told += tuple(told_of_given(given, config, groups, is_whole=is_whole))
    if isinstance(settings, UniversalSettings):
        ranks, stage, latest = Ranks(before * models, None), None, "latest_universal"
        told += tuple((False, text) for text in told_of_loading(options, settings, state))
    else:
        ranks = Ranks(before * models, settings.world_size * models)
        stage, latest = settings.stage, "latest"
        typed = None if given is None else settings.typed(given, config)
        if (before, checkpoint.stage) == (settings.world_size, settings.stage) and given is None:
            same = f"ZeRO-{settings.stage} on {before:,} rank{'s' * (before != 1)}"
            told += ((False, f"the checkpoint is of {same} already: this is a copy of it"),)
        told += tuple(told_of_batch(batch_of(config, before), settings.world_size, given))
    steps = checkpoint.global_steps
    taken = None if steps is None else steps - checkpoint.skipped_steps
    found = beside(location, ranks, stage, taken, typed)
    return Beside(
        files=(*found.files, SideFile(latest, location.tag.encode())),
        warnings=(*found.warnings, *(text for warns, text in told if warns)),
        notes=(
            *found.notes,
            *(text for warns, text in told if not warns),
            *told_of_resuming(location.framework, ranks),
        ),
    )


def _ranks_before(checkpoint: ZeroCheckpoint) -> int:
    """Data-parallel ranks that trained; a universal checkpoint has files of none of them."""
    if checkpoint.world_size is not None:
        return checkpoint.world_size
    models = models_of(checkpoint.cells).values()
    return next((one.dp_world_size for one in models if one.dp_world_size), 1)


def _dropped(state: TrainingState, options: ReshardOptions) -> tuple[str, ...]:
    """The client's keys that cannot be written, where they may be left out."""
    files = [said for cell in state.cells for said in (cell.model, cell.optimizer)]
    files += [own.client for cell in state.cells for own in cell.own]
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
    checkpoint: ZeroCheckpoint,
    settings: Settings,
    given: Mapping[str, object] | None,
    dropped: tuple[str, ...],
    warned: tuple[str, ...],
) -> JsonObject:
    return values_of(
        ReshardProvenance(
            checkpoint=CheckpointRecord.of(checkpoint),
            settings=settings if isinstance(settings, TargetSettings) else None,
            universal=settings if isinstance(settings, UniversalSettings) else None,
            ds_config=given,
            dropped=dropped,
            accounting=account(checkpoint, checkpoint.tensors),
            warnings=recorded_warnings(warned),
        )
    )


def _told(state: TrainingState, settings: Settings, dropped: tuple[str, ...]) -> Iterator[str]:
    """What the target will not have, or have otherwise."""
    if dropped:
        yield f"left out, as it cannot be written safely: client state {', '.join(dropped)}"
    cells = (cell for cell in state.cells if not keeps_own(cell, settings))
    if differing := dict.fromkeys(str(key) for cell in cells for key in cell.differing):
        yield (
            f"client state and buffers differ between ranks ({some([*differing], 8)}): every rank "
            "gets those of rank 0. Reshard to ZeRO-3 with as many ranks as before to keep each "
            "rank's own"
        )
    if isinstance(settings, UniversalSettings):
        yield from lost_in_loading(state, settings)
        return
    groups = [group for cell in state.cells for group in cell.groups]
    kept = {name for group in groups for name in group.scalars.values}
    kept |= {name for group in groups for one in group.parameters[:1] for name in one.tensors}
    if of_partition := sorted(kept & _BY_NORMS):
        yield (
            f"the optimizer keeps {', '.join(of_partition)}, as one that steps by norms of each "
            "rank's partition: later updates depend on the number of ranks"
        )
