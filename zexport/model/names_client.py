"""Ask transformers for the names of a model, in a subprocess, and cache the answers."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3
from msgspec import Raw, Struct
from msgspec.structs import replace

from zexport.errors import MissingExtraError
from zexport.model.config import ConfigFile
from zexport.model.hub_names import (
    Fit,
    ModelNames,
    Names,
    NamesUnknown,
    Stored,
    StoredLayout,
    as_it_is,
    best_fit,
)
from zexport.optional_deps import HUB_WANTED, installed, lack_for_names, to_have_names
from zexport.storage.files import matching, read_regular, write_durably
from zexport.storage.json import JsonTable, as_table
from zexport.storage.location import cache_folder

if TYPE_CHECKING:
    import subprocess

_log = logging.getLogger(__name__)

_SCHEMA = 13
_CACHED_NBYTES_MAX = 64 << 20
_MESSAGE_LENGTH_MAX = 500
_KILLED = {
    -signal.SIGXCPU: "building the model that config.json describes took too long",
    -signal.SIGKILL: "the process was killed, probably for lack of memory",
}
FAILED = 4
"""Exit code of the process if transformers cannot build the model of a config."""

ANSWER = b"\nzexport answers: "
"""Precedes the answer on stdout; before it is what libraries print while they are imported."""


class _Layouts(Struct, frozen=True):
    layouts: tuple[StoredLayout, ...] = ()


class _Answer(Struct, frozen=True):
    candidates: tuple[Raw, ...] = ()
    error: str = ""


def _decode_names(description: bytes | Raw) -> ModelNames:
    """Return the names that ``describe_model`` gives; ``LookupError``, ``ValueError`` if wrong."""
    names = msgspec.json.decode(description, type=ModelNames)
    if not (names.tied.keys() | set(names.tied.values())) <= names.shapes.keys():
        raise ValueError("tied names that the model does not have")
    stored = msgspec.json.decode(description, type=_Layouts).layouts
    return replace(names, layouts=tuple(layout.unfolded(names.shapes) for layout in stored))


class Learner:
    """Learns the names of models, of each config once.

    ``zexport train`` writes them to a sidecar (``source``); otherwise transformers or the cache is
    asked. If transformers cannot be asked, an answer for another version is used. If there is none,
    names that are needed are an error; otherwise they are unknown, and ``lacked`` is the reason.
    """

    def __init__(self, source: JsonTable | None = None, *, are_needed: bool = True) -> None:
        self.lacked = ""
        self._are_needed = are_needed
        self._lack = lack_for_names()
        self._version = "" if self._lack else installed("transformers") or ""
        self._recorded = None if source is None else _from_source_sidecar(source)
        self._answers: dict[bytes, list[ModelNames] | NamesUnknown] = {}

    def names(self, config: ConfigFile | None, stored: Stored) -> Names:
        """Return the names of a config's model; without an architecture, the class that fits."""
        if self._recorded is not None:
            return self._recorded
        if config is None:
            return NamesUnknown("there is no config.json")
        candidates = self._candidates(config)
        if isinstance(candidates, NamesUnknown):
            return candidates
        names = candidates[0] if len(candidates) == 1 else _closest(candidates, stored)
        if names is None:
            tried = ", ".join(str(one.architecture) for one in candidates)
            reason = f"config.json names no architecture, and the weights do not decide: {tried}"
            return NamesUnknown(reason, is_contradiction=True)
        if "auto_map" in config.content and best_fit(names, stored).difference.count:
            return NamesUnknown("config.json names custom code, which zexport does not run")
        return names

    def fit(self, config: ConfigFile | None, stored: Stored) -> Fit | NamesUnknown:
        """Return the form of a config's model that is closest to ``stored``."""
        names = self.names(config, stored)
        return names if isinstance(names, NamesUnknown) else best_fit(names, stored)

    def resize(self, config: ConfigFile, names: ModelNames, sizes: Mapping[str, int]) -> None:
        """Learn the names of a config whose ``sizes`` were changed without asking, if possible."""
        if (resized := names.resized(sizes)) is not None:
            self._answers.setdefault(config.serialized(), [resized])

    def other_classes(self, config: ConfigFile) -> list[ModelNames]:
        """Return every class of the config's model type except the ones that it names."""
        found = self._candidates(config.with_architecture(None)) if self._recorded is None else []
        others = [] if isinstance(found, NamesUnknown) else found
        for names in others:  # so that none of them is asked for again
            content = config.with_architecture(str(names.architecture)).serialized()
            self._answers.setdefault(content, [names])
        return [names for names in others if names.architecture not in config.architectures]

    def _candidates(self, config: ConfigFile) -> list[ModelNames] | NamesUnknown:
        content = config.serialized()
        if content not in self._answers:
            answer = self._describe(content)
            names = [*map(_decode_names, answer.candidates)]
            self._answers[content] = names or NamesUnknown(answer.error)
        return self._answers[content]

    def _describe(self, config: bytes) -> _Answer:
        """Return the answer of transformers or the cache."""
        for path in _cached(config, self._version):
            if (known := _read_cache(path)) is not None:
                return known
        if not self._lack:
            _log.info("Asking transformers for the names of this model, once for each config")
            import subprocess  # noqa: PLC0415 - most exports ask nothing

            done = subprocess.run(
                # -P: else Python imports modules of the current folder, perhaps the checkpoint's
                [sys.executable, "-P", "-m", "zexport.model.names_process"],
                input=config,
                capture_output=True,
                check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            )
            if done.returncode == 0:
                content = done.stdout.rpartition(ANSWER)[2]
                _write_cache(config, self._version, content)
                return msgspec.json.decode(content, type=_Answer)
            reason = _KILLED.get(done.returncode) or _last_error(done)
            if done.returncode in (FAILED, *_KILLED):
                return _Answer(error=f"transformers failed: {reason}")
            self._lack = f"transformers {self._version}, but {reason}"
        if self._are_needed:
            raise MissingExtraError(
                "the Hub names of the model's weights are not known in this environment",
                found=self._lack,
                expected=HUB_WANTED,
                hint=f"{to_have_names()}; or keep the names in memory, with --layout memory",
            )
        self.lacked = self._lack
        return _Answer(error=f"transformers cannot be asked: {self._lack}")


