"""Gather the inputs of an export: everything that is read before it is planned.

That is what transformers answers, the model files, the base model, an adapter to merge, and the few
comparisons of values that decisions depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from zexport.checkpoint.state import TrainingState, raise_problems
from zexport.export.adapters import (
    Adapter,
    adapters_in,
    check_adapter,
    choose_adapters,
    choose_mode,
    describe_configs,
)
from zexport.export.base_model import (
    Base,
    BaseCheck,
    BaseName,
    base_of,
    check_base,
    judge_base,
    read_base,
    under_names_of,
)
from zexport.export.copies import AdapterFile, adapter_files, gathered_copies, with_saved
from zexport.export.hub_tensors import with_hub_experts
from zexport.export.merge import adapter_to_merge, base_as_trained, merge_adapter, weights_of_base
from zexport.export.model_class import Model, Ties, compare_ties, identify
from zexport.export.peft_config import AdapterConfig
from zexport.export.plan import DTYPES, SourceFile
from zexport.export.select import in_form, is_adapted
from zexport.export.summary import share_memory
from zexport.export.weights import Weights
from zexport.filenames import ADAPTER_CONFIG, CONFIG, GENERATION_CONFIG, README, TOKENIZER
from zexport.findings import Finding
from zexport.model.card import is_unfilled
from zexport.model.config import ConfigFile
from zexport.model.hf_files import HfFiles, find_hf_files, notes_on, warnings_on
from zexport.model.hub_cache import model_folder
from zexport.model.names import ModelNames, NamesUnknown
from zexport.model.names_client import Learner, NamesClient
from zexport.model.token_ids import TokenId, file_ids
from zexport.options import AdapterMode, ExportOptions, NameLayout
from zexport.ranges.compare import CastReplica
from zexport.storage.files import is_file
from zexport.storage.os_errors import reading
from zexport.text import some

if TYPE_CHECKING:
    from zexport.ranges.reader import ReadableFile

_NOT_ASKED = NamesUnknown("not asked")


class Inputs(Struct, frozen=True):
    """All that a plan is decided from.

    Attributes:
        model: the model and its weights after every rename, with an adapter merged if asked.
        base: the base's weights, by in-memory name.
        sources: the files that the plan may read.
        mode: keep or merge adapters; ``None`` for a checkpoint without any.
        saved: PEFT's own files next to the checkpoint, by adapter.
        gathered: copies of fp32 master weights next to the checkpoint.
        tokens: the highest token ids in the model files; ``base_tokens`` in the base's tokenizer.
        is_card_unfilled: the model card is PEFT's template.
        nbytes_compared: bytes of tensors read to compare.
    """

    checkpoint: TrainingState
    options: ExportOptions
    files: HfFiles
    model: Model
    base: Base = Base()
    base_check: BaseCheck = BaseCheck()
    sources: tuple[SourceFile, ...] = ()
    mode: AdapterMode | None = None
    adapters: tuple[Adapter, ...] = ()
    saved: Mapping[str, AdapterFile] = {}
    ties: Ties = Ties()
    gathered: tuple[CastReplica, ...] = ()
    tokens: tuple[TokenId, ...] = ()
    base_tokens: tuple[TokenId, ...] = ()
    is_card_unfilled: bool = False
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    nbytes_compared: int = 0

    def adding(self, *, warnings: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Inputs:
        """Return the inputs with more warnings and notes."""
        return structs.replace(
            self, warnings=(*self.warnings, *warnings), notes=(*self.notes, *notes)
        )


def gather(checkpoint: TrainingState, options: ExportOptions | None = None) -> Inputs:
    """Return all that the plan of an export depends on.

    Raises:
        ZexportError: something that the output depends on is missing, damaged or contradictory.
    """
    options = options or ExportOptions()
    with reading(checkpoint.location.root, hint="Check its permissions"):
        if options.base is not None:
            options = replace(options, base=model_folder(options.base))
        transformers = NamesClient(are_needed=options.layout is NameLayout.HUB)
        inputs = _gather(checkpoint, options, transformers)
        if transformers.lacked:
            lacked = f"config.json was not compared with the weights: {transformers.lacked}"
            inputs = inputs.adding(warnings=(lacked,))
        return inputs


def _gather(checkpoint: TrainingState, options: ExportOptions, transformers: NamesClient) -> Inputs:
    findings = raise_problems(checkpoint, options.allow)
    share_memory(options)
    location = checkpoint.location
    parts = [(one.root, one.boundary) for one in checkpoint.parts]
    files = find_hf_files(location.root, options.base, location.boundary, parts)
    learner = Learner(files.source, transformers)
    part, of_part = Weights.of(checkpoint).only(options.only)
    stored = with_hub_experts(part, files.config, learner, options)
    weights = stored.renamed(options.renames)
    is_idle = bool(options.renames) and weights.names == stored.names
    headers = read_base(options.base, follow_symlinks=location.boundary.follow)
    gathered_headers, gathered = gathered_copies(checkpoint)
    sources: list[ReadableFile] = [*checkpoint.torch_files, *headers, *gathered_headers]
    inputs = Inputs(
        checkpoint,
        options,
        files,
        Model(files.config, _NOT_ASKED, weights),
        base=base_of(options.base, headers),
        sources=tuple({one.path: SourceFile.of(one) for one in sources}.values()),
        gathered=gathered,
        tokens=tuple(file_ids(files.copied)),
        is_card_unfilled=README in files.copied and is_unfilled(files.copied[README]),
        findings=findings,
        warnings=("--rename: no tensor name changed. Check the regex",) if is_idle else (),
        notes=(*of_part, *_notes_on(checkpoint)),
    )
    inputs = _with_files(_with_adapters(inputs, part))
    if inputs.mode is AdapterMode.KEEP:
        named = _base_name(inputs.adapters[0].config)
        stored = weights_of_base(inputs.model.weights)
        return _with_base_check(inputs, _NOT_ASKED, stored, named, files.config)
    task = ""
    if inputs.mode is AdapterMode.MERGE:
        adapter = adapter_to_merge(inputs.adapters, options)
        inputs, task = _merged(inputs, adapter, learner), adapter.config.task_type or ""
    return _with_model(inputs, learner, task)


def _notes_on(checkpoint: TrainingState) -> Iterator[str]:
    if unknown := {str(one): None for file in checkpoint.files for one in file.unknown_globals}:
        yield f"rank files name unknown code, which was not run: {some([*unknown], 8)}"
    differing: dict[str, None] = {}
    for ranks in (one for one in checkpoint.zero.values() if one.is_zero3 and one.model):
        for name in ranks.first.buffers:
            saved = [(m.file, m.module[name]) for m in ranks.model.values() if name in m.module]
            if len({(ref.shape, ref.dtype, f.checksum(ref.storage)) for f, ref in saved}) > 1:
                differing[name] = None
    if differing:
        yield f"buffers differ between ranks, the export has those of rank 0: {some([*differing])}"


def _with_adapters(inputs: Inputs, part: Weights) -> Inputs:
    """Choose what happens to adapters; ``part`` are the weights by their names in training."""
    checkpoint, options, weights = inputs.checkpoint, inputs.options, inputs.model.weights
    has_config = inputs.files.config is not None
    mode = choose_mode(checkpoint, weights, options, has_config=has_config)
    if options.layout is NameLayout.HUB and (mode or has_config or inputs.files.source):
        weights = weights.without_inner_wrappers()
        inputs = structs.replace(inputs, model=structs.replace(inputs.model, weights=weights))
    if mode is None:
        return inputs
    adapters = choose_adapters(checkpoint, weights, options)
    for adapter in adapters:
        trained = part.without_inner_wrappers() if mode is AdapterMode.MERGE else weights
        check_adapter(adapter, trained)
    saved = adapter_files(checkpoint, weights, adapters, options.check)
    chosen = {adapter.name for adapter in adapters}
    rest = [repr(name) for name in adapters_in(weights) if name not in chosen]
    left = (f"adapters left out: {', '.join(rest)}",) if rest else ()
    used = [one for one in saved.values() if one.replicas or one.of_base]
    return structs.replace(
        inputs,
        mode=mode,
        adapters=adapters,
        saved=saved,
        sources=(*inputs.sources, *(SourceFile.of(one.header) for one in used)),
        gathered=(*inputs.gathered, *(copy for one in used for copy in one.replicas)),
        notes=(*inputs.notes, *left, *describe_configs(adapters, checkpoint, options)),
        nbytes_compared=sum(one.nbytes_read for one in saved.values()),
    )


def _with_files(inputs: Inputs) -> Inputs:
    """Choose the files to copy: a kept adapter needs no config, a merged one no adapter card."""
    is_kept = inputs.mode is AdapterMode.KEEP
    left_out = {AdapterMode.KEEP: (GENERATION_CONFIG, ".py"), AdapterMode.MERGE: (README,)}
    ends = left_out.get(inputs.mode, ()) if inputs.mode is not None else ()
    copied = {name: path for name, path in inputs.files.copied.items() if not name.endswith(ends)}
    config = None if is_kept else inputs.files.config
    files = structs.replace(inputs.files, config=config, copied=copied)
    warnings = () if is_kept else tuple(warnings_on(files))
    return structs.replace(inputs, files=files).adding(
        warnings=warnings, notes=tuple(notes_on(files))
    )


def _with_base_check(
    inputs: Inputs,
    names: ModelNames | NamesUnknown,
    stored: Weights,
    named: BaseName | None,
    config: ConfigFile | None,
) -> Inputs:
    """Compare the base with the checkpoint's config and weights."""
    check = check_base(
        stored.tensors,
        under_names_of(names, inputs.base),
        (config, inputs.files.base_config),
        inputs.sources,
        location=inputs.checkpoint.location,
        named=named,
    )
    compared = inputs.nbytes_compared + check.nbytes_read
    return structs.replace(inputs, base_check=check, nbytes_compared=compared)


