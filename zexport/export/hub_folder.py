"""Files of a Hugging Face model folder, as transformers' ``save_pretrained`` writes it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import FrozenLeftOutError
from zexport.export.base_model import check_plain, judge_base
from zexport.export.copies import RESIZED_HINT
from zexport.export.gather import Inputs
from zexport.export.model_class import is_value_head
from zexport.export.plan import (
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHTS_ONLY,
    FilePlan,
    SideFile,
    plan_file,
    target_dtype,
)
from zexport.export.select import Selection, select
from zexport.export.weights import Tensors
from zexport.filenames import CONFIG, README
from zexport.findings import Finding, Findings
from zexport.model.card import model_card, paragraphs_of
from zexport.model.config import ConfigFile
from zexport.model.hub_cache import GivenBase
from zexport.model.hub_names import Fit
from zexport.model.token_ids import ADDED_TOKENS, TokenId, config_ids
from zexport.options import AdapterMode
from zexport.ranges.dtypes import DType
from zexport.text import some

HEAD_FILE = "value_head.safetensors"
OTHER_FILE = "other_weights.safetensors"
"""Files of weights that the model class does not have. They are not in the index.

LLaMA-Factory reads and writes the first (``extras/constants.py``). llama.cpp's converter takes
neither for a file of the model.
"""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Input embeddings of models whose class is unknown."""


class Folder(Struct, frozen=True, kw_only=True):
    """Contents of an output folder, and what to report.

    Attributes:
        heads: weights that the model class does not have.
        mended: corrections of config.json.
    """

    shards: tuple[FilePlan, ...]
    side_files: tuple[SideFile, ...]
    selection: Selection
    findings: Findings
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    heads: Tensors = {}
    mended: tuple[str, ...] = ()

    @property
    def written(self) -> list[StoredTensor]:
        return [*self.selection.tensors.values(), *self.heads.values()]


