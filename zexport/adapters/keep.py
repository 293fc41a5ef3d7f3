"""The folder that peft's ``save_pretrained`` writes of adapters, made of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from zexport.adapters.config import ADAPTER_CONFIG, EMBEDDINGS, AdapterConfig
from zexport.adapters.find import Adapter, check_whole, choose_adapters, not_just_tensors
from zexport.adapters.kept_embeddings import lacking_embeddings
from zexport.adapters.material import Content, Material
from zexport.adapters.saved_beside import ADAPTER_FILE
from zexport.checkpoint.contents import StoredTensor, ZeroCheckpoint
from zexport.model.added_tokens import tokens_beyond
from zexport.model.names import NamesUnknown
from zexport.model.peft_names import PEFT_PREFIX, inner_name, read_name
from zexport.model.sidecars import Sidecars
from zexport.options import ExportOptions
from zexport.plan.plan import SideFile, qualified
from zexport.plan.shards import DTYPES, plan_shard
from zexport.ranges.dtypes import DType
from zexport.weights.named import NamedTensors
from zexport.weights.quantized import check_plain
from zexport.weights.select import Selection


def keep_adapters(material: Material, options: ExportOptions) -> Content:
    """What peft's ``save_pretrained`` writes of the adapters: each in the folder it has there.

    Raises:
        ZexportError: as ``choose_adapters`` and ``_kept_tensors`` do.
    """
    checkpoint, stored = material.checkpoint, material.stored
    adapters = choose_adapters(checkpoint, stored, options)
    tensors: dict[str, StoredTensor] = {}
    shards, from_base, notes = [], list[str](), list[str]()
    for adapter in adapters:
        filename = f"{adapter.folder}{ADAPTER_FILE}"
        kept = _kept_tensors(checkpoint, stored, adapter)
        if (saved := material.saved.get(adapter.name)) is not None:
            kept |= {**saved.held, **saved.lacking} if saved.is_of_step else {}
            notes += [saved.note] if saved.note else []
        lacking = lacking_embeddings(adapter.config, kept)
        filled = {name: material.given[n] for name, n in lacking.items() if n in material.given}
        check_plain(filled.values(), material.given, NamesUnknown("not asked"), options.base)
        kept |= {n: replace(t, module_dtype=checkpoint.cast_dtype) for n, t in filled.items()}
        from_base += [qualified(filename, name) for name in filled]
        notes += [
            f"without {name}, which peft saves too: give --base"
            for name in lacking
            if name not in filled
        ]
        shards.append(plan_shard(filename, kept, _kept_dtypes(kept, options)))
        notes += _without_rows(kept, material.sidecars)
        tensors |= {qualified(filename, name): tensor for name, tensor in kept.items()}
    words = "adapter" if len(adapters) == 1 else "adapters"
    names = ", ".join(repr(adapter.name) for adapter in adapters)
    return Content(
        Selection(
            tensors,
            {},
            loadable=True,
            architecture=None,
            from_base=tuple(from_base),
            is_untied=False,
            warnings=(),
        ),
        tuple(shards),
        tuple(_kept_files(adapters, material.sidecars)),
        material.sidecars,
        (
            *material.notes,
            f"this is the {words} {names} for peft, not a model; --adapter merge makes one",
            *notes,
        ),
    )


def _kept_tensors(
    checkpoint: ZeroCheckpoint, stored: NamedTensors, adapter: Adapter
) -> dict[str, StoredTensor]:
    """What peft saves of an adapter, by the names it has in the file.

    Raises:
        UnsupportedError: the method saves something else than tensors of the module.
        FrozenLeftOutError: some of it is in no file.
    """
    if not adapter.config.is_kept_by_name:
        raise not_just_tensors(adapter.config)
    tied = {alias: stored.tensors[name] for alias, name in stored.aliases.items()}
    every = {**stored.tensors, **tied}
    kept = {
        part.on_disk: tensor
        for name, tensor in every.items()
        if (part := read_name(name)).adapter == adapter.name
    }
    check_whole(checkpoint, stored, adapter, kept)
    return kept | dict(_kept_of_base(every, adapter.config))


def _without_rows(kept: Mapping[str, StoredTensor], sidecars: Sidecars) -> Iterator[str]:
    """What to say where tokens were added, and the embedding that has their rows is not kept."""
    found = tokens_beyond(sidecars)
    whole = [t.shape for name, t in kept.items() if not read_name(name).adapter]
    if found is not None and not any(shape and shape[0] > found.last for shape in whole):
        yield (
            f"without the embedding, which was resized if it was trained with {found.last + 1} "
            f"tokens, and not {found.rows}: no file has it; save it with modules_to_save"
        )


def _kept_files(adapters: Iterable[Adapter], sidecars: Sidecars) -> Iterator[SideFile]:
    """The files beside the adapters': their configurations, and what is not the model's own."""
    for adapter in adapters:
        name, config = f"{adapter.folder}{ADAPTER_CONFIG}", adapter.config
        if config.content.get("inference_mode") is True:
            yield SideFile(name, origin=config.path)
        else:
            content = {**config.content, "inference_mode": True}  # peft loads it untrained
            yield SideFile(name, content=json.dumps(content, indent=2, sort_keys=True).encode())
    for name, path in sorted(sidecars.copied.items()):
        if name != "generation_config.json" and path.suffix != ".py":
            yield SideFile(name, origin=path)


def _kept_dtypes(tensors: Mapping[str, StoredTensor], options: ExportOptions) -> dict[str, DType]:
    """The element type of each tensor of an adapter: the one asked for, or its own in the module.

    peft saves what the module holds, which under ZeRO-3 may differ from tensor to tensor.
    """
    target = DTYPES.get(options.dtype)
    return {
        name: tensor.output_dtype(target or tensor.module_dtype or tensor.dtype)
        for name, tensor in tensors.items()
    }


def _kept_of_base(
    every: Mapping[str, StoredTensor], config: AdapterConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """Weights of the base model that peft saves too: trained biases, and targeted embeddings."""
    for name, tensor in every.items():
        if read_name(name).adapter:
            continue
        inner = inner_name(name)
        *_, wrapper, last = ("", *inner.split("."))
        is_bias = last == "bias" and (
            config.bias == "all" or (config.bias.endswith("_only") and wrapper == "base_layer")
        )
        is_embedding = config.is_embedding_targeted and any(
            f".{module}.base_layer." in f".{inner}" for module in EMBEDDINGS
        )
        if is_bias or is_embedding:
            yield PEFT_PREFIX + inner, tensor
