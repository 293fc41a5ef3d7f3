"""The adapters of a checkpoint: their configuration, and whether they are kept or merged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct, structs

from zexport.checkpoint.resolve import Kind
from zexport.checkpoint.state import TrainingState
from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    NotACheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from zexport.export.peft import (
    KEPT_BY_NAME,
    PROMPT,
    AdapterConfig,
    PeftName,
    names_of_adapter,
    parse_name,
)
from zexport.export.weights import PEFT_PREFIX, Weights
from zexport.filenames import ADAPTER_CONFIG
from zexport.model.hub_names import Shapes
from zexport.options import AdapterMode, ExportOptions, NameLayout
from zexport.ranges.dtypes import Shape
from zexport.storage.files import is_file, matching
from zexport.storage.json import read_json_object
from zexport.text import some

_DEFAULT = "default"
"""The adapter that peft saves without a folder of its own."""

_META_OF_VERL = "lora_train_meta.json"
"""Rank and alpha, which verl saves instead of a configuration."""

_HEADS = frozenset({"classifier", "score", "qa_outputs"})
"""Modules that peft trains in full because of the task (0.21, ``peft_model.py``)."""

_SWITCHES = {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}
"""Switches of LoRA, and the tensor that each adds to every target module."""

_FACTOR = re.compile(r"(?<=\.lora_)[AB](?=\.weight$)|(?<=\.lora_embedding_)[AB]$")


class Adapter(Struct, frozen=True):
    """An adapter of a checkpoint."""

    name: str
    config: AdapterConfig

    @property
    def folder(self) -> str:
        """Its folder within the output, with a trailing slash; empty for the output itself."""
        return "" if self.name == _DEFAULT else f"{self.name}/"


def choose_mode(
    checkpoint: TrainingState, stored: Weights, options: ExportOptions, *, has_config: bool
) -> AdapterMode | None:
    """Return what to do with the adapters; ``None`` if the model is exported as it is in memory.

    Without ``adapter_config.json``, tensors of adapters are exported like any others. Next to a
    ``config.json`` (``has_config``) they would load as a model without any trained weight.
    """
    asked = options.adapter
    if not is_peft(checkpoint, stored, options):
        if asked is AdapterMode.AUTO and options.adapter_name is None:
            return None
        config = find_config(options.adapter_name or _DEFAULT, checkpoint, options)
        if config is not None and _has_prefix(stored):
            _check_method(config)
        raise UsageError(
            "not a checkpoint of a PEFT model",
            path=checkpoint.location.tag_dir,
            hint="Leave out --adapter and --adapter-name",
        )
    if options.layout is NameLayout.MEMORY:
        if asked is AdapterMode.KEEP:
            raise UsageError(
                "--adapter keep writes PEFT's names, but --layout memory asks for in-memory names",
                hint="Leave out one of them",
            )
        return None if asked is AdapterMode.AUTO else asked
    if asked is not AdapterMode.AUTO:
        return asked
    if has_config or any(find_config(name, checkpoint, options) for name in adapters_in(stored)):
        return AdapterMode.KEEP if options.base is None else AdapterMode.MERGE
    return None


def is_peft(checkpoint: TrainingState, stored: Weights, options: ExportOptions) -> bool:
    """Return whether the weights are those of a PEFT model.

    Some models have LoRA layers of their own (Phi-4-multimodal), without PEFT's prefix and without
    ``adapter_config.json``.
    """
    adapted = [one for name in stored.tensors if (one := parse_name(name)).adapter]
    is_named = _has_prefix(stored) or any(one.attribute == PROMPT for one in adapted)
    return bool(adapted) and (is_named or any(_config_paths(_DEFAULT, checkpoint, options)))


def _has_prefix(stored: Weights) -> bool:
    return any(f".{PEFT_PREFIX}" in f".{name}" for name in stored.tensors)


def adapters_in(stored: Weights) -> tuple[str, ...]:
    """Return the names of a checkpoint's adapters; they are also folder names."""
    found = (parse_name(name).adapter for name in (*stored.tensors, *stored.aliases))
    names = tuple(dict.fromkeys(filter(None, found)))
    for name in names:
        if "/" in name or "\\" in name or "\0" in name:
            raise UnsafeError(
                "adapter name is not a plain folder name",
                found=repr(name),
                hint="Change it with --rename",
            )
    return names


