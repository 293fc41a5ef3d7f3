"""A model's ``config.json``: what it says, where weights tell otherwise, and what is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from zexport.ranges.dtypes import DType, Shape
from zexport.store.json import Json, JsonObject, as_table

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


class ConfigFile(Struct, frozen=True):
    """A ``config.json``: where it was read, what it says, and what of that was mended, in words."""

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
            (key,): as_table(self.content[key]).get("vocab_size") for key in keys
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
                content[path[0]] = {**as_table(content[path[0]]), "vocab_size": size}
            else:
                content["vocab_size"] = size
        return replace(self, content=content)

    def with_num_labels(self, count: int) -> ConfigFile:
        """The same config for ``count`` classes, under the names that transformers gives them.

        Source: transformers 5.23, ``configuration_utils.py``: ``num_labels`` is the length of
        ``id2label``, which is written in its place.
        """
        labels = {f"LABEL_{index}": index for index in range(count)}
        content = _less(self.content, "num_labels")
        content["id2label"] = {str(index): label for label, index in labels.items()}
        content["label2id"] = dict(labels)
        return replace(self, content=content)

    def with_architecture(self, name: str | None) -> ConfigFile:
        """The same config for another model class; for none, which leaves the class open."""
        if name is None:
            return replace(self, content=_less(self.content, "architectures"))
        was = ", ".join(self.architectures)
        note = f"architectures is {name}, whose weights these are (was {was})"
        content = {**self.content, "architectures": [name]}
        return replace(self, content=content, mended=(*self.mended, note))

    def without_quantization(self) -> ConfigFile:
        """The same config for weights that are written as ordinary numbers."""
        content = _edited(self.content, lambda table: _less(table, *_QUANTIZATION_KEYS))
        if content == self.content:
            return self
        note = "quantization: removed, weights are plain"
        return replace(self, content=content, mended=(*self.mended, note))

    def edited(
        self,
        dtype: DType,
        architecture: str | None = None,
        *,
        tie_word_embeddings: bool | None = None,
    ) -> bytes:
        """The file's new content: every key as it was and where it was, but for these."""
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


def _less(content: Mapping[str, Json], *keys: str) -> JsonObject:
    return {key: value for key, value in content.items() if key not in keys}


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


def _json_bytes(content: JsonObject) -> bytes:
    """The file as transformers writes it; escapes that no UTF-8 can stand for stay escapes."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()


def settings_of(config: ConfigFile | None) -> Mapping[str, Json]:
    """What a config says; nothing where there is none."""
    return {} if config is None else config.content


ShapesFor = Callable[[ConfigFile], Mapping[str, Shape] | None]
"""The shapes that a model has for a config; ``None`` where they cannot be learnt."""


class _Size(NamedTuple):
    """A size that a config states, and training may change.

    ``stand_in`` is one that no dimension of a real model has, and that costs little to build; no
    model has more than ``most``, since each class has a name in a config.
    """

    key: str
    stand_in: int
    most: int
    set: Callable[[ConfigFile, int], ConfigFile]
    stated: Callable[[ConfigFile], Iterable[Json]]


def _labels(config: ConfigFile) -> list[Json]:
    names = config.content.get("id2label")
    return [len(names) if isinstance(names, dict) else config.content.get("num_labels")]


_SIZES = (
    _Size(
        "vocab_size",
        10_000_019,
        1 << 31,
        ConfigFile.with_vocab_size,
        lambda config: config.vocab_sizes.values(),
    ),
    _Size("num_labels", 4099, 1 << 20, ConfigFile.with_num_labels, _labels),
)


def mend_sizes(
    config: ConfigFile, stored: Mapping[str, Shape], shapes_for: ShapesFor
) -> ConfigFile:
    """The config with the vocabulary and the number of classes that the weights have.

    A config saved from ZeRO-3's placeholders says 0 for the vocabulary, one from before a resize
    the old size. Which weights have that size is never guessed from their names: the model is asked
    for its shapes with a number that nothing else has. A size is mended only where all weights of
    that size agree on another one. A config that fits is asked about once.
    """
    by_ending: dict[str, set[Shape]] = {}
    for name, shape in stored.items():
        by_ending.setdefault(_ending(name), set()).add(shape)

    def beside(expected: Mapping[str, Shape]) -> list[tuple[Shape, Shape]]:
        """The model's shapes with the stored ones.

        Names may carry a wrapper's prefix, or the hub's where the module has another; then the last
        two parts tell which weight it is, if all that end so have one shape.
        """
        found = ((s, stored.get(n), by_ending.get(_ending(n), set())) for n, s in expected.items())
        likely = ((s, {own} if own is not None else alike) for s, own, alike in found)
        return [(shape, next(iter(shapes))) for shape, shapes in likely if len(shapes) == 1]

    for size in _SIZES:
        expected = shapes_for(config)
        if expected is not None and all(one == other for one, other in beside(expected)):
            return config
        stated = size.stated(config)
        if expected is not None or not all(isinstance(n, int) and n > 0 for n in stated):
            sized = shapes_for(size.set(config, size.stand_in)) or {}
            sized = {name: shape for name, shape in sized.items() if size.stand_in in shape}
            found = {count for count in _sizes(beside(sized), size.stand_in) if count <= size.most}
            as_is = {name: shape for name, shape in (expected or {}).items() if name in sized}
            differs = expected is None or any(one != other for one, other in beside(as_is))
            if len(found) == 1 and differs:
                config = _mended(config, size, *found)
    return config


def _mended(config: ConfigFile, size: _Size, new: int) -> ConfigFile:
    was = ", ".join("unstated" if one is None else str(one) for one in size.stated(config))
    note = f"{size.key} is {new}, as the weights have it (was {was})"
    return replace(size.set(config, new), mended=(*config.mended, note))


def _sizes(pairs: Iterable[tuple[Shape, Shape]], stand_in: int) -> Iterator[int]:
    """The sizes that weights have where the model, in each of its shapes, has the stand-in."""
    for shape, stored in pairs:
        axis = shape.index(stand_in)
        if len(stored) == len(shape) and shape == (*stored[:axis], stand_in, *stored[axis + 1 :]):
            yield stored[axis]


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])
