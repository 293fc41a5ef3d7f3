"""What an adapter's configuration names, held against the tensors that there are.

A file that names more than was trained is another run's, and its scale is not this adapter's; or
what it names is not in this model, as with lists of all usual names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from zexport.adapters.peft_format import HEADS, TRAINED_TOKENS, AdapterConfig
from zexport.adapters.peft_names import PeftName, inner_name, read_name
from zexport.facts.adapters import AdapterFact
from zexport.facts.statements import Statement
from zexport.printable import some
from zexport.ranges.dtypes import Shape

TENSORS = "the adapter's tensors"
_WEIGHT = ".weight"
_SINGLE_EXPERT = re.compile(r"experts\.\d+\.")
"""Of a base's names: experts that are stored one by one may be one module in memory."""


_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")


class Modules(Struct, frozen=True):
    """Modules, by what is known of them.

    Attributes:
        updated: those that the adapter's tensors update.
        copied: those that were trained whole.
        with_rows: those of which some rows were trained.
        of_model: those of the trained model that hold a weight, as far as names are known.
        are_all: whether these are all that the model has.
    """

    updated: tuple[str, ...]
    copied: tuple[str, ...]
    with_rows: tuple[str, ...]
    of_model: frozenset[str]
    are_all: bool

    @classmethod
    def of(
        cls,
        parts: Mapping[str, PeftName],
        names: Iterable[str],
        base: Iterable[str],
        layers: int = 0,
    ) -> Modules:
        """The modules of an adapter's parts, and those of the model by its names and the base's.

        The base's count where they are the names of the training: all that is updated has one. Not
        those of layers of which the checkpoint has nothing: a base may hold layers that no model
        is loaded with, such as those that predict several tokens; they lie beyond the number of
        ``layers`` that its config tells of.
        """
        rows = _modules(p for p in parts.values() if p.has_rows)
        copied = _modules(p for p in parts.values() if p.is_copy)
        updated = _modules(p for p in parts.values() if not (p.is_copy or p.has_rows))
        own = _own_modules(parts, names)
        given = {name.removesuffix(_WEIGHT) for name in base if name.endswith(_WEIGHT)}
        are_all = bool(updated or rows) and given | own >= {*updated, *rows}
        if are_all:
            loaded = {"", *map(_layer_of, (*own, *updated, *rows))}
            stems = {layer.rpartition(".")[0] for layer in loaded if layer}
            known = {
                one
                for one in given
                if (layer := _layer_of(one)) in loaded or _is_below(layer, stems, layers)
            }
            own |= {one for one in known if not _SINGLE_EXPERT.search(one)}
        return cls(updated, copied, rows, frozenset(own), are_all)

    def has(self, ending: str) -> bool:
        """Whether the model is known to have a module of this ending, with a weight in it."""
        return any(f"{ending}." in f"{one}." for one in self.of_model)


def _layer_of(module: str) -> str:
    """The name of the layer that a module is in; empty where it is in none."""
    found = _LAYER.match(module)
    return found[0] if found else ""


def _is_below(layer: str, stems: Collection[str], count: int) -> bool:
    """Whether a layer is among the first so many of a row of layers."""
    stem, _, number = layer.rpartition(".")
    return bool(layer) and stem in stems and int(number) < count


def _modules(parts: Iterable[PeftName]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.module for part in parts if part.module))


def _own_modules(parts: Mapping[str, PeftName], names: Iterable[str]) -> set[str]:
    """Modules that hold a weight in the same model under peft; others may lie beside it."""
    around = {name.removesuffix(inner_name(name)) for name in parts}
    weights = (
        read_name(name)
        for name in names
        if name.endswith(_WEIGHT) and name.removesuffix(inner_name(name)) in around
    )
    return {part.module for part in weights if not part.adapter}


def claimed_statements(config: AdapterConfig, by: str, modules: Modules) -> Iterator[Statement]:
    """What the file names of which there is no tensor: of this model, or not even of that.

    What the model has was trained, or the file is another run's; what it does not have, peft passes
    over. Where nothing tells what it has, that is to be looked at.
    """
    held = {*modules.updated, *modules.with_rows}
    for module in sorted(modules.of_model - held):
        if config.does_target(module):
            yield Statement(AdapterFact.ADAPTER_TARGETS, "updated", by, module)
            yield Statement(AdapterFact.ADAPTER_TARGETS, "not updated", TENSORS, module)
    for name in _not_copied(config, modules.copied):
        if modules.has(name) or not modules.are_all:
            fact = AdapterFact.ADAPTER_COPIES if modules.has(name) else AdapterFact.ADAPTER_UNHELD
            yield from _unheld(fact, by, "modules_to_save", name)
    layers = {config.layer_of(module) for module in modules.updated}
    for number in config.layers if layers else ():
        if number not in layers:
            yield from _unheld(AdapterFact.ADAPTER_UNHELD, by, "layers_to_transform", number)
    patterns = ("rank_pattern", "alpha_pattern")
    lists = ("target_modules", "target_parameters")
    for key in patterns if modules.are_all else (*patterns, *lists):
        for entry in config.entries(key):
            if held and not _is_used(config, key, entry, held):
                yield from _unheld(AdapterFact.ADAPTER_UNHELD, by, key, entry)


def _unheld(fact: AdapterFact, by: str, key: str, entry: object) -> Iterator[Statement]:
    yield Statement(fact, "no tensors", TENSORS, f"{key} {entry!r}")
    yield Statement(fact, "named", by, f"{key} {entry!r}")


def _is_used(config: AdapterConfig, key: str, entry: str, held: Iterable[str]) -> bool:
    """Whether a tensor is of what the file names."""
    if key == "target_parameters":
        entry = entry.rpartition(".")[0]
    keys = (one for module in held for one in (module, *config.targeted_parameters(module)))
    return not entry or any(config.means(key, entry, one) for one in keys)


def _not_copied(config: AdapterConfig, copied: Sequence[str]) -> list[str]:
    """Names in ``modules_to_save`` of which no module was trained.

    peft adds the usual heads to it by the task, and where ties are kept copies only one of several.
    """
    if copied and config.keeps_ties:
        return []
    names = (name for name in config.saved_modules if name not in HEADS)
    return [name for name in names if not any(one.endswith(name) for one in copied)]


def row_statements(
    config: AdapterConfig, by: str, parts: Mapping[str, PeftName], shapes: Mapping[str, Shape]
) -> Iterator[Statement]:
    """The rows of embeddings that were trained, and those that the file names."""
    embeddings = {
        part.of_base: shape
        for name, shape in shapes.items()
        if not (part := read_name(name)).adapter
    }
    for name, part in parts.items():
        rows, (held, *_) = config.trained_rows(part.module), shapes[name] or (0,)
        yield Statement(AdapterFact.ADAPTER_TOKENS, held, TENSORS, part.module)
        yield Statement(
            AdapterFact.ADAPTER_TOKENS, None if rows is None else len(rows), by, part.module
        )
        count, *_ = embeddings.get(f"{part.module}{_WEIGHT}") or (None,)
        beyond = [str(row) for row in rows or () if isinstance(row, int) and count and row >= count]
        if beyond:
            yield Statement(AdapterFact.ADAPTER_TOKENS, f"row {some(beyond)}", by, part.module)
    if config.content.get(TRAINED_TOKENS) and not parts:
        yield Statement(AdapterFact.ADAPTER_TOKENS, "no tokens", TENSORS)
        yield Statement(AdapterFact.ADAPTER_TOKENS, TRAINED_TOKENS, by)
