"""Weights that a model declares to be one, and a checkpoint holds twice: are they still one?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zexport.checkpoint.contents import StoredTensor
from zexport.export.naming import NamedTensors, Settled
from zexport.model.matching import ModelNames
from zexport.streams.equality import Equality
from zexport.streams.reader import ReadableFile, SourceReader


def settle_ties(settled: Settled, files: Iterable[ReadableFile]) -> Settled:
    """The same, with declared ties decided by the stored values.

    Two tensors of equal bytes become one and an alias of it. Of two that differ, both stay, and the
    tie is none of the model's any more. Reading ends at the first difference.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names, stored = settled.names, settled.stored
    if settled.layout is None or not isinstance(names, ModelNames):
        return settled
    twice = {a: s for a, s in names.tied.items() if {a, s} <= stored.tensors.keys()}
    if not twice:
        return settled
    with SourceReader(files) as reader:
        equality = Equality(reader)
        same = {
            alias: source
            for alias, source in twice.items()
            if _are_equal(stored.tensors[alias], stored.tensors[source], equality)
        }
    differing = twice.keys() - same.keys()
    tied = {alias: source for alias, source in names.tied.items() if alias not in differing}
    notes = tuple(
        f"{alias} differs from {twice[alias]}, to which {names.architecture} ties it: both are "
        "written, and config.json no longer ties them (tie_word_embeddings)"
        for alias in sorted(differing)
    )
    return replace(
        settled,
        stored=_as_aliases(stored, same),
        names=replace(names, tied=tied),
        untied=frozenset(differing),
        notes=(*settled.notes, *notes),
    )


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
