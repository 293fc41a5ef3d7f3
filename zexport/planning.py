"""Making the plan: from a checkpoint and the options to the origin of every output byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from zexport.adapters.find import adapter_mode, choose_adapters
from zexport.adapters.keep import keep_adapters
from zexport.adapters.material import Content, Material
from zexport.adapters.merging import check_embedding, work_in
from zexport.adapters.saved_beside import saved_beside
from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.checkpoint.layouts.data_parallel import Inventory
from zexport.checkpoint.opening import raise_problems
from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.formats.safetensors_file import SafetensorsHeader
from zexport.model.added_tokens import tokens_without_a_row
from zexport.model.card import model_card
from zexport.model.fit import ModelNames
from zexport.model.names import learn_names
from zexport.model.names_client import NamesClient
from zexport.model.sidecars import Sidecars, find_sidecars
from zexport.model.spoilt_files import spoilt_files
from zexport.options import AdapterMode, Engine, ExportDType, ExportOptions, NameLayout
from zexport.plan.memory import share_memory
from zexport.plan.plan import ExportPlan, FilePlan, Reference, SideFile, SourceFile
from zexport.plan.shards import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    files_apart,
    index_file,
    plan_heads,
    plan_shards,
)
from zexport.ranges.copies import CastReplica
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import paths_of
from zexport.store.json import JsonObject
from zexport.weights.accounting import account
from zexport.weights.base import base_tensors, read_base, source_files, under_names_of
from zexport.weights.expected_shapes import check_shapes
from zexport.weights.gathered import gathered_copies, may_be_gathered
from zexport.weights.model_class import Identity, identify
from zexport.weights.named import name_tensors, settle_names
from zexport.weights.select import Selection, select_tensors
from zexport.weights.ties import settle_ties, under_tied_sources


def plan_export(
    checkpoint: ZeroCheckpoint, out_dir: Path | str, options: ExportOptions | None = None
) -> ExportPlan:
    """The whole plan of an export; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or weights were left out of it.
        UnsupportedError: its layout is not one that can be exported.
        UsageError: an option cannot be meant.
    """
    options = options or ExportOptions()
    findings = raise_problems(checkpoint, options.allow)
    share_memory(options)
    location = checkpoint.location
    sidecars = find_sidecars(location.root, options.base, location.boundary)
    beside = _beside(checkpoint)
    with NamesClient() as transformers:
        original = checkpoint
        checkpoint = _with_fused_experts(checkpoint, sidecars, options, transformers)
        material = _material(checkpoint, sidecars, beside, options)
        mode = adapter_mode(checkpoint, material.stored, options)
        options = replace(options, adapter=mode or options.adapter)
        material = _prepared(material, mode, options)
        content = _content(material, mode, options, transformers)
    if not content.selection.tensors:
        raise _no_weights(checkpoint)
    gathered = gathered_copies(original, beside)
    jobs, chunk_nbytes = share_memory(options, content.shards)
    return ExportPlan(
        out_dir=Path(out_dir),
        shards=content.shards,
        side_files=content.side_files,
        sources=_sources(checkpoint, material.files, content.written, gathered),
        replicas=checkpoint.replicas,
        gathered=gathered,
        check=options.check,
        allow=options.allow,
        findings=findings + content.findings,
        provenance=_provenance(checkpoint, content, options),
        warnings=(*checkpoint.newer, *checkpoint.warnings, *content.warnings),
        overwrite=options.overwrite,
        jobs=jobs,
        chunk_nbytes=chunk_nbytes,
        reference=_reference(original, options),
    )


def _material(
    checkpoint: ZeroCheckpoint,
    sidecars: Sidecars,
    beside: Iterable[SafetensorsHeader],
    options: ExportOptions,
) -> Material:
    """What the checkpoint, the base and the options give, before an adapter is thought of."""
    stored = name_tensors(checkpoint, options.renames)
    base = read_base(options.base, follow_symlinks=checkpoint.location.boundary.follow)
    files = (*map(SourceFile.of, checkpoint.torch_files), *source_files((*base, *beside)))
    return Material(checkpoint, stored, sidecars, base_tensors(base), files)


def _prepared(material: Material, mode: AdapterMode | None, options: ExportOptions) -> Material:
    """The same without the names of inner wrappers, and with what peft saved beside it."""
    sidecars = material.sidecars
    if options.layout is NameLayout.HUB and (mode or sidecars.config or sidecars.source):
        material = _without_inner_wrappers(material)
    return material if mode is None else _with_saved_beside(material, options)


def _content(
    material: Material,
    mode: AdapterMode | None,
    options: ExportOptions,
    transformers: NamesClient,
) -> Content:
    """What the folder will hold: adapters kept, one merged into its base, or a model."""
    if mode is AdapterMode.KEEP:
        return keep_adapters(material, options)
    if mode is AdapterMode.MERGE:
        material = work_in(material, options, transformers)
    return _model_content(material, options, transformers)


def _without_inner_wrappers(material: Material) -> Material:
    """The same under names that no wrapper of a single module put its own into."""
    stored, parts = material.stored.without_inner_wrappers()
    notes = (f"{part!r}, which a wrapper put into names, was left out of them" for part in parts)
    return replace(material, stored=stored, notes=(*material.notes, *notes))


def _with_saved_beside(material: Material, options: ExportOptions) -> Material:
    """The same with what peft saved of the base model beside the checkpoint."""
    checkpoint, stored = material.checkpoint, material.stored
    adapters = choose_adapters(checkpoint, stored, options)
    saved = saved_beside(checkpoint, stored, adapters, options.check)
    more = source_files(one.header for one in saved.values())
    return replace(material, saved=saved, files=(*material.files, *more))


def _model_content(
    material: Material, options: ExportOptions, transformers: NamesClient
) -> Content:
    """A model's folder: its tensors by the names it has for them, and the files beside them."""
    checkpoint, stored = material.checkpoint, material.stored
    tag_dir = checkpoint.location.tag_dir
    model = identify(
        checkpoint, material.sidecars, stored, options, transformers, task=material.task
    )
    findings = check_shapes(model.trunk, model.names, options, tag_dir)
    if options.adapter is AdapterMode.MERGE:
        check_embedding(replace(material, sidecars=model.sidecars), options)
    given = under_names_of(model.names, material.given, options.base)
    given = under_tied_sources(model.names, given)
    given_shapes = {name: tensor.shape for name, tensor in given.items()}
    settled = settle_names(model.trunk, model.names, given_shapes, options, tag_dir)
    fills_in = checkpoint.may_lack_weights and not options.exclude_frozen
    settled = settle_ties(settled, given if fills_in else {}, material.files)
    selection = select_tensors(checkpoint, settled, given, options)
    model = replace(model, sidecars=_with_plain_weights(model.sidecars, selection))
    target = _target(checkpoint, options)
    shards = plan_shards(selection.tensors, target, options.max_shard_nbytes)
    return Content(
        selection=selection,
        heads=model.heads,
        shards=(*shards, *plan_heads(model.heads, target)),
        side_files=(
            *_copied_files(model.sidecars),
            *_written_files(checkpoint, model, selection, shards, target),
        ),
        sidecars=model.sidecars,
        warnings=(*material.notes, *_warnings(model), *selection.warnings),
        findings=findings,
        hub_layout=settled.label,
    )


