"""What an adapter's configuration and its tensors both say: method, targets, rank and parts.

peft loads an adapter by its configuration alone: what that does not tell of is left out of the
model without a word, and updates of another rank are not taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from msgspec.structs import replace

from zexport.adapters.find import Adapter
from zexport.adapters.peft_format import ADAPTER_CONFIG, TRAINED_TOKENS, AdapterConfig
from zexport.adapters.peft_names import PeftName, methods_of, read_name
from zexport.facts.statements import Statement
from zexport.facts.table import Fact
from zexport.model.config import ConfigFile
from zexport.model.hub_cache import is_hub_id, plain_name
from zexport.model.sidecars import CONFIG, Sidecars
from zexport.ranges.dtypes import Shape

_RANK_AXIS = {
    "lora_A.weight": 0,
    "lora_embedding_A": 0,
    "lora_B.weight": 1,
    "lora_embedding_B": 1,
    "hada_w1_b": 0,
}
_TENSORS = "the adapter's tensors"
_TOKENS = "trainable_tokens_delta"
_COPIED = "modules_to_save"
_NAMING = ("target_modules", _COPIED, "rank_pattern", "alpha_pattern")
_HEADS = frozenset({"classifier", "score", "qa_outputs"})
"""Modules that peft trains whole by the task, named or not (0.21, ``peft_model.py``)."""


_SWITCHES = ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying")
SCALING = (
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
    "r",
    "fan_in_fan_out",
    "init_lora_weights",
)
"""Keys by which the values of an update are made of its tensors."""

_DECIDING = (
    "base_model_name_or_path",
    "revision",
    "task_type",
    "target_modules",
    "modules_to_save",
    "layers_to_transform",
    *SCALING,
)
"""Keys by which an update is made of its tensors, and of what."""


def adapter_statements(
    adapter: Adapter, shapes: Mapping[str, Shape], elsewhere: Iterable[str]
) -> Iterator[Statement]:
    """What is said of one adapter, by its file and by the names and shapes of its tensors.

    Each of several adapters has its own rank and targets, so what is said is said of its modules.
    ``elsewhere`` are names of the model's weights that no file of the checkpoint holds.
    """
    modules = {part.module for n in (*shapes, *elsewhere) if not (part := read_name(n)).adapter}
    for one in (*_statements(adapter, shapes), *_said_alone(adapter, shapes, modules)):
        yield replace(one, about=f"{adapter.folder}{one.about}")


def kept_statements(adapter: Adapter) -> Iterator[Statement]:
    """What is said of the base weights of an adapter that is kept: whether peft changed them.

    Layers that peft replicates it replicates again whenever it loads the adapter.
    """
    if change := adapter.config.rewrites_base:
        by = f"{adapter.folder}{ADAPTER_CONFIG}"
        yield Statement(Fact.KEPT_CHANGES, f"init_lora_weights {change}", by)
        yield Statement(Fact.KEPT_CHANGES, "unchanged weights", "the base model")


def base_statements(named: Mapping[str, str], sidecars: Sidecars) -> Iterator[Statement]:
    """What adapters' files call their base, and the config that lies with the checkpoint."""
    own, base = sidecars.config, sidecars.base_config
    if own is None or (base is not None and own.path == base.path):
        return
    for by, name in {**named, CONFIG: str(own.content.get("_name_or_path"))}.items():
        yield Statement(Fact.ADAPTER_BASE, plain_name(name) if is_hub_id(name) else None, by)


def quantized_statements(config: ConfigFile | None) -> Iterator[Statement]:
    """The form of the base that a config tells of, for an adapter that is merged into weights."""
    told = config.content.get("quantization_config") if config is not None else None
    if isinstance(told, dict):
        yield Statement(Fact.BASE_QUANTIZED, told.get("quant_method") or "some", CONFIG)
        yield Statement(Fact.BASE_QUANTIZED, "plain", "--base")


def _statements(adapter: Adapter, shapes: Mapping[str, Shape]) -> Iterator[Statement]:
    config, by = adapter.config, f"{adapter.folder}{ADAPTER_CONFIG}"
    for key in _SWITCHES:
        config.switch(key)
    parts = {name: part for name in shapes if (part := read_name(name)).adapter == adapter.name}
    for key in _DECIDING:
        for one in (config, *adapter.others) if adapter.others else ():
            yield Statement(Fact.ADAPTER_CONFIGS, one.content.get(key), str(one.path), key)
    copies = dict.fromkeys(part.module for part in parts.values() if part.is_copy)
    for module in copies:
        yield Statement(Fact.ADAPTER_COPIES, "trained whole", _TENSORS, module)
        yield Statement(Fact.ADAPTER_COPIES, _copied(config, module), by, module)
    methods = {m for part in parts.values() for m in methods_of(part.attribute)}
    if methods and config.peft_type not in methods:
        yield Statement(Fact.ADAPTER_METHOD, " or ".join(sorted(methods)), _TENSORS)
        yield Statement(Fact.ADAPTER_METHOD, config.peft_type or "none", by)
    for name, part in parts.items() if config.peft_type == "PROMPT_TUNING" else ():
        for axis, key in enumerate(("num_virtual_tokens", "token_dim")) if part.is_prompt else ():
            yield Statement(Fact.ADAPTER_PROMPT, shapes[name][axis], _TENSORS, key)
            yield Statement(Fact.ADAPTER_PROMPT, config.content.get(key), by, key)
    if not config.variants:
        updates = {n: p for n, p in parts.items() if not (p.is_copy or p.is_prompt)}
        yield from _of_updates(config, by, updates, shapes)


