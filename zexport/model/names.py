"""Which names and shapes a model should have: told by a sidecar, or asked of transformers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from zexport.filenames import SOURCE_SIDECAR
from zexport.model.config import ConfigFile
from zexport.model.fit import Fit, ModelNames, NamesUnknown, best_fit, choose_class
from zexport.model.hub_layout import StoredLayout
from zexport.model.names_client import NamesClient
from zexport.ranges.dtypes import DType, Shape
from zexport.store.json import Json, Natural


class Learner:
    """Learns the names of models, of each config once.

    A training's own sidecar tells them; else transformers is asked.
    """

    def __init__(self, source: Mapping[str, Json] | None, transformers: NamesClient) -> None:
        self._told = None if source is None else _from_source_sidecar(source)
        self._transformers = transformers
        self._answers: dict[bytes, list[ModelNames] | NamesUnknown] = {}

    def names(
        self, config: ConfigFile | None, stored: Mapping[str, Shape | None]
    ) -> ModelNames | NamesUnknown:
        """The names of the model of a config.

        A config that names no architecture leaves several classes possible; then it is the one that
        is nearest to the ``stored`` names and shapes, if there is exactly one.
        """
        if self._told is not None:
            return self._told
        if config is None:
            return NamesUnknown("there is no config.json")
        candidates = self._candidates(config)
        if isinstance(candidates, NamesUnknown):
            return candidates
        names = candidates[0] if len(candidates) == 1 else choose_class(candidates, stored)
        if names is None:
            tried = ", ".join(str(names.architecture) for names in candidates)
            reason = f"config.json names no architecture, and of {tried} not one alone matches"
            return NamesUnknown(reason, is_contradiction=True)
        if "auto_map" in config.content and best_fit(names, stored).difference.count:
            reason = "config.json names code of its own, whose names transformers does not know"
            return NamesUnknown(reason)
        return names

    def fit(
        self, config: ConfigFile | None, stored: Mapping[str, Shape | None]
    ) -> Fit | NamesUnknown:
        """The model of a config, held against the ``stored`` names and shapes."""
        names = self.names(config, stored)
        return names if isinstance(names, NamesUnknown) else best_fit(names, stored)

    def other_classes(self, config: ConfigFile) -> list[ModelNames]:
        """Every class of the config's model type, but for the one that the config names.

        None where the training's own sidecar tells what the model is.
        """
        found = self._candidates(config.with_architecture(None)) if self._told is None else []
        if isinstance(found, NamesUnknown):
            return []
        return [names for names in found if names.architecture not in config.architectures]

    def _candidates(self, config: ConfigFile) -> list[ModelNames] | NamesUnknown:
        asked = config.serialized()
        if asked not in self._answers:
            self._answers[asked] = _from_transformers(asked, self._transformers)
        return self._answers[asked]


def _from_source_sidecar(source: Mapping[str, Json]) -> ModelNames | None:
    """What ``zexport_source.json`` says; ``None`` for adapters and where it says too little."""
    if source.get("adapter"):
        return None
    try:
        if source.get("model") is not None:
            found = msgspec.convert(source["model"], _Described)
        else:
            found = msgspec.convert(source, _DescribedBefore).now()
        # Patterns are transformers' alone: a checkpoint's might take for ever to match.
        return replace(found, ignored=()).names(SOURCE_SIDECAR)
    except ValueError:
        return None


def _from_transformers(config: bytes, transformers: NamesClient) -> list[ModelNames] | NamesUnknown:
    version, answer = transformers.describe(config)
    candidates = answer.get("candidates")
    if not isinstance(candidates, list):
        return NamesUnknown(str(answer.get("error", "transformers gave no answer")))
    origin = f"of transformers {version}"
    found = msgspec.convert(candidates, tuple[_Described, ...])
    return [one.names(f"{one.architecture} {origin}") for one in found]


class _Described(Struct, frozen=True):
    """A model as ``zexport.model.conversion`` describes it; see ``ModelNames``."""

    architecture: str
    shapes: dict[str, tuple[Natural, ...]]
    buffers: frozenset[str]
    tied: dict[str, str]
    unsaved: frozenset[str]
    keep_fp32: dict[str, frozenset[str]]
    layouts: tuple[StoredLayout, ...] = ()
    refused: str = ""
    base_prefix: str = ""
    ignored: tuple[str, ...] = ()
    other_type: str = ""
    defaults: dict[str, dict[str, object]] = {}

    def names(self, provenance: str) -> ModelNames:
        """The names that it tells."""
        if not (self.tied.keys() | set(self.tied.values())) <= self.shapes.keys():
            raise ValueError("a tie of names that the model does not have")
        kept = {
            dtype: self.keep_fp32.get(dtype.torch_name, frozenset())
            for dtype in (DType.BF16, DType.F16)
        }
        told = asdict(self) | {
            "layouts": tuple(layout.unfolded(self.shapes) for layout in self.layouts),
            "keep_fp32": kept,
            "ignored": tuple(sorted(self.ignored)),
        }
        return ModelNames(provenance=provenance, **told)


class _Shaped(Struct, frozen=True):
    shape: tuple[Natural, ...]


class _DescribedBefore(Struct, frozen=True):
    """A sidecar from before sidecars described the model; its names in memory are those of files.

    The first ones that ``zexport train`` wrote are of this form.
    """

    architecture: str
    tensors: dict[str, _Shaped]
    tied: dict[str, str]
    buffers: frozenset[str]
    names_match_memory: bool

    def __post_init__(self) -> None:
        if not self.names_match_memory:
            raise ValueError("names in memory are not told")

    def now(self) -> _Described:
        """The same as it is described now."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        numbers = {name: number for number, name in enumerate(shapes)}
        shapes |= {alias: shapes[name] for alias, name in self.tied.items() if name in shapes}
        layouts = (StoredLayout("", tuple(numbers), (), numbers),)
        return _Described(
            self.architecture, shapes, self.buffers, self.tied, frozenset(), {}, layouts
        )
