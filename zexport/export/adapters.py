"""A peft model's adapters: what is to become of them, and the files that keep one of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from zexport.checkpoint.boundary import Boundary
from zexport.checkpoint.contents import StoredTensor, ZeroCheckpoint
from zexport.dtypes import DType
from zexport.errors import (
    FrozenLeftOutError,
    NotACheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from zexport.export.kept_embeddings import lacking_embeddings
from zexport.export.naming import NamedTensors
from zexport.export.plan import ShardPlan, SideFile, SourceFile, qualified
from zexport.export.quantized import check_plain
from zexport.export.selection import Selection
from zexport.export.shards import DTYPES, plan_shard
from zexport.findings import Finding
from zexport.model.adapter_config import (
    ADAPTER_CONFIG,
    DEFAULT_ADAPTER,
    EMBEDDINGS,
    AdapterConfig,
    find_adapter_config,
)
from zexport.model.adapter_names import PEFT_PREFIX, adapters_of, inner_name, read_name
from zexport.model.names import NamesUnknown
from zexport.model.sidecars import Sidecars
from zexport.options import AdapterMode, ExportOptions, NameLayout

ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Content:
    """What an output folder will hold, before anything of how it is written.

    Attributes:
        selection: the tensors, by their names in the plan.
        shards: the files that hold them.
        side_files: the other files.
        sidecars: what they are made of.
        warnings: what the user should know.
        findings: what was found that was allowed.
        hub_layout: the label of the way in which the model is saved; ``None`` where it has none.
        heads: tensors of heads that the model does not know, by name.
    """

    selection: Selection
    shards: tuple[ShardPlan, ...]
    side_files: tuple[SideFile, ...]
    sidecars: Sidecars
    warnings: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    hub_layout: str | None = None
    heads: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def written(self) -> tuple[StoredTensor, ...]:
        """All that is written."""
        return (*self.selection.tensors.values(), *self.heads.values())


@dataclass(frozen=True, slots=True)
class Material:
    """What an export is made of.

    Attributes:
        checkpoint: what was opened.
        stored: its tensors, renamed.
        sidecars: the files around it.
        given: tensors of the base model's folder, by name.
        files: all files that may be read.
        notes: what was done to it so far, in words.
    """

    checkpoint: ZeroCheckpoint
    stored: NamedTensors
    sidecars: Sidecars
    given: Mapping[str, StoredTensor]
    files: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a checkpoint: its name in the module, and its ``adapter_config.json``."""

    name: str
    config: AdapterConfig

    @property
    def folder(self) -> str:
        """Where peft puts its files below the output folder, ending in a slash; may be empty."""
        return "" if self.name == DEFAULT_ADAPTER else f"{self.name}/"


def adapter_mode(
    checkpoint: ZeroCheckpoint, stored: NamedTensors, options: ExportOptions
) -> AdapterMode | None:
    """What is to become of the adapters; ``None`` for a checkpoint that is no peft model's.

    Names as they are in memory are nothing to work on: then a peft model is like any other. So is
    one of which nothing says what its adapters are, unless the options say what to make of them.

    Raises:
        UsageError: the options ask for what cannot be.
    """
    if not is_peft(stored, adapter_folders(checkpoint, options)):
        if options.adapter is AdapterMode.AUTO and options.adapter_name is None:
            return None
        _check_kept_by_name(checkpoint, stored, options)
        raise UsageError(
            "--adapter is about the checkpoint of a peft model, which this is not",
            path=checkpoint.location.tag_dir,
            hint="Leave --adapter and --adapter-name out",
        )
    if options.layout is NameLayout.MEMORY and options.adapter is not AdapterMode.MERGE:
        if options.adapter is AdapterMode.AUTO:
            return None
        raise UsageError(
            "--layout memory keeps every name as it is, and an adapter's folder has peft's names",
            hint="Leave --layout or --adapter out",
        )
    if options.adapter is not AdapterMode.AUTO:
        return options.adapter
    folders, boundary = adapter_folders(checkpoint, options), checkpoint.location.boundary
    if all(find_adapter_config(name, folders, boundary) is None for name in adapters_in(stored)):
        return None
    return AdapterMode.KEEP if options.base is None else AdapterMode.MERGE


