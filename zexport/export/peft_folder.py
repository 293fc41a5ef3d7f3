"""Plan the files of PEFT adapters, as ``save_pretrained`` writes them.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict``,
``save_embedding_layers``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import UnsupportedError
from zexport.export.adapters import Adapter
from zexport.export.base_model import check_plain, judge_base
from zexport.export.gather import Inputs
from zexport.export.hub_folder import Folder, describe_beyond, files_of_base
from zexport.export.peft import EMBEDDINGS, inner_name, names_of_adapter, parse_name
from zexport.export.plan import DTYPES, FilePlan, SideFile, plan_file, qualified
from zexport.export.select import Selection
from zexport.export.weights import PEFT_PREFIX, Tensors
from zexport.filenames import ADAPTER_CONFIG, ADAPTER_FILE, README
from zexport.model.card import model_card, paragraphs_of
from zexport.ranges.dtypes import DType
from zexport.text import some

_FACTORS = (".lora_embedding_A", ".lora_A.weight")


def peft_folder(inputs: Inputs) -> Folder:
    """Return the plan of the adapters' files, each in the folder that peft gives it.

    Each tensor has the dtype that was asked for, or its dtype in the module, as peft saves it.
    """
    checkpoint, target = inputs.checkpoint, DTYPES.get(inputs.options.dtype)
    shards, written = list[FilePlan](), dict[str, StoredTensor]()
    from_base, warnings = list[str](), list[str]()
    for adapter in inputs.adapters:
        filename = f"{adapter.folder}{ADAPTER_FILE}"
        kept = _kept(inputs, adapter)
        for name, inner in _missing_embeddings(adapter, kept).items():
            tensor = inputs.base.tensors.get(inner)
            if tensor is None:
                warnings.append(
                    f"{name}: not in the checkpoint; peft will use the base model's. If it was "
                    "resized, pass the resized base model with --base"
                )
            else:
                check_plain((tensor,), inputs.base)
                kept[name] = replace(tensor, module_dtype=checkpoint.cast_dtype)
                from_base.append(qualified(filename, name))
        dtypes = {
            name: one.output_dtype(target or one.module_dtype or one.dtype)
            for name, one in kept.items()
        }
        shards.append(plan_file(filename, kept, dtypes))
        written |= {qualified(filename, name): tensor for name, tensor in kept.items()}
        warnings += _warnings(inputs, adapter, kept)
    findings = judge_base(
        inputs.base_check,
        inputs.options,
        uses_weights=bool(from_base),
        files=files_of_base(inputs),
    )
    all_warnings = (*inputs.base_check.warnings, *inputs.warnings, *warnings)
    dtype = shards[0].tensors[0].dtype if shards[0].tensors else DType.F32
    names = ", ".join(repr(adapter.name) for adapter in inputs.adapters)
    return Folder(
        shards=tuple(shards),
        side_files=tuple(_side_files(inputs, all_warnings, dtype)),
        selection=Selection(written, loadable=True, from_base=tuple(from_base)),
        findings=(*inputs.findings, *findings),
        warnings=all_warnings,
        notes=(
            *inputs.notes,
            f"the export is a PEFT adapter ({names}), not a model. To merge it, pass "
            "--adapter merge, and --base unless the checkpoint contains the base model",
        ),
    )


def _kept(inputs: Inputs, adapter: Adapter) -> dict[str, StoredTensor]:
    """Return what peft saves of an adapter, by its names in the file."""
    stored, saved = inputs.model.weights, inputs.saved.get(adapter.name)
    every = stored.every_tensor
    parts = names_of_adapter(every, adapter.name)
    kept = {one.on_disk: every[name] for name, one in parts.items()}
    bias, saves_embeddings = adapter.config.bias or "none", adapter.config.saves_embeddings
    for name, tensor in every.items():
        *_, module, wrapper, last = ("", "", *(inner := inner_name(name)).split("."))
        is_bias = last == "bias" and (
            bias == "all" or (bias.endswith("_only") and wrapper == "base_layer")
        )
        is_embedding = saves_embeddings and wrapper == "base_layer" and module in EMBEDDINGS
        if (is_bias or is_embedding) and not parse_name(name).adapter:
            kept[PEFT_PREFIX + inner] = tensor
    if saved is not None and saved.is_of_step:
        kept |= {**saved.held, **saved.lacking}
    held = {tensor.name for tensor in kept.values()}
    lost = [
        name
        for name, tensor in stored.tensors.items()
        if tensor.role is Role.TRAINABLE
        and tensor.name not in held
        and not parse_name(name).adapter
    ]
    if lost:
        raise UnsupportedError(
            "trained weights outside the adapter have no place in its file",
            path=inputs.checkpoint.location.tag_dir,
            found=some(lost, 8),
            expected="only weights that adapter_config.json names",
            hint="Export a model with --adapter merge --base MODEL, or in-memory names with "
            "--layout memory --exclude-frozen",
        )
    return kept


def _missing_embeddings(adapter: Adapter, kept: Tensors) -> dict[str, str]:
    """Return embeddings that peft would save too, as {name in its file: name in the base model}."""
    if not adapter.config.saves_embeddings:
        return {}
    modules = {name.removesuffix(end) for name in kept for end in _FACTORS if name.endswith(end)}
    embeddings = {f"{n}.base_layer.weight" for n in modules if n.rpartition(".")[2] in EMBEDDINGS}
    return {name: parse_name(name).of_base for name in sorted(embeddings - kept.keys())}


def _warnings(inputs: Inputs, adapter: Adapter, kept: Tensors) -> Iterator[str]:
    """Yield what makes the adapter wrong although its file has all that the checkpoint has."""
    tensors = {**inputs.base.tensors, **kept}
    rows = [
        tensor.shape[0]
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1 and ".embed_tokens." in f".{name}" and "lora_" not in name
    ]
    if beyond := [one for one in inputs.tokens if rows and one.number >= max(rows)]:
        consequence = "if training resized it, no file contains it. Save it with modules_to_save"
        yield describe_beyond(max(rows), beyond, consequence)
    if init := adapter.config.changes_base:
        yield (
            f"init_lora_weights is {init}: peft changed base weights that the export does not "
            "contain. The adapter is right only if peft repeats that change exactly"
        )


def _side_files(inputs: Inputs, warnings: tuple[str, ...], dtype: DType) -> Iterator[SideFile]:
    """Yield the configurations, in inference mode, and the copied files."""
    for adapter in inputs.adapters:
        name, config = f"{adapter.folder}{ADAPTER_CONFIG}", adapter.config
        content = {**config.content, "inference_mode": True}
        yield SideFile(name, content=json.dumps(content, indent=2, sort_keys=True).encode())
    bases = {one.config.base_model_name_or_path or "" for one in inputs.adapters}
    for name, path in sorted(inputs.files.copied.items()):
        if name == README and inputs.is_card_unfilled:
            card = model_card(
                inputs.checkpoint,
                dtype,
                inputs.files,
                origin=paragraphs_of((*inputs.checkpoint.warnings, *warnings)),
                trained_on=bases.pop() if len(bases) == 1 else "",
                is_adapter=True,
            )
            yield SideFile(name, content=card)
        else:
            yield SideFile(name, origin=path)
