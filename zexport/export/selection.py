"""What is written under which name: the checkpoint's tensors matched with the model's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.errors import FrozenLeftOutError, UsageError
from zexport.model.names import ModelNames, NamesUnknown, Shape
from zexport.options import ExportOptions, NameLayout

_NAMES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors of the output.

    Attributes:
        tensors: output name to the stored tensor it is.
        tied: names that are left to the model to tie, to the output name they are tied to.
        loadable: whether transformers would load it with no missing and no unexpected key;
            ``False`` where that is not so or not known.
        from_base: names that the base model filled in.
        architecture: the model class that it loads as, where ``loadable``.
        warnings: what the user should know.
    """

    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]
    loadable: bool
    architecture: str | None
    from_base: tuple[str, ...]
    warnings: tuple[str, ...]


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
        """Every name with its shape, tied names included."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return shapes | {alias: shapes[name] for alias, name in self.aliases.items()}


def name_tensors(
    checkpoint: ZeroCheckpoint, renames: tuple[tuple[str, str], ...] = ()
) -> NamedTensors:
    """The checkpoint's tensors by name.

    Raises:
        UsageError: a rename is no pattern, or makes two names one.
    """
    own = [tensor.name for tensor in checkpoint.tensors]
    renamed = _rename([*own, *checkpoint.aliases, *checkpoint.left_out], renames)
    return NamedTensors(
        tensors={renamed[tensor.name]: tensor for tensor in checkpoint.tensors},
        aliases={renamed[alias]: renamed[name] for alias, name in checkpoint.aliases.items()},
        left_out=tuple(renamed[name] for name in checkpoint.left_out),
    )


def select_tensors(
    checkpoint: ZeroCheckpoint,
    stored: NamedTensors,
    names: ModelNames | NamesUnknown,
    base: Mapping[str, StoredTensor],
    options: ExportOptions,
) -> Selection:
    """Match the checkpoint's tensors with the model's names.

    Args:
        checkpoint: what was opened.
        stored: its tensors, renamed.
        names: what the model expects, where that is known.
        base: tensors of the base model, by name; they fill in frozen weights that were left out.
        options: layout and exclusions.

    Raises:
        FrozenLeftOutError: weights are missing, there is no base that has them, and leaving them
            out was not asked for.
    """
    own = {
        name: tensor
        for name, tensor in stored.tensors.items()
        if not (options.exclude_frozen and tensor.role is Role.FROZEN)
    }
    filled = _fill_from_base(checkpoint, stored, names, base, options)
    tensors = own | filled
    aliases = {a: n for a, n in stored.aliases.items() if n in tensors}
    obstacle = ""
    architecture = None
    if options.layout is NameLayout.HUB:
        obstacle = _obstacle(tensors, aliases, names)
        if isinstance(names, ModelNames):
            tensors, aliases = _tie_as_declared(tensors, aliases, names)
            architecture = None if obstacle else names.architecture
    from_base = f"{len(filled)} weights come from the base model" if filled else ""
    return Selection(
        tensors=tensors,
        tied=aliases,
        loadable=architecture is not None,
        architecture=architecture,
        from_base=tuple(filled),
        warnings=tuple(filter(None, (from_base, obstacle))),
    )


def _obstacle(
    tensors: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    names: ModelNames | NamesUnknown,
) -> str:
    """Why transformers may not load these names as they are; empty if it will."""
    if isinstance(names, NamesUnknown):
        return f"names are written as stored, unchecked: {names.reason}"
    if differences := _differences(tensors, aliases, names):
        return f"the folder will not load as it is: {'; '.join(differences)}"
    if not names.hub_is_memory:
        return f"names and shapes are those in memory; for {names.architecture} the hub's differ"
    return ""


def _fill_from_base(
    checkpoint: ZeroCheckpoint,
    stored: NamedTensors,
    names: ModelNames | NamesUnknown,
    base: Mapping[str, StoredTensor],
    options: ExportOptions,
) -> dict[str, StoredTensor]:
    """Weights that the checkpoint left out, from the base; refuses where they are nowhere."""
    if options.exclude_frozen:
        return {}
    shapes = stored.shapes
    if isinstance(names, ModelNames) and shapes.keys() <= names.shapes.keys():
        wanted = _missing_weights(checkpoint, names, shapes)
    elif checkpoint.frozen_left_out:
        wanted = {n: t.shape for n, t in base.items() if n not in shapes}
        if not wanted or not stored.tensors.keys() <= base.keys():
            raise _frozen_left_out(checkpoint, ("names that only a config would tell",), options)
    else:
        wanted = {n: base[n].shape if n in base else () for n in stored.left_out}
    absent = [n for n, shape in wanted.items() if n not in base or base[n].shape != shape]
    if absent:
        raise _frozen_left_out(checkpoint, tuple(absent), options)
    return {name: replace(base[name], role=Role.FROZEN) for name in wanted}


def _missing_weights(
    checkpoint: ZeroCheckpoint, names: ModelNames, stored: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Weights that the model has and a save that may leave some out has not stored.

    Of tied names one is enough, and the source is wanted.
    """
    if not checkpoint.may_lack_weights:
        return {}
    return {
        name: names.shapes[name]
        for name in _absent(names, stored)
        if name not in names.buffers and name not in names.tied
    }


