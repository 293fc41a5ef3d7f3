"""Which names and shapes a model should have: told by a sidecar, or asked of transformers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Timer
from typing import IO, Literal, Self, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import MissingExtraError, OutputError
from zexport.extras import HUB_WANTED, installed, lack_for_names, to_have_names
from zexport.model.config import ConfigFile
from zexport.model.fit import Fit, ModelNames, NamesUnknown, best_fit, choose_class
from zexport.model.hub_layout import StoredLayout
from zexport.ranges.dtypes import DType, Shape
from zexport.store.files import read_regular
from zexport.store.folders import cache_folder, matching, replace_content
from zexport.store.json import Json, JsonObject, Natural


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
        return replace(found, ignored=()).names("zexport_source.json")
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

    def names(self, provenance: str) -> ModelNames:
        """The names that it tells."""
        if not (self.tied.keys() | set(self.tied.values())) <= self.shapes.keys():
            raise ValueError("a tie of names that the model does not have")
        return ModelNames(
            architecture=self.architecture,
            shapes=self.shapes,
            buffers=self.buffers,
            tied=self.tied,
            layouts=tuple(layout.unfolded(self.shapes) for layout in self.layouts),
            provenance=provenance,
            unsaved=self.unsaved,
            keep_fp32={
                dtype: self.keep_fp32.get(dtype.torch_name, frozenset())
                for dtype in (DType.BF16, DType.F16)
            },
            refused=self.refused,
            ignored=tuple(sorted(self.ignored)),
            base_prefix=self.base_prefix,
            other_type=self.other_type,
        )


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
    names_match_memory: Literal[True]

    def now(self) -> _Described:
        """The same as it is described now."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        numbers = {name: number for number, name in enumerate(shapes)}
        shapes |= {alias: shapes[name] for alias, name in self.tied.items() if name in shapes}
        layouts = (StoredLayout("", tuple(numbers), (), numbers),)
        return _Described(
            self.architecture, shapes, self.buffers, self.tied, frozenset(), {}, layouts
        )


_SCHEMA = 6
_CACHED_NBYTES_MAX = 64 << 20
_TIMEOUT_SECONDS = 240
"""Importing transformers takes that long on no machine; what comes then is bounded by itself."""

_MESSAGE_LENGTH_MAX = 500
_ERROR = re.compile(r"\w+(Error|Exception|Interrupt|Exit)\b.*")