def _base_name(config: AdapterConfig) -> BaseName:
    return BaseName(config.base_model_name_or_path or "", ADAPTER_CONFIG, config.revision or "main")


def _merged(inputs: Inputs, adapter: Adapter, learner: Learner) -> Inputs:
    """Merge an adapter: the model's weights are then as if the base itself had been trained."""
    checkpoint, options, config = inputs.checkpoint, inputs.options, inputs.files.config
    weights = inputs.model.weights
    dtype = DTYPES.get(options.base_dtype, checkpoint.cast_dtype)
    stored = weights_of_base(weights)
    names = learner.names(config, {**inputs.base.shapes, **stored.known_shapes})
    inputs = _with_base_check(inputs, names, stored, _base_name(adapter.config), config)
    judge_base(inputs.base_check, inputs.base, options, uses_weights=True)
    base = base_as_trained(inputs.base, names, weights, adapter, dtype)
    ties = compare_ties(names, stored, base.tensors, inputs.sources)
    known = names.without_ties(ties.differing) if isinstance(names, ModelNames) else None
    saved = inputs.saved.get(adapter.name)
    whole = with_saved(weights, saved, base.shapes, needed=not options.exclude_frozen)
    model_type = "" if config is None else str(config.content.get("model_type") or "")
    merged = merge_adapter(checkpoint, whole, adapter, base, known, model_type)
    is_lacking = bool(base.tensors.keys() - merged.tensors.keys() - merged.aliases.keys())
    left_out = is_lacking if base.tensors else checkpoint.frozen_left_out
    base_tokens = inputs.tokens
    tokenizer = None if options.base is None else options.base / TOKENIZER
    if tokenizer not in (None, inputs.files.copied.get(TOKENIZER)):
        base_tokens = tuple(file_ids({TOKENIZER: tokenizer} if is_file(tokenizer) else {}))
    described = (saved.description,) if saved is not None and saved.description else ()
    warnings, notes = (described, ()) if saved is None or not saved.is_of_step else ((), described)
    rounded = ""
    if dtype is not None and base.tensors:
        rounded = f", whose weights are rounded to {dtype.torch_name}"
    return structs.replace(
        inputs,
        checkpoint=structs.replace(checkpoint, frozen_left_out=left_out),
        model=structs.replace(inputs.model, weights=merged),
        base=base,
        base_tokens=base_tokens,
        nbytes_compared=inputs.nbytes_compared + ties.nbytes_read,
    ).adding(
        warnings=warnings,
        notes=(f"adapter {adapter.name!r} is merged into the base model{rounded}", *notes),
    )