def _absent(names: ModelNames, stored: Iterable[str]) -> list[str]:
    """The model's names that are not stored, nor any that they are tied to.

    transformers fills a tie from whichever of its names is there (5.23, ``modeling_utils.py``,
    ``tie_weights``).
    """
    sources = {names.tied.get(name, name) for name in stored}
    return [name for name in names.shapes if names.tied.get(name, name) not in sources]


def _frozen_left_out(
    checkpoint: ZeroCheckpoint, names: tuple[str, ...], options: ExportOptions
) -> FrozenLeftOutError:
    where = "and the base does not have them either" if options.base else "and no base was given"
    return FrozenLeftOutError(
        f"weights were left out when the checkpoint was saved, {where}",
        path=checkpoint.location.tag_dir,
        found=f"no values for {_some(names)}",
        expected="every weight of the model",
        hint="Give the model that training began from with --base, or leave these weights out on "
        "purpose with --exclude-frozen",
    )


def _differences(
    tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str], names: ModelNames
) -> list[str]:
    """What the model would miss, not know, or find in another shape; empty if it loads."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shapes |= {alias: shapes[name] for alias, name in aliases.items()}
    missing = _absent(names, shapes)
    unknown = [n for n in shapes if n not in names.shapes]
    reshaped = [
        f"{n} {list(shapes[n])} for {list(names.shapes[n])}"
        for n in shapes
        if n in names.shapes and shapes[n] != names.shapes[n]
    ]
    found = (("missing", missing), ("unexpected", unknown), ("of another shape", reshaped))
    return [f"{what}: {_some(tuple(which))}" for what, which in found if which]


def _tie_as_declared(
    tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str], names: ModelNames
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors under the names that the model keeps of each tie.

    A tie of the checkpoint that the model declares is written once, under the name that the model
    calls its source. One that it does not declare is written under every name that the model has.
    """
    together: dict[str, list[str]] = {name: [name] for name in tensors}
    for alias, name in aliases.items():
        together[name].append(alias)
    written: dict[str, StoredTensor] = {}
    tied: dict[str, str] = {}
    for name, members in together.items():
        known = [member for member in members if member in names.shapes] or [name]
        kept: dict[str, str] = {}
        for member in known:
            source = names.tied.get(member, member)
            kept.setdefault(source, source if source in known else member)
        for member in members:
            keeper = kept.get(names.tied.get(member, member), known[0])
            if keeper == member:
                written[member] = tensors[name]
            else:
                tied[member] = keeper
    return written, tied


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
        if new in taken:
            raise UsageError(
                "--rename gives two tensors one name",
                found=f"{taken[new]} and {name} both become {new}",
                hint="Make the pattern more exact",
            )
        renamed[name] = new
        taken[new] = name
    return renamed


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