class NamesClient:
    """What transformers says of configs; use it in a ``with`` statement.

    Where it cannot be asked, what it said in another environment of this user is remembered. What
    is not is refused where names are needed, and unknown where they are not: ``lacked`` says why.
    """

    def __init__(self, *, are_needed: bool = True) -> None:
        self.lacked = ""
        self._are_needed = are_needed
        self._lack = lack_for_names()
        self._version = "" if self._lack else installed("transformers") or ""
        self._process: _NamesProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def describe(self, config: bytes) -> tuple[str, JsonObject]:
        """The version that answers, and state dicts that a config may mean.

        These are ``{"candidates": [...]}``, or ``{"error": ...}``.
        """
        for version, path in _remembered(config, self._version):
            if (known := _read_cache(path)) is not None:
                return version, known
        if not self._lack:
            self._start()
        if self._process is None:
            return "", self._unanswered()
        answer = self._process.ask(config)
        if answer is None:
            answer = {"error": f"transformers failed: {self._process.last_words()}"}
            self._end()
        elif (home := _cache_home()) is not None:
            content = json.dumps(answer).encode()
            with contextlib.suppress(OSError):  # without a cache the export goes on
                path = home / _cache_name(config, self._version)
                replace_content(path, b"%b\n%b" % (_digest(content).encode(), content))
        return self._version, answer

    def _start(self) -> None:
        """See to it that there is a process, unless transformers cannot be imported."""
        if self._process is not None:
            return
        self._process = _NamesProcess()
        if not self._process.is_ready():
            self._lack = f"transformers {self._version}, but {self._process.last_words()}"
            self._end()

    def _unanswered(self) -> JsonObject:
        """The answer where names are not needed; where they are, to go on would be a guess."""
        if self._are_needed:
            raise MissingExtraError(
                "the names of the model's weights on the hub are not known in this environment",
                found=self._lack,
                expected=HUB_WANTED,
                hint=f"{to_have_names()}; or keep the names in memory, with --layout memory",
            )
        self.lacked = self._lack
        return {"error": f"transformers cannot be asked: {self._lack}"}

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _NamesProcess:
    """``zexport.model.names_process``, as it runs."""

    def __init__(self) -> None:
        self._output = _temporary_file()
        answers, to_answer = os.pipe()
        # -P: without it the current folder, perhaps the checkpoint's, would be searched for code.
        self._popen = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "zexport.model.names_process", str(to_answer)],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=(to_answer,),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        os.close(to_answer)
        self._answers = os.fdopen(answers, "rb")

    def is_ready(self) -> bool:
        """Whether it could import what it needs to answer; else it is over."""
        return self._answered() is not None

    def ask(self, config: bytes) -> JsonObject | None:
        """The answer to one config; ``None`` if the process ended without it."""
        stdin = self._popen.stdin
        if stdin is None:
            raise AssertionError("it is a pipe")
        with contextlib.suppress(BrokenPipeError):
            stdin.write(config.replace(b"\n", b" ") + b"\n")
            stdin.flush()
        return self._answered()

    def _answered(self) -> JsonObject | None:
        """The next line that it has for us; ``None`` if it ended without one."""
        watch = Timer(_TIMEOUT_SECONDS, self._popen.kill)
        watch.start()
        try:
            return cast("JsonObject", json.loads(self._answers.readline()))
        except (ValueError, RecursionError):
            self._popen.wait()
            return None
        finally:
            watch.cancel()

    def last_words(self) -> str:
        """Why the process, which is over, ended without an answer."""
        status = self._popen.returncode
        if status == -signal.SIGXCPU:
            return "building the model that config.json describes took too long"
        if status == -signal.SIGKILL:
            return f"it was killed, for want of memory or after {_TIMEOUT_SECONDS} s"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        words = [line.strip() for line in reversed(lines) if re.search(r"\w", line)]
        last = next(filter(_ERROR.match, words), words[0] if words else "")
        if "MemoryError" in last or "not enough memory" in last:
            return "the model that config.json describes takes too much memory to build"
        return last[:_MESSAGE_LENGTH_MAX] or f"it ended with {status}"

    def end(self) -> None:
        """End the process, which has nothing to lose."""
        self._popen.kill()
        with contextlib.suppress(BrokenPipeError), self._popen, self._answers:
            self._output.close()


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as cause:
        raise OutputError(
            f"no temporary file can be made: {cause.strerror}",
            hint="Set TMPDIR to a folder that you may write to",
        ) from cause


def _cache_home() -> Path | None:
    """Where answers are kept; ``None`` for a user who has no folder for that."""
    try:
        return cache_folder() / "zexport"
    except RuntimeError:
        return None


def _cache_name(config: bytes, version: str) -> str:
    return f"names-{_SCHEMA}-transformers-{version}-{_digest(config)}.json"


def _remembered(config: bytes, version: str) -> Iterator[tuple[str, Path]]:
    """Where the answer of a version may lie; without one, that of any, the newest first."""
    home = _cache_home()
    if home is None:
        return
    if version:
        yield version, home / _cache_name(config, version)
        return
    before, after = _cache_name(config, "*").split("*")
    found = {
        path.name.removeprefix(before).removesuffix(after): path
        for path in matching(home, f"{before}*{after}")
    }
    yield from sorted(found.items(), key=_age, reverse=True)


def _age(item: tuple[str, Path]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", item[0])]


def _read_cache(path: Path) -> JsonObject | None:
    """The cached answer; one that is not as it was written counts as none: it is asked again."""
    try:
        content = read_regular(path, _CACHED_NBYTES_MAX)
    except OSError:
        return None
    seal, _, answer = (content or b"").partition(b"\n")
    return cast("JsonObject", json.loads(answer)) if seal == _digest(answer).encode() else None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
