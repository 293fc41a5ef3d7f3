"""Where a config states another size than the checkpoint's weights have, and training changes it.

That is the vocabulary (a config saved from ZeRO-3's placeholders says 0; one from before a resize
says the old size) and the number of classes. Which weights have that size is never guessed from
their names: the model is asked for its shapes with a number that nothing else has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from zexport.model.config import ConfigFile
from zexport.ranges.dtypes import Shape
from zexport.store.json import Json

ShapesFor = Callable[[ConfigFile], Mapping[str, Shape] | None]
"""The shapes that a model has for a config; ``None`` where they cannot be learnt."""


@dataclass(frozen=True, slots=True)
class _Size:
    """A size that a config states.

    Attributes:
        key: what the config calls it.
        stand_in: a size that no dimension of a real model has, and that costs little to build.
        set: the config with another size.
        stated: the sizes as the config has them.
        most: a size that no model has; each class has a name in a config.
    """

    key: str
    stand_in: int
    set: Callable[[ConfigFile, int], ConfigFile]
    stated: Callable[[ConfigFile], Iterable[Json]]
    most: int


def _labels(config: ConfigFile) -> list[Json]:
    names = config.content.get("id2label")
    return [len(names) if isinstance(names, dict) else config.content.get("num_labels")]


_VOCABULARY = _Size(
    "vocab_size",
    10_000_019,
    ConfigFile.with_vocab_size,
    lambda config: config.vocab_sizes.values(),
    most=1 << 31,
)
_LABELS = _Size("num_labels", 4099, ConfigFile.with_num_labels, _labels, most=1 << 20)


def mend_sizes(
    config: ConfigFile, stored: Mapping[str, Shape], shapes_for: ShapesFor
) -> ConfigFile:
    """The config with the vocabulary and the classes that the checkpoint's weights have.

    A size is mended only where all weights of that size agree on another one; ``mended`` of the
    result says so. Whatever else differs is left as it is. A config that fits is asked about once.
    """
    weights = _Weights(stored)
    for size in (_VOCABULARY, _LABELS):
        expected = shapes_for(config)
        if expected is not None and not weights.differ_from(expected):
            return config
        if expected is not None or not all(_is_positive(one) for one in size.stated(config)):
            sized = shapes_for(size.set(config, size.stand_in)) or {}
            sized = {name: shape for name, shape in sized.items() if size.stand_in in shape}
            found = weights.sizes(sized, size.stand_in)
            found = {count for count in found if count <= size.most}
            as_is = {name: shape for name, shape in (expected or {}).items() if name in sized}
            if len(found) == 1 and (expected is None or weights.differ_from(as_is)):
                config = _mended(config, size, *found)
    return config


def _mended(config: ConfigFile, size: _Size, new: int) -> ConfigFile:
    was = ", ".join("unstated" if one is None else str(one) for one in size.stated(config))
    note = f"{size.key} is {new}, as the weights have it (was {was})"
    return replace(size.set(config, new), mended=(*config.mended, note))


def _is_positive(size: Json) -> bool:
    return isinstance(size, int) and size > 0


class _Weights:
    """The checkpoint's shapes, by the model's names.

    Names may carry a wrapper's prefix, or the hub's where the module has another; then the last two
    parts tell which weight it is, if all that end so have one shape.
    """

    def __init__(self, stored: Mapping[str, Shape]) -> None:
        self._stored = stored
        self._by_ending: dict[str, set[Shape]] = {}
        for name, shape in stored.items():
            self._by_ending.setdefault(_ending(name), set()).add(shape)

    def differ_from(self, expected: Mapping[str, Shape]) -> bool:
        """Whether a weight has another shape than the model."""
        found = ((shape, self._shape_of(name)) for name, shape in expected.items())
        return any(shape != stored for shape, stored in found if stored is not None)

    def sizes(self, expected: Mapping[str, Shape], stand_in: int) -> set[int]:
        """The sizes that weights have where the model, in each of its shapes, has the stand-in."""
        sizes: set[int] = set()
        for name, shape in expected.items():
            stored = self._shape_of(name) or ()
            if len(stored) == len(shape):
                axis = shape.index(stand_in)
                if shape == (*stored[:axis], stand_in, *stored[axis + 1 :]):
                    sizes.add(stored[axis])
        return sizes

    def _shape_of(self, name: str) -> Shape | None:
        if name in self._stored:
            return self._stored[name]
        shapes = self._by_ending.get(_ending(name), set())
        return next(iter(shapes)) if len(shapes) == 1 else None


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])