def _check_kept_by_name(
    checkpoint: ZeroCheckpoint, stored: NamedTensors, options: ExportOptions
) -> None:
    """Nothing, unless it is a peft model of a method that names its tensors in no known way.

    Raises:
        UnsupportedError: it is.
    """
    folders, boundary = adapter_folders(checkpoint, options), checkpoint.location.boundary
    config = find_adapter_config(options.adapter_name or DEFAULT_ADAPTER, folders, boundary)
    if _is_prefixed(stored) and config is not None and not config.is_kept_by_name:
        raise _not_just_tensors(config)


def _not_just_tensors(config: AdapterConfig) -> UnsupportedError:
    return UnsupportedError(
        "is of a method whose adapters are not just tensors of the module",
        path=config.path,
        found=config.peft_type,
        expected="LORA or another method that saves what it trained",
        hint="Write the tensors as they are with --layout memory --exclude-frozen",
    )


def is_peft(stored: NamedTensors, folders: Iterable[Path]) -> bool:
    """Whether the tensors are those of a model under peft.

    Models exist that have adapters as parts of their own (Phi-4-multimodal); peft's prefix, or its
    file beside the checkpoint, tells one under peft from them.
    """
    adapted = [name for name in stored.tensors if read_name(name).adapter]
    if not adapted:
        return False
    if _is_prefixed(stored) or any(read_name(name).is_prompt for name in adapted):
        return True
    return any((folder / ADAPTER_CONFIG).is_file() for folder in folders)


def _is_prefixed(stored: NamedTensors) -> bool:
    return any(f".{PEFT_PREFIX}" in f".{name}" for name in stored.tensors)


def adapter_folders(checkpoint: ZeroCheckpoint, options: ExportOptions) -> tuple[Path, ...]:
    """Where an adapter's configuration may lie, the likeliest first."""
    location = checkpoint.location
    given = [] if options.adapter_config is None else [_folder_of(options.adapter_config)]
    base = [] if options.base is None else [options.base]
    return (*given, location.root, location.tag_dir, location.root.parent, *base)


