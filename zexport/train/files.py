"""Writing small files so that they are whole on disk or not there."""

from __future__ import annotations

import os
from pathlib import Path

from zexport.store.disk import sync_path
from zexport.store.retries import steadily, synced


def write_atomically(path: Path, text: str) -> None:
    """``path`` holds ``text``, on disk; whatever happens on the way, the old content or the new.

    A storage that falters is tried again, from the first byte.
    """
    steadily(lambda: _write_once(path, text))


def _write_once(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            synced(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def open_like_config(folder: Path) -> None:
    """The weights in a model folder are as readable as its configuration.

    safetensors 0.8 makes its files readable by their owner alone, whatever the umask says.
    """
    mode = next(folder.glob("*config.json")).stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def cause_of(error: Exception, path: Path) -> str:
    """Why a write to ``path`` failed, as the operating system says it.

    torch's zip writer reports a full disk as a wrong position in the file. Writing a few more bytes
    to the file, which is thrown away, gets the true reason; if they can be written, torch's message
    has to do.
    """
    if not isinstance(error, OSError):
        try:
            with path.open("ab", buffering=0) as file:
                file.write(bytes(4096))
                os.fsync(file.fileno())
        except OSError as reason:
            error = reason
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return f"{path}: {str(error).splitlines()[0]}"
