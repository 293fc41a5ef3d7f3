"""Deciding: from all that was collected to the origin of every output byte, and nothing is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType, structs

from zexport.checkpoint.state import StoredTensor, TrainingState
from zexport.collected import Collected
from zexport.errors import DamagedCheckpointError, raise_all
from zexport.facts.model import Fact
from zexport.facts.rows import AnyFact
from zexport.facts.statements import Judgement, Statement, judge
from zexport.facts.training import TrainingFact
from zexport.filenames import CONFIG
from zexport.findings import FindingKind
from zexport.model.fit import Fit, ModelNames
from zexport.model.hub_cache import GivenBase
from zexport.model.sidecars import states_model
from zexport.options import AdapterMode, Engine, ExportDType, NameLayout, RecordedOptions
from zexport.plan.plan import ExportPlan, FilePlan, Form, Origin, Reference, SideFile, SourceFile
from zexport.plan.summary import share_memory
from zexport.printable import placeless, some
from zexport.ranges.extents import paths_of
from zexport.store.address import place
from zexport.store.json import JsonObject, Natural, values_of
from zexport.targets.hf import HubModel
from zexport.targets.peft import PeftAdapters
from zexport.weights.named import Selection
from zexport.weights.proof import Accounting, account

_STEP = re.compile(r"(?:checkpoint|global_step|step)[-_]?(\d{1,18})", re.ASCII)


def decide(collected: Collected, out_dir: Path | str) -> ExportPlan:
    """The plan of an export: what its folder will hold, to the byte."""
    found = collected
    checkpoint, options, location = found.checkpoint, found.options, found.checkpoint.location
    is_kept = found.mode is AdapterMode.KEEP
    target: Target = PeftAdapters(found) if is_kept else HubModel(found)
    selection = target.select()
    if not selection.weights.tensors:
        raise DamagedCheckpointError(
            "holds no weights",
            path=location.tag_dir,
            expected="at least one",
            hint="Look at it with `zexport inspect`; another tag may be whole",
        )
    judged = _judge(found, selection, place(out_dir).name)
    files = target.files(selection)
    jobs, chunk_nbytes = share_memory(options, files)
    reference = Reference(location.root, location.tag, checkpoint.tensors)
    findings = (*found.findings, *judged.findings, *selection.findings)
    warned = (checkpoint.newer, checkpoint.warnings, found.warnings, selection.warnings)
    lasting = (*judged.warnings, *found.warnings, *selection.warnings)
    told = structs.replace(selection, findings=findings, warnings=lasting)
    sides = tuple(target.side_files(told, files))
    noted = (checkpoint.notes, found.notes, selection.notes, judged.notes)
    return ExportPlan(
        out_dir=place(out_dir),
        origin=Origin.of(checkpoint),
        form=_form(found, files, sides),
        shards=files,
        side_files=sides,
        sources=_sources(found, selection.written),
        replicas=checkpoint.replicas,
        gathered=found.gathered,
        check=options.check,
        allow=options.allow,
        findings=findings,
        provenance=_provenance(found, told),
        warnings=(*judged.warnings, *chain(*warned)),
        notes=(*chain(*noted), *_of_folders(found, selection, sides), *_without_effect(found)),
        left_out=tuple(_left_out(found, selection)),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
        nbytes_compared=found.nbytes_compared,
        pruned=checkpoint.pruned_files,
        base=_base(found),
        reference=reference if options.engine is Engine.DEEPSPEED else None,
    )


def _left_out(found: Collected, selection: Selection) -> dict[str, None]:
    """Return entries of the module's state dict that are no weights, and are not exported."""
    names = selection.names
    models = [one.first for one in found.checkpoint.zero.values() if one.model]
    known = {*selection.weights.shapes, *selection.from_base}
    known |= names.shapes.keys() if isinstance(names, ModelNames) else set()
    empty = (name for name in found.weights.left_out if name not in known)
    return dict.fromkeys((*empty, *(name for model in models for name in model.extra_state)))


def _base(found: Collected) -> GivenBase | None:
    """The model that was given, by names that tell it wherever it lies."""
    return None if found.sidecars.base is None else GivenBase.of(found.sidecars.base)


def _form(found: Collected, files: Iterable[FilePlan], sides: Iterable[SideFile]) -> Form:
    """What the folder is made as."""
    is_kept = found.mode is AdapterMode.KEEP
    dtypes = Counter(t.dtype for file in files for t in file.tensors if t.dtype.is_floating)
    return Form(
        dtypes=tuple(dtype.torch_name for dtype, _ in dtypes.most_common()),
        names="peft" if is_kept else _names(found),
        weights_only=not is_kept and all(side.filename != CONFIG for side in sides),
    )


def _names(found: Collected) -> str:
    """Whose names the tensors have: as they are stored where no model told others."""
    is_known = isinstance(found.fit, Fit)
    return (found.options.layout if is_known else NameLayout.MEMORY).value


