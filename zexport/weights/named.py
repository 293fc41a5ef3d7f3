"""Which names the output has: the checkpoint's names understood, and the hub's chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.errors import NamesMismatchError, UnsupportedError, UsageError
from zexport.model.fit import (
    INNER_WRAPPERS,
    Difference,
    Fit,
    ModelNames,
    absent,
    as_it_is,
    best_fit,
    without_inner_wrappers,
)
from zexport.model.hub_layout import HubLayout
from zexport.model.names import NamesUnknown
from zexport.options import ExportOptions, NameLayout
from zexport.printable import some
from zexport.ranges.dtypes import Shape

_ADAPTED = "base_model.model."
_KEEP_NAMES = "export with --layout memory, which keeps the checkpoint's names"


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """What a checkpoint stores, under the names it goes by after every rename.

    Attributes:
        tensors: each tensor once.
        aliases: tied name to the name of the tensor that it is.
        left_out: names whose values are in no file.
    """

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]

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
    def buffers(self) -> frozenset[str]:
        """The names of buffers."""
        return frozenset(n for n, tensor in self.tensors.items() if tensor.role is Role.BUFFER)

    def without(self, prefix: str) -> NamedTensors:
        """The same under names without a prefix that all of them have."""
        return self._renamed(lambda name: name.removeprefix(prefix))

    def without_inner_wrappers(self) -> tuple[NamedTensors, tuple[str, ...]]:
        """The same under names without the wrappers of single modules, and what was left out."""
        bare = without_inner_wrappers([*self.tensors, *self.aliases, *self.left_out])
        parts = {part for name, new in bare.items() if new != name for part in name.split(".")}
        return self._renamed(bare.__getitem__), tuple(p for p in INNER_WRAPPERS if p in parts)

    def _renamed(self, new: Callable[[str], str]) -> NamedTensors:
        return NamedTensors(
            {new(name): tensor for name, tensor in self.tensors.items()},
            {new(alias): new(name) for alias, name in self.aliases.items()},
            tuple(map(new, self.left_out)),
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """The names, understood.

    Attributes:
        stored: the checkpoint's tensors under the names of ``names``.
        names: the model in the form that the checkpoint has; as given where that is not known.
        layout: how the model is saved from that form; ``None`` where names stay as they are.
        is_for_hub: whether names should be the hub's.
        untied: names that the model ties to others, and that differ from these.
        notes: what the user should know of how this was decided.
    """

    stored: NamedTensors
    names: ModelNames | NamesUnknown
    layout: HubLayout | None
    is_for_hub: bool = True
    untied: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str | None:
        """The layout's label, where there is a layout."""
        return None if self.layout is None else self.layout.label


def name_tensors(
    checkpoint: ZeroCheckpoint, renames: tuple[tuple[str, str], ...] = ()
) -> NamedTensors:
    """The checkpoint's tensors by name.

    Raises:
        UsageError: a rename is no pattern, makes two names one, or makes what is no name.
    """
    own = [tensor.name for tensor in checkpoint.tensors]
    renamed = _rename([*own, *checkpoint.aliases, *checkpoint.left_out], renames)
    return NamedTensors(
        tensors={renamed[tensor.name]: tensor for tensor in checkpoint.tensors},
        aliases={renamed[alias]: renamed[name] for alias, name in checkpoint.aliases.items()},
        left_out=tuple(renamed[name] for name in checkpoint.left_out),
    )


def settle_names(
    stored: NamedTensors,
    names: ModelNames | NamesUnknown,
    base: Mapping[str, Shape],
    options: ExportOptions,
    path: Path,
) -> Settled:
    """Understand the stored names, and choose how the model is saved.

    Args:
        stored: the checkpoint's tensors, renamed.
        names: what the model expects, where that is known.
        base: names and shapes of the base model's files, which may show how the model is saved.
        options: whether names are to be the hub's at all, and how the model is saved.
        path: the checkpoint, for messages.

    Raises:
        NamesMismatchError: the stored names are neither those in memory nor the hub's, or weights
            are among them that the model does not have.
        UnsupportedError: it is not known how the model is saved.
    """
    if options.layout is NameLayout.MEMORY:
        return _as_stored(stored, names)
    if isinstance(names, NamesUnknown):
        if names.is_contradiction:
            raise UnsupportedError(names.reason, path=path, hint=f"Name it there, or {_KEEP_NAMES}")
        return Settled(stored, names, None)
    if all(name.startswith(_ADAPTED) for name in stored.tensors):
        return Settled(stored, NamesUnknown("they are those of a model with an adapter"), None)
    fit = best_fit(names, stored.known_shapes)
    unread = _unread(fit, stored.without(fit.prefix), options)
    if unread and fit.difference.missing:
        raise _mismatch(replace(fit.difference, unexpected=unread), names, path)
    if unread:
        raise _too_many(unread, names, path)
    if names.refused:
        raise UnsupportedError(
            f"how {names.architecture} is saved cannot be told from its conversions",
            path=path,
            found=names.refused,
            hint=_KEEP_NAMES.capitalize(),
        )
    chosen, note = _choose_layout(fit.names, base, options.hub_layout)
    notes = tuple(filter(None, (note, *_notes(fit))))
    return Settled(stored.without(fit.prefix), fit.names, chosen, notes=notes)


def _notes(fit: Fit) -> Iterator[str]:
    """What the user should know of how the names were understood."""
    if fit.prefix:
        yield f"the prefix {fit.prefix!r} of every name was left out"
    if ignored := tuple(filter(fit.names.ignores, fit.difference.unexpected)):
        yield f"transformers passes over {some(ignored)} when it loads the model"
    if fit.is_saved_form:
        yield "the checkpoint has the hub's names already; they are kept"


