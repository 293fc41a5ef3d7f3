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

from zexport.jsontypes import Json, JsonObject

_SCHEMA = 5
_TIMEOUT_SECONDS = 240
"""Importing transformers takes that long on no machine; what comes then is bounded by itself."""

_MESSAGE_LENGTH_MAX = 500


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
        answer = _read_cache(cached)
        if answer is None:
            self._process = self._process or _NamesProcess()
            answer = self._process.ask(config)
            if answer is None:  # there may be one another time, so that this is not kept
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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - as long-lived as the process
        # -P: without it the current folder, perhaps the checkpoint's, would be searched for code.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "zexport.model.names_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )

    def ask(self, config: bytes) -> JsonObject | None:
        """The answer to one config; ``None`` if the process ended without it."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        if stdin is None or stdout is None:
            raise AssertionError("both are pipes")
        watch = Timer(_TIMEOUT_SECONDS, self._popen.kill)
        watch.start()
        try:
            stdin.write(config.replace(b"\n", b" ") + b"\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        except (BrokenPipeError, ValueError, RecursionError):
            self._popen.wait()
            return None
        finally:
            watch.cancel()
        return cast("JsonObject", answer)

    def last_words(self) -> str:
        """Why the process, which is over, ended without an answer."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")
        status = self._popen.returncode
        if status == -signal.SIGXCPU:
            return "building the model that config.json describes took too long"
        if status == -signal.SIGKILL:
            return f"it was killed, for want of memory or after {_TIMEOUT_SECONDS} s"
        if "MemoryError" in last or "not enough memory" in last:
            return "the model that config.json describes takes too much memory to build"
        return last[:_MESSAGE_LENGTH_MAX] or f"it ended with {status}"

    def end(self) -> None:
        """End the process, which has nothing to lose."""
        self._popen.kill()
        with contextlib.suppress(BrokenPipeError), self._popen:
            self._stderr.close()


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache_file(config: bytes, version: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    key = hashlib.blake2b(config, digest_size=16).hexdigest()
    return Path(home) / "zexport" / f"names-{_SCHEMA}-transformers-{version}-{key}.json"


def _read_cache(path: Path) -> JsonObject | None:
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