def files_of_base(inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the files that are copied from the base model."""
    base, files = inputs.options.base, inputs.files.files
    return () if base is None else tuple(sorted(n for n in files if files[n].is_relative_to(base)))


def hub_folder(inputs: Inputs) -> Folder:
    """Return the model folder: tensors with the model's names, config, card and copied files."""
    checkpoint, options, heads = inputs.checkpoint, inputs.options, inputs.model.heads
    selection = select(checkpoint, inputs.model, inputs.base, inputs.ties, options)
    kept = {n: one for n, one in inputs.unloaded.items() if options.keep_unloaded}
    check_plain(kept.values(), inputs.base)
    tensors = {**selection.tensors, **kept}
    from_base = (*selection.from_base, *kept)
    selection = structs.replace(selection, tensors=tensors, from_base=from_base)
    config = _written_config(inputs.model.config, selection)
    is_merged = inputs.mode is AdapterMode.MERGE
    base_files = files_of_base(inputs)
    uses_weights = is_merged or bool(selection.from_base)
    allowed = judge_base(inputs.base_check, options, uses_weights=uses_weights, files=base_files)
    apart: dict[str, list[str]] = {}
    for name in heads:
        apart.setdefault(HEAD_FILE if is_value_head(name) else OTHER_FILE, []).append(name)
    findings = (*inputs.findings, *allowed, *selection.findings)
    warnings = (
        *inputs.base_check.warnings,
        *inputs.warnings,
        *_file_warnings(inputs, apart),
        *selection.warnings,
        *_token_warnings(inputs, config),
    )
    target = target_dtype(checkpoint, options.dtype)
    dtypes = {
        name: tensor.dtype if name in kept else tensor.output_dtype(target)
        for name, tensor in (*tensors.items(), *heads.items())
    }
    shards = _planned(_shards(tensors, dtypes, options.max_shard_nbytes), tensors, dtypes)
    dtype = _commonest(shards) if target is None else target
    files = structs.replace(inputs.files, config=config)
    sides = [SideFile(name, origin=path) for name, path in sorted(files.copied.items())]
    if README not in files.copied:
        is_sure = is_merged and not (allowed or inputs.base_check.warnings)
        named = inputs.adapters[0].config.base_model_name_or_path if is_sure else None
        card = model_card(
            checkpoint,
            dtype,
            files,
            architecture=next(iter(config.architectures if config else ()), selection.architecture),
            apart=apart,
            origin=[
                *_origin(inputs, selection, findings, base_files),
                *paragraphs_of((*checkpoint.warnings, *warnings)),
            ],
            trained_on=named or "",
        )
        sides.append(SideFile(README, card))
    if config is not None:
        content = config.edited(dtype, selection.architecture, is_untied=bool(selection.untied))
        sides.append(SideFile(CONFIG, content))
    # Without an index, vLLM and SGLang read every safetensors file of a folder as the model's.
    if heads or [shard.filename for shard in shards] != [SINGLE_FILE]:
        sides.append(SideFile(INDEX_FILE, _index_file(shards, tensors)))
    mended = () if config is None else config.changes
    notes = [*inputs.notes, *(f"config.json: {change}" for change in mended)]
    if options.base is not None and not (uses_weights or base_files):
        notes.append("--base is not used: it has nothing that the export needs")
    if inputs.unloaded and not kept:
        notes.append(
            f"the model class does not load {some(sorted(inputs.unloaded))} of the base; "
            "--keep-unloaded copies them"
        )
    if config is not None and inputs.files.missing:
        notes.append(
            f"not found: {', '.join(inputs.files.missing)}. Pass --base to copy from there"
        )
    return Folder(
        shards=(*shards, *_planned(apart, heads, dtypes)),
        side_files=tuple(sides),
        selection=selection,
        findings=findings,
        warnings=warnings,
        notes=tuple(notes),
        heads=heads,
        mended=mended,
    )


def _written_config(config: ConfigFile | None, selection: Selection) -> ConfigFile | None:
    """Return the config without quantization or tied weights that the written tensors lack."""
    if config is None:
        return None
    weights = [t for t in selection.tensors.values() if t.role is not Role.BUFFER]
    if all(tensor.dtype.is_floating for tensor in weights):
        config = config.without_quantization()
    if selection.untied:
        change = f"tie_word_embeddings is false, because {some(sorted(selection.untied))} differs"
        config = config.changed(change, config.content)
    return config


def _file_warnings(inputs: Inputs, apart: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if inputs.files.config is None:
        missing = ", ".join(inputs.files.missing)
        yield f"{WEIGHTS_ONLY}; not found: {missing}. Pass the base model with --base"
    for file, names in apart.items():
        yield f"{file}: contains {some(names)}, which from_pretrained does not load"


def _token_warnings(inputs: Inputs, config: ConfigFile | None) -> Iterator[str]:
    """Return a warning if token ids exceed the embedding.

    Raises:
        FrozenLeftOutError: an adapter was trained with a resized embedding, which is neither in the
            checkpoint nor in the base model.
    """
    fit, options, tensors = inputs.model.fit, inputs.options, inputs.model.weights.every_tensor
    axes = fit.names.sizes.get("vocab_size", {}) if isinstance(fit, Fit) else {}
    prefix = fit.prefix if isinstance(fit, Fit) else ""
    own = [tensors[prefix + n].shape[axis] for n, axis in axes.items() if prefix + n in tensors]
    own = own or [one.shape[0] for name, one in tensors.items() if name.endswith(_EMBEDDINGS)]
    stated = [] if config is None else [n for n in config.sizes("vocab_size") if type(n) is int]
    rows = max(own or stated, default=None)
    if rows is None:
        return
    beyond = [one for one in (*inputs.tokens, *config_ids(config)) if one.number >= rows]
    added = [one for one in beyond if one.about == ADDED_TOKENS]
    is_merged = inputs.mode is AdapterMode.MERGE and options.base and not options.exclude_frozen
    of_base = (one.number for one in inputs.base_tokens if one.about == ADDED_TOKENS)
    if is_merged and added and not own and max(of_base, default=-1) < rows:
        raise FrozenLeftOutError(
            "embedding was resized for added tokens, and is not in the checkpoint",
            path=inputs.checkpoint.location.tag_dir,
            found=str(added[0]),
            expected=f"token ids below {rows}, the rows of --base's embedding",
            hint=RESIZED_HINT,
        )
    if beyond:
        yield describe_beyond(
            rows, beyond, "using them will fail. Pass the tokenizer and config of the training"
        )


def describe_beyond(rows: int, beyond: Sequence[TokenId], consequence: str) -> str:
    """Return a warning about token ids that exceed the rows of the embedding."""
    ids = some([str(one) for one in beyond], 4)
    return f"token ids exceed the embedding's {rows} rows ({ids}); {consequence}"


def _origin(
    inputs: Inputs, selection: Selection, findings: Iterable[Finding], base_files: Sequence[str]
) -> Iterator[str]:
    """Return the card's paragraphs about what is not from training, and accepted findings."""
    base = inputs.files.base
    of = "" if base is None else f" ({GivenBase.of(base)})"
    every = (*selection.tensors.values(), *inputs.model.heads.values())
    if inputs.mode is AdapterMode.MERGE:
        count = sum(tensor.role is Role.FROZEN for tensor in every)
        yield (
            f"The adapter {inputs.adapters[0].name} is merged into its base model{of}: {count} of "
            f"{len(every)} tensors equal the base's."
        )
    elif selection.from_base:
        yield (
            f"{len(selection.from_base)} of {len(every)} tensors come from the base model{of}: "
            "they were frozen, and not saved in the checkpoint."
        )
    if base_files:
        yield f"Files of the base model{of}: {', '.join(base_files)}."
    for one in findings:
        if one.accepted:
            yield f"Accepted with --allow {one.kind}: {one.detail or one.tensor}."


def _commonest(shards: Iterable[FilePlan]) -> DType:
    """Return the floating dtype of most bytes."""
    nbytes = Counter[DType]()
    for tensor in (one for shard in shards for one in shard.tensors if one.dtype.is_floating):
        nbytes[tensor.dtype] += tensor.nbytes
    return max(nbytes, key=nbytes.__getitem__, default=DType.F32)


def _shards(tensors: Tensors, dtypes: Mapping[str, DType], nbytes_max: int) -> dict[str, list[str]]:
    """Return the names in each shard, split as huggingface_hub does.

    Source: huggingface_hub 1.0, ``serialization/_base.py``: in the order given; a tensor larger
    than a shard gets its own, before the one that is being filled.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel * dtypes[name].itemsize
        if nbytes > nbytes_max:
            shards.append([name])
            continue
        if used + nbytes > nbytes_max:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += nbytes
    shards += [current] if current else []
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    ending = f"-of-{len(shards):05d}.safetensors"
    return {f"model-{number:05d}{ending}": names for number, names in enumerate(shards, 1)}


def _planned(
    files: Mapping[str, Sequence[str]], tensors: Tensors, dtypes: Mapping[str, DType]
) -> tuple[FilePlan, ...]:
    return tuple(
        plan_file(file, {name: tensors[name] for name in names}, dtypes)
        for file, names in files.items()
    )


def _index_file(shards: Sequence[FilePlan], tensors: Tensors) -> bytes:
    """Return the index as transformers 5 writes it: sorted, two spaces, a newline at the end."""
    planned = [(tensor, shard) for shard in shards for tensor in shard.tensors]
    parameters = [t for t, _ in planned if tensors[t.name].role is not Role.BUFFER]
    content = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in parameters),
            "total_size": sum(tensor.nbytes for tensor, _ in planned),
        },
        "weight_map": {tensor.name: shard.filename for tensor, shard in planned},
    }
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
