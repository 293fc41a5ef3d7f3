"""What is written under which name: the checkpoint's tensors as those of the model's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.errors import FrozenLeftOutError
from zexport.model.fit import Difference, ModelNames, NamesUnknown, absent, difference
from zexport.model.hub_layout import HubLayout
from zexport.options import ExportOptions
from zexport.printable import some
from zexport.ranges.dtypes import DType, Shape
from zexport.weights.base_model import Base, check_plain
from zexport.weights.hub_names import check_complete
from zexport.weights.hub_tensors import lay_out
from zexport.weights.model_class import is_value_head
from zexport.weights.named import Selection, Weights


def select_tensors(
    checkpoint: TrainingState, settled: Selection, base: Base, options: ExportOptions
) -> Selection:
    """Make the checkpoint's tensors those of the model's files."""
    own = {
        name: tensor
        for name, tensor in settled.weights.tensors.items()
        if not (options.exclude_frozen and tensor.role is Role.FROZEN)
    }
    wanted = _wanted(checkpoint, settled, base, options)
    found = _from_base(settled, wanted, own, base.tensors)
    filled = {name: tensor for name, tensor in found.items() if tensor is not None}
    if len(filled) < len(found):
        nowhere = tuple(name for name, tensor in found.items() if tensor is None)
        check_plain((), base, settled.names, absent=nowhere)
        raise _frozen_left_out(checkpoint, nowhere, base)
    aliases = {a: n for a, n in settled.weights.aliases.items() if n in own or n in wanted}
    merged_over = (tensor for tensor in own.values() if base.tensors.get(tensor.name) is tensor)
    check_plain((*filled.values(), *merged_over), base, settled.names)
    differences = _differences(own, wanted, aliases, settled)
    excluded = _excluded(settled, checkpoint) if options.exclude_frozen else ()
    names, tied = settled.names, aliases
    if settled.layout is not None and isinstance(names, ModelNames):
        if not options.exclude_frozen:
            check_complete(names, {**own, **wanted, **aliases}, checkpoint.location.tag_dir)
        own, tied = _tie_as_declared(own, aliases, names)
        own, tied = _as_saved(own, tied, names, settled.layout)
    from_base = (f"{len(filled)} weights come from the base model",) if filled else ()
    written = own | filled
    if settled.untied:
        written, tied = _under_all_names(written, tied, settled)
    return structs.replace(
        settled,
        weights=Weights(written, tied),
        from_base=tuple(filled),
        loadable=not str(differences)
        and (settled.layout is not None or _is_saved_so(settled, aliases)),
        warnings=(*_obstacle(settled, differences, excluded), *settled.warnings),
        notes=(*from_base, *settled.notes),
    )


def with_frozen_counted(settled: Selection, checkpoint: TrainingState) -> Selection:
    """The same, saying what ``--exclude-frozen`` leaves out, and what the save did before it."""
    every = _excluded(settled, checkpoint)
    is_known = isinstance(settled.names, ModelNames)
    more = "; others may have been left out when it was saved"
    told = (
        f"--exclude-frozen left out {len(every):,} weight{'s' * (len(every) != 1)}"
        + (f", so this is no whole model and will not load as one: {some(every)}" if every else "")
        + ("" if is_known or not checkpoint.may_lack_weights else more)
    )
    if every or told.endswith(more):
        return structs.replace(settled, warnings=(*settled.warnings, told))
    return structs.replace(settled, notes=(*settled.notes, told))


def _excluded(settled: Selection, checkpoint: TrainingState) -> Sequence[str]:
    """What ``--exclude-frozen`` leaves out, and the save before it, in the model's order."""
    stored, names = settled.weights, settled.names
    frozen = {name for name, tensor in stored.tensors.items() if tensor.role is Role.FROZEN}
    every = frozen | (set(stored.left_out) - stored.buffers)
    if not isinstance(names, ModelNames):
        return sorted(every)
    if checkpoint.may_lack_weights:
        nowhere = absent(names, stored.shapes)
        every |= {n for n in nowhere if n not in names.buffers and n not in names.tied}
    return [name for name in names.shapes if name in every] + sorted(every - names.shapes.keys())


