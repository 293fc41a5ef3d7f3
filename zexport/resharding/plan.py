"""From a training state and a target to an ExportPlan; optimizer states files without states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType

from zexport.checkpoint.boxes import state_replicas
from zexport.checkpoint.resolve import original_name
from zexport.checkpoint.state import Recorded, Structure, TrainingState, raise_problems
from zexport.checkpoint.zero.records import PRUNED, OptimizerStates
from zexport.errors import UnsafeError, UnsupportedError, layout_of
from zexport.export.checked_reader import Accounting, account
from zexport.export.manifest import Manifest
from zexport.export.plan import (
    ExportPlan,
    FilePlan,
    Form,
    Origin,
    SideFile,
    SourceFile,
    plan_torch_file,
    share_memory,
)
from zexport.export.planner import CheckpointRecord, recorded_warnings
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import view
from zexport.options import CheckMode, ReshardOptions
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, paths_of
from zexport.resharding.framework_files import plan_framework_files
from zexport.resharding.rank_files import plan_rank_files
from zexport.resharding.reshardable import reshardable
from zexport.resharding.target import (
    Config,
    Settings,
    Target,
    TargetSettings,
    UniversalSettings,
    decide_target,
    models_of,
    source_config,
)
from zexport.resharding.universal_files import plan_universal_files, whole_of
from zexport.resharding.values import records_of, unwritable, with_leaves
from zexport.resharding.warnings import (
    check_loadable,
    describe_batch_change,
    describe_losses,
)
from zexport.storage.json import values_of
from zexport.storage.location import place

_BY_ORDER = (
    "optimizer states are numbered, and matched to weights in the model's order. If the optimizer "
    "was given another order, resume with ZeRO stage 1, save, and reshard that"
)
_HOW_TO_LOAD = (
    'to load it, set {"checkpoint": {"load_universal": true}} in the DeepSpeed config; remove that '
    "to resume from rank files, which the run saves from then on"
)
DELETE_BY_HAND = (
    "To free the disk, verify a complete fp32 export with zexport verify OUT --against CKPT, and "
    "remove the checkpoint yourself"
)
_ZERO = "optimizer_state_dict"
_NESTING_MAX = 6
"""No known optimizer nests states of a parameter deeper."""


class ReshardProvenance(Struct, frozen=True):
    """The source and settings of a resharding, as the manifest records them.

    Attributes:
        checkpoint: the checkpoint that was resharded.
        settings: layout of the rank files; null for a universal checkpoint.
        universal: form of the universal checkpoint; null for rank files.
        ds_config: content of ``--ds-config``; null without.
        dropped: keys of client state that were left out.
        accounting: coverage of every element of the flat partitions.
        warnings: those of planning, without the checkpoint's own; left out if empty.
    """

    checkpoint: CheckpointRecord
    settings: TargetSettings | None
    universal: UniversalSettings | None
    ds_config: Config | None
    dropped: tuple[str, ...]
    accounting: Accounting
    warnings: tuple[str, ...] | UnsetType = UNSET


def plan_reshard(
    checkpoint: TrainingState,
    out_dir: Path | str,
    options: ReshardOptions,
    target: Target | None = None,
) -> ExportPlan:
    """Return the plan of a resharding; nothing is written.

    A recorded ``target`` replaces what the options say.
    """
    if not checkpoint.location.is_zero:
        raise UnsupportedError(
            "only DeepSpeed checkpoints need resharding: torch reshards others when it loads them",
            path=checkpoint.location.tag_dir,
            found=checkpoint.layout,
            expected="a DeepSpeed checkpoint",
            hint="Load it on any number of ranks with the framework that saved it",
        )
    target = target or decide_target(checkpoint, options)
    settings, given, warnings = target.settings, target.given, [*target.warnings]
    findings = raise_problems(checkpoint, options.allow)
    checkpoint = reshardable(checkpoint)
    dropped = _dropped(checkpoint, options)
    files = _files(checkpoint, settings, dropped)
    jobs, chunk_nbytes = share_memory(options, files)

    location, notes = checkpoint.location, list[str]()
    source, ranks = source_config(checkpoint), _ranks_before(checkpoint)
    around, more, around_notes = plan_framework_files(checkpoint, ranks, settings, given)
    warnings += [*describe_losses(checkpoint, settings, dropped), *more]
    if checkpoint.stage == 0 and checkpoint.module_dtype is DType.F32:
        notes.append(_BY_ORDER)
    native = settings if isinstance(settings, TargetSettings) else None
    if native is not None:
        latest, wholes = "latest", []
        more, batch_notes = describe_batch_change(source, ranks, given, native.world_size)
        warnings += more
        notes += batch_notes
    else:
        latest, wholes = "latest_universal", [checkpoint.whole]
        notes.append(_HOW_TO_LOAD)

    replicas = (*checkpoint.replicas, *state_replicas((*checkpoint.cells, *wholes)))
    provenance = ReshardProvenance(
        checkpoint=CheckpointRecord.of(checkpoint),
        settings=native,
        universal=settings if isinstance(settings, UniversalSettings) else None,
        ds_config=given,
        dropped=dropped,
        accounting=account(checkpoint, checkpoint.tensors),
        warnings=recorded_warnings(warnings),
    )
    return ExportPlan(
        out_dir=place(out_dir),
        origin=Origin.of(checkpoint),
        form=Form((), "checkpoint", weights_only=False),
        shards=files,
        side_files=(*around, SideFile(latest, location.tag.encode())),
        sources=_sources(checkpoint, replicas, files),
        replicas=replicas,
        check=options.check,
        allow=options.allow,
        findings=findings,
        provenance=values_of(provenance),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *warnings),
        notes=(*checkpoint.notes, *around_notes, *notes),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
    )


def _files(
    checkpoint: TrainingState, settings: Settings, dropped: Collection[str]
) -> tuple[FilePlan, ...]:
    """Return all files of the tag folder."""
    tag_dir, tag = checkpoint.location.tag_dir, checkpoint.location.tag
    try:
        with layout_of(tag_dir):
            if isinstance(settings, TargetSettings):
                return tuple(plan_rank_files(checkpoint, settings, tag, dropped))
            whole = whole_of(checkpoint)
            check_loadable(checkpoint.cells, settings)
            return tuple(plan_universal_files(checkpoint, whole, settings, tag, dropped))
    except UnsafeError as error:
        if error.path is not None:
            raise
        raise UnsafeError(  # outside client state, such as a module's extra state
            error.problem,
            path=tag_dir,
            found=error.found,
            expected=error.expected,
            hint="Resume with as many ranks, or from an export's weights with a new optimizer",
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
    return plan_reshard(checkpoint, out_dir, options, Target(settings, given))


def _ranks_before(checkpoint: TrainingState) -> int:
    """Return the data-parallel world size; a universal checkpoint records it in its model files."""
    if checkpoint.world_size is not None:
        return checkpoint.world_size
    return next((one.dp_world_size for one in models_of(checkpoint) if one.dp_world_size), 1)


def _dropped(checkpoint: TrainingState, options: ReshardOptions) -> tuple[str, ...]:
    """Return the keys of client state that cannot be written, if they may be left out."""
    records = [one for cell in checkpoint.cells for one in records_of(cell)]
    records += [own.client for cell in checkpoint.cells for own in cell.own]
    found = {key: (one, error) for one in records for key, error in unwritable(one).items()}
    if found and not options.drop_client_state:
        key, (record, error) = next(iter(found.items()))
        raise UnsafeError(
            f"client state {key!r} is an object that needs code to load, and is not written",
            path=record.file.path,
            found=error.found,
            expected=error.expected,
            hint="Leave it out with --drop-client-state",
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


class StrippedFile(Struct, frozen=True):
    """An optimizer states file without states, its old size, and keys that cannot be written."""

    file: FilePlan
    nbytes_before: int
    left_out: tuple[str, ...]


def strip_optimizer_states(checkpoint: TrainingState) -> tuple[StrippedFile, ...]:
    """Return every optimizer states file without states, except those that zexport has stripped.

    The files suffice to export. The checkpoint must have no problems.

    Raises:
        UnsupportedError: optimizer states are in other files.
        UnsafeError: needed values cannot be written safely.
    """
    states = [one for cell in checkpoint.zero.values() for one in cell.optimizer.values()]
    if not states or checkpoint.structure is Structure.UNIVERSAL:
        raise UnsupportedError(
            "optimizer states are not in files of their own and cannot be removed",
            path=checkpoint.location.tag_dir,
            found=checkpoint.layout,
            expected="optimizer states files of ranks (*_optim_states.pt)",
            hint=DELETE_BY_HAND,
        )
    tag = original_name(checkpoint.location.tag)
    return tuple(_stripped(one, tag) for one in states if not one.is_pruned)


def _stripped(states: OptimizerStates, tag: str) -> StrippedFile:
    file = states.file
    top = view(file, "optimizer states")
    zero = top.need(_ZERO)
    key = "optimizer_state_dict" if zero.has("fp32_flat_groups") else "base_optimizer_state"
    inner = {PRUNED if k == key else k: v for k, v in zero.mapping().items()}
    inner[PRUNED] = _without_tensors(inner.get(PRUNED))
    kept, left_out = _writable(Recorded(file, inner))
    rest, more = _writable(Recorded(file, {k: v for k, v in top.mapping().items() if k != _ZERO}))
    value = with_leaves({_ZERO: kept, **rest}, file)
    content = plan_torch_file(f"{tag}/{file.path.name}", value)
    return StrippedFile(content, file.version.nbytes, (*left_out, *more))


def _writable(recorded: Recorded) -> tuple[dict[object, object], tuple[str, ...]]:
    """Return what can be written safely, and the keys of the rest, which no export needs."""
    left_out = unwritable(recorded, [key for key in recorded.values if isinstance(key, str)])
    kept = {key: one for key, one in recorded.values.items() if key not in left_out}
    return kept, tuple(left_out)


def _without_tensors(value: object, depth: int = 0) -> object:
    """Return an optimizer's dictionary with settings and steps, and no other tensors."""
    if depth > _NESTING_MAX or not isinstance(value, dict | list):
        return value
    kept = {
        key: _without_tensors(one, depth + 1)
        for key, one in (value.items() if isinstance(value, dict) else enumerate(value))
        if not (isinstance(one, TensorRef) and one.shape)
    }
    return kept if isinstance(value, dict) else [*kept.values()]