def _judge(found: Collected, selection: Selection, name: str) -> Judgement:
    """What the statements lead to."""
    judged = judge(
        (*found.statements, *selection.statements, *_of_name(name, found.checkpoint)),
        found.checkpoint.location.tag_dir,
        chosen=found.base.path,
        allow=found.options.allow,
        harmless=_harmless(found, selection),
    )
    raise_all(judged.refused, found.checkpoint.location.tag_dir)
    return judged


def _harmless(found: Collected, selection: Selection) -> Mapping[AnyFact, str]:
    """What a base may be another model in: a wrong weight is given by none that gives none.

    Config and tokenizer of a stranger make a wrong model too: weights and sizes tell a stranger.
    """
    if found.mode is AdapterMode.MERGE or selection.from_base:
        return {}
    files = found.files_of_base
    kept = f", only {some(files)}" if files else ""
    facts = {fact for fact in Fact if fact.value.kind is FindingKind.BASE_MISMATCH}
    if any(map(states_model, files)):
        facts -= {Fact.BASE_WEIGHTS, Fact.BASE_CONFIG}
    return dict.fromkeys(facts, f"no weight of it is in the export{kept}")


def _of_name(name: str, checkpoint: TrainingState) -> Iterator[Statement]:
    """The step that the output folder's name tells of, and the checkpoint's."""
    if named := _STEP.fullmatch(name):
        yield Statement(TrainingFact.OUT_STEP, checkpoint.global_steps, "the checkpoint")
        yield Statement(TrainingFact.OUT_STEP, int(named[1]), "the output folder's name")


def _of_folders(found: Collected, selection: Selection, sides: Iterable[SideFile]) -> Iterator[str]:
    """Tells which files the folder above and a base give, or that the base was not needed."""
    written = {side.filename for side in sides}
    if files := [name for name in found.sidecars.files_above if name in written]:
        yield f"from the folder above: {some(files)}"
    if found.options.base is None:
        return
    if files := found.files_of_base:
        yield f"from --base: {some(files)}"
    elif found.mode is not AdapterMode.MERGE and not selection.from_base:
        is_left = found.options.exclude_frozen and found.checkpoint.may_lack_weights
        why = "--exclude-frozen leaves out what it would give, and the checkpoint has all files"
        has_all = "the checkpoint has all weights and files of its own"
        yield f"nothing of --base was needed: {why if is_left else has_all}"


def _without_effect(found: Collected) -> Iterator[str]:
    """Tells of options that change nothing here."""
    options = found.options
    if options.base_dtype is not ExportDType.AUTO and found.mode is not AdapterMode.MERGE:
        yield "--base-dtype changes nothing: no adapter is merged into a base"
    if options.adapter_config is not None and found.mode is None:
        yield "--adapter-config changes nothing: no adapter is exported"


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
            base=_base(found) or UNSET,
            warnings=recorded_warnings(selection.warnings),
        )
    )


def recorded_warnings(told: Iterable[str]) -> tuple[str, ...] | UnsetType:
    """What a manifest keeps of warnings: nothing of a place, and no key for none."""
    return tuple(map(placeless, told)) or UNSET


class CheckpointRecord(Struct, frozen=True):
    """The checkpoint that was exported.

    Attributes:
        folder: the last names of the checkpoint's folder, which tell it wherever it lies.
        tag: name of the tag folder.
        layout: in words, such as ``ZeRO-3`` or ``ZeRO-1 (BF16_Optimizer)``.
        stage: ZeRO stage.
        world_size: data-parallel ranks that wrote it.
        ranks: all ranks that wrote it.
        global_steps: optimizer steps taken.
        deepspeed_version: version of DeepSpeed that wrote it.
        module_dtype: element type the module trained in, as torch names it (``bfloat16``).
        master_dtype: element type of the master weights.
        warnings: what should be known of how values were chosen, in sentences.
        notes: what may be of interest of it.
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
        """What is recorded of a checkpoint."""
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
    """What an export was made of.

    Attributes:
        checkpoint: the checkpoint that was exported.
        options: the options that decide what is written.
        loadable: whether transformers loads the folder with no missing and no unexpected key; false
            also where that is not known.
        tied: name that is not written, to the written name that the model ties it to.
        from_base: weights that the base model filled in.
        heads: weights that the model's class does not know, in files of their own.
        mended: what config.json stated otherwise than the weights have it, and was mended, in
            words.
        accounting: where every element of the flat partitions went, and of trained weights that
            lie elsewhere; an export whose sum is not exact is refused.
        base: the model that was given for what the checkpoint lacks; only where one was.
        warnings: what was told when it was made, beside the checkpoint's own; only where there was
            anything.
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


class Target(Protocol):
    """What a folder is to be, for all that was collected; nothing is read any more."""

    def select(self) -> Selection:
        """Which weights are written, under which names and in which form."""
        ...

    def files(self, selection: Selection) -> tuple[FilePlan, ...]:
        """The files that hold them, laid out to the byte."""
        ...

    def side_files(self, selection: Selection, files: Sequence[FilePlan]) -> Iterable[SideFile]:
        """What completes the folder beside these."""
        ...
