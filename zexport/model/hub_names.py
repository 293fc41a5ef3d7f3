"""The names of a model: in memory, in files, and in a checkpoint.

A checkpoint has in-memory names or those of a Hub layout, perhaps with a wrapper's prefix. The JSON
of layouts is from ``zexport.model.conversion`` or a checkpoint's sidecar: its numbers are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property, lru_cache
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import row_major
from zexport.storage.json import Natural
from zexport.text import some

Shapes: TypeAlias = Mapping[str, Shape]


class Box(Struct, frozen=True):
    """A box of a hub tensor, of ``shape`` at ``start``, and the elements that fill it.

    ``source`` is the name of a tensor in memory, or a tensor that is itself made of boxes;
    ``offset`` and ``stride`` count its elements.
    """

    source: str | HubTensor
    offset: int
    stride: Shape
    start: Shape
    shape: Shape


class HubTensor(Struct, frozen=True):
    """A tensor of the model's files: its shape, and boxes that cover it."""

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def sources(self) -> frozenset[str]:
        """Names in memory of all that it is made of."""
        sources = [box.source for box in self.boxes]
        names = ({one} if isinstance(one, str) else one.sources for one in sources)
        return frozenset[str]().union(*names)

    def is_all_of(self, shapes: Shapes) -> str | None:
        """Return the name in memory of the tensor that this is unchanged, or ``None``."""
        box = self.boxes[0] if len(self.boxes) == 1 else None
        if box is None or not isinstance(box.source, str) or shapes.get(box.source) != self.shape:
            return None
        is_dense = (box.offset, box.stride) == (0, row_major(self.shape))
        return box.source if is_dense and box.shape == self.shape else None


def whole(name: str, shape: Shape) -> HubTensor:
    """Return the hub tensor that equals a tensor in memory."""
    shape, stride, start = _dense(shape)
    return HubTensor(shape, (Box(name, 0, stride, start, shape),))


@lru_cache(1 << 10)
def _dense(shape: Shape) -> tuple[Shape, Shape, Shape]:
    """Return shape, stride and start of a dense tensor; 100,000 tensors share the tuples."""
    return shape, row_major(shape), (0,) * len(shape)


