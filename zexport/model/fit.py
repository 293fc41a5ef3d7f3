"""Which of a model's forms a set of names is: as in memory, or as in one of its files.

Pure: names and shapes in, the difference out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from zexport.model.hub_layout import HubLayout, whole
from zexport.printable import some
from zexport.ranges.dtypes import DType, Shape

_WRAPPERS = (
    "module.",
    "_orig_mod.",
    "_forward_module.",
    "pretrained_model.",
    "actor.",
    "rwtransformer.",
    "model.",
)
"""What wrappers put before every name: DDP, ``torch.compile``, Lightning, TRL, RLHF trainers, and
the reward models of DeepSpeed-Chat (DeepSpeedExamples, ``utils/model/reward_model.py``)."""

INNER_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers of single modules put into names: ``torch.compile``, and torch's activation
checkpointing (torch 2.13, ``_dynamo/eval_frame.py``, ``distributed/algorithms/_checkpoint``)."""


class ModelNames(Struct, frozen=True):
    """The state dict that a model class has for a config.

    ``shapes`` has tied names and persistent buffers too; ``tied`` leads from alias to source, as
    the class declares it. ``layouts`` are the ways in which it is saved, the one that transformers
    takes unasked first, and ``refused`` is why that is not known. ``keep_fp32`` has, for an element
    type, what transformers leaves in float32 when it loads the model in it; ``ignored`` patterns of
    what it passes over. Under ``base_prefix`` classes with a head have the model of their base
    class, whose files have names without it; ``other_type`` is the class's model type where that of
    the config is surely another. ``defaults`` are what the class takes for keys that a config, or
    one of its parts, leaves out; empty where nobody was asked. Where several classes have these
    names, it is that of none.
    """

    architecture: str | None
    shapes: Mapping[str, Shape]
    buffers: frozenset[str]
    tied: Mapping[str, str]
    layouts: tuple[HubLayout, ...]
    provenance: str
    unsaved: frozenset[str] = frozenset()
    keep_fp32: Mapping[DType, frozenset[str]] = field(default_factory=dict)
    refused: str = ""
    ignored: tuple[str, ...] = ()
    base_prefix: str = ""
    other_type: str = ""
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def all_names(self) -> frozenset[str]:
        """Every name in memory, and every one in files."""
        hub = (layout.tensors.keys() for layout in self.layouts)
        return frozenset(self.shapes).union(*hub)

    @property
    def hub_is_memory(self) -> bool:
        """Whether there is one way of saving it, and that under the names in memory."""
        return len(self.layouts) == 1 and all(
            tensor.is_all_of(self.shapes) == name
            for name, tensor in self.layouts[0].tensors.items()
        )

    def kept_in_fp32(self, name: str) -> frozenset[DType]:
        """The element types under which a tensor stays in float32."""
        return frozenset(dtype for dtype, kept in self.keep_fp32.items() if name in kept)

    def ignores(self, name: str) -> bool:
        """Whether transformers passes over a name that the model does not have."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def names_in(self, layout: HubLayout) -> dict[str, str]:
        """Name in memory to name in files, of what lies there unchanged; aliases included."""
        whole = {
            same: name
            for name, tensor in layout.tensors.items()
            if (same := tensor.is_all_of(self.shapes)) is not None
        }
        return {**layout.aliases, **whole}

    def as_saved(self, layout: HubLayout) -> ModelNames:
        """The model as if it had in memory what ``layout`` has in files."""
        made_of = {name: tensor.sources for name, tensor in layout.tensors.items()}
        renamed = dict(layout.aliases)
        for name, sources in made_of.items():
            for source in sources:
                renamed.setdefault(source, name)
        tied = {
            renamed.get(alias, alias): renamed[source]
            for alias, source in self.tied.items()
            if source in renamed
        }
        shapes = layout.shapes
        shapes |= {alias: shapes[source] for alias, source in tied.items()}

        def holding(names: frozenset[str]) -> frozenset[str]:
            return frozenset(n for n, sources in made_of.items() if sources & names)

        return replace(
            self,
            shapes=shapes,
            buffers=holding(self.buffers),
            tied=tied,
            layouts=(as_it_is(layout.shapes, tied),),
            unsaved=frozenset(),
            keep_fp32={dtype: holding(kept) for dtype, kept in self.keep_fp32.items()},
        )


class NamesUnknown(Struct, frozen=True):
    """The names could not be learnt, and why.

    A contradiction is a config that says what the checkpoint is not.
    """

    reason: str
    is_contradiction: bool = False


def as_it_is(shapes: Mapping[str, Shape], tied: Iterable[str] = ()) -> HubLayout:
    """The layout of a model that is saved as it is in memory."""
    return HubLayout(
        "", {name: whole(name, shape) for name, shape in shapes.items()}, {a: a for a in tied}
    )


class Difference(Struct, frozen=True):
    """How stored names and shapes differ from a model's; what is tied to a stored name is there."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    def __str__(self) -> str:
        """The names, by what is wrong with them."""
        told = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.reshaped),
        )
        return "; ".join(f"{what}: {some(which)}" for what, which in told if which)

    @property
    def count(self) -> int:
        """How many names are concerned; 0 if they are the model's."""
        return self.misnamed + len(self.reshaped)

    @property
    def misnamed(self) -> int:
        """How many names one side has and the other has not."""
        return len(self.missing) + len(self.unexpected)


