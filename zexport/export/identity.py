"""What model a checkpoint is: its config held against its weights, and its names learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.export.naming import NamedTensors, some
from zexport.export.shards import HEAD_FILE
from zexport.model.config import ConfigFile
from zexport.model.heads import head_names, without_known_heads
from zexport.model.hub_layout import Shape
from zexport.model.matching import ModelNames, best_fit
from zexport.model.mending import mend_sizes
from zexport.model.names import NamesUnknown, learn_names
from zexport.model.sidecars import Sidecars
from zexport.options import ExportOptions, NameLayout

Stored = Mapping[str, Shape | None]
"""Names to shapes; ``None`` where the values are in no file."""


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
        if not self.heads or not isinstance(self.names, ModelNames):
            return ()
        return (
            f"{self.names.architecture} does not know {some(tuple(self.heads))}: a head of its "
            f"own, which lies in {HEAD_FILE}",
        )


def identify(
    checkpoint: ZeroCheckpoint, sidecars: Sidecars, stored: NamedTensors, options: ExportOptions
) -> Identity:
    """The model of a checkpoint, and what is its config's and what is not."""
    known = stored.known_shapes
    if not checkpoint.may_lack_weights:
        sidecars = _with_fitting_class(sidecars, known)
    sidecars = _with_mended_sizes(sidecars, stored.shapes)
    names = learn_names(sidecars, known)
    if not isinstance(names, ModelNames) or options.layout is NameLayout.MEMORY:
        return Identity(sidecars, names, stored, {})
    heads = head_names(names, known) & stored.tensors.keys()
    if heads & {*stored.aliases, *stored.aliases.values()}:
        heads = frozenset()  # a head that is tied to the model does not stand apart
    trunk = {name: tensor for name, tensor in stored.tensors.items() if name not in heads}
    return Identity(
        sidecars,
        names,
        replace(stored, tensors=trunk),
        {
            name: stored.tensors[name]
            for name in sorted(heads)
            if not (options.exclude_frozen and stored.tensors[name].role is Role.FROZEN)
        },
    )


def _with_fitting_class(sidecars: Sidecars, stored: Stored) -> Sidecars:
    """With another class of the same model type, where the one of the config lacks weights.

    So the config of a base model serves a reward model that was made of it. The other class must
    fit in every name; what sizes it has is not asked here.
    """
    names = learn_names(sidecars, stored)
    if sidecars.config is None or not isinstance(names, ModelNames):
        return sidecars
    if names.shapes.keys().isdisjoint(stored):  # an adapter's names, or a wrapper's
        return sidecars
    heads = head_names(names, stored)
    if _fits(names, {name: shape for name, shape in stored.items() if name not in heads}):
        return sidecars
    other = replace(sidecars, config=sidecars.config.with_architecture(None))
    trunk = without_known_heads(stored)
    found = learn_names(other, trunk)
    if not isinstance(found, ModelNames) or not found.architecture or not _fits(found, trunk):
        return sidecars
    return replace(sidecars, config=sidecars.config.with_architecture(found.architecture))


def _fits(names: ModelNames, stored: Stored) -> bool:
    """Whether a model has all the names that are stored and no weight more."""
    fit = best_fit(names, stored)
    missing = [name for name in fit.difference.missing if name not in fit.names.buffers]
    return not missing and not fit.difference.unexpected


def _with_mended_sizes(sidecars: Sidecars, stored: Mapping[str, Shape]) -> Sidecars:
    """With the config's vocabulary and classes as the checkpoint's weights have them."""

    def shapes_for(config: ConfigFile) -> Mapping[str, Shape] | None:
        names = learn_names(replace(sidecars, config=config), dict(stored))
        if not isinstance(names, ModelNames):
            return None
        fit = best_fit(names, dict(stored))
        return {fit.prefix + name: shape for name, shape in fit.names.shapes.items()}

    if sidecars.config is None:
        return sidecars
    return replace(sidecars, config=mend_sizes(sidecars.config, stored, shapes_for))