def choose_adapters(
    checkpoint: TrainingState, stored: Weights, options: ExportOptions
) -> tuple[Adapter, ...]:
    """Return the adapter that the options name, or all."""
    names = adapters_in(stored)
    if {"weight", "bias"} & {*names}:
        raise UsageError(
            "adapter name is missing from the names of its tensors",
            path=checkpoint.location.tag_dir,
            found="names such as lora_A.weight",
            expected="names such as lora_A.default.weight",
            hint="Leave out the --rename that removes it",
        )
    if options.adapter_name is not None:
        if options.adapter_name not in names:
            raise UsageError(f"no adapter is named {options.adapter_name!r}", found=some(names))
        names = (options.adapter_name,)
    adapters = []
    for name in names:
        config = find_config(name, checkpoint, options, is_only=len(names) == 1)
        if config and config.path.name == _META_OF_VERL:
            config = _of_verl(config, names_of_adapter(stored.shapes, name).values())
        if config is None:
            raise NotACheckpointError(
                f"no {ADAPTER_CONFIG} for adapter {name!r}",
                path=checkpoint.location.root,
                found="none there, in the tag folder, in the parent folder or in --base",
                hint="Pass the one of this run with --adapter-config FILE, or export in-memory "
                "names with --layout memory --exclude-frozen",
            )
        adapters.append(Adapter(name, config))
    return tuple(adapters)


def _of_verl(config: AdapterConfig, parts: Iterable[PeftName]) -> AdapterConfig | None:
    """Return the configuration that verl's own merger makes: LoRA of the modules with updates.

    Source: verl 0.9, ``model_merger/base_model_merger.py`` (``save_lora_adapter``).
    """
    if config.r is None or config.lora_alpha is None:
        return None
    updated = {one.module for one in parts if one.attribute.startswith("lora_")}
    targets = sorted({module.rpartition(".")[2] for module in updated})
    content = {**config.content, "peft_type": "LORA", "target_modules": targets}
    return structs.replace(config, content=content, peft_type="LORA", target_modules=targets)


def find_config(
    name: str, checkpoint: TrainingState, options: ExportOptions, *, is_only: bool = True
) -> AdapterConfig | None:
    """Return the configuration of an adapter; ``is_only``: no other adapter is exported."""
    path = next(_config_paths(name, checkpoint, options, is_only=is_only), None)
    return None if path is None else AdapterConfig.read(path)


def _config_paths(
    name: str, checkpoint: TrainingState, options: ExportOptions, *, is_only: bool = True
) -> Iterator[Path]:
    """Yield the existing configurations that may be the adapter's, the preferred one first.

    An adapter's own folder comes first, but ``--adapter-config`` before it if it can mean only one.
    """
    location = checkpoint.location
    given = [] if options.adapter_config is None else [_checked(options.adapter_config)]
    others = [location.model_dir, location.tag_dir, location.model_dir.parent]
    others += (
        [location.tag_dir / "lora_adapter"] if location.kind is Kind.FSDP else []
    )  # of verl, SkyRL
    others += [] if options.base is None else [options.base]
    for places in (given, others) if is_only else ([*given, *others],):
        paths = [(place, place if is_file(place) else place / ADAPTER_CONFIG) for place in places]
        if name != _DEFAULT:
            folders = [place for place in places if not is_file(place)]
            paths = [*((place, place / name / ADAPTER_CONFIG) for place in folders), *paths]
        for place, path in paths:
            location.boundary.including(place).check(path)
            if is_file(path):
                yield path
    meta = location.tag_dir / _META_OF_VERL
    if location.kind is Kind.FSDP and is_file(meta):
        location.boundary.check(meta)
        yield meta


def _checked(path: Path) -> Path:
    """Return what ``--adapter-config`` names: a configuration, or a folder with some."""
    is_folder = any(matching(path, name) for name in (ADAPTER_CONFIG, f"*/{ADAPTER_CONFIG}"))
    if not is_folder and not (is_file(path) and "peft_type" in read_json_object(path)):
        raise NotACheckpointError(
            f"not an {ADAPTER_CONFIG}",
            path=path,
            expected="a JSON object with peft_type",
            hint="Pass the file that peft wrote with --adapter-config",
        )
    return path