def _with_model(inputs: Inputs, learner: Learner, task: str) -> Inputs:
    """Find out the model class, check the base, and compare tied weights."""
    checkpoint, options, files = inputs.checkpoint, inputs.options, inputs.files
    lacks = checkpoint.may_lack_weights
    model = identify(
        inputs.model.weights, files.config, learner, options, may_lack_weights=lacks, task=task
    )
    own, base = model.config, under_names_of(model.names, inputs.base)
    files = structs.replace(files, config=own)
    inputs = structs.replace(inputs, model=model, base=base, files=files)
    fills_in = lacks and not options.exclude_frozen
    if inputs.mode is None:
        named = None
        if fills_in and base.tensors.keys() - model.weights.shapes.keys():
            path = None if files.base_config is None else files.base_config.path
            is_own = own is not None and own.path != path
            name = own.content.get("_name_or_path") if own is not None and is_own else None
            named = BaseName(str(name or ""), CONFIG)
        inputs = _with_base_check(inputs, model.names, model.weights, named, own)
    is_for_hub = options.layout is NameLayout.HUB
    if is_for_hub and is_adapted(model.weights):
        return inputs
    names, stored = in_form(model.weights, model.fit, options)
    given = base.tensors if fills_in else {}
    ties = compare_ties(names, stored, given, inputs.sources, stored_twice=is_for_hub)
    compared = inputs.nbytes_compared + ties.nbytes_read
    return structs.replace(inputs, ties=ties, nbytes_compared=compared)