class Fit(Struct, frozen=True):
    """A form of a model, held against stored names.

    ``model`` is as it is in memory, ``names`` in that form, which is a file's or the one in memory;
    ``difference`` is what is left once ``prefix``, a wrapper's, is gone.
    """

    model: ModelNames
    names: ModelNames
    prefix: str
    is_saved_form: bool
    difference: Difference


def best_fit(names: ModelNames, stored: Mapping[str, Shape | None]) -> Fit:
    """The form that differs least from ``stored``; of equals the simplest."""
    best: Fit | None = None
    for prefix in wrapper_prefixes(stored):
        bare = {name.removeprefix(prefix): shape for name, shape in stored.items()}
        for form, is_saved in _forms(names):
            fit = Fit(names, form, prefix, is_saved, difference(form, bare))
            if best is None or fit.difference.count < best.difference.count:
                best = fit
            if not best.difference.count:
                return best
    if best is None:  # there is always the form in memory, and no prefix
        raise AssertionError("no form to compare with")
    return best


def _forms(names: ModelNames) -> Iterator[tuple[ModelNames, bool]]:
    yield names, False
    if not names.hub_is_memory:
        for layout in names.layouts:
            yield names.as_saved(layout), True


def wrapper_prefixes(stored: Iterable[str]) -> Iterator[str]:
    """Nothing, and then one wrapper after the other that all names have gone through."""
    prefix, rest = "", list(stored)
    yield prefix
    while found := next((w for w in _WRAPPERS if rest and all(n.startswith(w) for n in rest)), ""):
        prefix += found
        rest = [name.removeprefix(found) for name in rest]
        yield prefix


def without_inner_wrappers(stored: Iterable[str]) -> dict[str, str]:
    """Every name to itself without the wrappers of single modules.

    What all names begin with stays, for ``wrapper_prefixes``; so do all names, if two became one.
    """
    names = list(stored)
    *_, prefix = wrapper_prefixes(names)
    bare = {
        name: prefix
        + ".".join(p for p in name[len(prefix) :].split(".") if p not in INNER_WRAPPERS)
        for name in names
    }
    return bare if len({*bare.values()}) == len(bare) else {name: name for name in names}


def difference(names: ModelNames, stored: Mapping[str, Shape | None]) -> Difference:
    """How ``stored`` differs from the model as it is in memory."""
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
    """The model's names that are not stored, nor any that they are tied to.

    transformers fills a tie from whichever of its names is there (5.23, ``modeling_utils.py``,
    ``tie_weights``).
    """
    sources = {names.tied.get(name, name) for name in stored}
    return [
        name
        for name in names.shapes
        if names.tied.get(name, name) not in sources and name not in names.unsaved
    ]


def choose_class(
    candidates: Sequence[ModelNames], stored: Mapping[str, Shape | None]
) -> ModelNames | None:
    """The class whose names differ least from ``stored``, if it is one alone.

    Names count before shapes, which hang on sizes that training changes. Where several have the
    names, and one alone the shapes or all of them the same, it is that without a class.
    """
    fits = [(names, best_fit(names, stored).difference) for names in candidates]
    least = min(found.misnamed for _, found in fits)
    named = [(names, found) for names, found in fits if found.misnamed == least]
    fewest = min(found.count for _, found in named)
    nearest = [names for names, found in named if found.count == fewest]
    if len(named) == 1:
        return nearest[0]
    if all(_nameless(names) == _nameless(nearest[0]) for names in nearest):
        return replace(nearest[0], architecture=None)
    return None


def _nameless(names: ModelNames) -> ModelNames:
    return replace(names, architecture=None, provenance="")
