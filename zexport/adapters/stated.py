"""What an adapter's configuration and its tensors both say: method, targets, rank and parts.

peft loads an adapter by its configuration alone: what that does not tell of is left out of the
model without a word, and updates of another rank are not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from msgspec.structs import replace

from zexport.adapters.find import Adapter
from zexport.adapters.peft_format import (
    ADAPTER_CONFIG,
    AdapterConfig,
    PeftName,
    methods_of,
    read_name,
)
from zexport.facts.statements import Statement
from zexport.facts.table import Fact
from zexport.ranges.dtypes import Shape

_RANK_AXIS = {
    "lora_A.weight": 0,
    "lora_embedding_A": 0,
    "lora_B.weight": 1,
    "lora_embedding_B": 1,
}
_TENSORS = "the adapter's tensors"
_HEADS = frozenset({"classifier", "score", "qa_outputs"})
"""Modules that peft trains whole by the task, named or not (0.21, ``peft_model.py``)."""


_DECIDING = (
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
    "r",
    "fan_in_fan_out",
    "init_lora_weights",
)
"""Keys by which the values of an update are made of its tensors."""


def adapter_statements(adapter: Adapter, shapes: Mapping[str, Shape]) -> Iterator[Statement]:
    """What is said of one adapter, by its file and by the names and shapes of its tensors.

    Each of several adapters has its own rank and targets, so what is said is said of its modules.
    """
    for one in _statements(adapter, shapes):
        yield replace(one, about=f"{adapter.folder}{one.about}")


def kept_statements(adapter: Adapter) -> Iterator[Statement]:
    """What is said of the base weights of an adapter that is kept: whether peft changed them.

    Layers that peft replicates it replicates again whenever it loads the adapter.
    """
    if change := adapter.config.rewrites_base:
        by = f"{adapter.folder}{ADAPTER_CONFIG}"
        yield Statement(Fact.KEPT_CHANGES, f"init_lora_weights {change}", by)
        yield Statement(Fact.KEPT_CHANGES, "unchanged weights", "the base model")


def _statements(adapter: Adapter, shapes: Mapping[str, Shape]) -> Iterator[Statement]:
    config, by = adapter.config, f"{adapter.folder}{ADAPTER_CONFIG}"
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
    if config.peft_type == "LORA" and not config.variants:
        yield from _of_lora(config, by, {n: p for n, p in parts.items() if not p.is_copy}, shapes)


def _of_lora(
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
    for module, held in attributes.items():
        tokens = held & {"trainable_tokens_delta"}
        if tokens:
            yield Statement(Fact.ADAPTER_TOKENS, "trained", _TENSORS, module)
            said = config.content.get("trainable_token_indices")
            yield Statement(Fact.ADAPTER_TOKENS, "trained" if said else "none", by, module)
        if held > tokens:
            yield from _of_update(config, by, module, held)


def _of_update(config: AdapterConfig, by: str, module: str, held: Set[str]) -> Iterator[Statement]:
    """What is said of the update of one module."""
    is_target = config.does_target(module)
    said = {None: None, True: "updated", False: "no target"}[is_target]
    yield Statement(Fact.ADAPTER_TARGETS, "updated", _TENSORS, module)
    yield Statement(Fact.ADAPTER_TARGETS, said, by, module)
    for fact, key, attribute in (
        (Fact.ADAPTER_DORA, "use_dora", "lora_magnitude_vector"),
        (Fact.ADAPTER_BIAS, "lora_bias", "lora_B.bias"),
    ):
        has_it = any(name.startswith(attribute) for name in held)
        yield Statement(fact, has_it, _TENSORS, module)
        yield Statement(fact, config.content.get(key) is True, by, module)


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