def _of_updates(
    config: AdapterConfig, by: str, parts: Mapping[str, PeftName], shapes: Mapping[str, Shape]
) -> Iterator[Statement]:
    attributes: dict[str, set[str]] = {}
    for name, part in parts.items():
        short = ".".join(filter(None, (part.attribute, part.rest)))
        attributes.setdefault(part.module, set()).add(short)
        if (axis := _RANK_AXIS.get(short)) is not None and len(shapes[name]) > axis:
            rank = shapes[name][axis]
            yield Statement(Fact.ADAPTER_RANK, rank, _TENSORS, part.module)
            yield Statement(Fact.ADAPTER_RANK, _rank(config, part.module, rank), by, part.module)
        if part.attribute == _TOKENS:
            rows = config.trained_rows(part.module)
            yield Statement(Fact.ADAPTER_TOKENS, shapes[name][0], _TENSORS, part.module)
            yield Statement(Fact.ADAPTER_TOKENS, rows, by, part.module)
    for module, held in attributes.items():
        if held - {_TOKENS}:
            yield from _of_update(config, by, module, held)


def _of_update(config: AdapterConfig, by: str, module: str, held: Set[str]) -> Iterator[Statement]:
    """What is said of the update of one module."""
    is_target = config.does_target(module)
    said = {None: None, True: "updated", False: "no target"}[is_target]
    yield Statement(Fact.ADAPTER_TARGETS, "updated", _TENSORS, module)
    yield Statement(Fact.ADAPTER_TARGETS, said, by, module)
    lora_alone = (
        (Fact.ADAPTER_DORA, "use_dora", "lora_magnitude_vector"),
        (Fact.ADAPTER_BIAS, "lora_bias", "lora_B.bias"),
    )
    for fact, key, attribute in lora_alone if config.peft_type == "LORA" else ():
        has_it = any(name.startswith(attribute) for name in held)
        yield Statement(fact, has_it, _TENSORS, module)
        yield Statement(fact, config.switch(key), by, module)


def _said_alone(
    adapter: Adapter, shapes: Mapping[str, Shape], modules: Set[str]
) -> Iterator[Statement]:
    """What the file names and no tensor of the adapter is of.

    peft passes over what the model does not have; what it has was trained, or the file is another
    run's. Where nothing tells what the model has, that is to be looked at.
    """
    config, by = adapter.config, f"{adapter.folder}{ADAPTER_CONFIG}"
    parts = [part for name in shapes if (part := read_name(name)).adapter == adapter.name]
    copied = {part.module for part in parts if part.is_copy}
    held = {part.module for part in parts}
    is_plain = bool(held) and not (config.variants or config.keeps_ties)
    for key in _NAMING if is_plain else ():
        for entry in config.entries(key):
            of = copied if key == _COPIED else held
            named = {m for module in of for m in (module, *config.targeted_parameters(module))}
            if not any(config.means(key, entry, module) for module in named):
                fact = _fact_of_unheld(config, key, entry, held, modules)
                if fact is not None:
                    yield Statement(fact, "no tensors", _TENSORS, f"{key} {entry!r}")
                    yield Statement(fact, "named", by, f"{key} {entry!r}")
    if config.content.get(TRAINED_TOKENS) and all(part.attribute != _TOKENS for part in parts):
        yield Statement(Fact.ADAPTER_TOKENS, "no tokens", _TENSORS)
        yield Statement(Fact.ADAPTER_TOKENS, TRAINED_TOKENS, by)


def _fact_of_unheld(
    config: AdapterConfig, key: str, entry: str, held: Set[str], modules: Set[str]
) -> Fact | None:
    """What an entry that is about no tensor of the adapter is to be told as, if at all."""
    if key.endswith("_pattern"):
        return Fact.ADAPTER_UNHELD
    theirs = [module for module in modules if config.means(key, entry, module)]
    if key == _COPIED and (theirs or entry in _HEADS):
        return Fact.ADAPTER_COPIES if theirs else None
    if any(config.does_target(module) for module in theirs):
        return Fact.ADAPTER_TARGETS
    return None if held & modules else Fact.ADAPTER_UNHELD


def _rank(config: AdapterConfig, module: str, held: int) -> int | None:
    """What the file says of a module's rank, as its factors have it.

    Those of fused experts, which are targeted as parameters, have it as often as there are experts.
    """
    parameters = config.targeted_parameters(module)
    ranks = [config.rank_of(key) for key in parameters or [module]]
    if parameters and any(rank and held % rank == 0 for rank in ranks):
        return held
    return ranks[0]


def _copied(config: AdapterConfig, module: str) -> str:
    named = any(module.endswith(name) for name in config.saved_modules)
    by_task = config.text("task_type") and module.rpartition(".")[2] in _HEADS
    return "trained whole" if named or config.keeps_ties or by_task else "not in modules_to_save"
