"""What model a checkpoint is: the class its config means, held against its weights, heads apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import NamesMismatchError
from zexport.facts.adapters import AdapterFact
from zexport.facts.statements import Statement
from zexport.filenames import ADAPTER_CONFIG
from zexport.model.config import ConfigFile, mend_sizes
from zexport.model.fit import Fit, ModelNames, NamesUnknown, best_fit, wrapper_prefixes
from zexport.model.names import Learner
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.dtypes import Shape
from zexport.weights.named import PEFT_PREFIX, Weights

Stored = Mapping[str, Shape | None]
"""Names to shapes; ``None`` where the values are in no file."""


_TASKS = {
    "SEQ_CLS": ("ForSequenceClassification",),
    "TOKEN_CLS": ("ForTokenClassification",),
    "QUESTION_ANS": ("ForQuestionAnswering",),
    "CAUSAL_LM": ("ForCausalLM", "LMHeadModel"),
    "SEQ_2_SEQ_LM": ("ForConditionalGeneration",),
}
"""How the names of the classes end that an adapter's task is for.

Source: peft 0.21, ``utils/peft_types.py`` (``TaskType``); transformers 5.23,
``models/auto/modeling_auto.py``.
"""


class Model(NamedTuple):
    """What model a checkpoint is: its config, mended, held against its weights, and heads apart."""

    config: ConfigFile | None
    fit: Fit | NamesUnknown
    weights: Weights
    heads: Mapping[str, StoredTensor]


def identify(
    stored: Weights,
    config: ConfigFile | None,
    learner: Learner,
    options: ExportOptions,
    *,
    may_lack_weights: bool,
    task: str = "",
) -> Model:
    """The model that weights are of, and what is its config's and what is not."""
    known = stored.known_shapes
    if config is not None and options.layout is not NameLayout.MEMORY:
        buffers = stored.buffers
        weights = {name: shape for name, shape in known.items() if name not in buffers}
        config = _of_fitting_class(
            config, weights, learner, task=task, may_lack_weights=may_lack_weights
        )
    if config is not None:
        config = _with_mended_sizes(config, stored.shapes, learner)
    fit = learner.fit(config, known)
    if not isinstance(fit, Fit) or options.layout is NameLayout.MEMORY:
        return Model(config, fit, stored, {})
    heads = head_names(fit, known) & stored.tensors.keys()
    if not heads or heads & {*stored.aliases, *stored.aliases.values()}:
        return Model(config, fit, stored, {})  # a head that is tied to the model stands not apart
    prefix = shared_prefix(known)
    trunk = replace(stored, tensors={n: t for n, t in stored.tensors.items() if n not in heads})
    apart = {
        name.removeprefix(prefix): stored.tensors[name]
        for name in sorted(heads)
        if not (options.exclude_frozen and stored.tensors[name].role is Role.FROZEN)
    }
    return Model(config, best_fit(fit.model, trunk.known_shapes), trunk, apart)


def _of_fitting_class(
    config: ConfigFile,
    stored: Stored,
    learner: Learner,
    *,
    task: str,
    may_lack_weights: bool,
) -> ConfigFile:
    """The config of another class of the same model type, where its own has other weights.

    So the config of a base model serves a reward model that was made of it. The other class must
    fit in every name, value heads aside; what sizes it has is asked only where several fit. Where
    frozen weights may have been left out it must have all that is stored. Of several, an adapter's
    task decides.
    """
    names = learner.names(config, stored)
    trunk = without_value_heads(stored)
    if not isinstance(names, ModelNames):
        return config
    if any(f".{PEFT_PREFIX}" in f".{name}" for name in stored):
        return config
    lacking = _lacking(names, trunk)
    if lacking is not None and (may_lack_weights or not lacking):
        return config
    others = {
        other.architecture: found
        for other in learner.other_classes(config)
        if (found := _lacking(other, trunk)) is not None
        and (may_lack_weights or not found)
        and not _lacks_its_head(other, found)
    }
    fitting = [
        config.with_architecture(architecture)
        for architecture in _for_task(task, _possible(others, trunk))
    ]
    if len(fitting) > 1:
        fitting = [one for one in fitting if _has_shapes(one, trunk, learner)]
    if len(fitting) > 1:
        raise _undecided(config, (one.architectures[0] for one in fitting))
    return next(iter(fitting), config)


def _possible(lacking: Mapping[str | None, frozenset[str]], stored: Stored) -> list[str | None]:
    """The classes that may have been trained, of those that have every stored weight.

    What one lacks and another does not would have been frozen; not so beside a trained weight of
    the same module. A head without its bias is none that has one.
    """
    common = frozenset.intersection(*lacking.values()) if lacking else frozenset()
    modules = {name.rpartition(".")[0] for name in stored}
    return [
        architecture
        for architecture, names in lacking.items()
        if modules.isdisjoint(name.rpartition(".")[0] for name in names - common)
    ]


def _lacks_its_head(names: ModelNames, lacking: frozenset[str]) -> bool:
    """Whether a class has a head of its own, and none of it is stored: it would be untrained."""
    inner = f"{names.base_prefix}."
    untrained = names.buffers | names.tied.keys()
    head = {n for n in names.shapes.keys() - untrained if not n.startswith(inner)}
    return bool(head) and all(any(f".{one}".endswith(f".{n}") for one in lacking) for n in head)


