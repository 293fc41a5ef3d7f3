"""Which transformers class the weights fit; extra heads; tied weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor, source_of
from zexport.errors import DamagedCheckpointError, NamesMismatchError
from zexport.export.weights import PEFT_PREFIX, Tensors, Weights
from zexport.model.config import ConfigFile, with_stored_sizes
from zexport.model.hub_names import (
    Fit,
    ModelNames,
    Names,
    NamesUnknown,
    Stored,
    best_fit,
    wrapper_prefixes,
)
from zexport.model.names_client import Learner
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.compare import are_equal
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import Read
from zexport.text import some

_TASKS = {
    "SEQ_CLS": ("ForSequenceClassification",),
    "TOKEN_CLS": ("ForTokenClassification",),
    "QUESTION_ANS": ("ForQuestionAnswering",),
    "CAUSAL_LM": ("ForCausalLM", "LMHeadModel"),
    "SEQ_2_SEQ_LM": ("ForConditionalGeneration",),
}
"""Suffixes of the classes for each PEFT task type.

Source: peft 0.21, ``utils/peft_types.py`` (``TaskType``); transformers 5.23,
``models/auto/modeling_auto.py``.
"""

_HEAD_TENSORS_MAX = 16
_VALUE_HEADS = ("v_head", "value_head", "reward_head", "critic_head")


class Model(Struct, frozen=True):
    """The model of a checkpoint; ``heads`` are small weights that its class does not have."""

    config: ConfigFile | None
    fit: Fit | NamesUnknown
    weights: Weights
    heads: Tensors = {}

    @property
    def names(self) -> Names:
        return self.fit.model if isinstance(self.fit, Fit) else self.fit


def identify(
    stored: Weights,
    config: ConfigFile | None,
    learner: Learner,
    options: ExportOptions,
    *,
    may_lack_weights: bool,
    task: str = "",
) -> Model:
    """Return the model of the weights; ``task`` is the PEFT task type.

    Raises:
        NamesMismatchError: several classes have these weights, and config.json names none of them.
        DamagedCheckpointError: ``architectures`` and ``model_type`` contradict each other.
    """
    known = stored.known_shapes
    is_for_hub = options.layout is not NameLayout.MEMORY
    if config is not None and is_for_hub:
        shapes = {name: shape for name, shape in known.items() if name not in stored.buffers}
        config = _with_fitting_class(config, shapes, learner, task, may_lack=may_lack_weights)
    config, fit = _fitted(config, known, learner)
    if not isinstance(fit, Fit):
        return Model(config, fit, stored)
    if config is not None and fit.model.other_type and "auto_map" not in config.content:
        raise DamagedCheckpointError(
            "architectures and model_type contradict each other, and transformers would load "
            "another model",
            path=config.path,
            found=f"{fit.model.architecture}, of {fit.model.other_type}",
            expected=f"a class of {config.content.get('model_type')}",
            hint="Correct config.json, or pass the right one with --base",
        )
    heads = _head_names(fit.model, known) & stored.tensors.keys() if is_for_hub else set()
    if not heads or heads & {*stored.aliases, *stored.aliases.values()}:
        return Model(config, fit, stored)
    *_, prefix = wrapper_prefixes(known)
    trunk = replace(stored, tensors={n: t for n, t in stored.tensors.items() if n not in heads})
    apart = {
        name.removeprefix(prefix): stored.tensors[name]
        for name in sorted(heads)
        if not (options.exclude_frozen and stored.tensors[name].role is Role.FROZEN)
    }
    return Model(config, best_fit(fit.model, trunk.known_shapes), trunk, apart)


def _fitted(
    config: ConfigFile | None, stored: Stored, learner: Learner
) -> tuple[ConfigFile | None, Fit | NamesUnknown]:
    """Return the config with the sizes of the weights, and its class's names compared with them."""
    fit = learner.fit(config, stored)
    if config is not None and isinstance(fit, Fit):
        config, sizes = with_stored_sizes(config, fit, stored)
        learner.resize(config, fit.model, sizes)
        fit = learner.fit(config, stored)
    return config, fit


def _with_fitting_class(
    config: ConfigFile, stored: Stored, learner: Learner, task: str, *, may_lack: bool
) -> ConfigFile:
    """Return the config of another class of its model type if only that has these weights.

    So the config of a base model serves the reward model made of it. The class has all stored
    weights except value heads, and no others unless frozen weights may be left out. The adapter's
    task, then the shapes, choose among several classes.
    """
    names = learner.names(config, stored)
    if not isinstance(names, ModelNames) or any(f".{PEFT_PREFIX}" in f".{n}" for n in stored):
        return config
    *_, prefix = wrapper_prefixes(stored)
    trunk = {n: s for n, s in stored.items() if not is_value_head(n.removeprefix(prefix))}

    def lacking(names: ModelNames) -> frozenset[str] | None:
        """Return the weights that are not stored; ``None`` if the class does not fit."""
        fit = best_fit(names, trunk)
        missing = [fit.prefix + n for n in fit.difference.missing if n not in fit.names.buffers]
        is_misfit = fit.difference.unexpected or (missing and not may_lack)
        return None if is_misfit else frozenset(missing)

    if lacking(names) is not None:
        return config
    others = {
        str(other.architecture): absent
        for other in learner.other_classes(config)
        if (absent := lacking(other)) is not None and not _is_headless(other, absent)
    }
    # Weights that only some classes have were frozen and left out, unless another weight of the
    # same module is stored: a head that is stored without a bias has none.
    common = frozenset.intersection(*others.values()) if others else frozenset()
    modules = {name.rpartition(".")[0] for name in trunk}
    classes = [
        name
        for name, absent in others.items()
        if modules.isdisjoint(one.rpartition(".")[0] for one in absent - common)
    ]
    classes = [one for one in classes if one.endswith(_TASKS.get(task, ("",)))] or classes
    fitting = [config.with_architecture(name) for name in classes]
    if len(fitting) > 1:
        fits = [(one, _fitted(one, trunk, learner)[1]) for one in fitting]
        fitting = [o for o, fit in fits if isinstance(fit, Fit) and not fit.difference.reshaped]
    if len(fitting) > 1:
        raise NamesMismatchError(
            "several model classes have these weights, and architectures names none of them",
            path=config.path,
            found=", ".join(config.architectures) or "no architectures",
            expected=f"one of {some(classes)}",
            hint="Write the trained class into architectures of a copy and pass that with --base, "
            "or export with --layout memory",
        )
    return next(iter(fitting), config)