def _with_fused_experts(
    checkpoint: ZeroCheckpoint,
    sidecars: Sidecars,
    options: ExportOptions,
    transformers: NamesClient,
) -> ZeroCheckpoint:
    """The checkpoint with AutoEP's experts as the Hugging Face model has them, if it is one."""
    is_split = any(tensor.name.endswith(".experts.w1") for tensor in checkpoint.tensors)
    if options.layout is NameLayout.MEMORY or not is_split:
        return checkpoint
    from zexport.weights.autoep_experts import (  # noqa: PLC0415 - rare
        fuse_experts,
        with_original_names,
    )

    inventory = fuse_experts(Inventory(checkpoint.tensors, checkpoint.aliases, checkpoint.left_out))
    shapes = {tensor.name: tensor.shape for tensor in inventory.tensors}
    names = learn_names(sidecars, shapes, transformers)
    if not isinstance(names, ModelNames):
        return checkpoint
    inventory = with_original_names(inventory, names.shapes)
    fused = replace(checkpoint, tensors=inventory.tensors, aliases=inventory.aliases)
    return (
        fused
        if name_tensors(fused, options.renames).shapes.keys() <= names.shapes.keys()
        else checkpoint
    )


def _no_weights(checkpoint: ZeroCheckpoint) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "holds no weights",
        path=checkpoint.location.tag_dir,
        expected="at least one",
        hint="Look at it with `zexport inspect`; another tag may be whole",
    )


def _with_plain_weights(sidecars: Sidecars, selection: Selection) -> Sidecars:
    """With a config that tells of no packing, unless packed weights are what is written."""
    weights = (t for t in selection.tensors.values() if t.role is not Role.BUFFER)
    if sidecars.config is None or not all(tensor.dtype.is_floating for tensor in weights):
        return sidecars
    return replace(sidecars, config=sidecars.config.without_quantization())