def _for_task(task: str, classes: list[str | None]) -> list[str | None]:
    """Those of several classes that are for a task, if any is."""
    endings = _TASKS.get(task, ())
    return [name for name in classes if endings and (name or "").endswith(endings)] or classes


def task_statements(task: str, config: ConfigFile | None) -> Iterator[Statement]:
    """The task that an adapter was trained for, and the one of the class that it is merged into.

    Models that generate are of several kinds, whose adapters are trained for either task.
    """
    named = "" if config is None else next(iter(config.architectures), "")
    of_class = next((one for one, ends in _TASKS.items() if named.endswith(ends)), None)
    if task in _TASKS and not {task, of_class} <= {"CAUSAL_LM", "SEQ_2_SEQ_LM"}:
        yield Statement(AdapterFact.ADAPTER_TASK, task, ADAPTER_CONFIG)
        yield Statement(AdapterFact.ADAPTER_TASK, of_class, f"config.json, {named}")


def _has_shapes(config: ConfigFile, stored: Stored, learner: Learner) -> bool:
    """Whether a config's class has the shapes that are stored, once its sizes are mended."""
    shapes = {name: shape for name, shape in stored.items() if shape is not None}
    fit = learner.fit(_with_mended_sizes(config, shapes, learner), stored)
    return isinstance(fit, Fit) and not fit.difference.reshaped


def _undecided(config: ConfigFile, classes: Iterable[str]) -> NamesMismatchError:
    return NamesMismatchError(
        "does not name the model class that was trained, and several have these weights",
        path=config.path,
        found=", ".join(config.architectures) or "no architectures",
        expected=f"one of {', '.join(classes)}",
        hint="Write the class that was trained into `architectures` of a copy given with --base, "
        "or export with --layout memory",
    )


def _lacking(names: ModelNames, stored: Stored) -> frozenset[str] | None:
    """The weights a model has beside those stored, as named there; ``None`` if not all of these."""
    fit = best_fit(names, stored)
    missing = (name for name in fit.difference.missing if name not in fit.names.buffers)
    return None if fit.difference.unexpected else frozenset(fit.prefix + name for name in missing)


def _with_mended_sizes(
    config: ConfigFile, stored: Mapping[str, Shape], learner: Learner
) -> ConfigFile:
    """The config with the vocabulary and classes that the checkpoint's weights have."""

    def shapes_for(config: ConfigFile) -> Mapping[str, Shape] | None:
        fit = learner.fit(config, dict(stored))
        if not isinstance(fit, Fit):
            return None
        return {fit.prefix + name: shape for name, shape in fit.names.shapes.items()}

    return mend_sizes(config, stored, shapes_for)


_TENSORS_MAX = 16
_VALUE_HEADS = ("v_head", "value_head", "reward_head", "critic_head")


def is_value_head(name: str) -> bool:
    """Whether a tensor is of a head that is known by name, whatever the model is."""
    return _first(name) in _VALUE_HEADS


def shared_prefix(stored: Iterable[str]) -> str:
    """What wrappers put before every name, heads included."""
    *_, prefix = wrapper_prefixes(stored)
    return prefix


def without_value_heads(stored: Mapping[str, Shape | None]) -> dict[str, Shape | None]:
    """The names but for those of value heads, which stand where all wrappers are left behind."""
    prefix = shared_prefix(stored)
    return {n: shape for n, shape in stored.items() if not is_value_head(n.removeprefix(prefix))}


def head_names(fit: Fit, stored: Mapping[str, Shape | None]) -> frozenset[str]:
    """The names of the heads; none where the rest would not be the model.

    A head has a first part in its names, at the level where the model begins, that the model does
    not have. It is small, and without it no name is left that the model does not know: anything
    else is no head but another model than the config says. What transformers passes over when it
    loads the model is no head either, but the business of the model's files.
    """
    names = fit.model
    read = {name: shape for name, shape in stored.items() if not names.ignores(name)}
    whole = fit if len(read) == len(stored) else best_fit(names, read)
    if not whole.difference.unexpected:
        return frozenset()
    firsts = {_first(name) for name in names.shapes}
    firsts |= {_first(name) for layout in names.layouts for name in layout.tensors}
    heads = _beside(firsts, read)
    trunk = {name: shape for name, shape in read.items() if name not in heads}
    if not trunk or len(heads) > min(_TENSORS_MAX, len(trunk)):
        return frozenset()
    return frozenset() if best_fit(names, trunk).difference.unexpected else heads


def _beside(firsts: set[str], stored: Iterable[str]) -> frozenset[str]:
    """The names beside the model, which begins where one of its first parts is met.

    Above that level there are wrappers: of what lies side by side there, the model is in the one
    with most names.
    """
    beside: set[str] = set()
    inside, prefix = list(stored), ""
    while inside:
        parts: dict[str, list[str]] = {}
        for name in inside:
            parts.setdefault(_first(name.removeprefix(prefix)), []).append(name)
        if firsts & parts.keys():
            beside.update(
                n for part, members in parts.items() for n in members if part not in firsts
            )
            return frozenset(beside)
        main = max(parts, key=lambda part: len(parts[part]))
        beside.update(n for part, members in parts.items() for n in members if part != main)
        prefix += f"{main}."
        inside = [name for name in parts[main] if name.startswith(prefix)]
    return frozenset()


def _first(name: str) -> str:
    return name.partition(".")[0]
