"""A model's weights by name, at every point of the way from a checkpoint to the files.

As weights alone; and as what is selected to be written, with what was decided of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from msgspec import Struct, field

from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.errors import UsageError
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.findings import Finding
from zexport.model.config import ConfigFile
from zexport.model.fit import (
    INNER_WRAPPERS,
    ModelNames,
    NamesUnknown,
    without_inner_wrappers,
)
from zexport.model.hub_layout import HubLayout
from zexport.printable import some
from zexport.ranges.dtypes import Shape

PEFT_PREFIX = "base_model.model."
"""What a peft model puts before the names of the model in it, in memory and in its files."""


class Weights(Struct, frozen=True):
    """Weights, under the names that they go by at one point of the way.

    Each tensor is there once, ``aliases`` lead to it; ``left_out`` are names without a value.
    """

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: TrainingState) -> Weights:
        """A checkpoint's, under its own names."""
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        return cls(tensors, checkpoint.aliases, checkpoint.left_out)

    def __repr__(self) -> str:
        """Their number; a model has thousands."""
        counts = (len(self.tensors), len(self.aliases), len(self.left_out))
        return "Weights({} tensors, {} aliases, {} left out)".format(*counts)

    @property
    def names(self) -> list[str]:
        """Every name: of tensors, tied ones, and those without a value."""
        return [*self.tensors, *self.aliases, *self.left_out]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Every name that has a value with its shape, tied names included."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return shapes | {alias: shapes[name] for alias, name in self.aliases.items()}

    @property
    def known_shapes(self) -> dict[str, Shape | None]:
        """Every name, with its shape where there is one."""
        return {**dict.fromkeys(self.left_out), **self.shapes}

    @property
    def every_tensor(self) -> dict[str, StoredTensor]:
        """Every name that has a value with its tensor, tied names included."""
        return {**self.tensors, **{a: self.tensors[n] for a, n in self.aliases.items()}}

    @property
    def buffers(self) -> frozenset[str]:
        """The names of buffers."""
        return frozenset(n for n, tensor in self.tensors.items() if tensor.role is Role.BUFFER)

    def only(self, prefix: str) -> tuple[Weights, tuple[str, ...]]:
        """The part under a prefix, by the names that it has there, and what is told of the rest.

        A tensor that lies outside and has a second name within is of the part as well.
        """
        if not prefix:
            return self, ()
        start = prefix.removesuffix(".") + "."
        if not any(name.startswith(start) for name in self.known_shapes):
            raise UsageError(
                f"--only {prefix!r} names no part of the model",
                found=some(sorted({name.partition(".")[0] for name in self.known_shapes})),
                hint="Name one of these, or a part of one, as in model.layers",
            )
        first: dict[str, str] = {}
        for name, target in {**{name: name for name in self.tensors}, **self.aliases}.items():
            if name.startswith(start):
                first.setdefault(target, name)
        part = Weights(
            {name: self.tensors[target] for target, name in first.items()},
            {
                alias: first[target]
                for alias, target in self.aliases.items()
                if alias.startswith(start) and alias != first[target]
            },
            tuple(name for name in self.left_out if name.startswith(start)),
        )
        rest = [tensor for name, tensor in self.tensors.items() if name not in first]
        count = sum(tensor.numel for tensor in rest)
        told = (
            f"of the part {start!r} alone: {len(rest):,} tensors beside it, of {count:,} elements, "
            "are left out"
        )
        return part.without(start), (told,) if rest else ()

    def without(self, prefix: str) -> Weights:
        """The same under names without a prefix that all of them have."""
        return self.named(lambda name: name.removeprefix(prefix)) if prefix else self

    def without_inner_wrappers(self) -> tuple[Weights, tuple[str, ...]]:
        """The same under names without the wrappers of single modules, and what was left out."""
        bare = without_inner_wrappers(self.names)
        parts = {part for name, new in bare.items() if new != name for part in name.split(".")}
        return self.named(bare.__getitem__), tuple(p for p in INNER_WRAPPERS if p in parts)

    def rename_statements(self, renames: tuple[tuple[str, str], ...]) -> Iterator[Statement]:
        """The names that renames give which other weights had, and renames that change none."""
        names = self.names
        had = frozenset(names)
        changed: set[int] = set()
        for name in names:
            each = [name, *_steps(name, renames)]
            changed |= {n for n, (old, new) in enumerate(pairwise(each)) if old != new}
        for number, (pattern, _) in enumerate(renames):
            if number not in changed:
                yield Statement(Fact.RENAMED_NONE, "given", "--rename", repr(pattern))
                yield Statement(Fact.RENAMED_NONE, "no such name", "the checkpoint", repr(pattern))
        for name, new in _rename(names, renames).items() if renames else ():
            if new != name and new in had:
                yield Statement(Fact.RENAMED_ONTO, name, "--rename", new)
                yield Statement(Fact.RENAMED_ONTO, new, "the checkpoint", new)

    def renamed(self, renames: tuple[tuple[str, str], ...]) -> Weights:
        """The same after every rename that was asked for, in turn."""
        return self.named(_rename(self.names, renames).__getitem__) if renames else self

    def named(self, new: Callable[[str], str]) -> Weights:
        """The same under new names."""
        return Weights(
            {new(name): tensor for name, tensor in self.tensors.items()},
            {new(alias): new(name) for alias, name in self.aliases.items()},
            tuple(map(new, self.left_out)),
        )


