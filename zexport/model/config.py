"""A model's ``config.json``: read, edit, and compare with another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.model.hub_names import Fit, Stored
from zexport.ranges.dtypes import DType
from zexport.storage.json import Json, JsonObject, JsonTable, as_table, several

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""transformers 5 writes the first; transformers 4 wrote the second, which older engines read."""

_TIED = "tie_word_embeddings"

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""How weights are quantized: transformers, and older files of compressed-tensors."""

_SIZES_MAX = {"vocab_size": 1 << 31, "num_labels": 1 << 20}
"""More than any model has; each label has a name in the config."""

_TEXT_CONFIGS = ("text_config", "decoder", "generator", "text_encoder")
"""Keys of the language model's config in that of a composite model.

Source: transformers 5.23, ``configuration_utils.py`` (``get_text_config``).
"""


class ConfigFile(Struct, frozen=True):
    """A ``config.json``: its path, its content, and what was changed in that, in words."""

    path: Path
    content: JsonTable
    changes: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model classes; a single one may be a bare string.

        FSDP2 names a wrapped class ``FSDPLlamaForCausalLM``, and verl saves that name (torch 2.13,
        ``distributed/fsdp/_fully_shard/_fully_shard.py``).
        """
        names = several(self.content.get("architectures"))
        return tuple(one.removeprefix("FSDP") for one in names if isinstance(one, str) and one)

    @property
    def tables(self) -> dict[str, JsonObject]:
        """The config itself, under an empty key, and those of its language model."""
        inner = {key: one for key in _TEXT_CONFIGS if (one := as_table(self.content.get(key)))}
        return {"": dict(self.content), **inner}

    def sizes(self, key: str) -> list[Json]:
        labels = self.content.get("id2label")
        if key == "num_labels" and isinstance(labels, dict):
            return [len(labels)]
        return [table[key] for table in self.tables.values() if key in table]

    def changed(self, change: str, content: JsonTable) -> ConfigFile:
        return ConfigFile(self.path, content, (*self.changes, change))

    def serialized(self) -> bytes:
        """Return the content as JSON; equal content gives equal bytes."""
        return _json_bytes(_as_list(self.content, self.architectures))

    def with_size(self, key: str, size: int) -> ConfigFile:
        """Return the config for another vocabulary or number of labels.

        Source: transformers 5.23, ``configuration_utils.py``: ``num_labels`` is the length of
        ``id2label``, which is written in its place.
        """
        was = ", ".join(map(str, self.sizes(key)))
        change = f"{key} is {size}, from the weights (was {was or 'unstated'})"
        content = dict(self.content)
        if key == "num_labels":
            content.pop(key, None)
            labels = [f"LABEL_{index}" for index in range(size)]
            content["id2label"] = {str(index): label for index, label in enumerate(labels)}
            content["label2id"] = {label: index for index, label in enumerate(labels)}
        else:
            inner = {name: {**table, key: size} for name, table in self.tables.items() if name}
            content |= inner | ({key: size} if key in content or not inner else {})
        return self.changed(change, content)

    def with_architecture(self, name: str | None) -> ConfigFile:
        if name is None:
            return replace(self, content=_without(self.content, "architectures"))
        change = f"architectures is {name}, from the weights (was {', '.join(self.architectures)})"
        return self.changed(change, {**self.content, "architectures": [name]})

    def without_quantization(self) -> ConfigFile:
        content = _edited(self.content, lambda table: _without(table, *QUANTIZATION_KEYS))
        if content == self.content:
            return self
        change = "quantization settings are removed, because the weights are not quantized"
        return self.changed(change, content)

    def edited(self, dtype: DType, architecture: str | None, *, is_untied: bool) -> bytes:
        """Return the new content of the file; all other keys keep their place and value."""
        names = self.architectures or ((architecture,) if architecture is not None else ())
        dtypes: JsonObject = dict.fromkeys(_DTYPE_KEYS, dtype.torch_name)
        content = _edited(
            _as_list(self.content, names),
            lambda table: {k: v if v is None else dtypes.get(k, v) for k, v in table.items()},
        )
        content |= {key: name for key, name in dtypes.items() if key == "dtype" or key in content}
        if is_untied:
            inner = {key: as_table(content[key]) for key in self.tables if key}
            content |= {k: {**table, _TIED: False} for k, table in inner.items() if _TIED in table}
            content[_TIED] = False
        return _json_bytes(content)


def _as_list(content: JsonTable, architectures: tuple[str, ...]) -> JsonObject:
    return {**content, "architectures": list(architectures)} if architectures else dict(content)