def _obstacle(
    settled: Selection, differences: Difference | str, excluded: Sequence[str]
) -> Iterator[str]:
    """Why transformers may not load the output, unless that was not asked for, or is told."""
    names = settled.names
    if not settled.is_for_hub or not str(differences):
        return
    if isinstance(differences, str) or isinstance(names, NamesUnknown):
        yield f"names are those of the checkpoint, and were not checked: {differences}"
        return
    known = {*excluded}
    missing = (n for n in differences.missing if names.tied.get(n, n) not in known)
    if rest := str(structs.replace(differences, missing=tuple(missing))):
        yield f"the folder will not load as it is: {rest}"


def _is_saved_so(settled: Selection, aliases: Mapping[str, str]) -> bool:
    """Whether names as they are stored are those of the hub, and every tie is the model's."""
    names = settled.names
    return (
        isinstance(names, ModelNames)
        and names.hub_is_memory
        and all(names.tied.get(a, a) == names.tied.get(n, n) for a, n in aliases.items())
    )


def _differences(
    own: Mapping[str, StoredTensor],
    wanted: Mapping[str, Shape],
    aliases: Mapping[str, str],
    settled: Selection,
) -> Difference | str:
    """How the tensors differ from the model's, or why that is not known."""
    if not isinstance(settled.names, ModelNames):
        return settled.names.reason
    shapes = {name: tensor.shape for name, tensor in own.items()} | dict(wanted)
    shapes |= {alias: shapes[name] for alias, name in aliases.items() if name in shapes}
    found = difference(settled.names, dict(shapes))
    reshaped = (
        f"{n} {list(shapes[n])} for {list(settled.names.shapes[n])}" for n in found.reshaped
    )
    unexpected = (n for n in found.unexpected if not settled.names.ignores(n))
    return structs.replace(found, unexpected=tuple(unexpected), reshaped=tuple(reshaped))


def _wanted(
    checkpoint: TrainingState,
    settled: Selection,
    base: Base,
    options: ExportOptions,
) -> dict[str, Shape]:
    """Weights that the checkpoint left out, by the name they go by in it."""
    if options.exclude_frozen:
        return {}
    stored, names, given = settled.weights, settled.names, base.tensors
    shapes = stored.shapes
    if isinstance(names, ModelNames) and (
        settled.layout is not None or not _unknown(names, stored)
    ):
        return {
            name: names.shapes[name]
            for name in (absent(names, shapes) if checkpoint.may_lack_weights else ())
            if name not in names.buffers and name not in names.tied  # of a tie one is enough
        }
    if checkpoint.frozen_left_out:
        more = {n: t.shape for n, t in given.items() if n not in shapes}
        if not more or not stored.tensors.keys() <= given.keys():
            raise _frozen_left_out(checkpoint, ("names that only a config would tell",), base)
        return more
    others = _unknown(names, stored) - given.keys()
    if others and any(n in given for n in stored.left_out):
        raise _other_names(checkpoint, stored.left_out, tuple(sorted(others)))
    return {n: given[n].shape if n in given else () for n in stored.left_out}


def _unknown(names: ModelNames | NamesUnknown, stored: Weights) -> set[str]:
    """The weights that a model does not have, value heads and what it passes over aside."""
    others = {n for n in stored.shapes.keys() - stored.buffers if not is_value_head(n)}
    if isinstance(names, NamesUnknown):
        return others
    return {n for n in others - names.shapes.keys() if not names.ignores(n)}


def _from_base(
    settled: Selection,
    wanted: Mapping[str, Shape],
    own: Mapping[str, StoredTensor],
    base: Mapping[str, StoredTensor],
) -> dict[str, StoredTensor | None]:
    """Tensors of the output that the base fills in; ``None`` for those that it does not have."""
    if settled.layout is not None:
        needed = {
            name: tensor.shape
            for name, tensor in settled.layout.tensors.items()
            if tensor.sources & wanted.keys() and not tensor.sources & own.keys()
        }
        untied = settled.layout.aliases
        needed |= {untied[name]: shape for name, shape in wanted.items() if name in untied}
    else:
        needed = dict(wanted)
        base = {**_under_memory_names(base, settled), **base}
    return {
        name: replace(base[name], role=Role.FROZEN, fp32_under=_kept_in_fp32(name, settled))
        if name in base and base[name].shape == shape
        else None
        for name, shape in needed.items()
    }


