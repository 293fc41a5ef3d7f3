"""What two configs say of one model: how it is built, which must be the same, and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.model.config import ConfigFile, settings_of
from zexport.model.fit import ModelNames
from zexport.store.json import Json, JsonObject, as_table

_BUILT = re.compile(
    r"model_type|head_dim|n_(?:embd|layer|head|inner)|d_(?:model|ff|kv)|\w*hidden_(?:act|activation)"
    r"|activation_function|feed_forward_proj|layer_types|sliding_window|partial_rotary_factor"
    r"|(?!vocab_|type_vocab_)\w*_size|(?:num|n)_\w*(?:layers|heads|experts)|\w+_lora_rank"
    r"|\w*(?:norm|layernorm)\w*_eps(?:ilon)?|(?:attention|mlp)_bias"
    r"|\w+_(?:multiplier|softcapping|scaling_factor)|query_pre_attn_scalar|logits?_scal(?:e|ing)"
    r"|num_experts_per_tok|moe_topk|norm_topk_prob|scoring_func|scale_attn_\w+"
)
"""Keys that say how a model is built; a training changes none of them.

Source: transformers 5.23, ``configuration_*.py`` of every model.
"""

_OF_THE_FILE = re.compile(
    r"_name_or_path|transformers_version|(?:torch_)?dtype|use_cache|architectures|auto_map"
    r"|quantization_config|compression_config|vocab_size|id2label|label2id|num_labels"
    r"|tie_word_embeddings|rope_theta|rope_scaling|rope_parameters|_\w+"
)
"""Keys that say something of the file or the run, or that the weights tell better."""

_OF_TRAINING = re.compile(
    r"\w*dropout(?:_\w+)?|\w*(?:drop_rate|layerdrop|_pdrop)|drop_path\w*|(?:\w+_)?initializer_\w+"
    r"|init_(?:std|method_std)|pretraining_tp|\w*_loss_\w+|gradient_checkpointing"
)
"""Keys that count while a model is trained, and change nothing in one that was loaded."""

_PLACEHOLDER = re.compile(r"LABEL_\d+")
"""What transformers calls classes that nobody named."""

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_NOTHING = "nothing"

_NONE = re.compile(r"sliding_window|\w+_softcapping")
"""Keys of which null says that the model has none, and not that the class decides."""

_CHUNKS = re.compile(r"(?:chunk|patch|image|crop|pool|batch)_\w*size\w*")
"""Sizes of what is put in, which may be others from run to run."""


def config_statements(
    own: ConfigFile, base: ConfigFile, whose: str = "the checkpoint's config.json"
) -> Iterator[Statement]:
    """What the config beside a checkpoint, or another one, and that of its base both state."""
    sides = ((own, whose), (base, "the base's"))
    for fact, about, values in _both(own, base):
        for (_, by), value in zip(sides, values, strict=True):
            yield Statement(fact, value, by, about)


def run_statements(own: ConfigFile, other: ConfigFile, where: str) -> Iterator[Statement]:
    """What the config beside a checkpoint and that of another folder of the run both state."""
    sides = ("the checkpoint's", f"{where}'s")
    yield from _labels_of_both(own, other, sides[1])
    for _, about, values in _both(own, other):
        for by, value in zip(sides, values, strict=True):
            yield Statement(Fact.RUN_CONFIG, value, by, about)


def unstated_statements(
    own: ConfigFile, other: ConfigFile, by: str, defaults: Mapping[str, Mapping[str, object]]
) -> Iterator[Statement]:
    """What one of two configs says of how a model is built, and the other leaves to the class.

    ``defaults`` are the class's own values; where nobody was asked for them, positions that are
    rotated otherwise than in most models, and what keeps norms from zero, are told of.
    """
    for about, first, second in _tables(own.content, other.content):
        known = defaults.get(about.removesuffix("."), {})
        one, another = built_of(first), built_of(second)
        for key in sorted(one.keys() ^ another.keys()):
            stated = one.get(key, another.get(key))
            default = known.get(key) if defaults else _unless_usual(key, stated)
            if stated is None or default is None:
                continue
            said = (stated, default) if key in one else (default, stated)
            for value, who, table in zip(said, ("config.json", by), (one, another), strict=True):
                left = "" if key in table else ", which leaves it to the model's class"
                yield Statement(Fact.CONFIG_UNSTATED, value, f"{who}{left}", about + key)


def _unless_usual(key: str, stated: object) -> object:
    """What a config that leaves out a key is told to say, where others are not like the stated."""
    if key.endswith(("_eps", "_epsilon")):
        return _NOTHING
    is_usual = {"rope_theta": 10000, "rope_type": "default"}.get(key, stated) == stated
    return None if is_usual else _NOTHING


def built_of(table: Mapping[str, Json]) -> dict[str, Json]:
    """What a config says of how its model is built, and how that rotates positions."""
    built = {key: _said(table, key) for key in table if _fact_of(key) is Fact.BASE_CONFIG}
    built.pop("model_type", None)
    said = any(table.get(key) for key in ROPE)
    return built | (rope_of(table) if said else {})


def layers_of(config: ConfigFile | None) -> int:
    """How many layers a config tells of, or its language model's; 0 where it tells of none."""
    content = settings_of(config)
    tables = (as_table(content.get("text_config")), content)
    told = (table.get(key) for table in tables for key in ("num_hidden_layers", "n_layer"))
    return next((count for count in told if type(count) is int), 0)


