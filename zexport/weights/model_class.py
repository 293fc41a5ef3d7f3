"""What model a checkpoint is: its config held against its weights, and its names learnt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.errors import NamesMismatchError
from zexport.model.config import ConfigFile
from zexport.model.fit import ModelNames, best_fit
from zexport.model.heads import head_names, shared_prefix, without_value_heads
from zexport.model.mending import mend_sizes
from zexport.model.names import NamesUnknown, learn_classes, learn_names
from zexport.model.names_client import NamesClient
from zexport.model.peft_names import PEFT_PREFIX
from zexport.model.sidecars import Sidecars
from zexport.options import ExportOptions, NameLayout
from zexport.plan.shards import HEAD_FILE, files_apart
from zexport.printable import some
from zexport.ranges.dtypes import Shape
from zexport.weights.named import NamedTensors

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


@dataclass(frozen=True, slots=True)
class Identity:
    """What model a checkpoint is.

    Attributes:
        sidecars: what lies around it, with its config mended where the weights tell otherwise.
        names: the model's, where they are known.
        trunk: the tensors of the model.
        heads: those of heads that it does not know, by name.
    """

    sidecars: Sidecars
    names: ModelNames | NamesUnknown
    trunk: NamedTensors
    heads: Mapping[str, StoredTensor]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the heads."""
        if not isinstance(self.names, ModelNames):
            return ()
        what = {HEAD_FILE: "a head of its own, which lies in"}
        return tuple(
            f"{self.names.architecture} does not know {some(tuple(names))}: "
            f"{what.get(file, 'weights beside it, which nothing loads by itself, in')} {file}"
            for file, names in files_apart(self.heads).items()
        )


def identify(
    checkpoint: ZeroCheckpoint,
    sidecars: Sidecars,
    stored: NamedTensors,
    options: ExportOptions,
    transformers: NamesClient,
    *,
    task: str = "",
) -> Identity:
    """The model of a checkpoint, and what is its config's and what is not.

    Args:
        checkpoint: what was opened.
        sidecars: what lies around it.
        stored: its tensors, or those of the model that its adapter was merged into.
        options: which names the output has, and what is left out.
        transformers: to be asked for names.
        task: what that adapter was trained for, as peft calls it; empty where that is not known.

    Raises:
        NamesMismatchError: several classes fit, and it would be a guess which.
    """
    known = stored.known_shapes
    if options.layout is not NameLayout.MEMORY:
        buffers = stored.buffers
        weights = {name: shape for name, shape in known.items() if name not in buffers}
        may_lack = checkpoint.may_lack_weights
        sidecars = _with_fitting_class(
            sidecars, weights, transformers, task=task, may_lack_weights=may_lack
        )
    sidecars = _with_mended_sizes(sidecars, stored.shapes, transformers)
    names = learn_names(sidecars, known, transformers)
    if not isinstance(names, ModelNames) or options.layout is NameLayout.MEMORY:
        return Identity(sidecars, names, stored, {})
    heads = head_names(names, known) & stored.tensors.keys()
    if heads & {*stored.aliases, *stored.aliases.values()}:
        heads = frozenset()  # a head that is tied to the model does not stand apart
    trunk = {name: tensor for name, tensor in stored.tensors.items() if name not in heads}
    prefix = shared_prefix(known)
    return Identity(
        sidecars,
        names,
        replace(stored, tensors=trunk),
        {
            name.removeprefix(prefix): stored.tensors[name]
            for name in sorted(heads)
            if not (options.exclude_frozen and stored.tensors[name].role is Role.FROZEN)
        },
    )


def _with_fitting_class(
    sidecars: Sidecars,
    stored: Stored,
    transformers: NamesClient,
    *,
    task: str,
    may_lack_weights: bool,
) -> Sidecars:
    """With another class of the same model type, where the one of the config has other weights.

    So the config of a base model serves a reward model that was made of it. The other class must
    fit in every name, value heads aside; what sizes it has is asked only where several fit. Where
    frozen weights may have been left out it must have all that is stored. Of several, an adapter's
    task decides.

    Args:
        sidecars: with the config.
        stored: the weights, without buffers: older versions saved some that no class has today.
        transformers: to be asked for the classes.
        task: what an adapter was trained for, as peft calls it.
        may_lack_weights: whether the save may have left frozen ones out.

    Raises:
        NamesMismatchError: several fit, and it would be a guess which.
    """
    names = learn_names(sidecars, stored, transformers)
    trunk = without_value_heads(stored)
    if sidecars.config is None or not isinstance(names, ModelNames):
        return sidecars
    if any(f".{PEFT_PREFIX}" in f".{name}" for name in stored):
        return sidecars
    lacking = _lacking(names, trunk)
    if lacking is not None and (may_lack_weights or not lacking):
        return sidecars
    others = {
        other.architecture: found
        for other in learn_classes(sidecars, transformers)
        if (found := _lacking(other, trunk)) is not None
        and (may_lack_weights or not found)
        and not _lacks_its_head(other, found)
    }
    fitting = {
        architecture: replace(sidecars, config=sidecars.config.with_architecture(architecture))
        for architecture in _for_task(task, _possible(others, trunk))
    }
    if len(fitting) > 1:
        fitting = {
            architecture: one
            for architecture, one in fitting.items()
            if _has_shapes(one, trunk, transformers)
        }
    if len(fitting) > 1:
        raise _undecided(sidecars.config, map(str, fitting))
    return next(iter(fitting.values()), sidecars)


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


def _has_shapes(sidecars: Sidecars, stored: Stored, transformers: NamesClient) -> bool:
    """Whether a config's class has the shapes that are stored, once its sizes are mended."""
    shapes = {name: shape for name, shape in stored.items() if shape is not None}
    mended = _with_mended_sizes(sidecars, shapes, transformers)
    names = learn_names(mended, stored, transformers)
    return isinstance(names, ModelNames) and not best_fit(names, stored).difference.reshaped


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
    sidecars: Sidecars, stored: Mapping[str, Shape], transformers: NamesClient
) -> Sidecars:
    """With the config's vocabulary and classes as the checkpoint's weights have them."""

    def shapes_for(config: ConfigFile) -> Mapping[str, Shape] | None:
        names = learn_names(replace(sidecars, config=config), dict(stored), transformers)
        if not isinstance(names, ModelNames):
            return None
        fit = best_fit(names, dict(stored))
        return {fit.prefix + name: shape for name, shape in fit.names.shapes.items()}

    if sidecars.config is None:
        return sidecars
    return replace(sidecars, config=mend_sizes(sidecars.config, stored, shapes_for))