def _check_method(config: AdapterConfig) -> None:
    if config.peft_type not in KEPT_BY_NAME or config.prefix_projection:
        raise UnsupportedError(
            "adapter method is not supported: peft saves more than the tensors of the module",
            path=config.path,
            found=config.peft_type or "no peft_type",
            expected="LORA or another method that saves what it trained",
            hint="Export in-memory names with --layout memory --exclude-frozen",
        )


def check_adapter(adapter: Adapter, stored: Weights) -> None:
    """Raise if ``adapter_config.json`` does not describe the adapter's tensors.

    peft skips tensors that the configuration does not name, without a warning. That of another run
    may also have another scale.
    """
    config, shapes = adapter.config, stored.shapes
    _check_method(config)
    parts = names_of_adapter(shapes, adapter.name)
    is_lora = config.peft_type == "LORA"
    problems = [
        f"{name} but peft_type {config.peft_type}"
        for name, one in parts.items()
        if one.attribute.startswith("lora_") != is_lora and not (one.is_copy or one.is_tokens)
    ]
    problems += _unnamed_copies(config, parts)
    if is_lora and not (problems or config.variants):
        problems += _lora_mismatches(config, parts, shapes)
    if problems:
        raise DamagedCheckpointError(
            "does not fit the adapter's tensors",
            path=config.path,
            found=some(problems, 4),
            hint="Replace it with the adapter_config.json that the training run wrote",
        )


def _unnamed_copies(config: AdapterConfig, parts: Mapping[str, PeftName]) -> Iterator[str]:
    """Yield modules that were trained in full, and that peft would not load."""
    for module in dict.fromkeys(one.module for one in parts.values() if one.is_copy):
        is_head = config.task_type and module.rpartition(".")[2] in _HEADS
        is_named = any(module.endswith(name) for name in config.modules_to_save or ())
        if not (is_named or is_head or config.ensure_weight_tying):
            yield f"{module} trained in full but not in modules_to_save"


def _lora_mismatches(
    config: AdapterConfig, parts: Mapping[str, PeftName], shapes: Shapes
) -> Iterator[str]:
    """Yield updates of other modules, another rank or kind, and other trained tokens."""
    modules: dict[str, dict[str, Shape]] = {}
    for name, one in parts.items():
        if one.attribute.startswith("lora_"):
            modules.setdefault(one.module, {})[one.tensor] = shapes[name]
    for module, tensors in modules.items():
        if not config.may_target(module):
            yield f"{module} trained but not in target_modules"
        factor = tensors.get("lora_A.weight", tensors.get("lora_embedding_A"))
        rank = config.rank_of(module)
        stacked = config.target_parameters and rank  # a factor for each expert
        if factor and (factor[0] % stacked if stacked else factor[0] != rank):
            yield f"rank of {module} is {factor[0]} but r is {rank}"
        for key, start in _SWITCHES.items():
            has_it = any(name.startswith(start) for name in tensors)
            if has_it != bool(getattr(config, key)):
                yield f"{module} has {'a' if has_it else 'no'} {start} but {key} is {not has_it}"
    tokens = config.trainable_token_indices or ()
    lists = tokens.values() if isinstance(tokens, dict) else filter(None, [tokens])
    trained = {shapes[name][:1] for name, one in parts.items() if one.is_tokens}
    if trained != {(len(one),) for one in lists}:
        yield "number of trained tokens differs from trainable_token_indices"


def check_whole(checkpoint: TrainingState, stored: Weights, adapter: Adapter) -> None:
    """Raise if frozen tensors of the adapter were left out of the checkpoint.

    A missing LoRA factor may leave no other trace than its counterpart.
    """
    kept = {one.on_disk for one in names_of_adapter(stored.every_tensor, adapter.name).values()}
    lost = [*names_of_adapter(stored.left_out, adapter.name)]
    counterparts = {_FACTOR.sub(lambda found: "BA"["AB".index(found[0])], n) for n in kept}
    lost += sorted(counterparts - kept)
    if lost:
        raise FrozenLeftOutError(
            f"frozen tensors of adapter {adapter.name!r} are not in the checkpoint",
            path=checkpoint.location.tag_dir,
            found=f"no values for {some(lost, 4)}",
            hint="Save again with exclude_frozen_parameters=False",
        )
