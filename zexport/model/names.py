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
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from zexport.jsontypes import Json
from zexport.model.config import ConfigFile
from zexport.model.sidecars import Sidecars

_SCHEMA = 1
_TIMEOUT_SECONDS = 300

Shape = tuple[int, ...]


class _Candidate(TypedDict):
    """One class in the names process's answer."""

    architecture: str
    shapes: dict[str, list[int]]
    buffers: list[str]
    tied: dict[str, str]
    hub_is_memory: bool


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The state dict that a model class has for a config.

    Attributes:
        architecture: name of the model class.
        shapes: name in memory to shape; tied names and persistent buffers included.
        buffers: those names that are buffers.
        tied: alias to source, as the model class declares it for this config.
        hub_is_memory: whether ``save_pretrained`` writes these same names and shapes.
        provenance: where this was learnt, in words.
    """

    architecture: str
    shapes: Mapping[str, Shape]
    buffers: frozenset[str]
    tied: Mapping[str, str]
    hub_is_memory: bool
    provenance: str


@dataclass(frozen=True, slots=True)
class NamesUnknown:
    """The names could not be learnt, and why."""

    reason: str


def learn_names(sidecars: Sidecars, stored: Mapping[str, Shape]) -> ModelNames | NamesUnknown:
    """The names of the model that ``sidecars`` describe: from its sidecar, else from its config.

    A config that names no architecture leaves several classes possible; then it is the one whose
    state dict is just the ``stored`` names and shapes, if there is exactly one.
    """
    if sidecars.source is not None and (names := _from_source_sidecar(sidecars.source)):
        return names
    if sidecars.config is None:
        return NamesUnknown("there is no config.json")
    candidates = _from_transformers(sidecars.config)
    if isinstance(candidates, NamesUnknown) or len(candidates) == 1:
        return candidates if isinstance(candidates, NamesUnknown) else candidates[0]
    matching = [names for names in candidates if names.shapes == stored]
    if len(matching) == 1:
        return matching[0]
    tried = ", ".join(names.architecture for names in candidates)
    return NamesUnknown(f"config.json names no architecture, and of {tried} not one alone matches")


def _from_source_sidecar(source: Mapping[str, Json]) -> ModelNames | None:
    """What ``zexport_source.json`` says; ``None`` for adapters and for other schemas."""
    tensors, tied = source.get("tensors"), source.get("tied")
    if source.get("schema") != 1 or source.get("adapter") or not isinstance(tensors, dict):
        return None
    shapes: dict[str, Shape] = {}
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
            return None
        stored = entry.get("stored_name", name)
        shapes[str(stored)] = cast("Shape", tuple(cast("list[int]", entry["shape"])))
    aliases = {a: str(s) for a, s in tied.items()} if isinstance(tied, dict) else {}
    for alias, stored in aliases.items():
        if stored in shapes:
            shapes[alias] = shapes[stored]
    buffers = source.get("buffers")
    return ModelNames(
        architecture=str(source.get("architecture")),
        shapes=shapes,
        buffers=frozenset(str(b) for b in buffers) if isinstance(buffers, list) else frozenset(),
        tied=aliases,
        hub_is_memory=source.get("names_match_memory") is True,
        provenance="zexport_source.json",
    )


def _from_transformers(config: ConfigFile) -> list[ModelNames] | NamesUnknown:
    version = _installed_transformers()
    if version is None:
        return NamesUnknown("transformers is not installed")
    content = config.serialized()
    cached = _cache_file(content, version)
    answer = _read_cache(cached)
    if answer is None:
        answer = _ask_transformers(content)
        if "candidates" in answer:
            _write_cache(cached, answer)
    if "candidates" not in answer:
        return NamesUnknown(str(answer.get("error", "transformers gave no answer")))
    return [
        ModelNames(
            architecture=candidate["architecture"],
            shapes={name: tuple(shape) for name, shape in candidate["shapes"].items()},
            buffers=frozenset(candidate["buffers"]),
            tied=candidate["tied"],
            hub_is_memory=candidate["hub_is_memory"],
            provenance=f"{candidate['architecture']} of transformers {version}",
        )
        for candidate in cast("list[_Candidate]", answer["candidates"])
    ]


def _installed_transformers() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_transformers(config: bytes) -> dict[str, Json]:
    """The answer of the names process; ``{"error": ...}`` where it has none."""
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
        return {"error": f"transformers took longer than {_TIMEOUT_SECONDS} s"}
    except ValueError:
        last = done.stderr.strip().rpartition(b"\n")[2].decode(errors="replace")
        return {"error": f"transformers failed: {last or done.returncode}"}
    return cast("dict[str, Json]", answer)


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