class Selection(Struct, frozen=True):
    """What is written, as far as it is decided.

    ``weights`` are at first the checkpoint's under the names of ``names``, which is the model in
    the form that the checkpoint has; at last those of the output, with names that are left to the
    model to tie as aliases. Without a ``layout`` names stay as they are. ``untied`` are names that
    the config must no longer tie, and ``loadable`` is whether transformers would load it with no
    missing and no unexpected key; ``False`` where that is not known.
    """

    weights: Weights
    names: ModelNames | NamesUnknown
    layout: HubLayout | None = None
    is_for_hub: bool = True
    untied: frozenset[str] = frozenset()
    from_base: tuple[str, ...] = ()
    heads: Mapping[str, StoredTensor] = field(default_factory=dict)
    config: ConfigFile | None = None
    findings: tuple[Finding, ...] = ()
    loadable: bool = False
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    statements: tuple[Statement, ...] = ()

    @property
    def label(self) -> str | None:
        """The layout's label, where there is a layout."""
        return None if self.layout is None else self.layout.label

    @property
    def architecture(self) -> str | None:
        """The model class that it loads as, where that is known."""
        names = self.names
        return names.architecture if self.loadable and isinstance(names, ModelNames) else None

    @property
    def written(self) -> tuple[StoredTensor, ...]:
        """All that is written."""
        return (*self.weights.tensors.values(), *self.heads.values())


def _rename(names: Iterable[str], renames: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Old name to new name, after every rename in turn."""
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        *_, new = name, *_steps(name, renames)
        is_path = "/" in new and "/" not in name
        if new != name and (is_path or not new or not new.isprintable()):
            raise UsageError(  # tools might stumble over it, as over a path or a terminal's command
                "--rename makes a name that no tensor should have",
                found=f"{name} becomes {new!r}",
                expected="a printable name without slashes",
                hint="Mend the replacement",
            )
        if new in taken:
            raise UsageError(
                "--rename gives two tensors one name",
                found=f"{taken[new]} and {name} both become {new}",
                hint="Make the pattern more exact",
            )
        renamed[name] = new
        taken[new] = name
    return renamed


def _steps(name: str, renames: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """What a name is after each rename in turn."""
    for pattern, replacement in renames:
        try:
            name = re.sub(pattern, replacement, name)
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            raise UsageError(f"--rename {pattern!r} is no pattern", found=error) from error
        yield name
