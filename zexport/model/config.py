"""A model's ``config.json``: what it says, and the few keys of it that an export changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zexport.ranges.dtypes import DType
from zexport.store.json import Json, JsonObject

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""transformers 5 writes the first; transformers 4 wrote the second, which older engines read."""

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""How weights are packed: transformers and compressed-tensors (older files have the second)."""

_TEXT_CONFIGS = ("text_config", "decoder", "generator", "text_encoder")
"""Where a composite model's config keeps that of its language model.

Source: transformers 5.23, ``configuration_utils.py``, ``get_text_config``.
"""

Sizes = Mapping[tuple[str, ...], Json]
"""Path of a table within the config (empty: the config itself) to a size that it states."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A ``config.json``: where it lies and what it says.

    Attributes:
        path: where it was read.
        content: its content, mended where that was needed.
        mended: what was mended, in words.
    """

    path: Path
    content: Mapping[str, Json]
    mended: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model classes, as the config gives them; one alone may be a bare string."""
        names = self.content.get("architectures")
        if isinstance(names, str):
            return (names,) if names else ()
        return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list) else ()

    @property
    def vocab_sizes(self) -> Sizes:
        """The vocabulary's size as each table states it that should; ``None`` where it does not.

        Those are the language model's own config and, where it states one, the whole model's.
        """
        keys = [key for key in _TEXT_CONFIGS if isinstance(self.content.get(key), dict)]
        sizes: dict[tuple[str, ...], Json] = {
            (key,): _table(self.content[key]).get("vocab_size") for key in keys
        }
        if not keys or "vocab_size" in self.content:
            sizes[()] = self.content.get("vocab_size")
        return sizes

    def serialized(self) -> bytes:
        """The content as JSON: the same for equal content."""
        return _json_bytes(_as_list(self.content, self.architectures))

    def with_vocab_size(self, size: int) -> ConfigFile:
        """The same config for a vocabulary of ``size``, wherever it states one."""
        content: JsonObject = dict(self.content)
        for path in self.vocab_sizes:
            if path:
                content[path[0]] = {**_table(content[path[0]]), "vocab_size": size}
            else:
                content["vocab_size"] = size
        return replace(self, content=content)

    def with_num_labels(self, count: int) -> ConfigFile:
        """The same config for ``count`` classes, under the names that transformers gives them.

        Source: transformers 5.23, ``configuration_utils.py``: ``num_labels`` is the length of
        ``id2label``, which is written in its place.
        """
        labels = {f"LABEL_{index}": index for index in range(count)}
        content = {key: value for key, value in self.content.items() if key != "num_labels"}
        content["id2label"] = {str(index): label for label, index in labels.items()}
        content["label2id"] = dict(labels)
        return replace(self, content=content)

    def with_architecture(self, name: str | None) -> ConfigFile:
        """The same config for another model class; for none, which leaves the class open."""
        if name is None:
            content = {k: v for k, v in self.content.items() if k != "architectures"}
            return replace(self, content=content)
        was = ", ".join(self.architectures)
        note = f"architectures is {name}, whose weights these are (was {was})"
        content = {**self.content, "architectures": [name]}
        return replace(self, content=content, mended=(*self.mended, note))

    def without_quantization(self) -> ConfigFile:
        """The same config for weights that are written as ordinary numbers."""
        content = _edited(self.content, _drop_quantization)
        if content == self.content:
            return self
        return replace(
            self, content=content, mended=(*self.mended, "quantization: removed, weights are plain")
        )

    def edited(
        self,
        dtype: DType,
        architecture: str | None = None,
        *,
        tie_word_embeddings: bool | None = None,
    ) -> bytes:
        """The file's new content: every key as it was and where it was, but for these.

        Args:
            dtype: element type of the weights; written as ``dtype``, and wherever the config or
                that of a sub-model already names one, under ``torch_dtype`` too.
            architecture: the model class; written where the file names none, since servers choose
                their code by it.
            tie_word_embeddings: whether the output's weights are the input's; ``None`` leaves what
                the file says. Written at the top, where transformers reads it for the whole model,
                and in the language model's config where it stands there.
        """
        names = self.architectures or ((architecture,) if architecture is not None else ())
        content = _as_list(self.content, names)
        content = _edited(content, lambda table: _with_dtype(table, dtype.torch_name))
        content |= {key: dtype.torch_name for key in _DTYPE_KEYS if key in content}
        content["dtype"] = dtype.torch_name
        if tie_word_embeddings is not None:
            for key in _TEXT_CONFIGS:
                table = content.get(key)
                if isinstance(table, dict) and "tie_word_embeddings" in table:
                    content[key] = {**table, "tie_word_embeddings": tie_word_embeddings}
            content["tie_word_embeddings"] = tie_word_embeddings
        return _json_bytes(content)


def _as_list(content: Mapping[str, Json], architectures: tuple[str, ...]) -> JsonObject:
    """The content with ``architectures`` as the list that every reader expects."""
    return {**content, "architectures": list(architectures)} if architectures else dict(content)


def _edited(
    table: Mapping[str, Json], edit: Callable[[Mapping[str, Json]], JsonObject]
) -> JsonObject:
    """A config with ``edit`` applied to it and to the configs of its sub-models."""
    return {
        key: _edited(value, edit) if isinstance(value, dict) and _is_config(key, value) else value
        for key, value in edit(table).items()
    }


def _is_config(key: str, value: JsonObject) -> bool:
    """Whether a table describes a sub-model: ``vision_config``, or ``encoder`` with its type."""
    named = key.endswith("_config") and key not in _QUANTIZATION_KEYS
    return named or isinstance(value.get("model_type"), str)


def _with_dtype(table: Mapping[str, Json], name: str) -> JsonObject:
    """A table with another element type where it states one; ``null`` states none."""
    return {
        key: name if key in _DTYPE_KEYS and value is not None else value
        for key, value in table.items()
    }


def _drop_quantization(table: Mapping[str, Json]) -> JsonObject:
    return {key: value for key, value in table.items() if key not in _QUANTIZATION_KEYS}


def _table(value: Json) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _json_bytes(content: JsonObject) -> bytes:
    """The file as transformers writes it; escapes that no UTF-8 can stand for stay escapes."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()
