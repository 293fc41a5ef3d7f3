"""Gather the inputs of an export: everything that is read before it is planned.

That is what transformers answers, the model files, the base model, an adapter to merge, and the few
comparisons of values that decisions depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import Struct, structs

from zexport.checkpoint.state import StoredTensor, TrainingState, raise_problems
from zexport.errors import UnsupportedError
from zexport.export.adapters import (
    Adapter,
    check_adapter,
    check_whole,
    choose_adapters,
    choose_mode,
)
from zexport.export.base_model import (
    Base,
    BaseCheck,
    BaseName,
    base_of,
    check_base,
    judge_base,
    not_loaded,
    read_base,
    under_names_of,
)
from zexport.export.copies import AdapterFile, adapter_files, gathered_copies, with_saved
from zexport.export.hub_tensors import with_hub_experts
from zexport.export.merge import adapter_to_merge, base_as_trained, merge_adapter, weights_of_base
from zexport.export.model_class import Model, Ties, compare_ties, identify
from zexport.export.plan import DTYPES, SourceFile, share_memory
from zexport.export.select import in_form, is_adapted
from zexport.export.weights import Weights
from zexport.filenames import ADAPTER_CONFIG, CONFIG, GENERATION_CONFIG, README, TOKENIZER
from zexport.findings import Findings
from zexport.model.card import is_unfilled
from zexport.model.config import ConfigFile
from zexport.model.hf_files import HfFiles, find_hf_files, notes_on, warnings_on
from zexport.model.hub_cache import model_folder
from zexport.model.hub_names import ModelNames, NamesUnknown
from zexport.model.names_client import Learner
from zexport.model.token_ids import TokenId, file_ids
from zexport.options import AdapterMode, CheckMode, ExportDType, ExportOptions, NameLayout
from zexport.ranges.compare import CastReplica
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.storage.files import is_file
from zexport.storage.os_errors import reading
from zexport.text import some

_TORCHTITAN = "tok_embeddings.weight"


class Inputs(Struct):
    """All that a plan is decided from; each step of ``gather`` adds to it.

    Attributes:
        model: the model and its weights after every rename, with an adapter merged if asked.
        base: the base's weights, by in-memory name.
        unloaded: tensors of the base that the model class does not load, by name in its files.
        sources: the files that the plan may read.
        reader: compares weights; it is closed once everything is gathered.
        mode: keep or merge adapters; ``None`` for a checkpoint without any.
        saved: PEFT's own files next to the checkpoint, by adapter.
        gathered: copies of fp32 master weights next to the checkpoint.
        tokens: the highest token ids in the model files; ``base_tokens`` in the base's tokenizer.
        is_card_unfilled: the model card is PEFT's template.
    """

    checkpoint: TrainingState
    options: ExportOptions
    files: HfFiles
    model: Model
    base: Base
    sources: dict[Path, SourceFile]
    reader: SourceReader
    findings: Findings
    base_check: BaseCheck = BaseCheck()
    unloaded: Mapping[str, StoredTensor] = {}
    mode: AdapterMode | None = None
    adapters: tuple[Adapter, ...] = ()
    saved: Mapping[str, AdapterFile] = {}
    ties: Ties = Ties()
    gathered: tuple[CastReplica, ...] = ()
    tokens: tuple[TokenId, ...] = ()
    base_tokens: tuple[TokenId, ...] = ()
    is_card_unfilled: bool = False
    warnings: list[str] = []
    notes: list[str] = []


def gather(checkpoint: TrainingState, options: ExportOptions | None = None) -> Inputs:
    """Return all that the plan of an export depends on.

    Raises:
        ZexportError: something that the output depends on is missing, damaged or contradictory.
    """
    options, location = options or ExportOptions(), checkpoint.location
    with reading(location.root, hint="Check its permissions"):
        if options.dtype is None:
            dtype = ExportDType.FP32 if location.is_zero else ExportDType.AUTO
            options = replace(options, dtype=dtype)
        if options.base is not None:
            options = replace(options, base=model_folder(options.base))
        findings = raise_problems(checkpoint, options.allow)
        share_memory(options)
        parts = [(one.root, one.boundary) for one in checkpoint.parts]
        files = find_hf_files(location.model_dir, options.base, location.boundary, parts)
        learner = Learner(files.source, are_needed=options.layout is NameLayout.HUB)
        part = Weights.of(checkpoint).only(options.only)
        if _TORCHTITAN in part.names and options.layout is NameLayout.HUB:
            raise UnsupportedError(
                "weights have torchtitan's own names, which no class of transformers loads",
                path=location.tag_dir,
                found=_TORCHTITAN,
                hint="Export them under these names with --layout memory",
            )
        stored = with_hub_experts(part, files.config, learner, options)
        weights = stored.renamed(options.renames)
        headers = read_base(options.base, follow_symlinks=location.boundary.follow)
        gathered_headers, gathered = gathered_copies(checkpoint)
        every: list[ReadableFile] = [*checkpoint.torch_files, *headers, *gathered_headers]
        sources = {one.path: SourceFile.of(one) for one in every}
        with SourceReader(sources.values()) as reader:
            inputs = Inputs(
                checkpoint,
                options,
                files,
                Model(files.config, NamesUnknown("not asked"), weights),
                base_of(options.base, headers),
                sources,
                reader,
                findings,
                gathered=gathered,
                tokens=tuple(file_ids(files.copied)),
                is_card_unfilled=README in files.copied and is_unfilled(files.copied[README]),
            )
            if options.renames and weights.names == stored.names:
                inputs.warnings.append("--rename: no tensor name changed. Check the regex")
            _gather(inputs, part, learner)
        if learner.lacked:
            inputs.warnings.append(
                f"config.json was not compared with the weights: {learner.lacked}"
            )
        return inputs


def _gather(inputs: Inputs, part: Weights, learner: Learner) -> None:
    """Add the adapters, files and model; ``part`` are the weights by their names in training."""
    rank_files, config = inputs.checkpoint.files, inputs.files.config
    if unknown := {str(one): None for file in rank_files for one in file.unknown_globals}:
        inputs.notes.append(f"rank files name unknown code, which was not run: {some([*unknown])}")
    if differing := _differing_buffers(inputs.checkpoint):
        inputs.notes.append(
            f"buffers differ between ranks, the export has those of rank 0: {some(differing)}"
        )
    _choose_adapters(inputs, part)
    _choose_files(inputs)
    if inputs.mode is AdapterMode.KEEP:
        own = weights_of_base(inputs.model.weights)
        _compare_base(inputs, own, _base_name(inputs.adapters[0]), config)
        return
    task = ""
    if inputs.mode is AdapterMode.MERGE:
        adapter = adapter_to_merge(inputs.adapters, inputs.options)
        _merge(inputs, adapter, learner)
        task = adapter.config.task_type or ""
    _identify(inputs, learner, task)


def _differing_buffers(checkpoint: TrainingState) -> list[str]:
    sums: dict[tuple[int, str], set[int | bytes]] = {}
    for ranks in checkpoint.zero.values():
        for one in ranks.model.values() if ranks.is_zero3 else ():
            for name in one.module.keys() & {*one.buffers}:
                found = sums.setdefault((ranks.index, name), set())
                found.add(one.file.checksum(one.module[name].storage))
    return sorted({name for (_, name), found in sums.items() if len(found) > 1})


def _choose_adapters(inputs: Inputs, part: Weights) -> None:
    checkpoint, options, weights = inputs.checkpoint, inputs.options, inputs.model.weights
    has_config = inputs.files.config is not None
    inputs.mode = choose_mode(checkpoint, weights, options, has_config=has_config)
    if options.layout is NameLayout.HUB and (inputs.mode or has_config or inputs.files.source):
        weights = weights.without_inner_wrappers()
        inputs.model = structs.replace(inputs.model, weights=weights)
    if inputs.mode is None:
        return
    inputs.adapters = choose_adapters(checkpoint, weights, options)
    trained = part.without_inner_wrappers() if inputs.mode is AdapterMode.MERGE else weights
    for adapter in inputs.adapters:
        check_adapter(adapter, trained)
        check_whole(checkpoint, weights, adapter)
        used = adapter.config.path
        if used.parent != checkpoint.location.model_dir / adapter.folder:
            inputs.notes.append(f"adapter {adapter.name!r}: using {used}. Check lora_alpha")
    is_full = options.check is CheckMode.FULL
    inputs.saved = adapter_files(
        checkpoint, weights, inputs.adapters, inputs.reader, is_full=is_full
    )
    for saved in inputs.saved.values():
        if saved.replicas or saved.lacking:
            inputs.sources[saved.header.path] = SourceFile.of(saved.header)
            inputs.gathered += saved.replicas
        if saved.lacking:
            (inputs.notes if saved.is_of_step else inputs.warnings).append(saved.description)


def _choose_files(inputs: Inputs) -> None:
    """Choose the files to copy: a kept adapter needs no config, a merged one no adapter card."""
    files, left_out = inputs.files, tuple[str, ...]()
    if inputs.mode is AdapterMode.KEEP:
        files, left_out = structs.replace(files, config=None), (GENERATION_CONFIG, ".py")
    elif inputs.mode is AdapterMode.MERGE:
        left_out = (README,)
    copied = {name: path for name, path in files.copied.items() if not name.endswith(left_out)}
    inputs.files = files = structs.replace(files, copied=copied)
    if inputs.mode is not AdapterMode.KEEP:
        inputs.warnings += warnings_on(files)
    inputs.notes += notes_on(files)


def _compare_base(
    inputs: Inputs, stored: Weights, named: BaseName | None, config: ConfigFile | None
) -> None:
    inputs.base_check = check_base(
        stored.tensors,
        inputs.base,
        (config, inputs.files.base_config),
        inputs.reader,
        location=inputs.checkpoint.location,
        named=named,
    )


def _base_name(adapter: Adapter) -> BaseName:
    config = adapter.config
    return BaseName(config.base_model_name_or_path or "", ADAPTER_CONFIG, config.revision or "main")


def _merge(inputs: Inputs, adapter: Adapter, learner: Learner) -> None:
    """Merge an adapter: the model's weights are then as if the base itself had been trained."""
    checkpoint, options, config = inputs.checkpoint, inputs.options, inputs.files.config
    weights = inputs.model.weights
    stored = weights_of_base(weights)
    names = learner.names(config, {**inputs.base.shapes, **stored.known_shapes})
    inputs.unloaded = not_loaded(names, inputs.base)
    inputs.base = under_names_of(names, inputs.base)
    _compare_base(inputs, stored, _base_name(adapter), config)
    judge_base(inputs.base_check, options, uses_weights=True)
    dtype = DTYPES.get(options.base_dtype, checkpoint.cast_dtype)
    inputs.base = base = base_as_trained(inputs.base, names, weights, adapter, dtype)
    ties = compare_ties(names, stored, base.tensors, inputs.reader)
    known = names.without_ties(ties.differing) if isinstance(names, ModelNames) else None
    saved = inputs.saved.get(adapter.name)
    whole = with_saved(weights, saved, base.shapes, needed=not options.exclude_frozen)
    model_type = "" if config is None else str(config.content.get("model_type") or "")
    merged = merge_adapter(whole, adapter, base, known, model_type)
    inputs.model = structs.replace(inputs.model, weights=merged)
    if base.tensors:
        lacking = base.tensors.keys() - merged.tensors.keys() - merged.aliases.keys()
        inputs.checkpoint = structs.replace(checkpoint, frozen_left_out=bool(lacking))
    inputs.base_tokens = inputs.tokens
    tokenizer = None if options.base is None else options.base / TOKENIZER
    if tokenizer not in (None, inputs.files.copied.get(TOKENIZER)):
        inputs.base_tokens = tuple(file_ids({TOKENIZER: tokenizer} if is_file(tokenizer) else {}))
    inputs.notes.append(f"adapter {adapter.name!r} is merged into the base model")


def _identify(inputs: Inputs, learner: Learner, task: str) -> None:
    options, files, lacks = inputs.options, inputs.files, inputs.checkpoint.may_lack_weights
    inputs.model = model = identify(
        inputs.model.weights, files.config, learner, options, may_lack_weights=lacks, task=task
    )
    if inputs.mode is None and options.layout is NameLayout.HUB:
        inputs.unloaded = not_loaded(model.names, inputs.base)
    inputs.base = base = under_names_of(model.names, inputs.base)
    fills_in = lacks and not options.exclude_frozen
    if inputs.mode is None:
        named, own = None, model.config
        if fills_in and base.tensors.keys() - model.weights.shapes.keys():
            of_base = files.base_config and files.base_config.path
            content = own.content if own is not None and own.path != of_base else {}
            named = BaseName(str(content.get("_name_or_path") or ""), CONFIG)
        _compare_base(inputs, model.weights, named, own)
    is_for_hub = options.layout is NameLayout.HUB
    if is_for_hub and is_adapted(model.weights):
        return
    names, stored = in_form(model.weights, model.fit, options)
    given = base.tensors if fills_in else {}
    inputs.ties = compare_ties(names, stored, given, inputs.reader, stored_twice=is_for_hub)
