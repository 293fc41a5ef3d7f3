"""Deciding: from all that was collected to the origin of every output byte, and nothing is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from zexport.checkpoint.contents import StoredTensor, ZeroCheckpoint
from zexport.collect import Collected
from zexport.errors import DamagedCheckpointError
from zexport.options import AdapterMode, Engine
from zexport.plan.memory import share_memory
from zexport.plan.plan import ExportPlan, Reference, SourceFile
from zexport.ranges.extents import paths_of
from zexport.store.json import JsonObject, values_of
from zexport.targets.hf import HubModel
from zexport.targets.peft import PeftAdapters
from zexport.targets.target import Target
from zexport.weights.accounting import account
from zexport.weights.hub_names import Selection
from zexport.weights.provenance import CheckpointRecord, Provenance


def decide(collected: Collected, out_dir: Path | str) -> ExportPlan:
    """The plan of an export: what its folder will hold, to the byte."""
    found = collected
    checkpoint, options = found.checkpoint, found.options
    is_kept = found.mode is AdapterMode.KEEP
    target: Target = PeftAdapters(found) if is_kept else HubModel(found)
    selection = target.select()
    if not selection.weights.tensors:
        raise _no_weights(checkpoint)
    files = target.files(selection)
    jobs, chunk_nbytes = share_memory(options, files)
    return ExportPlan(
        out_dir=Path(out_dir),
        shards=files,
        side_files=tuple(target.side_files(selection, files)),
        sources=_sources(found, selection.written),
        replicas=checkpoint.replicas,
        gathered=found.gathered,
        check=options.check,
        allow=options.allow,
        findings=found.findings + selection.findings,
        provenance=_provenance(found, selection),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *found.notes, *selection.notes),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
        nbytes_compared=found.nbytes_compared,
        reference=_reference(checkpoint) if options.engine is Engine.DEEPSPEED else None,
    )


def _reference(checkpoint: ZeroCheckpoint) -> Reference:
    """What DeepSpeed's own converter needs to rebuild the checkpoint."""
    location = checkpoint.location
    return Reference(location.root, location.tag, checkpoint.tensors)


def _no_weights(checkpoint: ZeroCheckpoint) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "holds no weights",
        path=checkpoint.location.tag_dir,
        expected="at least one",
        hint="Look at it with `zexport inspect`; another tag may be whole",
    )


def _sources(found: Collected, written: Iterable[StoredTensor]) -> tuple[SourceFile, ...]:
    """The files that the plan reads."""
    kept = [tensor.source for tensor in written if tensor.source is not None]
    replicas = (*found.checkpoint.replicas, *found.gathered)
    read = paths_of([*kept, *(copy for r in replicas for copy in (r.kept, r.other))])
    return tuple(file for file in found.files if file.path in read)


def _provenance(found: Collected, selection: Selection) -> JsonObject:
    """What the manifest says of the checkpoint and the options; nothing that varies by run."""
    checkpoint, options, config = found.checkpoint, found.options, selection.config
    decided = replace(
        options, hub_layout=selection.label, adapter=found.mode or options.adapter
    ).recorded()
    return values_of(
        Provenance(
            checkpoint=CheckpointRecord.of(checkpoint),
            options=decided,
            loadable=selection.loadable,
            tied=selection.weights.aliases,
            from_base=tuple(selection.from_base),
            heads=tuple(selection.heads),
            mended=tuple(config.mended) if config is not None else (),
            accounting=account(checkpoint, selection.written),
        )
    )
