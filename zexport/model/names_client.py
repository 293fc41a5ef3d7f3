"""Transformers, asked for the names of models in a process of its own.

Importing transformers takes seconds and hundreds of megabytes, so ``zexport.model.names_process``
does it, and ends with the client; each answer is cached by the config's digest and the version of
transformers, so that most exports need no process at all.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from threading import Timer
from typing import Self, cast

from zexport.store.files import read_regular
from zexport.store.folders import cache_folder, replace_content
from zexport.store.json import Json, JsonObject

_SCHEMA = 5
_CACHED_NBYTES_MAX = 64 << 20
_TIMEOUT_SECONDS = 240
"""Importing transformers takes that long on no machine; what comes then is bounded by itself."""

_MESSAGE_LENGTH_MAX = 500
_ERROR = re.compile(r"\w+(Error|Exception|Interrupt|Exit)\b.*")


class NamesClient:
    """What the installed transformers says of configs; use it in a ``with`` statement.

    Attributes:
        version: of transformers; ``None`` where it is not installed.
    """

    def __init__(self) -> None:
        self.version = _installed_version()
        self._process: _NamesProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def describe(self, config: bytes) -> JsonObject:
        """State dicts that a config may mean: ``{"candidates": [...]}``, or ``{"error": ...}``.

        Args:
            config: the content of a ``config.json``.
        """
        if self.version is None:
            return {"error": "transformers is not installed"}
        cached = _cache_file(config, self.version)
        if (known := _read_cache(cached)) is not None:
            return known
        self._process = self._process or _NamesProcess()
        answer = self._process.ask(config)
        if answer is None:
            answer = {"error": f"transformers failed: {self._process.last_words()}"}
            self._end()
        else:
            _write_cache(cached, answer)
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _NamesProcess:
    """``zexport.model.names_process``, as it runs."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the process
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

    def ask(self, config: bytes) -> JsonObject | None:
        """The answer to one config; ``None`` if the process ended without it."""
        stdin = self._popen.stdin
        if stdin is None:
            raise AssertionError("it is a pipe")
        watch = Timer(_TIMEOUT_SECONDS, self._popen.kill)
        watch.start()
        try:
            stdin.write(config.replace(b"\n", b" ") + b"\n")
            stdin.flush()
            return cast("JsonObject", json.loads(self._answers.readline()))
        except (BrokenPipeError, ValueError, RecursionError):
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


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache_file(config: bytes, version: str) -> Path | None:
    """Where the answer is kept; ``None`` for a user who has no folder for that."""
    try:
        home = cache_folder()
    except RuntimeError:
        return None
    key = hashlib.blake2b(config, digest_size=16).hexdigest()
    return home / "zexport" / f"names-{_SCHEMA}-transformers-{version}-{key}.json"


def _read_cache(path: Path | None) -> JsonObject | None:
    """The cached answer; one that is not as it was written counts as none: it is asked again."""
    try:
        content = None if path is None else read_regular(path, _CACHED_NBYTES_MAX)
    except OSError:
        return None
    seal, _, answer = (content or b"").partition(b"\n")
    return cast("JsonObject", json.loads(answer)) if seal == _seal(answer) else None


def _write_cache(path: Path | None, answer: Mapping[str, Json]) -> None:
    """Keep an answer; a cache that cannot be written is no failure of the export."""
    if path is None:
        return
    content = json.dumps(answer).encode()
    with contextlib.suppress(OSError):
        replace_content(path, b"%b\n%b" % (_seal(content), content))


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()