def _closest(candidates: list[ModelNames], stored: Stored) -> ModelNames | None:
    """Return the only class whose names differ least from ``stored``; equal classes are one.

    Names count before shapes, which depend on sizes that training changes.
    """
    fits = [(names, best_fit(names, stored).difference) for names in candidates]
    named = [one for one in fits if one[1].misnamed == min(found.misnamed for _, found in fits)]
    least = [names for names, found in named if found.count == min(f.count for _, f in named)]
    if len(named) == 1:
        return least[0]
    first, *others = [replace(o, architecture=None, other_type="") for o in least]
    return replace(least[0], architecture=None) if all(o == first for o in others) else None


def _from_source_sidecar(source: JsonTable) -> ModelNames | None:
    """Return the names in ``zexport_source.json``, or ``None`` if it has none of a whole model."""
    if source.get("adapter"):
        return None
    try:
        if model := source.get("model"):
            names = _decode_names(msgspec.json.encode(model))
        else:
            names = _described_by_tensors(source)
    except (LookupError, ValueError):
        return None
    return replace(names, ignored=())  # its patterns are not trusted


def _described_by_tensors(source: JsonTable) -> ModelNames:
    """Return the names in a file of zexport's first versions: Hub names, if in memory."""
    if not source.get("names_match_memory"):
        raise ValueError("in-memory names are missing")
    tensors = as_table(source.get("tensors"))
    described = {key: source.get(key) for key in ("architecture", "tied", "buffers")}
    described["shapes"] = {name: as_table(one).get("shape") for name, one in tensors.items()}
    names = msgspec.convert(described, ModelNames)
    shapes = {alias: names.shapes[name] for alias, name in names.tied.items()}
    return replace(names, shapes={**names.shapes, **shapes}, layouts=(as_it_is(names.shapes),))


def _last_error(done: subprocess.CompletedProcess[bytes]) -> str:
    *_, last = ["", *done.stderr.decode(errors="replace").strip().splitlines()]
    return last[:_MESSAGE_LENGTH_MAX] or f"the process exited with {done.returncode}"


def _cache_path(config: bytes, version: str) -> Path:
    return (
        cache_folder()
        / "zexport"
        / f"names-{_SCHEMA}-{_digest(config)}-transformers-{version}.json"
    )


def _cached(config: bytes, version: str) -> list[Path]:
    """Return the cached answers of a version; without one, of any, the newest first."""
    try:
        pattern = _cache_path(config, version or "*")
    except (OSError, RuntimeError):
        return []

    return sorted(
        matching(pattern.parent, pattern.name),
        key=lambda path: [*map(int, re.findall(r"\d+", path.stem.rpartition("-")[2]))],
        reverse=True,
    )


def _read_cache(path: Path) -> _Answer | None:
    try:
        content = read_regular(path, _CACHED_NBYTES_MAX) or b""
    except OSError:
        return None
    seal, _, answer = content.partition(b"\n")
    is_ours = seal == _digest(answer).encode()
    return msgspec.json.decode(answer, type=_Answer) if is_ours else None


def _write_cache(config: bytes, version: str, answer: bytes) -> None:
    """Cache an answer; warn if that is not possible."""
    try:
        write_durably(_cache_path(config, version), _digest(answer).encode() + b"\n" + answer)
    except (OSError, RuntimeError) as cause:
        _log.warning(
            "The names cannot be cached (%s), so every export asks transformers again. Set "
            "XDG_CACHE_HOME to a writable folder.",
            cause,
        )


def _digest(content: bytes) -> str:
    return blake3(content).hexdigest(16)