def _without(content: JsonTable, *keys: str) -> JsonObject:
    return {key: value for key, value in content.items() if key not in keys}


def _edited(table: JsonTable, edit: Callable[[JsonTable], JsonObject]) -> JsonObject:
    """Return a config with ``edit`` applied to it and to the configs of its sub-models."""
    return {
        key: _edited(value, edit) if isinstance(value, dict) and _is_config(key, value) else value
        for key, value in edit(table).items()
    }


def _is_config(key: str, value: JsonObject) -> bool:
    """Whether a table describes a sub-model: ``vision_config``, or ``encoder`` with its type."""
    return isinstance(value.get("model_type"), str) or (
        key.endswith("_config") and key not in QUANTIZATION_KEYS
    )


def _json_bytes(content: JsonObject) -> bytes:
    """Return the file as transformers writes it; lone surrogates stay escaped."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")


def with_stored_sizes(
    config: ConfigFile, fit: Fit, stored: Stored
) -> tuple[ConfigFile, dict[str, int]]:
    """Return the config with the vocabulary and number of labels of the weights, and what changed.

    A config saved from ZeRO-3's placeholders states 0 for the vocabulary; one from before a resize
    states the old size. A size is changed if all weights that have it agree on another one.
    """
    changed: dict[str, int] = {}
    for size, axes in fit.names.sizes.items():
        found, known = set(), set()
        for name, axis in axes.items():
            shape, expected = stored.get(fit.prefix + name), fit.names.shapes[name]
            known.add(expected[axis])
            if shape is not None and len(shape) == len(expected):
                resized = (*expected[:axis], shape[axis], *expected[axis + 1 :])
                found.add(shape[axis] if shape == resized else expected[axis])
        if len(found) == 1 and not found <= known and max(found) <= _SIZES_MAX[size]:
            changed[size] = found.pop()
            config = config.with_size(size, changed[size])
    return config, changed


_BUILT = (
    r"model_type|head_dim|n_(?:embd|layer|head|inner)|d_(?:model|ff|kv)|\w*hidden_(?:act|activation)"
    r"|activation_function|feed_forward_proj|layer_types|sliding_window|partial_rotary_factor"
    r"|\w+_lora_rank|(?!(?:type_)?vocab_|(?:chunk|patch|image|crop|pool|batch)_)\w*_size"
    r"|(?:num|n)_\w*(?:layers|heads|experts)|\w*(?:norm|layernorm)\w*_eps(?:ilon)?"
    r"|(?:attention|mlp)_bias|\w+_(?:multiplier|softcapping|scaling_factor)"
    r"|query_pre_attn_scalar|logits?_scal(?:e|ing)|num_experts_per_tok|moe_topk"
    r"|norm_topk_prob|scoring_func|scale_attn_\w+"
)
"""Keys that define how a model is built; training changes none of them.

Source: transformers 5.23, ``configuration_*.py`` of every model.
"""


def differences(one: JsonTable, other: JsonTable) -> Iterator[tuple[str, Json, Json]]:
    """Yield keys with both values in which two configs of one model contradict each other.

    If one is of a whole model and the other of its language model, that part is compared.
    """
    inner, others = _parts(one), _parts(other)
    if one.get("model_type") != other.get("model_type"):
        for key, ours, theirs in (
            *((key, table, other) for key, table in inner.items()),
            *((key, one, table) for key, table in others.items()),
        ):
            if ours.get("model_type") == theirs.get("model_type") is not None:
                yield from _differing(f"{key}.", ours, theirs)
                return
    yield from _differing("", one, other)
    for key in sorted(inner.keys() & others.keys()):
        yield from _differing(f"{key}.", inner[key], others[key])


def _differing(prefix: str, one: JsonTable, other: JsonTable) -> Iterator[tuple[str, Json, Json]]:
    for key in sorted(filter(re.compile(_BUILT).fullmatch, one.keys() & other.keys())):
        ours, theirs = _value(one, key), _value(other, key)
        if None not in (ours, theirs) and ours != theirs:
            yield prefix + key, ours, theirs


def _value(table: JsonTable, key: str) -> Json:
    """Return the value of a key; ``null`` turns off a sliding window or softcapping."""
    is_unused = key == "sliding_window" and table.get("use_sliding_window") is False
    is_off = table[key] is None and (key == "sliding_window" or key.endswith("_softcapping"))
    return "null" if is_unused or is_off else table[key]


def _parts(content: JsonTable) -> dict[str, JsonObject]:
    return {
        key: one for key, one in content.items() if isinstance(one, dict) and _is_config(key, one)
    }
