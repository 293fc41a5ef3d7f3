"""The output folder's transaction: it appears complete, or everything is as it was."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from zexport.errors import OutputError
from zexport.run.journal import JOURNAL_NAME, drop_unfinished, finished_shards
from zexport.run.place import check_content, check_place, real_path
from zexport.store.disk import HINTS, sync_path, writing

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_LOCKS_UNKNOWN = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


@contextmanager
def staged_folder(
    out_dir: Path,
    *,
    overwrite: bool,
    sources: Iterable[Path] = (),
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[Path]:
    """A folder to fill: it becomes ``out_dir`` when the block ends, and never when that fails.

    It lies beside ``out_dir``, as ``<out_dir>.partial``, so that the last step is a rename. Before
    the block, everything that can be known to fail has been looked at; an older folder is replaced
    only when the new one is complete and on the disk. Two processes never fill the same folder.

    What was done is kept where a rerun may go on: after an interrupt, and where the system refused,
    the folder stays with the shards that its journal notes. It holds what a stopped export left,
    killed ones included, when the block begins. After any other failure it is gone.

    Args:
        out_dir: the folder to make; a symbolic link is followed.
        overwrite: whether an older model folder is replaced.
        sources: the files being read, which the folder must neither hold nor lie beside.
        warn: told of what could not be cleared away once the folder was there.

    Raises:
        OutputError: the folder cannot be made.
    """
    target = real_path(out_dir)
    check_place(target, sources)
    for place in _workplaces(target):
        check_place(place, sources)
    with _parents(target.parent), _lock(target):
        _restore(target)
        check_content(target, overwrite=overwrite)
        partial = _beside(target, _PARTIAL)
        with writing(partial):
            partial.mkdir(exist_ok=True)
            drop_unfinished(partial)
        try:
            yield partial
            with writing(partial):
                _commit(partial, target, overwrite=overwrite, warn=warn)
        except BaseException as error:
            _clear_up(partial, error)
            raise


def _clear_up(partial: Path, error: BaseException) -> None:
    """Keep the finished shards where a rerun may succeed; else leave nothing."""
    finished = finished_shards(partial) if _may_pass(error) else ()
    if not finished:
        shutil.rmtree(partial, ignore_errors=True)
        return
    with suppress(OSError):
        drop_unfinished(partial)
    count = f"{len(finished)} finished shard{'s' * (len(finished) > 1)}"
    error.add_note(f"Kept {count} in {partial}: the same command goes on from there.")


def _may_pass(error: BaseException) -> bool:
    """Whether the cause lies with the user or the system, and not in what was read or written."""
    is_interrupt = not isinstance(error, Exception) or isinstance(error, MemoryError)
    return is_interrupt or isinstance(error.__cause__, OSError)


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(target.name + ending)


def _workplaces(target: Path) -> tuple[Path, Path]:
    """The folders that are made, and cleared away, on the way to ``target``."""
    return _beside(target, _PARTIAL), _beside(target, _REPLACED)


def _in_the_way(place: Path) -> OutputError:
    """No killed export has left this folder: it is the user's."""
    return OutputError(
        "is in the way: an export works under this name before it has its own",
        path=place,
        hint="Move it away, or choose another name for the output",
    )


@contextmanager
def _parents(parent: Path) -> Iterator[None]:
    """Make the missing folders above the target; take them away again when the block fails."""
    with writing(parent):
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
    try:
        _check_permission(parent)
        yield
    except BaseException:
        for folder in missing:
            _remove_if_empty(folder)
        raise


def _check_permission(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError("cannot be written: no permission", path=folder, hint=HINTS[errno.EACCES])


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Hold ``<target>.partial.lock``, a file that is locked for as long as its process lives.

    It stays where its process leaves unfinished work, which the next one knows by it: without it,
    a folder of that name is the user's.

    Where the file system knows no locks, the work goes on without one: that errs on the side of
    working on shared disks, where a second export into the same folder is the user's to avoid.
    """
    path = _beside(target, f"{_PARTIAL}.lock")
    descriptor, was_there = _locked(path, target)
    foreign = [] if was_there else [place for place in _workplaces(target) if place.exists()]
    try:
        if foreign:
            raise _in_the_way(foreign[0])
        yield
    finally:
        if foreign or not any(place.exists() for place in _workplaces(target)):
            with suppress(OSError):  # left behind, it is taken by the next export
                path.unlink()
        os.close(descriptor)


def _locked(path: Path, target: Path) -> tuple[int, bool]:
    while True:
        with writing(path):
            was_there = path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            os.close(descriptor)
            raise OutputError(
                "another export is writing this folder",
                path=target,
                hint="Wait for it, or choose another name",
            ) from cause
        except OSError as cause:
            if cause.errno not in _LOCKS_UNKNOWN:
                os.close(descriptor)
                raise OutputError(f"cannot be locked: {cause.strerror}", path=path) from cause
        if _is_still(path, descriptor):
            return descriptor, was_there
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the name still leads to the locked file, and not to one made after its removal."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _restore(target: Path) -> None:
    """Undo the first half of a replacement whose process was killed between two renames."""
    replaced = _beside(target, _REPLACED)
    with writing(target):
        if replaced.exists() and not target.exists():
            replaced.rename(target)


def _commit(partial: Path, target: Path, *, overwrite: bool, warn: Callable[[str], None]) -> None:
    """Give the folder its name, or leave everything under the names that it had."""
    _remove(partial / JOURNAL_NAME)
    _sync_all(partial)
    if not (overwrite and target.exists()):
        _rename_for_good(partial, target)
        return
    replaced = _beside(target, _REPLACED)
    _discard(replaced, warn)
    target.rename(replaced)
    try:
        _rename_for_good(partial, target)
    except BaseException:
        replaced.rename(target)
        raise
    _discard(replaced, warn)


def _discard(replaced: Path, warn: Callable[[str], None]) -> None:
    """Remove a folder that was replaced.

    What cannot be removed is told, and gets another name: the next replacement needs this one.
    """
    try:
        _remove(replaced)
    except OSError as cause:
        names = (replaced.with_name(f"{replaced.name}-{number}") for number in count(2))
        left = next(name for name in names if not os.path.lexists(name))
        try:
            replaced.rename(left)
        except OSError:
            left = replaced
        warn(f"what was replaced cannot be removed ({cause.strerror}): it is left in {left}")


def _rename_for_good(folder: Path, name: Path) -> None:
    """Rename a folder, and have the disk take the new name; else it has the old one."""
    folder.rename(name)
    try:
        sync_path(name.parent)
    except BaseException:
        name.rename(folder)
        raise


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_all(folder: Path) -> None:
    """Put every file on the disk, then the folders that name them."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync_path(path)
    sync_path(folder)
