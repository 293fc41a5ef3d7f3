"""Which names the output has: the checkpoint's names understood, and the hub's chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import DamagedCheckpointError, NamesMismatchError, UnsupportedError
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.findings import Finding, FindingKind
from zexport.model.fit import Difference, Fit, ModelNames, NamesUnknown, absent, as_it_is
from zexport.model.hub_layout import HubLayout
from zexport.options import ExportOptions, NameLayout
from zexport.printable import some
from zexport.ranges.dtypes import Shape
from zexport.weights.named import PEFT_PREFIX, Selection, Weights

_KEEP_NAMES = "export with --layout memory, which keeps the checkpoint's names"


def settle_names(
    stored: Weights,
    fit: Fit | NamesUnknown,
    base: Mapping[str, Shape],
    options: ExportOptions,
    path: Path,
) -> Selection:
    """Understand the stored names, and choose how the model is saved."""
    if options.layout is NameLayout.MEMORY:
        told = tuple(_misfits(fit, stored, options))
        names, stored = in_form(stored, fit, options)
        return Selection(stored, names, is_for_hub=False, statements=told)
    if isinstance(fit, NamesUnknown):
        if fit.is_contradiction:
            raise UnsupportedError(fit.reason, path=path, hint=f"Name it there, or {_KEEP_NAMES}")
        return Selection(stored, fit)
    if is_adapted(stored):
        return Selection(stored, NamesUnknown("they are those of a model with an adapter"))
    model = fit.model
    names, stored = in_form(stored, fit, options)
    unread = _unread(fit, stored, options)
    if unread and fit.difference.missing:
        raise _mismatch(replace(fit.difference, unexpected=unread), model, path)
    if unread:
        raise _too_many(unread, model, path)
    if model.refused:
        raise UnsupportedError(
            f"how {model.architecture} is saved cannot be told from its conversions",
            path=path,
            found=model.refused,
            hint=_KEEP_NAMES.capitalize(),
        )
    chosen, undecided = _choose_layout(fit.names, base, options.hub_layout)
    return Selection(stored, names, chosen, warnings=undecided, notes=tuple(_notes(fit)))


def _misfits(
    fit: Fit | NamesUnknown, stored: Weights, options: ExportOptions
) -> Iterator[Statement]:
    """The names that a model does not have, where it was renamed and is to keep its names."""
    unread = _unread(fit, stored, options) if options.renames and isinstance(fit, Fit) else ()
    if unread:
        yield Statement(Fact.RENAMED_MISFIT, some(unread), "--rename")
        yield Statement(Fact.RENAMED_MISFIT, "no such names", "the model")


def in_form(
    stored: Weights, fit: Fit | NamesUnknown, options: ExportOptions
) -> tuple[ModelNames | NamesUnknown, Weights]:
    """The model in the form that the checkpoint has, and its weights under the names of that.

    Names that are to stay as they are keep what wrappers put before them.
    """
    if isinstance(fit, NamesUnknown):
        return fit, stored
    if options.layout is NameLayout.MEMORY:
        return fit.model if fit.prefix else fit.names, stored
    return fit.names, stored.without(fit.prefix)


def is_adapted(stored: Weights) -> bool:
    """Whether the names are those of a model with an adapter, which is like any other here."""
    return all(name.startswith(PEFT_PREFIX) for name in stored.tensors)


def check_shapes(
    fit: Fit | NamesUnknown, stored: Weights, options: ExportOptions, tag_dir: Path
) -> tuple[Finding, ...]:
    """What has another shape than the model, where that was allowed: a finding for each.

    Only the config's shapes show two dimensions recorded in the wrong order, where the product, and
    so every length, is the same.
    """
    if isinstance(fit, NamesUnknown):
        return ()
    shapes, expected = stored.shapes, fit.names.shapes
    differing = {
        fit.prefix + name: f"{list(shapes[fit.prefix + name])} for {list(expected[name])}"
        for name in fit.difference.reshaped
    }
    if differing and FindingKind.SHAPE_MISMATCH not in options.allow:
        told = [f"{name} {details}" for name, details in differing.items()]
        raise DamagedCheckpointError(
            f"holds weights of other shapes than {fit.model.architecture} has for its config",
            path=tag_dir,
            found=some(told, 8),
            expected="the config's shapes",
            hint="Put the config.json beside it that the model was trained with, or give a model "
            "folder with --base",
            finding=FindingKind.SHAPE_MISMATCH,
        )
    return tuple(
        Finding(FindingKind.SHAPE_MISMATCH, name, 0, details, accepted=True)
        for name, details in differing.items()
    )


def _notes(fit: Fit) -> Iterator[str]:
    """What the user should know of how the names were understood."""
    if fit.prefix:
        yield f"the prefix {fit.prefix!r} of every name was left out"
    if ignored := tuple(filter(fit.names.ignores, fit.difference.unexpected)):
        yield f"transformers passes over {some(ignored)} when it loads the model"
    if fit.is_saved_form:
        yield "the checkpoint has the hub's names already; they are kept"


def _unread(fit: Fit, stored: Weights, options: ExportOptions) -> tuple[str, ...]:
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


def check_complete(names: ModelNames, stored: Iterable[str], path: Path) -> None:
    """Refuse to go on where a weight of the model is missing; buffers may be."""
    missing = [name for name in absent(names, stored) if name not in names.buffers]
    if missing:
        raise _mismatch(Difference(tuple(missing), (), ()), names, path)


def _choose_layout(
    names: ModelNames, base: Mapping[str, Shape], label: str | None
) -> tuple[HubLayout, tuple[str, ...]]:
    """The way of saving that is asked for or that the base shows, else the first.

    And what is not certain of it, in words.
    """
    first = names.layouts[0] if names.layouts else as_it_is(names.shapes, names.tied)
    if len(names.layouts) < 2:
        return first, ()
    asked = [layout for layout in names.layouts if layout.label == label]
    if asked:
        return asked[0], ()
    alike = {
        number: sum(base.get(name) == shape for name, shape in layout.shapes.items())
        for number, layout in enumerate(names.layouts)
    }
    most = max(alike.values())
    best = [names.layouts[number] for number, count in alike.items() if count == most]
    if most and len(best) == 1:
        return best[0], ()
    other = next(layout for layout in best or names.layouts if layout is not first)
    return first, (_undecided(first, other, names),)


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
    return NamesMismatchError(
        "the weights are neither named as in memory nor as on the hub",
        path=path,
        found=str(found),
        expected=f"the names of {names.provenance}",
        hint="Give the config.json of this model, or the model that training began from with "
        f"--base; put the names right with --rename; or {_KEEP_NAMES}",
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
