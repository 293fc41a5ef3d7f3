"""Decide the plan of an export: from its inputs to the source of every output byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType

from zexport.checkpoint.state import TrainingState
from zexport.errors import DamagedCheckpointError
from zexport.export.checked_reader import Accounting, account
from zexport.export.gather import Inputs
from zexport.export.hub_folder import Folder, hub_folder
from zexport.export.peft_folder import peft_folder
from zexport.export.plan import ExportPlan, Form, Origin, share_memory
from zexport.filenames import CONFIG
from zexport.model.hub_cache import GivenBase
from zexport.model.hub_names import Fit, ModelNames
from zexport.options import AdapterMode, Engine, NameLayout, RecordedOptions
from zexport.ranges.source import paths_of
from zexport.storage.json import JsonObject, Natural, values_of
from zexport.storage.location import place
from zexport.text import placeless


def decide(inputs: Inputs, out_dir: Path | str) -> ExportPlan:
    """Return the plan of an export to ``out_dir``; reads nothing.

    Raises:
        ZexportError: an output would be wrong or incomplete.
    """
    checkpoint, options, location = inputs.checkpoint, inputs.options, inputs.checkpoint.location
    if not inputs.model.weights.tensors:
        raise DamagedCheckpointError(
            "checkpoint contains no weights",
            path=location.tag_dir,
            expected="at least one",
            hint="Run `zexport inspect` to find another tag",
        )
    folder = peft_folder(inputs) if inputs.mode is AdapterMode.KEEP else hub_folder(inputs)
    jobs, chunk_nbytes = share_memory(options, folder.shards)
    base = None if inputs.files.base is None else GivenBase.of(inputs.files.base)
    copies = [copy for r in (*checkpoint.replicas, *inputs.gathered) for copy in (r.kept, r.other)]
    kept = [tensor.source for tensor in folder.written if tensor.source is not None]
    read = paths_of([*kept, *copies])
    return ExportPlan(
        out_dir=place(out_dir),
        origin=Origin.of(checkpoint),
        form=_form(inputs, folder),
        shards=folder.shards,
        side_files=folder.side_files,
        sources=tuple(file for path, file in inputs.sources.items() if path in read),
        replicas=checkpoint.replicas,
        gathered=inputs.gathered,
        check=options.check,
        allow=options.allow,
        findings=folder.findings,
        provenance=_provenance(inputs, folder, base),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *folder.warnings),
        notes=(*checkpoint.notes, *folder.notes),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
        nbytes_compared=inputs.reader.nbytes_read,
        left_out=tuple(_left_out(inputs, folder)),
        pruned=checkpoint.pruned_files,
        base=base,
        reference=checkpoint.tensors if options.engine is Engine.DEEPSPEED else None,
    )


def _left_out(inputs: Inputs, folder: Folder) -> dict[str, None]:
    """Return entries of the module's state dict that are no weights, and are not exported."""
    names, weights = inputs.model.names, inputs.model.weights
    models = [one.first for one in inputs.checkpoint.zero.values() if one.model]
    known = {*weights.shapes, *folder.selection.from_base}
    known |= names.shapes.keys() if isinstance(names, ModelNames) else set()
    empty = (name for name in weights.left_out if name not in known)
    return dict.fromkeys((*empty, *(name for model in models for name in model.extra_state)))


def _form(inputs: Inputs, folder: Folder) -> Form:
    is_kept = inputs.mode is AdapterMode.KEEP
    dtypes = Counter(t.dtype for file in folder.shards for t in file.tensors if t.dtype.is_floating)
    is_known = isinstance(inputs.model.fit, Fit)
    names = (inputs.options.layout if is_known else NameLayout.MEMORY).value
    return Form(
        dtypes=tuple(dtype.torch_name for dtype, _ in dtypes.most_common()),
        names="peft" if is_kept else names,
        weights_only=not is_kept and all(side.filename != CONFIG for side in folder.side_files),
    )


def _provenance(inputs: Inputs, folder: Folder, base: GivenBase | None) -> JsonObject:
    """Return what the manifest records of checkpoint and options: equal for equal exports."""
    checkpoint, options, selection = inputs.checkpoint, inputs.options, folder.selection
    decided = replace(options, hub_layout=selection.label, adapter=inputs.mode or options.adapter)
    return values_of(
        Provenance(
            checkpoint=CheckpointRecord.of(checkpoint),
            options=decided.recorded(),
            loadable=selection.loadable,
            tied=selection.tied,
            from_base=selection.from_base,
            heads=tuple(folder.heads),
            mended=folder.mended,
            accounting=account(checkpoint, folder.written),
            base=base or UNSET,
            warnings=recorded_warnings(folder.warnings),
        )
    )


def recorded_warnings(warnings: Iterable[str]) -> tuple[str, ...] | UnsetType:
    """Return warnings for a manifest: without paths, and no key if there are none."""
    return tuple(map(placeless, warnings)) or UNSET


class CheckpointRecord(Struct, frozen=True):
    """The checkpoint that was exported.

    Attributes:
        folder: last names of the checkpoint folder.
        tag: name of the tag folder.
        layout: such as ``ZeRO-3`` or ``ZeRO-1 (BF16_Optimizer)``.
        stage: ZeRO stage.
        world_size: number of data-parallel ranks that wrote it.
        ranks: number of ranks that wrote it.
        global_steps: optimizer step.
        deepspeed_version: version of DeepSpeed that wrote it.
        module_dtype: dtype of the module weights, as torch names it (``bfloat16``).
        master_dtype: dtype of the fp32 master weights, which are rarely 16-bit.
        warnings: what the user should act on.
        notes: what the user may want to know.
    """

    folder: str
    tag: str
    layout: str
    stage: Natural | None
    world_size: Natural | None
    ranks: Natural | None
    global_steps: Natural | None
    deepspeed_version: str | None
    module_dtype: str | None
    master_dtype: str | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: TrainingState) -> CheckpointRecord:
        module_dtype, master_dtype = checkpoint.module_dtype, checkpoint.master_dtype
        return cls(
            checkpoint.location.name,
            checkpoint.location.tag,
            checkpoint.layout,
            checkpoint.stage,
            checkpoint.world_size,
            checkpoint.ranks,
            checkpoint.global_steps,
            checkpoint.ds_version,
            module_dtype and module_dtype.torch_name,
            master_dtype and master_dtype.torch_name,
            checkpoint.warnings,
            checkpoint.notes,
        )


class Provenance(Struct, frozen=True):
    """What an export was made from.

    Attributes:
        checkpoint: the checkpoint.
        options: the options that decide what is written.
        loadable: transformers loads the folder with no missing and no unexpected key; false if
            unknown.
        tied: names that are not written, each with the written name that the model ties it to.
        from_base: weights from the base model.
        heads: weights that the model class does not have, in files of their own.
        mended: corrections of config.json, to what the weights have.
        accounting: coverage: what every element of the partitions was used for.
        base: the base model, if given.
        warnings: warnings of the export, if any.
    """

    checkpoint: CheckpointRecord
    options: RecordedOptions
    loadable: bool
    tied: Mapping[str, str]
    from_base: tuple[str, ...]
    heads: tuple[str, ...]
    mended: tuple[str, ...]
    accounting: Accounting
    base: GivenBase | UnsetType = UNSET
    warnings: tuple[str, ...] | UnsetType = UNSET
