"""One writer per output: lock files, and the names of unfinished folders.

``OUT.partial`` is filled and then renamed to OUT; ``OUT.replaced`` is the old OUT meanwhile.
Buckets have neither locks nor renames: there the output is filled in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zexport.errors import OutputError, ZexportError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.storage import local
from zexport.storage.files import exists, is_file, is_folder, is_local, make_folder, sync_path
from zexport.storage.os_errors import writing
from zexport.text import shell_word

_PARTIAL = ".partial"
_LOCK_SECONDS = 0.1  # its owner may be removing it right now


def workplaces(target: Path) -> tuple[Path, Path]:
    """Return the folder to fill and the name of the old folder while it is replaced."""
    if not is_local(target):
        return target, target
    return with_suffix(target, _PARTIAL), with_suffix(target, ".replaced")


def with_suffix(target: Path, suffix: str) -> Path:
    """Return the path next to ``target`` with a suffix appended to its name."""
    return target.parent / f"{target.name}{suffix}"  # also of the root folder


def is_unfinished(folder: Path) -> bool:
    """Whether it is an unfinished folder: there is a lock file next to it."""
    return folder.name.endswith(_PARTIAL) and exists(with_suffix(folder, ".lock"))


def check_finished(folder: Path, refusal: type[ZexportError]) -> None:
    """Raise ``refusal`` if a folder is an unfinished export, or the name of one.

    In a bucket, a journal without a manifest is unfinished.
    """
    left, name = folder, folder
    if not is_local(folder):
        left = folder / RECEIPTS
        is_begun = is_folder(left) and not is_file(folder / MANIFEST_NAME)
    elif is_begun := is_unfinished(folder):
        name = folder.with_name(folder.name.removesuffix(_PARTIAL))
    elif folder.name:
        left = with_suffix(folder, _PARTIAL)
        is_begun = is_unfinished(left) and exists(left) and not exists(folder)
    if is_begun:
        raise refusal(
            "is not finished",
            path=folder,
            found=f"unfinished work in {left}",
            hint="Run the same command again to continue; if all parts are written, run zexport "
            f"finish {shell_word(name)}",
        )


@contextmanager
def parents(parent: Path) -> Iterator[None]:
    """Create the missing folders above the target; remove them if the block fails."""
    with writing(parent):
        missing = [folder for folder in (parent, *parent.parents) if not exists(folder)]
        make_folder(parent)
    try:
        yield
    except BaseException:  # Ctrl-C too
        local.remove_empty(missing)
        raise


@contextmanager
def locked(target: Path, *, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold ``OUT.partial.lock`` for the block; wait up to ``seconds`` for it.

    The lock file stays next to an unfinished folder and marks it as an export's. Without it and
    without a journal, the folder belongs to the user.

    Raises:
        OutputError: another process holds the lock, or a folder of the user is in the way.
    """
    if not is_local(target):
        yield
        return
    path, places = with_suffix(target, f"{_PARTIAL}.lock"), workplaces(target)
    with writing(path):
        there = [place for place in places if place.exists() and not (place / RECEIPTS).is_dir()]
        # Another export may begin or end right now.
        if there and not path.exists() and there[0].exists():
            raise OutputError(
                "blocks the export: zexport needs this name for unfinished work",
                path=there[0],
                hint="Move it, or choose another output",
            )
    lock = _take(path, target, "another export is writing this folder", seconds)
    try:
        with writing(path):
            sync_path(path.parent)
        yield
    finally:
        local.unlock(lock, None if any(place.exists() for place in places) else path)


@contextmanager
def locked_file(
    path: Path, target: Path, held: str, *, seconds: float = _LOCK_SECONDS
) -> Iterator[None]:
    """Hold a lock file for the block.

    Raises:
        OutputError: another process holds it, with the message ``held`` about ``target``.
    """
    lock = _take(path, target, held, seconds)
    try:
        yield
    finally:
        local.unlock(lock, path)


def is_being_written(target: Path) -> bool:
    """Whether a process holds the lock of ``target``; unknown without locks."""
    with suppress(OSError):
        if is_local(target):
            lock = local.try_lock(with_suffix(target, f"{_PARTIAL}.lock"), create=False)
            if lock is None:
                return True
            local.unlock(lock)
    return False


def _take(path: Path, target: Path, held: str, seconds: float) -> int:
    until = time.monotonic() + seconds
    with writing(path if os.path.lexists(path) else target):
        while (lock := local.try_lock(path)) is None:
            if time.monotonic() >= until:
                raise OutputError(held, path=target, hint="Wait for it, or choose another name")
            time.sleep(0.02)
    return lock