def _unread(fit: Fit, stored: NamedTensors, options: ExportOptions) -> tuple[str, ...]:
    """Weights that the model would be loaded without, and that nothing says it may be.

    Buffers are none: older versions saved some that are worked out today. Nor are second names of
    what the model has, what is left out on purpose, and what transformers itself passes over.
    """
    has = fit.names.shapes.keys()
    had = {name for alias, name in stored.aliases.items() if alias in has}
    return tuple(
        name
        for name in fit.difference.unexpected
        if name not in stored.aliases
        and name not in had
        and not fit.names.ignores(name)
        and not _is_spared(stored.tensors.get(name), options)
    )


def _is_spared(tensor: StoredTensor | None, options: ExportOptions) -> bool:
    """Whether it is a buffer, or frozen and not written; what has no values is frozen."""
    role = Role.FROZEN if tensor is None else tensor.role
    return role is Role.BUFFER or (role is Role.FROZEN and options.exclude_frozen)


def _as_stored(stored: NamedTensors, names: ModelNames | NamesUnknown) -> Settled:
    """Names as they are, with the model's form only to tell what is missing."""
    if isinstance(names, ModelNames):
        fit = best_fit(names, stored.known_shapes)
        names = names if fit.prefix else fit.names
    return Settled(stored, names, None, is_for_hub=False)


def check_complete(names: ModelNames, stored: Iterable[str], path: Path) -> None:
    """Nothing, where the model lacks no weight; buffers may be missing.

    Raises:
        NamesMismatchError: it does.
    """
    missing = [name for name in absent(names, stored) if name not in names.buffers]
    if missing:
        raise _mismatch(Difference(tuple(missing), (), ()), names, path)


def _choose_layout(
    names: ModelNames, base: Mapping[str, Shape], label: str | None
) -> tuple[HubLayout, str]:
    """The way of saving that is asked for or that the base shows, else the first.

    And what is not certain of it, in words.
    """
    first = names.layouts[0] if names.layouts else as_it_is(names.shapes, names.tied)
    if len(names.layouts) < 2:  # noqa: PLR2004 - nothing to choose
        return first, ""
    asked = [layout for layout in names.layouts if layout.label == label]
    if asked:
        return asked[0], ""
    alike = {
        number: sum(base.get(name) == shape for name, shape in layout.shapes.items())
        for number, layout in enumerate(names.layouts)
    }
    most = max(alike.values())
    best = [names.layouts[number] for number, count in alike.items() if count == most]
    if most and len(best) == 1:
        return best[0], ""
    other = next(layout for layout in best or names.layouts if layout is not first)
    return first, _undecided(first, other, names)


def _undecided(first: HubLayout, other: HubLayout, names: ModelNames) -> str:
    """What two ways of saving differ in, by an example."""
    ours, theirs = first.shapes, other.shapes
    name = next(n for n, shape in theirs.items() if ours.get(n) != shape)
    mine = next(
        (n for n, t in first.tensors.items() if t.sources == other.tensors[name].sources), name
    )
    one, two = (f"{n} {list(s[n])}" for n, s in ((mine, ours), (name, theirs)))
    return (
        f"files of {names.architecture} have one of several layouts, and the checkpoint does not "
        f"tell which: chosen was {one}, not {two}; a model folder given with --base decides it"
    )


def _mismatch(found: Difference, names: ModelNames, path: Path) -> NamesMismatchError:
    told = (
        ("missing", found.missing),
        ("unexpected", found.unexpected),
        ("of another shape", found.reshaped),
    )
    return NamesMismatchError(
        "the weights are neither named as in memory nor as on the hub",
        path=path,
        found="; ".join(f"{what}: {some(which)}" for what, which in told if which),
        expected=f"the names of {names.provenance}",
        hint=f"Put the names right with --rename, give the right config.json, or {_KEEP_NAMES}",
    )


def _too_many(unread: tuple[str, ...], names: ModelNames, path: Path) -> NamesMismatchError:
    return NamesMismatchError(
        "holds weights that the model of config.json does not have, and would be loaded without",
        path=path,
        found=some(unread),
        expected=f"the names of {names.provenance}",
        hint="Give the config.json that the model was trained with (its class, the number of its "
        f"layers, its biases), put the names right with --rename, or {_KEEP_NAMES}",
    )


def _rename(names: Iterable[str], renames: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Old name to new name, after every rename in turn."""
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        new = name
        for pattern, replacement in renames:
            try:
                new = re.sub(pattern, replacement, new)
            except (re.error, IndexError, OverflowError, RecursionError) as error:
                raise UsageError(f"--rename {pattern!r} is no pattern", found=error) from error
        if new != name:
            _check_name(name, new)
        if new in taken:
            raise UsageError(
                "--rename gives two tensors one name",
                found=f"{taken[new]} and {name} both become {new}",
                hint="Make the pattern more exact",
            )
        renamed[name] = new
        taken[new] = name
    return renamed


def _check_name(name: str, new: str) -> None:
    """Refuse a new name that tools might stumble over, as over a path or a terminal's command."""
    if not new or not new.isprintable() or ("/" in new and "/" not in name):
        raise UsageError(
            "--rename makes a name that no tensor should have",
            found=f"{name} becomes {new!r}",
            expected="a printable name without slashes",
            hint="Mend the replacement",
        )