class HubLayout(Struct, frozen=True):
    """One way to save a model: hub name to tensor.

    ``aliases`` maps a tied name in memory to its name in a file that holds it too.
    """

    label: str
    tensors: Mapping[str, HubTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


_Numbers = Annotated[tuple[Natural, ...], msgspec.Meta(max_length=64)]
_Entry: TypeAlias = Natural | tuple[_Numbers, ...]
"""The number of a source, or a shape and boxes; see ``Trace.entry_of``."""

_BOXES_MAX, _DEPTH_MAX = 1 << 14, 16
"""Parts that each use the previous part twice would unfold to more than any memory."""


class _Known(Struct, frozen=True):
    """A tensor that entries refer to by number, and how many boxes it unfolds to, how deep."""

    source: str | HubTensor
    tensor: HubTensor
    boxes: int = 1
    depth: int = 0


class StoredLayout(Struct, frozen=True):
    """A layout as ``zexport.model.conversion`` writes it."""

    label: str
    sources: tuple[str, ...]
    parts: tuple[_Entry, ...]
    tensors: Mapping[str, _Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def unfolded(self, shapes: Shapes) -> HubLayout:
        """Return the layout of a model whose tensors in memory have these shapes.

        Raises:
            LookupError, ValueError: an entry contradicts the shapes or the entries before it.
        """
        known = [_Known(name, whole(name, shapes[name])) for name in self.sources]
        for part in self.parts:
            known.append(_unfold(part, known))
        tensors = {name: _unfold(one, known).tensor for name, one in self.tensors.items()}
        return HubLayout(self.label, tensors, self.aliases)


def _unfold(entry: _Entry, known: list[_Known]) -> _Known:
    if isinstance(entry, int):
        return known[entry]
    shape, *stored = entry
    shape, dense, zeros = _dense(shape)
    dims, boxes, count, depth = len(shape), [], 0, 0
    for numbers in stored:
        of, offset, place = known[numbers[0]], numbers[1], numbers[2:]
        if place and len(place) != 3 * dims:
            raise LookupError(numbers)
        stride, start, size = place[:dims], place[dims : 2 * dims], place[2 * dims :]
        boxes.append(Box(of.source, offset, stride or dense, start or zeros, size or shape))
        count, depth = count + of.boxes, max(depth, of.depth + 1)
    if count > _BOXES_MAX or depth > _DEPTH_MAX:
        raise LookupError(count, depth)
    tensor = HubTensor(shape, tuple(boxes))
    return _Known(tensor, tensor, count, depth)


Stored = Mapping[str, Shape | None]
"""Stored names with their shapes; ``None`` if no file has the values."""

_WRAPPER = re.compile(
    r"(?:module|_orig_mod|_forward_module|pretrained_model|actor|rwtransformer|model)\."
)
"""Prefixes of every name: DDP, ``torch.compile``, Lightning, TRL, RLHF trainers, and the reward
models of DeepSpeed-Chat (DeepSpeedExamples, ``utils/model/reward_model.py``)."""

INNER_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of names from wrappers of single modules: ``torch.compile`` and activation checkpointing
(torch 2.13, ``_dynamo/eval_frame.py``, ``distributed/algorithms/_checkpoint``)."""


class ModelNames(Struct, frozen=True, dict=True):
    """The state dict that a model class has for a config.

    Attributes:
        architecture: the class; ``None`` if several classes have these names.
        shapes: every name in memory, including tied names and persistent buffers.
        buffers: which of them are buffers.
        tied: alias to source, as the class declares it.
        layouts: the ways to save it, the default of transformers first.
        unsaved: names that ``save_pretrained`` leaves out.
        keep_fp32: for a dtype, what transformers leaves in float32 when it loads in it.
        refused: why ``layouts`` are not known.
        ignored: patterns of names that transformers skips when it loads.
        base_prefix: prefix of the base class's names in classes with a head.
        other_type: the class's model type if it is surely not that of the config.
        sizes: ``vocab_size`` and ``num_labels``, each with the axis of the tensors that have it.
    """

    architecture: str | None
    shapes: Shapes
    buffers: frozenset[str]
    tied: Mapping[str, str]
    layouts: tuple[HubLayout, ...] = field(default=(), name="unfolded_layouts")
    unsaved: frozenset[str] = frozenset()
    keep_fp32: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused: str = ""
    ignored: tuple[str, ...] = ()
    base_prefix: str = ""
    other_type: str = ""
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.architecture or "the model"

    @property
    def all_names(self) -> frozenset[str]:
        return frozenset(self.shapes).union(*(layout.tensors for layout in self.layouts))

    @cached_property
    def hub_is_memory(self) -> bool:
        return len(self.layouts) == 1 and all(
            tensor.is_all_of(self.shapes) == name
            for name, tensor in self.layouts[0].tensors.items()
        )

    @cached_property
    def saved_forms(self) -> tuple[ModelNames, ...]:
        """The model as if it had in memory what each layout has in files."""
        return tuple(map(self._as_saved, self.layouts))

    def kept_in_fp32(self, name: str) -> frozenset[DType]:
        """Dtypes for which transformers leaves a tensor in float32."""
        dtypes = (DType.BF16, DType.F16)
        return frozenset(one for one in dtypes if name in self.keep_fp32.get(one.torch_name, ()))

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)

    def names_in(self, layout: HubLayout) -> dict[str, str]:
        """Return name in memory to name in files of tensors that a layout leaves unchanged."""
        unchanged = {
            same: name
            for name, tensor in layout.tensors.items()
            if (same := tensor.is_all_of(self.shapes)) is not None
        }
        return {**layout.aliases, **unchanged}

    def resized(self, sizes: Mapping[str, int]) -> ModelNames | None:
        """Return the names with other ``sizes``; ``None`` if Hub names differ from these."""
        if not self.hub_is_memory:
            return None
        shapes = dict(self.shapes)
        for size, value in sizes.items():
            for name, axis in self.sizes[size].items():
                shapes[name] = (*shapes[name][:axis], value, *shapes[name][axis + 1 :])
        (layout,) = self.layouts
        tensors = {name: whole(name, shapes[name]) for name in layout.tensors}
        return replace(self, shapes=shapes, layouts=(replace(layout, tensors=tensors),))

    def without_ties(self, aliases: Set[str]) -> ModelNames:
        """Return the same without declared ties whose values differ, which transformers unties."""
        return replace(self, tied={a: s for a, s in self.tied.items() if a not in aliases})

    def _as_saved(self, layout: HubLayout) -> ModelNames:
        made_of = {name: tensor.sources for name, tensor in layout.tensors.items()}
        renamed = dict(layout.aliases)
        for name, sources in made_of.items():
            for source in sources:
                renamed.setdefault(source, name)
        tied = {renamed.get(a, a): renamed[s] for a, s in self.tied.items() if s in renamed}
        shapes = layout.shapes
        shapes |= {alias: shapes[source] for alias, source in tied.items()}
        unchanged = self.names_in(layout)

        def holding(names: frozenset[str]) -> frozenset[str]:
            return frozenset(name for name, sources in made_of.items() if sources & names)

        return replace(
            self,
            shapes=shapes,
            buffers=holding(self.buffers),
            tied=tied,
            layouts=(as_it_is(layout.shapes, tied),),
            unsaved=frozenset(),
            keep_fp32={dtype: holding(kept) for dtype, kept in self.keep_fp32.items()},
            sizes={
                size: {unchanged[name]: axis for name, axis in axes.items() if name in unchanged}
                for size, axes in self.sizes.items()
            },
        )


class NamesUnknown(Struct, frozen=True):
    """Why names are not known; a contradiction is a config that cannot be meant."""

    reason: str
    is_contradiction: bool = False


Names: TypeAlias = ModelNames | NamesUnknown


def as_it_is(shapes: Shapes, tied: Iterable[str] = ()) -> HubLayout:
    return HubLayout("", {n: whole(n, shape) for n, shape in shapes.items()}, {a: a for a in tied})


class Difference(Struct, frozen=True):
    """How stored names and shapes differ from a model's; a tie counts under any of its names."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = (self.missing, self.unexpected, self.reshaped)
        kinds = zip(("missing", "unexpected", "of another shape"), names, strict=True)
        return "; ".join(f"{kind}: {some(which)}" for kind, which in kinds if which)

    @property
    def misnamed(self) -> int:
        return len(self.missing) + len(self.unexpected)

    @property
    def count(self) -> int:
        return self.misnamed + len(self.reshaped)


class Fit(Struct, frozen=True):
    """The form of a model that is closest to stored names.

    ``model`` has the names in memory, ``names`` those of this form: in memory or of a Hub layout.
    ``difference`` is what remains without ``prefix``, a wrapper's.
    """

    model: ModelNames
    names: ModelNames
    prefix: str
    difference: Difference


def best_fit(names: ModelNames, stored: Stored) -> Fit:
    """Return the form that differs least from ``stored``; the simplest of equals."""
    fits = []
    for prefix in wrapper_prefixes(stored):
        bare = {name.removeprefix(prefix): shape for name, shape in stored.items()}
        for form in (names, *(() if names.hub_is_memory else names.saved_forms)):
            fits.append(Fit(names, form, prefix, difference(form, bare)))
            if not fits[-1].difference.count:
                return fits[-1]
    return min(fits, key=lambda fit: fit.difference.count)


def wrapper_prefixes(stored: Iterable[str]) -> Iterator[str]:
    """Yield the empty prefix, then each longer one of wrappers around the whole model."""
    prefix, rest = "", list(stored)
    yield prefix
    while rest and (found := _WRAPPER.match(rest[0])):
        if not all(name.startswith(found[0]) for name in rest):
            return
        prefix += found[0]
        rest = [name.removeprefix(found[0]) for name in rest]
        yield prefix


def without_inner_wrappers(stored: Iterable[str]) -> dict[str, str]:
    """Map every name to itself without wrappers of single modules.

    A prefix of all names stays, for ``wrapper_prefixes``; so do all names if two would be equal.
    """
    names = list(stored)
    *_, prefix = wrapper_prefixes(names)
    bare = {
        name: prefix
        + ".".join(p for p in name[len(prefix) :].split(".") if p not in INNER_WRAPPERS)
        for name in names
    }
    return bare if len({*bare.values()}) == len(bare) else {name: name for name in names}


def difference(names: ModelNames, stored: Stored) -> Difference:
    return Difference(
        missing=tuple(absent(names, stored)),
        unexpected=tuple(name for name in stored if name not in names.shapes),
        reshaped=tuple(
            name
            for name, shape in stored.items()
            if shape is not None and names.shapes.get(name, shape) != shape
        ),
    )


def absent(names: ModelNames, stored: Iterable[str]) -> list[str]:
    """Return the model's names that are not stored under any name of their tie.

    Source: transformers 5.23, ``modeling_utils.py`` (``tie_weights``): any name of a tie suffices.
    """
    sources = {names.tied.get(name, name) for name in stored}
    return [
        name
        for name in names.shapes
        if names.tied.get(name, name) not in sources and name not in names.unsaved
    ]