def _target(checkpoint: ZeroCheckpoint, options: ExportOptions) -> DType:
    """The element type of the output's parameters."""
    if options.dtype is ExportDType.AUTO:
        return checkpoint.module_dtype or DType.F32
    return DTYPES[options.dtype]


def _copied_files(sidecars: Sidecars) -> tuple[SideFile, ...]:
    return tuple(SideFile(name, origin=path) for name, path in sorted(sidecars.copied.items()))


def _written_files(
    checkpoint: ZeroCheckpoint,
    model: Identity,
    selection: Selection,
    shards: Sequence[FilePlan],
    target: DType,
) -> Iterator[SideFile]:
    """The files beside the shards whose content is new: card, config, index.

    There is an index wherever there is a head: without one, vLLM and SGLang read every safetensors
    file of a folder as the model's.
    """
    sidecars = model.sidecars
    if "README.md" not in sidecars.copied:
        apart = files_apart(model.heads)
        card = model_card(checkpoint, target, sidecars, selection.architecture, apart)
        yield SideFile("README.md", card)
    if sidecars.config is not None:
        content = sidecars.config.edited(
            target,
            selection.architecture,
            tie_word_embeddings=False if selection.is_untied else None,
        )
        yield SideFile("config.json", content)
    if model.heads or [shard.filename for shard in shards] != [SINGLE_FILE]:
        yield SideFile(INDEX_FILE, index_file(shards, selection.tensors))


def _sources(
    checkpoint: ZeroCheckpoint,
    files: Iterable[SourceFile],
    tensors: Iterable[StoredTensor],
    gathered: Iterable[CastReplica],
) -> tuple[SourceFile, ...]:
    """Those of ``files`` that the plan reads."""
    kept = [tensor.source for tensor in tensors if tensor.source is not None]
    copies = [c for r in (*checkpoint.replicas, *gathered) for c in (r.kept, r.other)]
    read = paths_of([*kept, *copies])
    return tuple(file for file in files if file.path in read)


def _warnings(model: Identity) -> Iterator[str]:
    """What is missing beside the weights, is not as it was found, or stands apart."""
    sidecars = model.sidecars
    if sidecars.missing:
        yield (
            f"without {' and '.join(sidecars.missing)}: nothing of that kind lies with the "
            "checkpoint; give a model folder with --base"
        )
    if sidecars.config is not None:
        yield from (f"config.json is mended: {note}" for note in sidecars.config.mended)
    for name in spoilt_files(sidecars.copied):
        yield f"{name} is copied as it is, but is not whole JSON: what reads it will fail"
    if told := tokens_without_a_row(sidecars):
        yield told
    yield from model.warnings


def _reference(checkpoint: ZeroCheckpoint, options: ExportOptions) -> Reference | None:
    """What DeepSpeed's own converter needs, where it is to rebuild the checkpoint."""
    location = checkpoint.location
    if options.engine is not Engine.DEEPSPEED:
        return None
    return Reference(location.root, location.tag, checkpoint.tensors)


def _provenance(checkpoint: ZeroCheckpoint, content: Content, options: ExportOptions) -> JsonObject:
    """What the manifest says of the checkpoint and the options; nothing that varies by run."""
    selection, config = content.selection, content.sidecars.config
    dtypes = (checkpoint.module_dtype, checkpoint.master_dtype)
    module_dtype, master_dtype = (dtype.torch_name if dtype else None for dtype in dtypes)
    return {
        "checkpoint": {
            "tag": checkpoint.location.tag,
            "layout": checkpoint.layout,
            "stage": checkpoint.stage,
            "world_size": checkpoint.world_size,
            "global_steps": checkpoint.global_steps,
            "deepspeed_version": checkpoint.ds_version,
            "module_dtype": module_dtype,
            "master_dtype": master_dtype,
            "warnings": list(checkpoint.warnings),
        },
        "options": replace(options, hub_layout=content.hub_layout).recorded(),
        "loadable": selection.loadable,
        "tied": dict(sorted(selection.tied.items())),
        "from_base": list(selection.from_base),
        "heads": list(content.heads),
        "mended": list(config.mended) if config is not None else [],
        "accounting": account(checkpoint, content.written).to_json(),
    }


def _beside(checkpoint: ZeroCheckpoint) -> tuple[SafetensorsHeader, ...]:
    """Headers of the weight files beside the checkpoint; none that cannot be read, or is a link."""
    if not may_be_gathered(checkpoint):
        return ()
    try:
        headers = read_base(
            checkpoint.location.root, follow_symlinks=checkpoint.location.boundary.follow
        )
    except ZexportError:
        return ()  # nothing depends on them; `zexport inspect` tells what is wrong
    return () if any(header.path.is_symlink() for header in headers) else headers
