"""Which names and shapes a model should have: told by a sidecar, or asked of transformers.

Importing transformers takes seconds and hundreds of megabytes, so it happens in a short-lived
process (``zexport.model.names_process``), once for each config: the answer is cached by the
config's digest and the version of transformers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from zexport.dtypes import DType
from zexport.jsontypes import Json, JsonObject
from zexport.model.config import ConfigFile
from zexport.model.hub_layout import Shape, read_hub_layout
from zexport.model.matching import ModelNames, best_fit, choose_class
from zexport.model.sidecars import Sidecars

_SCHEMA = 4
_TIMEOUT_SECONDS = 240
"""Importing transformers takes that long on no machine; what comes then is bounded by itself."""

_MESSAGE_LENGTH_MAX = 500


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
    sidecars: Sidecars, stored: Mapping[str, Shape | None]
) -> ModelNames | NamesUnknown:
    """The names of the model that ``sidecars`` describe: from its sidecar, else from its config.

    A config that names no architecture leaves several classes possible; then it is the one that is
    nearest to the ``stored`` names and shapes, if there is exactly one.
    """
    if sidecars.source is not None and (names := _from_source_sidecar(sidecars.source)):
        return names
    if sidecars.config is None:
        return NamesUnknown("there is no config.json")
    candidates = _from_transformers(sidecars.config)
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


def learn_classes(sidecars: Sidecars) -> list[ModelNames]:
    """Every class of the config's model type, but for the one that the config names.

    None where the training's own sidecar tells what the model is.
    """
    config = sidecars.config
    if config is None or (sidecars.source is not None and _from_source_sidecar(sidecars.source)):
        return []
    found = _from_transformers(config.with_architecture(None))
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


def _from_transformers(config: ConfigFile) -> list[ModelNames] | NamesUnknown:
    version = _installed_transformers()
    if version is None:
        return NamesUnknown("transformers is not installed")
    content = config.serialized()
    cached = _cache_file(content, version)
    answer = _read_cache(cached)
    if answer is None:
        answer, is_final = _ask_transformers(content)
        if is_final:
            _write_cache(cached, answer)
    candidates = answer.get("candidates")
    if not isinstance(candidates, list):
        return NamesUnknown(str(answer.get("error", "transformers gave no answer")))
    described = [candidate for candidate in candidates if isinstance(candidate, dict)]
    origin = f"of transformers {version}"
    return [
        replace(
            _model_names(one, f"{one.get('architecture')} {origin}"),
            ignored=tuple(sorted(_names(one.get("ignored")))),
        )
        for one in described
    ]


def _model_names(described: Mapping[str, Json], provenance: str) -> ModelNames:
    """The names that ``zexport.conversion.describe`` wrote.

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


def _installed_transformers() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_transformers(config: bytes) -> tuple[dict[str, Json], bool]:
    """The answer of the names process, ``{"error": ...}`` where it has none.

    And whether it would be the same another time: what transformers does not know, it will not know
    then, but a process that did not come to its end may do so.
    """
    # -P: without it the current folder, perhaps the checkpoint's, would be searched for modules.
    command = [sys.executable, "-P", "-m", "zexport.model.names_process"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(  # noqa: S603 - our own module, by its name
            command,
            input=config,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
        answer = json.loads(done.stdout.strip().rpartition(b"\n")[2])
    except subprocess.TimeoutExpired:
        return {"error": f"transformers took longer than {_TIMEOUT_SECONDS} s"}, False
    except (ValueError, RecursionError):
        return {"error": f"transformers failed: {_last_words(done)}"}, False
    return cast("dict[str, Json]", answer), True


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Why the names process ended without an answer."""
    lines = done.stderr.decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")
    if done.returncode == -signal.SIGXCPU:
        return "building the model that config.json describes took too long"
    if "MemoryError" in last or "not enough memory" in last:
        return "the model that config.json describes takes too much memory to build"
    return last[:_MESSAGE_LENGTH_MAX] or f"it ended with {done.returncode}"


def _cache_file(config: bytes, version: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    key = hashlib.blake2b(config, digest_size=16).hexdigest()
    return Path(home) / "zexport" / f"names-{_SCHEMA}-transformers-{version}-{key}.json"


def _read_cache(path: Path) -> dict[str, Json] | None:
    """The cached answer; anything unreadable counts as none, since it can be asked again."""
    try:
        answer = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _write_cache(path: Path, answer: Mapping[str, Json]) -> None:
    """Keep an answer; a cache that cannot be written is no failure of the export."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(answer, file)
        Path(file.name).replace(path)
    except OSError:
        return