def parts_of(content: Mapping[str, Json]) -> list[str]:
    """The keys of a config under which those of its model's parts lie."""
    return [*_inner(content)]


def _both(one: ConfigFile, other: ConfigFile) -> Iterator[tuple[Fact, str, tuple[Json, Json]]]:
    """Every key that two configs state of one model, with its fact and both values."""
    for about, first, second in _tables(one.content, other.content):
        for key in sorted(first.keys() & second.keys()):
            if (fact := _fact_of(key)) is not None:
                yield fact, about + key, (_said(first, key), _said(second, key))
        ropes = rope_of(first), rope_of(second)
        for key in sorted(ropes[0].keys() & ropes[1].keys()):
            yield Fact.BASE_ROPE, about + key, (ropes[0][key], ropes[1][key])


def _said(table: Mapping[str, Json], key: str) -> Json:
    """What a config says under a key; a window that is not used is none (Qwen 2)."""
    is_off = key == "sliding_window" and table.get("use_sliding_window") is False
    return "null" if _NONE.fullmatch(key) and (is_off or table[key] is None) else table[key]


def dtype_statements(config: ConfigFile | None) -> Iterator[Statement]:
    """The element types of one config, by its newer key and its older."""
    for key in ("dtype", "torch_dtype"):
        yield Statement(Fact.CONFIG_DTYPE, config and config.content.get(key), key)


def rope_statements(config: ConfigFile | None) -> Iterator[Statement]:
    """How positions are rotated, by a config's newer table and by its older keys.

    Source: transformers 5.23, ``modeling_rope_utils.py``, and 4.57, which reads the older alone.
    """
    content = settings_of(config)
    newer = as_table(content.get("rope_parameters"))
    older = {"rope_theta": content.get("rope_theta"), **as_table(content.get("rope_scaling"))}
    for key in sorted(older.keys() & newer.keys()):
        yield Statement(Fact.CONFIG_ROPE, newer[key], "rope_parameters", key)
        yield Statement(Fact.CONFIG_ROPE, older[key], "rope_theta and rope_scaling", key)


def level_statements(config: ConfigFile | None) -> Iterator[Statement]:
    """What a config says of its language model, beside the others and in the part that has it."""
    content = settings_of(config)
    outer = built_of(_without(content, _inner(content)))
    part = built_of(as_table(content.get("text_config")))
    for key in sorted(outer.keys() & part.keys()):
        if not key.endswith("_size"):  # which may be that of all parts' results
            yield Statement(Fact.CONFIG_LEVELS, part[key], "text_config", key)
            yield Statement(Fact.CONFIG_LEVELS, outer[key], "the config around it", key)


