"""Weights by name, at each step from a checkpoint to the files of an export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from msgspec import Struct

from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.errors import UsageError
from zexport.model.hub_names import without_inner_wrappers
from zexport.ranges.dtypes import Shape
from zexport.text import some

PEFT_PREFIX = "base_model.model."
"""Prefix of a PEFT model's names, in memory and in adapter files."""

Tensors: TypeAlias = Mapping[str, StoredTensor]
Renames: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of regex and replacement."""


class Weights(Struct, frozen=True):
    """Weights under the names of one step.

    Attributes:
        tensors: each tensor once.
        aliases: further names of tied weights, each to a name in ``tensors``.
        left_out: names without values.
    """

    tensors: Tensors
    aliases: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: TrainingState) -> Weights:
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        return cls(tensors, checkpoint.aliases, checkpoint.left_out)

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.aliases, *self.left_out]

    @property
    def every_tensor(self) -> Tensors:
        return {**self.tensors, **{a: self.tensors[n] for a, n in self.aliases.items()}}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.every_tensor.items()}

    @property
    def known_shapes(self) -> dict[str, Shape | None]:
        """The shape of each name; ``None`` if it has no values."""
        return {**dict.fromkeys(self.left_out), **self.shapes}

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset(n for n, tensor in self.tensors.items() if tensor.role is Role.BUFFER)

    def named(self, new: Callable[[str], str]) -> Weights:
        return Weights(
            {new(name): tensor for name, tensor in self.tensors.items()},
            {new(alias): new(name) for alias, name in self.aliases.items()},
            tuple(map(new, self.left_out)),
        )

    def without_prefix(self, prefix: str) -> Weights:
        return self.named(lambda name: name.removeprefix(prefix)) if prefix else self

    def without_inner_wrappers(self) -> Weights:
        """Return the weights under names without wrappers of single modules (``_orig_mod``)."""
        return self.named(without_inner_wrappers(self.names).__getitem__)

    def renamed(self, renames: Renames) -> Weights:
        return self.named(_rename(self.names, renames).__getitem__) if renames else self

    def only(self, prefix: str) -> Weights:
        """Return the weights below ``prefix``, without it.

        Tied weights are included if one of their names is below it.

        Raises:
            UsageError: no name is below ``prefix``.
        """
        if not prefix:
            return self
        start = prefix.removesuffix(".") + "."
        if not any(name.startswith(start) for name in self.names):
            raise UsageError(
                f"--only {prefix!r} matches no weight",
                found=some(sorted({name.partition(".")[0] for name in self.names})),
                expected="a prefix such as model or model.layers",
            )
        kept: dict[str, str] = {}
        aliases: dict[str, str] = {}
        for name, target in {**{name: name for name in self.tensors}, **self.aliases}.items():
            if name.startswith(start) and kept.setdefault(target, name) != name:
                aliases[name] = kept[target]
        part = Weights(
            {name: self.tensors[target] for target, name in kept.items()},
            aliases,
            tuple(name for name in self.left_out if name.startswith(start)),
        )
        return part.without_prefix(start)


def _rename(names: Iterable[str], renames: Renames) -> dict[str, str]:
    """Return the new name of each name.

    Raises:
        UsageError: a regex or replacement is invalid, or two names become one.
    """
    before: dict[str, str] = {}
    for name in names:
        new = name
        for pattern, replacement in renames:
            try:
                new = re.sub(pattern, replacement, new)
            except (re.error, IndexError, OverflowError, RecursionError) as error:
                raise UsageError(
                    f"--rename {pattern!r} is not a valid regex", found=error
                ) from error
        if new in before:
            raise UsageError(
                "--rename gives two tensors one name",
                found=f"{before[new]} and {name} both become {new}",
                hint="Make the regex match fewer names",
            )
        before[new] = name
    return {name: new for new, name in before.items()}
