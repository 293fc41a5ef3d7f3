"""Weights that a model declares to be one, and a checkpoint holds twice: are they still one?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from zexport.checkpoint.contents import Role, StoredTensor
from zexport.model.fit import ModelNames
from zexport.model.names import NamesUnknown
from zexport.ranges.equality import Equality
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.weights.named import NamedTensors, Settled


def settle_ties(
    settled: Settled, given: Mapping[str, StoredTensor], files: Iterable[ReadableFile]
) -> Settled:
    """The same, with declared ties decided by the stored values.

    Two tensors of equal bytes become one and an alias of it. Of two that differ, both stay, and the
    tie is none of the model's any more. Reading ends at the first difference, and proves nothing:
    what damage sets apart stays, and is proven when it is exported.

    Args:
        settled: the checkpoint's tensors under the model's names.
        given: the base model's tensors that may fill in what was left out, by name.
        files: all files that may be read.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names, stored = settled.names, settled.stored
    if not isinstance(names, ModelNames):
        return settled
    twice = {} if settled.layout is None else _stored_twice(names, stored)
    with SourceReader(files) as reader:
        equality = Equality(reader)
        same = _equal(twice, stored, equality)
        apart = _apart_in_base(names, stored, given, equality)
    differing = (twice.keys() - same.keys()) | apart
    notes = tuple(
        f"{alias} differs from {names.tied[alias]}, to which {names.architecture} ties it: both "
        "are written, and config.json no longer ties them (tie_word_embeddings)"
        for alias in sorted(differing)
    )
    return replace(
        settled,
        stored=_as_aliases(stored, same),
        names=_without_ties(names, differing),
        untied=frozenset(differing),
        notes=(*settled.notes, *notes),
    )


def without_broken_ties(
    names: ModelNames,
    stored: NamedTensors,
    given: Mapping[str, StoredTensor],
    files: Iterable[ReadableFile],
) -> ModelNames:
    """The model without the declared ties that stored values, or its base's, contradict.

    transformers unties what a model folder holds twice, and differently (5.23,
    ``modeling_utils.py``, ``tie_weights``).

    Args:
        names: the model.
        stored: its tensors that the checkpoint holds.
        given: those of the base model's folder, by name.
        files: all files that may be read.

    Raises:
        CheckpointError: a file cannot be read.
    """
    twice = _stored_twice(names, stored)
    with SourceReader(files) as reader:
        equality = Equality(reader)
        differing = twice.keys() - _equal(twice, stored, equality).keys()
        return _without_ties(names, differing | _apart_in_base(names, stored, given, equality))


def under_tied_sources(
    names: ModelNames | NamesUnknown, given: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """A base model's weights, where it has a tied one under its alias alone under its source.

    So leave it savers that write shared tensors once, under whichever name comes first.
    """
    renamed = dict(given)
    if isinstance(names, NamesUnknown):
        return renamed
    spellings = _spellings(names)
    for alias, source in names.tied.items():
        if _find(source, renamed, spellings) is not None:
            continue
        for spelling in spellings:
            if (tensor := renamed.pop(spelling.get(alias, alias), None)) is not None:
                name = spelling.get(source, source)
                renamed[name] = replace(tensor, name=name)
                break
    return renamed


def _stored_twice(names: ModelNames, stored: NamedTensors) -> dict[str, str]:
    return {a: s for a, s in names.tied.items() if {a, s} <= stored.tensors.keys()}


def _equal(twice: Mapping[str, str], stored: NamedTensors, equality: Equality) -> dict[str, str]:
    return {
        alias: source
        for alias, source in twice.items()
        if _are_equal(stored.tensors[alias], stored.tensors[source], equality)
    }


def _without_ties(names: ModelNames, aliases: Set[str]) -> ModelNames:
    return replace(names, tied={a: s for a, s in names.tied.items() if a not in aliases})


def _apart_in_base(
    names: ModelNames,
    stored: NamedTensors,
    given: Mapping[str, StoredTensor],
    equality: Equality,
) -> frozenset[str]:
    """Aliases that the base model has with other values than those they are declared tied to.

    But for ties that the checkpoint shows: it stores both names, or as one; or one of them alone
    and frozen, which a save without frozen weights drops under the name of the parameter only.
    """
    spellings = _spellings(names)
    apart = set()
    for alias, source in names.tied.items():
        known = {alias, source} & (stored.tensors.keys() | stored.aliases.keys())
        if any(n in stored.aliases or stored.tensors[n].role is Role.FROZEN for n in known):
            continue
        one, other = (_find(name, given, spellings) for name in (alias, source))
        if len(known) < len({alias, source}) and one is not None and other is not None:
            apart |= set() if _are_equal(one, other, equality) else {alias}
    return frozenset(apart)


def _spellings(names: ModelNames) -> list[dict[str, str]]:
    """For each way of saving the model, name in memory to name in files; at last the same name."""
    return [*map(names.names_in, names.layouts), {}]


def _find(
    name: str, given: Mapping[str, StoredTensor], spellings: Iterable[Mapping[str, str]]
) -> StoredTensor | None:
    return next(filter(None, (given.get(spelling.get(name, name)) for spelling in spellings)), None)


def _as_aliases(stored: NamedTensors, same: dict[str, str]) -> NamedTensors:
    """The same with some tensors as mere aliases of others that equal them."""
    aliases = {alias: same.get(name, name) for alias, name in stored.aliases.items()}
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in same}
    return replace(stored, tensors=tensors, aliases=aliases | same)


def _are_equal(one: StoredTensor, other: StoredTensor, equality: Equality) -> bool:
    if one.source is None or other.source is None:
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype) and equality.holds(
        one.source, other.source
    )