def _labels_of_both(own: ConfigFile, other: ConfigFile, by: str) -> Iterator[Statement]:
    """The names of classes where both have as many, and the other's are more than numbers."""
    ours, theirs = _labels(own.content), _labels(other.content)
    if ours.keys() != theirs.keys():
        return
    for number, name in theirs.items():
        if not _PLACEHOLDER.fullmatch(name):
            about = f"class {number}"
            yield Statement(Fact.RUN_CONFIG, ours[number], "the checkpoint's config.json", about)
            yield Statement(Fact.RUN_CONFIG, name, by, about)


def _labels(content: Mapping[str, Json]) -> dict[str, str]:
    return {key: str(name) for key, name in as_table(content.get("id2label")).items()}


def type_statements(config: ConfigFile | None, names: ModelNames) -> Iterator[Statement]:
    """The model type of a config, and that of its class; none where code of its own is loaded."""
    if config is None or not names.other_type or "auto_map" in config.content:
        return
    stated = config.content.get("model_type")
    yield Statement(Fact.MODEL_TYPE, stated, "config.json's model_type")
    yield Statement(Fact.MODEL_TYPE, names.other_type, f"{names.architecture} of its architectures")


def _fact_of(key: str) -> Fact | None:
    if _BUILT.fullmatch(key) and not _CHUNKS.fullmatch(key):
        return Fact.BASE_CONFIG
    is_told = not (_OF_THE_FILE.fullmatch(key) or _OF_TRAINING.fullmatch(key))
    return Fact.CONFIG_KEY if is_told else None


_Tables = tuple[str, Mapping[str, Json], Mapping[str, Json]]


def _tables(one: Mapping[str, Json], other: Mapping[str, Json]) -> Iterator[_Tables]:
    """Tables of two configs that describe the same, with what to put before their keys.

    Where one is of a whole model and the other of its language model, that is the part which both
    describe.
    """
    inner, others = _inner(one), _inner(other)
    parts: list[_Tables] = [
        *((key, table, other) for key, table in inner.items()),
        *((key, one, table) for key, table in others.items()),
    ]
    if one.get("model_type") != other.get("model_type"):
        for key, first, second in parts:
            if first.get("model_type") == second.get("model_type") is not None:
                yield f"{key}.", first, second
                return
    yield "", _without(one, inner), _without(other, others)
    for key in sorted(inner.keys() & others.keys()):
        yield f"{key}.", inner[key], others[key]


def _inner(content: Mapping[str, Json]) -> dict[str, JsonObject]:
    """The configs of parts of a model."""
    return {
        key: table
        for key, table in content.items()
        if isinstance(table, dict) and (key.endswith("_config") or "model_type" in table)
    }


def _without(content: Mapping[str, Json], inner: Mapping[str, JsonObject]) -> Mapping[str, Json]:
    return {key: value for key, value in content.items() if key not in inner}


def rope_of(content: Mapping[str, Json]) -> dict[str, Json]:
    """How positions are rotated, whichever version of transformers wrote it.

    Source: transformers 5.23, ``modeling_rope_utils.py``: ``rope_parameters`` holds what 4 wrote as
    ``rope_theta`` and ``rope_scaling``, which goes first where both are there, and whose
    ``rope_type`` was called ``type`` before.
    """
    found = {**as_table(content.get("rope_scaling") or content.get("rope_parameters"))}
    kinds = {kind: inner for kind, inner in found.items() if isinstance(inner, dict)}
    if kinds and len(kinds) == len(found):  # one for each kind of layer
        return {f"{kind}.{key}": v for kind, inner in kinds.items() for key, v in inner.items()}
    found.setdefault("rope_type", found.pop("type", "default"))
    if "rope_theta" in content:
        found.setdefault("rope_theta", content["rope_theta"])
    return found