def _folder_of(path: Path) -> Path:
    """The folder that ``--adapter-config`` means: the file's, or the one it names.

    Raises:
        NotACheckpointError: there is no such file.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or (path.is_file() and path.name == ADAPTER_CONFIG):
        return folder
    raise NotACheckpointError(
        f"is no {ADAPTER_CONFIG}", path=path, hint="Give --adapter-config the file that peft wrote"
    )


def adapters_in(stored: NamedTensors) -> tuple[str, ...]:
    """The names of a checkpoint's adapters, which are those of folders too.

    Raises:
        UnsafeError: one leads elsewhere than to a folder of its own.
    """
    names = adapters_of([*stored.tensors, *stored.aliases])
    for name in names:
        if "/" in name or "\\" in name or "\0" in name:
            raise UnsafeError(
                "an adapter's name leads to another folder",
                found=repr(name),
                expected="a plain name",
                hint="Give the tensors another with --rename",
            )
    return names


def choose_adapters(
    checkpoint: ZeroCheckpoint, stored: NamedTensors, options: ExportOptions
) -> tuple[Adapter, ...]:
    """The adapters that the options mean: the one they name, else all.

    Raises:
        UsageError: there is none of the name given.
        NotACheckpointError: the configuration of one is nowhere.
    """
    names = adapters_in(stored)
    if options.adapter_name is not None:
        if options.adapter_name not in names:
            raise UsageError(
                f"there is no adapter named {options.adapter_name!r}", found=", ".join(names)
            )
        names = (options.adapter_name,)
    folders, boundary = adapter_folders(checkpoint, options), checkpoint.location.boundary
    return tuple(Adapter(name, _config_of(name, folders, boundary)) for name in names)


def _config_of(name: str, folders: tuple[Path, ...], boundary: Boundary) -> AdapterConfig:
    config = find_adapter_config(name, folders, boundary)
    if config is None:
        raise NotACheckpointError(
            f"has no {ADAPTER_CONFIG}, which says what the adapter {name!r} is",
            path=folders[0],
            found="none there, in the tag folder, in the folder above or in --base",
            hint="Give the one that training began with as --adapter-config FILE; or write the "
            "tensors as they are with --layout memory --exclude-frozen",
        )
    return config


def keep_adapters(material: Material, options: ExportOptions) -> Content:
    """What peft's ``save_pretrained`` writes of the adapters: each in the folder it has there.

    Raises:
        ZexportError: as ``choose_adapters`` and ``kept_tensors`` do.
    """
    checkpoint, stored = material.checkpoint, material.stored
    adapters = choose_adapters(checkpoint, stored, options)
    tensors: dict[str, StoredTensor] = {}
    shards, from_base, nowhere = [], list[str](), list[str]()
    for adapter in adapters:
        filename = f"{adapter.folder}{ADAPTER_FILE}"
        kept = kept_tensors(checkpoint, stored, adapter)
        lacking = lacking_embeddings(adapter.config, kept)
        filled = {name: material.given[n] for name, n in lacking.items() if n in material.given}
        check_plain(filled.values(), material.given, NamesUnknown("not asked"), options.base)
        kept |= {n: replace(t, module_dtype=checkpoint.cast_dtype) for n, t in filled.items()}
        from_base += [qualified(filename, name) for name in filled]
        nowhere += [name for name in lacking if name not in filled]
        shards.append(plan_shard(filename, kept, kept_dtypes(kept, options)))
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
        tuple(kept_files(adapters, material.sidecars)),
        material.sidecars,
        (
            f"this is the {words} {names} for peft, not a model; --adapter merge makes one",
            *(f"without {name}, which peft saves too: give --base" for name in nowhere),
        ),
    )


def kept_tensors(
    checkpoint: ZeroCheckpoint, stored: NamedTensors, adapter: Adapter
) -> dict[str, StoredTensor]:
    """What peft saves of an adapter, by the names it has in the file.

    Raises:
        UnsupportedError: the method saves something else than tensors of the module.
        FrozenLeftOutError: some of it is in no file.
    """
    if not adapter.config.is_kept_by_name:
        raise _not_just_tensors(adapter.config)
    tied = {alias: stored.tensors[name] for alias, name in stored.aliases.items()}
    every = {**stored.tensors, **tied}
    kept = {
        part.on_disk: tensor
        for name, tensor in every.items()
        if (part := read_name(name)).adapter == adapter.name
    }
    check_whole(checkpoint, stored, adapter, kept)
    return kept | dict(_kept_of_base(every, adapter.config))


def kept_files(adapters: Iterable[Adapter], sidecars: Sidecars) -> Iterator[SideFile]:
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


def kept_dtypes(tensors: Mapping[str, StoredTensor], options: ExportOptions) -> dict[str, DType]:
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


def check_whole(
    checkpoint: ZeroCheckpoint,
    stored: NamedTensors,
    adapter: Adapter,
    kept: Mapping[str, StoredTensor],
) -> None:
    """Nothing, if no part of the adapter was left out of the save.

    Frozen parts of an adapter are left out with all that is frozen; of two factors that one is
    there tells that the other was.

    Raises:
        FrozenLeftOutError: some of it is in no file.
    """
    lost = [name for name in stored.left_out if read_name(name).adapter == adapter.name]
    for name in kept:
        for one, other in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            for here, there in ((one, other), (other, one)):
                counterpart = name.replace(f".{here}", f".{there}")
                if (
                    f".{here}" in name
                    and name.endswith(("weight", here))
                    and (counterpart not in kept)
                ):
                    lost.append(counterpart)
    if lost:
        raise FrozenLeftOutError(
            f"parts of the adapter {adapter.name!r} were frozen, and left out of the save",
            path=checkpoint.location.tag_dir,
            found=f"no values for {', '.join(lost[:4])}{' and more' if len(lost) > 4 else ''}",  # noqa: PLR2004 - a few
            expected="all of the adapter",
            hint="Save again with exclude_frozen_parameters=False",
        )
