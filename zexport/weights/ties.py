"""Weights that a model declares to be one, and a checkpoint holds twice: are they still one?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from msgspec import Struct, structs

from zexport.checkpoint.state import Role, StoredTensor
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import CONFIG
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.ranges.extents import Read
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.ranges.replicas import are_equal
from zexport.weights.base_model import Base
from zexport.weights.named import Selection, Weights


class Ties(Struct, frozen=True):
    """What values say of declared ties: aliases that equal what they are tied to, and others."""

    equal: frozenset[str] = frozenset()
    differing: frozenset[str] = frozenset()
    nbytes_read: int = 0


def compare_ties(
    names: ModelNames | NamesUnknown,
    stored: Weights,
    given: Mapping[str, StoredTensor],
    files: Iterable[ReadableFile],
    *,
    stored_twice: bool = True,
) -> Ties:
    """Read what a model ties and a checkpoint, or its base, holds twice, and compare it.

    Reading ends at the first difference, and proves nothing: what damage sets apart stays, and is
    proven when it is exported.
    """
    if isinstance(names, NamesUnknown) or not names.tied:
        return Ties()
    twice = {a: s for a, s in names.tied.items() if {a, s} <= stored.tensors.keys()}
    twice = twice if stored_twice else {}
    with SourceReader(files) as reader:
        equal = frozenset(
            alias
            for alias, source in twice.items()
            if _are_equal(stored.tensors[alias], stored.tensors[source], reader.read_into)
        )
        apart = _apart_in_base(names, stored, given, reader.read_into)
        return Ties(equal, frozenset(twice.keys() - equal) | apart, reader.nbytes_read)


def settle_ties(selection: Selection, ties: Ties) -> Selection:
    """The same, with declared ties decided by the stored values.

    Two tensors of equal bytes become one and an alias of it. Of two that differ, both stay, and the
    tie is none of the model's any more.
    """
    names, stored = selection.names, selection.weights
    if isinstance(names, NamesUnknown):
        return selection
    same = {alias: names.tied[alias] for alias in names.tied if alias in ties.equal}
    warnings = tuple(
        f"{alias} differs from {names.tied[alias]}, to which {names.architecture} ties it: both "
        "are written"
        for alias in sorted(ties.differing)
    )
    return structs.replace(
        selection,
        weights=_as_aliases(stored, same) if same else stored,
        names=without_ties(names, ties.differing),
        untied=ties.differing,
        warnings=(*selection.warnings, *warnings),
    )


def tie_statements(selection: Selection) -> Iterator[Statement]:
    """Weights that the checkpoint has as one, and whether the model declares that it ties them."""
    names = selection.names
    for alias, name in selection.weights.aliases.items():
        if isinstance(names, ModelNames) and {alias, name} <= names.shapes.keys():
            one, other = (names.tied.get(n, n) for n in (alias, name))
            yield Statement(Fact.TIES, name, "the checkpoint", alias)
            yield Statement(Fact.TIES, name if one == other else alias, CONFIG, alias)


def without_ties(names: ModelNames, differing: Set[str]) -> ModelNames:
    """The model without the declared ties that values contradict.

    transformers unties what a model folder holds twice, and differently (5.23,
    ``modeling_utils.py``, ``tie_weights``).
    """
    return structs.replace(names, tied={a: s for a, s in names.tied.items() if a not in differing})


def under_tied_sources(names: ModelNames | NamesUnknown, base: Base) -> Base:
    """A base model's weights, where it has a tied one under its alias alone under its source.

    So leave it savers that write shared tensors once, under whichever name comes first.
    """
    if isinstance(names, NamesUnknown):
        return base
    renamed = dict(base.tensors)
    spellings = _spellings(names)
    for alias, source in names.tied.items():
        if _find(source, renamed, spellings) is not None:
            continue
        for spelling in spellings:
            if (tensor := renamed.pop(spelling.get(alias, alias), None)) is not None:
                name = spelling.get(source, source)
                renamed[name] = replace(tensor, name=name)
                break
    return structs.replace(base, tensors=renamed)


def _apart_in_base(
    names: ModelNames,
    stored: Weights,
    given: Mapping[str, StoredTensor],
    read: Read,
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
            apart |= set() if _are_equal(one, other, read) else {alias}
    return frozenset(apart)


def _spellings(names: ModelNames) -> list[dict[str, str]]:
    """For each way of saving the model, name in memory to name in files; at last the same name."""
    return [*map(names.names_in, names.layouts), {}]


def _find(
    name: str, given: Mapping[str, StoredTensor], spellings: Iterable[Mapping[str, str]]
) -> StoredTensor | None:
    return next(filter(None, (given.get(spelling.get(name, name)) for spelling in spellings)), None)


def _as_aliases(stored: Weights, same: Mapping[str, str]) -> Weights:
    """The same with some tensors as mere aliases of others that equal them."""
    aliases = {alias: same.get(name, name) for alias, name in stored.aliases.items()}
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in same}
    return structs.replace(stored, tensors=tensors, aliases={**aliases, **same})


def _are_equal(one: StoredTensor, other: StoredTensor, read: Read) -> bool:
    if one.source is None or other.source is None:
        return False
    is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_alike and are_equal(read, one.source, other.source)
