"""Which tensors are written, and under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    NamesMismatchError,
    UnsupportedError,
    layout_of,
)
from zexport.export.base_model import Base, check_plain
from zexport.export.hub_tensors import to_hub
from zexport.export.model_class import Model, Ties, is_value_head, tie_as_declared
from zexport.export.weights import PEFT_PREFIX, Tensors, Weights
from zexport.findings import Finding, FindingKind, Findings
from zexport.model.hub_names import (
    Difference,
    Fit,
    HubLayout,
    ModelNames,
    Names,
    NamesUnknown,
    Shapes,
    absent,
    as_it_is,
    difference,
)
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.dtypes import DType, Shape
from zexport.text import some

_KEEP_NAMES = "export with --layout memory, which keeps the checkpoint's names"
_CONFIG_HINT = (
    "Pass a folder with the config.json of this run with --base, correct names with --rename, or "
    f"{_KEEP_NAMES}"
)


class Selection(Struct, frozen=True):
    """What is written.

    Attributes:
        tensors: every tensor of the model's or adapters' files, by its name in the output.
        loadable: whether transformers, or peft, loads it without missing or unexpected keys.
        from_base: written names whose weights come from the base model.
        tied: names that are not written, each to the written name that the model ties it to.
        untied: declared tied weights that are written under both names.
        label: which of the model's Hub layouts is used; ``None`` if names stay.
        architecture: the model class, if it is loadable.
    """

    tensors: Tensors
    loadable: bool
    from_base: tuple[str, ...] = ()
    tied: Mapping[str, str] = {}
    untied: Set[str] = frozenset()
    label: str | None = None
    architecture: str | None = None
    findings: Findings = ()
    warnings: Sequence[str] = ()


def select(
    checkpoint: TrainingState, model: Model, base: Base, ties: Ties, options: ExportOptions
) -> Selection:
    """Return the tensors of the model files.

    The checkpoint's names become those of the model class; the base model supplies what was left
    out; tied weights are written once; then names and shapes become those on the Hub.

    Raises:
        NamesMismatchError, DamagedCheckpointError: names or shapes are not those of config.json.
        FrozenLeftOutError: frozen weights are neither in the checkpoint nor in the base model.
        UnsupportedError: how transformers saves the model is unknown.
    """
    tag_dir, is_whole = checkpoint.location.tag_dir, not options.exclude_frozen
    findings = _check_shapes(model, options, tag_dir)
    names, stored = in_form(model.weights, model.fit, options)
    layout, untied, warnings = None, ties.differing, list[str]()
    if options.layout is not NameLayout.MEMORY:
        if is_adapted(stored):
            names = NamesUnknown("they are those of a model with an adapter")
        if isinstance(names, NamesUnknown):
            if names.is_contradiction:
                hint = f"Name it there, or {_KEEP_NAMES}"
                raise UnsupportedError(names.reason, path=tag_dir, hint=hint)
            if model.config is not None:
                warnings.append(f"weight names are not checked against the model: {names.reason}")
        elif isinstance(model.fit, Fit):
            _check_names(model.fit, stored, options, tag_dir)
            layout = _choose_layout(names, base.shapes, options.hub_layout)
    known = None
    if isinstance(names, ModelNames):
        same = {alias: names.tied[alias] for alias in ties.equal}
        stored = replace(
            stored,
            tensors={name: one for name, one in stored.tensors.items() if name not in same},
            aliases={**{a: same.get(n, n) for a, n in stored.aliases.items()}, **same},
        )
        known = names.without_ties(untied)
    if untied:
        warnings.append(
            f"{some(sorted(untied))}: values differ from the weights that the model ties them "
            "to; both are written, and config.json no longer ties them"
        )
    own = {n: t for n, t in stored.tensors.items() if is_whole or t.role is not Role.FROZEN}
    wanted = _wanted(checkpoint, known, layout, stored, base) if is_whole else {}
    filled = _from_base(known, layout, wanted, own, base, tag_dir)
    # With a merged adapter, the checkpoint's weights include those of the base.
    of_base = (tensor for tensor in own.values() if base.tensors.get(tensor.name) is tensor)
    check_plain((*filled.values(), *of_base), base)
    aliases = {a: n for a, n in stored.aliases.items() if n in own or n in wanted}
    shapes = {**{name: tensor.shape for name, tensor in own.items()}, **wanted}
    shapes |= {alias: shapes[name] for alias, name in aliases.items()}
    is_loadable = known is not None and _is_loadable(known, layout, shapes, aliases)
    lost = [name for name in stored.names if name not in shapes]
    written, tied = own, aliases
    if known is not None and layout is not None:
        lost = [n for n in difference(known, shapes).missing if n not in known.buffers]
        if lost and is_whole:
            raise _mismatch(Difference(tuple(lost)), known, tag_dir)
        with layout_of(tag_dir):
            written, tied = _as_saved(own, aliases, known, layout)
    written = {**written, **filled}
    if known is not None and untied:
        # The config no longer ties anything, so the model's other tied weights are written too.
        renamed = {} if layout is None else known.names_in(layout)
        for alias, source in known.tied.items():
            if (other := renamed.get(source, source)) in written:
                written.setdefault(renamed.get(alias, alias), written[other])
        tied = {alias: name for alias, name in tied.items() if alias not in written}
    if lost and not is_whole:
        warnings.append(
            f"--exclude-frozen: {len(lost):,} weights are not exported, so the folder is not a "
            f"whole model: {some(lost, 3)}"
        )
    return Selection(
        written,
        is_loadable,
        tuple(filled),
        tied,
        untied,
        None if layout is None else layout.label,
        known.architecture if known is not None and is_loadable else None,
        findings,
        warnings,
    )


def _is_loadable(
    names: ModelNames,
    layout: HubLayout | None,
    shapes: Mapping[str, Shape | None],
    aliases: Mapping[str, str],
) -> bool:
    """Whether transformers loads these weights without missing or unexpected keys."""
    found = difference(names, shapes)
    if found.missing or found.reshaped or not all(map(names.ignores, found.unexpected)):
        return False
    are_tied = (names.tied.get(a, a) == names.tied.get(n, n) for a, n in aliases.items())
    return layout is not None or (names.hub_is_memory and all(are_tied))


def in_form(
    stored: Weights, fit: Fit | NamesUnknown, options: ExportOptions
) -> tuple[Names, Weights]:
    """Return the model in the form that the checkpoint has, and the weights under its names.

    With ``--layout memory``, names keep the prefixes of wrappers.
    """
    if isinstance(fit, NamesUnknown):
        return fit, stored
    if options.layout is NameLayout.MEMORY:
        return fit.model if fit.prefix else fit.names, stored
    return fit.names, stored.without_prefix(fit.prefix)


def is_adapted(stored: Weights) -> bool:
    return all(name.startswith(PEFT_PREFIX) for name in stored.tensors)


def _check_shapes(model: Model, options: ExportOptions, tag_dir: Path) -> Findings:
    """Return the accepted findings; exchanged dimensions are found by nothing else."""
    fit, shapes, kind = model.fit, model.weights.shapes, FindingKind.SHAPE_MISMATCH
    if isinstance(fit, NamesUnknown):
        return ()
    apart = {}
    for name in fit.difference.reshaped:
        stored = fit.prefix + name
        apart[stored] = f"{list(shapes[stored])} for {list(fit.names.shapes[name])}"
    if apart and kind not in options.allow:
        raise DamagedCheckpointError(
            f"shapes of weights are not those of {fit.model.title} in config.json",
            path=tag_dir,
            found=some([f"{name} {details}" for name, details in apart.items()], 8),
            expected="the shapes of config.json",
            hint=_CONFIG_HINT,
            finding=kind,
        )
    return tuple(Finding(kind, name, 0, details, accepted=True) for name, details in apart.items())


def _check_names(fit: Fit, stored: Weights, options: ExportOptions, tag_dir: Path) -> None:
    """Raise if the model would load without some of the weights.

    Buffers may be unknown: older versions of transformers saved some that are computed today.
    """
    names = fit.names
    known = {name for alias, name in stored.aliases.items() if alias in names.shapes}
    spared = {Role.BUFFER, Role.FROZEN} if options.exclude_frozen else {Role.BUFFER}
    roles = {name: tensor.role for name, tensor in stored.tensors.items()}
    unexpected = [
        name
        for name in fit.difference.unexpected
        if roles.get(name, Role.FROZEN) not in spared
        and name not in stored.aliases
        and name not in known
        and not names.ignores(name)
    ]
    if unexpected:
        found = Difference(fit.difference.missing, tuple(unexpected), fit.difference.reshaped)
        raise _mismatch(found, fit.model, tag_dir)
    if fit.model.refused:
        raise UnsupportedError(
            f"Hub names of {fit.model.title} are unknown, because transformers' conversion "
            "cannot be reversed",
            path=tag_dir,
            found=fit.model.refused,
            hint=_KEEP_NAMES.capitalize(),
        )


def _mismatch(found: Difference, names: ModelNames, path: Path) -> NamesMismatchError:
    return NamesMismatchError(
        "weight names do not fit the model of config.json, which would load incompletely",
        path=path,
        found=str(found),
        expected=f"in-memory or Hub names of {names.title}",
        hint=_CONFIG_HINT,
    )


def _choose_layout(names: ModelNames, given: Shapes, label: str | None) -> HubLayout:
    """Return the layout with this label, or the one most like ``given``.

    Of equals, the first is transformers' default.
    """
    layouts = names.layouts or (as_it_is(names.shapes, names.tied),)
    asked = [layout for layout in layouts if layout.label == label]
    return max(
        asked or layouts,
        key=lambda one: sum(given.get(name) == shape for name, shape in one.shapes.items()),
    )


def _wanted(
    checkpoint: TrainingState,
    names: ModelNames | None,
    layout: HubLayout | None,
    stored: Weights,
    base: Base,
) -> dict[str, Shape | None]:
    """Return the weights that the base must supply, with their shapes if known.

    Raises:
        FrozenLeftOutError: neither config.json nor the base contains their names.
    """
    others = {n for n in stored.shapes.keys() - stored.buffers if not is_value_head(n)}
    if names is not None:
        others = {n for n in others - names.shapes.keys() if not names.ignores(n)}
        if layout is not None or not others:
            lacking = absent(names, stored.shapes) if checkpoint.may_lack_weights else ()
            ours = (n for n in lacking if n not in names.buffers and n not in names.tied)
            return {name: names.shapes[name] for name in ours}
    given = base.shapes
    if checkpoint.frozen_left_out:
        more = {name: shape for name, shape in given.items() if name not in stored.shapes}
        if not more or not stored.tensors.keys() <= given.keys():
            found = "no names, because config.json is missing or does not fit"
            raise _frozen_left_out(found, base, checkpoint.location.tag_dir)
        return {**more}
    others -= given.keys()
    if others and given and stored.left_out:  # weights of equal names may be others
        found = f"no values for {some(stored.left_out)}, and the base lacks {some(sorted(others))}"
        raise _frozen_left_out(found, base, checkpoint.location.tag_dir)
    return {name: given.get(name) for name in stored.left_out}


def _from_base(
    names: ModelNames | None,
    layout: HubLayout | None,
    wanted: Mapping[str, Shape | None],
    own: Tensors,
    base: Base,
    tag_dir: Path,
) -> Tensors:
    """Return the tensors that the base supplies, by their names in the output."""
    given, needed = base.tensors, dict(wanted)
    if layout is not None:
        needed = {
            name: form.shape
            for name, form in layout.tensors.items()
            if form.sources & wanted.keys() and not form.sources & own.keys()
        }
        needed |= {layout.aliases[n]: shape for n, shape in wanted.items() if n in layout.aliases}
    elif names is not None:
        for one in names.layouts:
            same = names.names_in(one).items()
            given = {**{memory: given[name] for memory, name in same if name in given}, **given}
    if nowhere := [n for n, shape in needed.items() if n not in given or given[n].shape != shape]:
        check_plain((), base, nowhere)
        raise _frozen_left_out(f"no values for {some(nowhere)}", base, tag_dir)

    filled = {name: given[name] for name in needed}
    if layout is not None and names is not None:
        for name in needed.keys() & layout.tensors.keys():
            kept = map(names.kept_in_fp32, layout.tensors[name].sources)
            filled[name] = replace(filled[name], fp32_under=frozenset[DType]().union(*kept))
    return filled


def _frozen_left_out(found: str, base: Base, tag_dir: Path) -> FrozenLeftOutError:
    instead = f"; {base.path} contains {base.instead}" if base.instead else ""
    return FrozenLeftOutError(
        "frozen weights were left out of the checkpoint"
        + (f", and {base.path} lacks them" if base.path else ""),
        path=tag_dir,
        found=f"{found}{instead}",
        expected="all weights of the model",
        hint="Pass the base model with --base, or omit frozen weights with --exclude-frozen",
    )


def _as_saved(
    own: Tensors,
    aliases: Mapping[str, str],
    names: ModelNames,
    layout: HubLayout,
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    tensors, tied = tie_as_declared(own, aliases, names)
    saved = {
        name: replace(tensor, fp32_under=names.kept_in_fp32(name))
        for name, tensor in tensors.items()
        if name not in names.unsaved
    }
    new = names.names_in(layout)
    tied = {new.get(a, a): new.get(n, n) for a, n in tied.items() if a not in names.unsaved}
    return to_hub(saved, layout, names.shapes), tied
