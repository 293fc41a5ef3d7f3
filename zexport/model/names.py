"""Which names and shapes a model should have: told by a sidecar, or asked of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zexport.model.config import ConfigFile
from zexport.model.fit import ModelNames, best_fit, choose_class
from zexport.model.hub_layout import read_hub_layout
from zexport.model.names_client import NamesClient
from zexport.model.sidecars import Sidecars
from zexport.ranges.dtypes import DType, Shape
from zexport.store.json import Json, JsonObject


@dataclass(frozen=True, slots=True)
class NamesUnknown:
    """The names could not be learnt, and why.

    Attributes:
        reason: why, in words.
        is_contradiction: whether the config says what the checkpoint is not, so that the names in
            the hub's layout cannot be known.
    """

    reason: str
    is_contradiction: bool = False


def learn_names(
    sidecars: Sidecars, stored: Mapping[str, Shape | None], transformers: NamesClient
) -> ModelNames | NamesUnknown:
    """The names of the model that ``sidecars`` describe: from its sidecar, else from its config.

    A config that names no architecture leaves several classes possible; then it is the one that is
    nearest to the ``stored`` names and shapes, if there is exactly one.
    """
    if sidecars.source is not None and (names := _from_source_sidecar(sidecars.source)):
        return names
    if sidecars.config is None:
        return NamesUnknown("there is no config.json")
    candidates = _from_transformers(sidecars.config, transformers)
    if isinstance(candidates, NamesUnknown):
        return candidates
    names = candidates[0] if len(candidates) == 1 else choose_class(candidates, stored)
    if names is None:
        tried = ", ".join(str(names.architecture) for names in candidates)
        reason = f"config.json names no architecture, and of {tried} not one alone matches"
        return NamesUnknown(reason, is_contradiction=True)
    if "auto_map" in sidecars.config.content and best_fit(names, stored).difference.count:
        reason = "config.json names code of its own, whose names transformers does not know"
        return NamesUnknown(reason)
    return names


def learn_classes(sidecars: Sidecars, transformers: NamesClient) -> list[ModelNames]:
    """Every class of the config's model type, but for the one that the config names.

    None where the training's own sidecar tells what the model is.
    """
    config = sidecars.config
    if config is None or (sidecars.source is not None and _from_source_sidecar(sidecars.source)):
        return []
    found = _from_transformers(config.with_architecture(None), transformers)
    if isinstance(found, NamesUnknown):
        return []
    return [names for names in found if names.architecture not in config.architectures]


def _from_source_sidecar(source: Mapping[str, Json]) -> ModelNames | None:
    """What ``zexport_source.json`` says; ``None`` for adapters and where it says too little."""
    if source.get("adapter"):
        return None
    try:
        described = source.get("model")
        if described is None:
            described = _described_before(source)
        return _model_names(_object(described), "zexport_source.json")
    except ValueError:
        return None


def _described_before(source: Mapping[str, Json]) -> JsonObject:
    """What a sidecar of version 0.1 says, where names and shapes in memory are those of files.

    Raises:
        ValueError: they are not, or it is of another form.
    """
    if source.get("names_match_memory") is not True:
        raise ValueError("names in memory are not those of files")
    tensors, tied = _object(source.get("tensors")), _object(source.get("tied"))
    shapes = {name: _object(entry).get("shape") for name, entry in tensors.items()}
    names = list(shapes)
    entries: JsonObject = {name: number for number, name in enumerate(names)}
    layout: JsonObject = {"label": "", "sources": [*names], "parts": [], "tensors": entries}
    return {
        "architecture": source.get("architecture"),
        "shapes": shapes | {alias: shapes.get(str(name)) for alias, name in tied.items()},
        "buffers": source.get("buffers"),
        "tied": tied,
        "unsaved": [],
        "keep_fp32": {"bfloat16": [], "float16": []},
        "layouts": [layout],
    }


def _from_transformers(
    config: ConfigFile, transformers: NamesClient
) -> list[ModelNames] | NamesUnknown:
    answer = transformers.describe(config.serialized())
    candidates = answer.get("candidates")
    if not isinstance(candidates, list):
        return NamesUnknown(str(answer.get("error", "transformers gave no answer")))
    described = [candidate for candidate in candidates if isinstance(candidate, dict)]
    origin = f"of transformers {transformers.version}"
    return [
        replace(
            _model_names(one, f"{one.get('architecture')} {origin}"),
            ignored=tuple(sorted(_names(one.get("ignored")))),
        )
        for one in described
    ]


def _model_names(described: Mapping[str, Json], provenance: str) -> ModelNames:
    """The names that ``zexport.model.conversion`` wrote.

    Raises:
        ValueError: they are not of that form.
    """
    shapes = {name: _shape(shape) for name, shape in _object(described.get("shapes")).items()}
    tied = {alias: str(name) for alias, name in _object(described.get("tied")).items()}
    if not (tied.keys() | set(tied.values())) <= shapes.keys():
        raise ValueError("a tie of names that the model does not have")
    layouts = described.get("layouts", [])
    return ModelNames(
        architecture=str(described.get("architecture")),
        shapes=shapes,
        buffers=_names(described.get("buffers")),
        tied=tied,
        layouts=tuple(
            read_hub_layout(_object(layout), shapes)
            for layout in (layouts if isinstance(layouts, list) else ())
        ),
        provenance=provenance,
        unsaved=_names(described.get("unsaved")),
        keep_fp32={
            dtype: _names(_object(described.get("keep_fp32")).get(dtype.torch_name))
            for dtype in (DType.BF16, DType.F16)
        },
        refused=str(described.get("refused", "")),
        base_prefix=str(described.get("base_prefix", "")),
    )


def _object(value: Json) -> JsonObject:
    if isinstance(value, dict):
        return value
    raise ValueError("not a JSON object")


def _names(value: Json) -> frozenset[str]:
    if isinstance(value, list):
        return frozenset(str(name) for name in value)
    raise ValueError("not a list of names")


def _shape(value: Json) -> Shape:
    sizes = value if isinstance(value, list) else [None]
    numbers = tuple(size for size in sizes if type(size) is int and size >= 0)
    if len(numbers) != len(sizes):
        raise ValueError("not a shape")
    return numbers