def _is_headless(names: ModelNames, lacking: frozenset[str]) -> bool:
    """Return whether a class has a head, and all of it is lacking: it would be untrained."""
    inner, untrained = f"{names.base_prefix}.", names.buffers | names.tied.keys()
    head = {n for n in names.shapes.keys() - untrained if not n.startswith(inner)}
    return bool(head) and all(any(f".{one}".endswith(f".{n}") for one in lacking) for n in head)


def is_value_head(name: str) -> bool:
    return name.partition(".")[0] in _VALUE_HEADS


def _head_names(names: ModelNames, stored: Stored) -> frozenset[str]:
    """Return the names of heads that the class does not have; none if the rest does not fit it.

    Heads are few, and their names differ from the model's where these begin.
    """
    read = {name: shape for name, shape in stored.items() if not names.ignores(name)}
    if not best_fit(names, read).difference.unexpected:
        return frozenset()
    heads = _outside({name.partition(".")[0] for name in names.all_names}, read)
    trunk = {name: shape for name, shape in read.items() if name not in heads}
    if not trunk or len(heads) > min(_HEAD_TENSORS_MAX, len(trunk)):
        return frozenset()
    return frozenset() if best_fit(names, trunk).difference.unexpected else heads


def _outside(firsts: set[str], stored: Iterable[str]) -> frozenset[str]:
    """Return the names outside the model, whose names begin with one of ``firsts``.

    Wrappers may be around it: the model has the prefix that the most names share.
    """
    names = [name.split(".") for name in stored]
    prefixes = Counter(
        tuple(parts[:at]) for parts in names for at, part in enumerate(parts) if part in firsts
    )
    prefix = max(prefixes, key=lambda one: (prefixes[one], -len(one)), default=())
    inside = {(*prefix, first) for first in firsts}
    return frozenset(
        ".".join(parts) for parts in names if tuple(parts[: len(prefix) + 1]) not in inside
    )


class Ties(Struct, frozen=True):
    """Aliases of declared tied weights whose values equal those of their source, and others."""

    equal: Set[str] = frozenset()
    differing: Set[str] = frozenset()


def compare_ties(
    names: Names,
    stored: Weights,
    given: Tensors,
    reader: SourceReader,
    *,
    stored_twice: bool = True,
) -> Ties:
    """Compare declared tied weights that the checkpoint, or the base model, contains twice.

    The base decides only if the checkpoint has at most one name of the tie, and its weight trained.
    """
    if isinstance(names, NamesUnknown) or not names.tied:
        return Ties()
    spellings = [*map(names.names_in, names.layouts), {}]

    def of_base(name: str) -> StoredTensor | None:
        return next((given[n] for one in spellings if (n := one.get(name, name)) in given), None)

    equal, differing = set[str](), set[str]()
    for alias, source in names.tied.items():
        here = [stored.tensors[n] for n in (alias, source) if n in stored.tensors]
        if len(here) == 2:
            if stored_twice:
                is_equal = _are_equal(here[0], here[1], reader.read_into)
                (equal if is_equal else differing).add(alias)
            continue
        is_tied = {alias, source} & stored.aliases.keys()
        one, other = of_base(alias), of_base(source)
        if is_tied or one is None or other is None or any(t.role is Role.FROZEN for t in here):
            continue
        if not _are_equal(one, other, reader.read_into):
            differing.add(alias)
    return Ties(equal, differing)


def _are_equal(one: StoredTensor, other: StoredTensor, read: Read) -> bool:
    is_alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return is_alike and are_equal(read, source_of(one), source_of(other))


def tie_as_declared(
    tensors: Tensors, aliases: Mapping[str, str], names: ModelNames
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors under the names that the model keeps of tied weights, and its aliases.

    Tied weights that the model does not declare are written under each of its names.
    """
    groups: dict[str, list[str]] = {name: [name] for name in tensors}
    tied = {alias: name for alias, name in aliases.items() if name not in groups}
    for alias, name in aliases.items():
        groups.get(name, []).append(alias)
    written: dict[str, StoredTensor] = {}
    for name, members in groups.items():
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