def _kept_in_fp32(name: str, settled: Selection) -> frozenset[DType]:
    """The element types under which a tensor of the model's files stays in float32."""
    if settled.layout is None or not isinstance(settled.names, ModelNames):
        return frozenset()
    made = settled.layout.tensors.get(name)
    kept = map(settled.names.kept_in_fp32, () if made is None else made.sources)
    return frozenset().union(*kept)


def _under_memory_names(
    base: Mapping[str, StoredTensor], settled: Selection
) -> dict[str, StoredTensor]:
    """The base's tensors that are in its files as they are in memory, under the names there."""
    names = settled.names
    if not isinstance(names, ModelNames):
        return {}
    return {
        same: base[name]
        for layout in names.layouts
        for name, tensor in layout.tensors.items()
        if name in base and (same := tensor.is_all_of(names.shapes)) is not None
    }


def _as_saved(
    tensors: Mapping[str, StoredTensor],
    tied: Mapping[str, str],
    names: ModelNames,
    layout: HubLayout,
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors and ties under the names of the model's files."""
    saved = {name: tensor for name, tensor in tensors.items() if name not in names.unsaved}
    for name in saved.keys() & set().union(*names.keep_fp32.values()):
        saved[name] = replace(saved[name], fp32_under=names.kept_in_fp32(name))
    renamed = names.names_in(layout)
    ties = {renamed.get(a, a): renamed.get(n, n) for a, n in tied.items() if a not in names.unsaved}
    return lay_out(saved, layout, names.shapes), ties


def _under_all_names(
    tensors: Mapping[str, StoredTensor], tied: Mapping[str, str], settled: Selection
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors also under the names of ties that hold, where the config must no longer tie any.

    BERT's config ties the weight of its output and its bias, or neither.
    """
    names, written = settled.names, dict(tensors)
    if not isinstance(names, ModelNames):
        return written, dict(tied)
    renamed = {} if settled.layout is None else names.names_in(settled.layout)
    for alias, source in names.tied.items():
        one, other = renamed.get(alias, alias), renamed.get(source, source)
        if other in written:
            written.setdefault(one, written[other])
    return written, {alias: name for alias, name in tied.items() if alias not in written}


def _frozen_left_out(
    checkpoint: TrainingState, names: tuple[str, ...], base: Base
) -> FrozenLeftOutError:
    where = "and the base does not have them either" if base.path else "and no base was given"
    if base.instead:
        where = f"and the base has {base.instead}"
    return FrozenLeftOutError(
        f"weights were left out when the checkpoint was saved, {where}",
        path=checkpoint.location.tag_dir,
        found=f"no values for {some(names)}",
        expected="every weight of the model",
        hint="Give the model that training began from with --base, or leave these weights out on "
        "purpose with --exclude-frozen",
    )


def _other_names(
    checkpoint: TrainingState, lost: tuple[str, ...], others: tuple[str, ...]
) -> FrozenLeftOutError:
    return FrozenLeftOutError(
        "weights have no values, and to take the base's would be a guess: others were trained "
        "under names that it does not have",
        path=checkpoint.location.tag_dir,
        found=f"no values for {some(lost)}; {some(others)} beside them",
        expected="the base's names throughout",
        hint="Put the names right with --rename, or save again from the model without the wrapper "
        "that changes its names",
    )


def _tie_as_declared(
    tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str], names: ModelNames
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors under the names that the model keeps of each tie.

    A tie of the checkpoint that the model declares is written once, under the name that the model
    calls its source. One that it does not declare is written under every name that the model has.
    """
    together: dict[str, list[str]] = {name: [name] for name in tensors}
    tied: dict[str, str] = {}
    for alias, name in aliases.items():
        if name in together:
            together[name].append(alias)
        else:
            tied[alias] = name
    written: dict[str, StoredTensor] = {}
    for name, members in together.items():
        known = [member for member in members if member in names.shapes] or [name]
        kept: dict[str, str] = {}
        for member in known:
            source = names.tied.get(member, member)
            is_free = source not in tensors and source not in aliases
            kept.setdefault(source, source if source in known or is_free else member)
        for member in members:
            keeper = kept.get(names.tied.get(member, member), known[0])
            written[keeper] = tensors[name]
            if keeper != member:
                tied[member] = keeper
    return written, tied
