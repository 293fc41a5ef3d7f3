"""Asking transformers for models' names, by a process of its own, and remembering what it said."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import IO, Self, cast

from zexport.errors import MissingExtraError, OutputError
from zexport.extras import HUB_WANTED, installed, lack_for_names, to_have_names
from zexport.store.contents import read_regular
from zexport.store.folders import cache_folder, exists, home, matching, replace_content
from zexport.store.json import JsonObject

_log = logging.getLogger(__name__)

_SCHEMA = 7


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
        self._is_forgetful = False

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
        else:
            self._remember(config, answer)
        return self._version, answer

    def _remember(self, config: bytes, answer: JsonObject) -> None:
        """Keep an answer for the next time; without a cache the export goes on, and says so."""
        content = json.dumps(answer).encode()
        folder, why = _cache_home(), "there is no home folder"
        if folder is not None:
            try:
                path = folder / _cache_name(config, self._version)
                replace_content(path, b"%b\n%b" % (_digest(content).encode(), content))
            except OSError as refusal:
                why = f"{folder}: {refusal.strerror}"
            else:
                return
        if not self._is_forgetful:
            self._is_forgetful = True
            _log.warning(
                "The names cannot be kept (%s), and the next export asks for them again. Set "
                "XDG_CACHE_HOME to a folder that you may write to.",
                why,
            )

    def _start(self) -> None:
        """See to it that there is a process, unless transformers cannot be imported."""
        if self._process is not None:
            return
        _log.info("Asking transformers for the names of this model, once for each config")
        self._process = _NamesProcess()
        if self._process.answered() is None:  # to begin with, that it has imported what it needs
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

    def ask(self, config: bytes) -> JsonObject | None:
        """The answer to one config; ``None`` if the process ended without it."""
        stdin = self._popen.stdin
        if stdin is None:
            raise AssertionError("it is a pipe")
        with contextlib.suppress(BrokenPipeError):
            stdin.write(config.replace(b"\n", b" ") + b"\n")
            stdin.flush()
        return self.answered()

    def answered(self) -> JsonObject | None:
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
    import tempfile  # noqa: PLC0415 - names that are known need none

    try:
        return tempfile.TemporaryFile()
    except OSError as cause:
        raise OutputError(
            f"no temporary file can be made: {cause.strerror}",
            hint="Set TMPDIR to a folder that you may write to",
        ) from cause


def _cache_home() -> Path | None:
    """Where answers are kept; ``None`` for a user who has no folder for that.

    A home folder that is not there is not made, though root could.
    """
    try:
        cache, own = cache_folder(), home()
    except RuntimeError:
        return None
    is_homeless = own is not None and cache.is_relative_to(own) and not exists(own)
    return None if is_homeless else cache / "zexport"


def _cache_name(config: bytes, version: str) -> str:
    return f"names-{_SCHEMA}-transformers-{version}-{_digest(config)}.json"


def _remembered(config: bytes, version: str) -> Iterator[tuple[str, Path]]:
    """Where the answer of a version may lie; without one, that of any, the newest first."""
    folder = _cache_home()
    if folder is None:
        return
    if version:
        yield version, folder / _cache_name(config, version)
        return
    before, after = _cache_name(config, "*").split("*")
    found = {
        path.name.removeprefix(before).removesuffix(after): path
        for path in matching(folder, f"{before}*{after}")
    }
    ages = {version: [*map(int, re.findall(r"\d+", version))] for version in found}
    yield from sorted(found.items(), key=lambda one: ages[one[0]], reverse=True)


def _read_cache(path: Path) -> JsonObject | None:
    """The cached answer; one that is not as it was written counts as none: it is asked again."""
    try:
        content = read_regular(path, _CACHED_NBYTES_MAX)
    except OSError:
        return None
    seal, _, answer = (content or b"").partition(b"\n")
    return cast("JsonObject", json.loads(answer)) if seal == _digest(answer).encode() else None


def _digest(content: bytes) -> str:
    import hashlib  # noqa: PLC0415 - it loads OpenSSL

    return hashlib.blake2b(content, digest_size=16).hexdigest()
