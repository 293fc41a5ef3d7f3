"""Giving a folder its name: alone, complete and on the disk, or everything as it was.

A folder is filled beside its place, under a name of its own, while a lock is held. In object
storage there are neither names to be given nor locks: an ``Address`` is filled where it is.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

from blake3 import blake3

from zexport.errors import OutputError, ZexportError
from zexport.filenames import MANIFEST_NAME, RECEIPTS
from zexport.printable import shell_word
from zexport.store import objects
from zexport.store.address import Address
from zexport.store.files import HINTS, sync_path, version, writing
from zexport.store.folders import exists, is_file, is_folder
from zexport.store.retries import steadily, synced

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_LOCK_SECONDS = 0.1
"""A lock that its owner removes as we open it is taken anew; one that is held stays so."""

_LOCK_PAUSE_SECONDS = 0.02
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_HELD = frozenset({errno.EAGAIN, errno.EACCES})
_OWN = b"a zexport export\n"
"""In the lock's file: nothing that was not an export's lay under the names that it works under."""

_LOCKS_UNKNOWN = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


def workplaces(target: Path) -> tuple[Path, Path]:
    """On the way to ``target``: the folder that is filled, and the one that is being replaced."""
    if isinstance(target, Address):
        return target, target
    return _beside(target, _PARTIAL), _beside(target, _REPLACED)


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(target.name + ending)


def is_unfinished(folder: Path) -> bool:
    """Whether it is being filled, or was when that was stopped: it has a lock beside it."""
    return folder.name.endswith(_PARTIAL) and exists(folder.with_name(f"{folder.name}.lock"))


def unfinished_work(target: Path) -> tuple[Path, Path] | None:
    """What was begun and not ended: the folder that is filled, and its name once it is complete.

    ``target`` may be either of the two; nothing where it is complete, or was never begun. In object
    storage it has its name already, and there are receipts where the manifest is to be.
    """
    if isinstance(target, Address):
        receipts = target / RECEIPTS
        is_begun = is_folder(receipts) and not is_file(target / MANIFEST_NAME)
        return (receipts, target) if is_begun else None
    if is_unfinished(target):
        return target, target.with_name(target.name.removesuffix(_PARTIAL))
    partial = _beside(target, _PARTIAL) if target.name else target
    is_begun = is_unfinished(partial) and exists(partial) and not exists(target)
    return (partial, target) if is_begun else None


def check_finished(folder: Path, refusal: type[ZexportError]) -> None:
    """Refuse what is being filled, or was when that was stopped."""
    if (work := unfinished_work(folder)) is not None:
        left, name = work
        raise refusal(
            "is not finished",
            path=folder,
            found=f"unfinished work in {left}",
            hint="Run the command that makes it again: it goes on from there; where all parts "
            f"are written, type zexport finish {shell_word(name)}",
        )


@contextmanager
def parents(parent: Path) -> Iterator[None]:
    """Make the missing folders above the target; take them away again when the block fails."""
    if isinstance(parent, Address):
        yield
        return
    with writing(parent):
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        parent.mkdir(parents=True, exist_ok=True)
    try:
        _check_permission(parent)
        yield
    except BaseException:  # Ctrl-C, too, leaves no empty folders behind
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()  # only where it is empty
        raise


def _check_permission(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        is_fixed = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_fixed else errno.EACCES
        with writing(folder):
            raise OSError(number, os.strerror(number))


@contextmanager
def locked(target: Path, *, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold ``<target>.partial.lock`` while the process lives; wait for it ``seconds`` at most.

    It stays beside unfinished work, and says that the folder of that name is an export's own: one
    without it is the user's, unless it has receipts. Where the file system knows no locks the work
    goes on without: a second export into the same folder is the user's to avoid.
    """
    if isinstance(target, Address):
        yield
        return
    path = _beside(target, f"{_PARTIAL}.lock")
    lock = _taken(path, target, "another export is writing this folder", seconds)
    foreign: list[Path] = []
    try:
        with writing(path):
            there = [place for place in workplaces(target) if place.exists()]
            # Asked last: where locks are unknown, another may begin just now.
            if not steadily(lambda: os.pread(lock, 1, 0)):
                foreign = [place for place in there if not (place / RECEIPTS).is_dir()]
                if not foreign:
                    steadily(lambda: os.pwrite(lock, _OWN, 0))
                    synced(lock)  # a power cut that spares the folder is not to lose whose it is
        if foreign:
            raise OutputError(  # no killed export has left it: it is the user's
                "is in the way: an export works under this name before it has its own",
                path=foreign[0],
                hint="Move it away, or choose another name for the output",
            )
        yield
    finally:
        if foreign or not any(place.exists() for place in workplaces(target)):
            with suppress(OSError):  # left behind, it is taken by the next export
                path.unlink()
        _release(lock)


def locked_part(
    target: Path, number: int, *, seconds: float = _LOCK_SECONDS
) -> AbstractContextManager[None]:
    """Hold the lock of one of several workers on ``target``; wait for it ``seconds`` at most."""
    if isinstance(target, Address):
        return nullcontext()
    path = _beside(target, f"{_PARTIAL}.part-{number}.lock")
    held = f"another process writes part {number} of this folder"
    return locked_file(path, target, held, seconds=seconds)


def locked_parts(target: Path) -> AbstractContextManager[None]:
    """Hold the lock of the process that has all parts of ``target`` written by others."""
    path = _beside(target, f"{_PARTIAL}.part-all.lock")
    return locked_file(path, target, "another process has this folder written by a cluster")


@contextmanager
def locked_file(
    path: Path, target: Path, held: str, *, seconds: float = _LOCK_SECONDS
) -> Iterator[None]:
    """Hold a lock while the process lives; ``held`` says of ``target`` that another holds it."""
    lock = _taken(path, target, held, seconds)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        _release(lock)


@contextmanager
def marked(target: Path) -> Iterator[Path]:
    """A file beside ``target`` of a name that there never was: who sees it sees that folder."""
    path = _beside(target, f"{_PARTIAL}.{uuid4().hex}.mark")
    with writing(path):
        path.touch(exist_ok=False)
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def check_no_parts(target: Path) -> None:
    """Refuse a folder that several workers are filling; what dead ones have left is removed."""
    for path in target.parent.glob(glob.escape(f"{target.name}{_PARTIAL}.part-") + "*.lock"):
        with locked_file(path, target, "parts of an export are being written to this folder"):
            pass  # which removes it


def parts_at_work(target: Path) -> tuple[int, ...]:
    """The numbers of the workers that write parts of ``target`` now; none where no locks are."""
    if isinstance(target, Address):
        return ()
    found = []
    for path in target.parent.glob(glob.escape(f"{target.name}{_PARTIAL}.part-") + "[0-9]*.lock"):
        try:
            with locked_file(path, target, "held", seconds=0):
                pass  # which removes what a dead one has left
        except OutputError:
            found.append(int(path.name.rpartition("-")[2].removesuffix(".lock")))
    return tuple(sorted(found))


def is_being_written(target: Path) -> bool:
    """Whether a process holds the lock on ``target`` now; never where no locks are."""
    if isinstance(target, Address):
        return False
    try:
        descriptor = os.open(_beside(target, f"{_PARTIAL}.lock"), _LOCK_FLAGS & ~os.O_CREAT)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as refusal:
        return refusal.errno in _LOCK_HELD
    finally:
        os.close(descriptor)
    return False


def _known(path: Path, target: Path) -> Path:
    """What a refusal is about: a lock that is there, else the folder that it is for."""
    return path if os.path.lexists(path) else target


def _taken(path: Path, target: Path, held: str, seconds: float = _LOCK_SECONDS) -> int:
    """A descriptor that holds the lock of a file until ``_release``, or the process's end."""
    until = time.monotonic() + seconds
    try:
        while (descriptor := _try_lock(path)) is None:
            if time.monotonic() >= until:
                raise OutputError(held, path=target, hint="Wait for it, or choose another name")
            time.sleep(_LOCK_PAUSE_SECONDS)
    except OSError as cause:
        act = "locked" if cause.filename is None else "written"
        hint = HINTS.get(cause.errno or 0, "")
        place = _known(path, target)
        raise OutputError(f"cannot be {act}: {cause.strerror}", path=place, hint=hint) from cause
    return descriptor


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the file's lock; ``None`` where another process does."""
    descriptor = os.open(path, _LOCK_FLAGS, 0o666)
    is_held = False
    try:
        is_held = _lock(descriptor, path)
    finally:
        if not is_held:
            os.close(descriptor)
    return descriptor if is_held else None


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the lock is held now: not of a file that its last owner has removed meanwhile.

    NFS gives such a file another name while it is open; so its name is looked at, not its links.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as refusal:
        if refusal.errno in _LOCK_HELD:
            return False
        if refusal.errno not in _LOCKS_UNKNOWN:
            raise
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _release(descriptor: int) -> None:
    """Give a lock up, whoever else has the descriptor, such as a child that was forked."""
    with suppress(OSError):  # where the file system knows no locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def restore(target: Path) -> None:
    """Undo the first half of a replacement whose process was killed between two renames."""
    if isinstance(target, Address):
        return
    replaced = _beside(target, _REPLACED)
    with writing(target):
        if replaced.exists() and not target.exists():
            replaced.rename(target)


def publish(partial: Path, target: Path, *, overwrite: bool, warn: Callable[[str], None]) -> None:
    """Give the folder its name, or leave everything under the names that it had."""
    if isinstance(target, Address):
        return
    now = time.time_ns()
    for path in (*sorted(partial.rglob("*"), reverse=True), partial):  # files before their folders
        with suppress(OSError):  # some file systems set no times: then `unedited` finds nothing
            os.utime(path, ns=(now, now))
        sync_path(path)
    if not (overwrite and target.exists()):
        _rename_for_good(partial, target)
        return
    replaced = _beside(target, _REPLACED)
    _discard(replaced, warn)
    target.rename(replaced)
    try:
        _rename_for_good(partial, target)
    except BaseException:  # whatever it was, Ctrl-C too: the old folder has its name again
        replaced.rename(target)
        raise
    _discard(replaced, warn)


def put_last(path: Address, content: bytes, others: Iterable[str]) -> None:
    """Write a folder's last object, with a note of the versions of others, for ``unedited``."""
    objects.put(path, content, is_new=True, note=_versions(path.parent, others))


def unedited(last: Path, names: Iterable[str]) -> set[str]:
    """Return which files were not written since their folder was published with ``last``.

    They have the time of ``last``. In a bucket all have the versions of its note, or none counts.
    """
    if isinstance(last, Address):
        is_same = objects.read_note(last) == _versions(last.parent, names)
        return {*names} if is_same else set()
    made, there = version(last).mtime_ns, {name: last.parent / name for name in names}
    return {n for n, path in there.items() if exists(path) and version(path).mtime_ns == made}


def _versions(folder: Address, names: Iterable[str]) -> str:
    listed = [(name, objects.listed(folder / name)) for name in sorted(names)]
    return blake3(repr(listed).encode()).hexdigest()


def _discard(replaced: Path, warn: Callable[[str], None]) -> None:
    """Remove a folder that was replaced.

    What cannot be removed is told, and gets another name: the next replacement needs this one.
    """
    try:
        if replaced.exists():
            shutil.rmtree(replaced)
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
    except BaseException:  # Ctrl-C while it syncs, too: a name that may not last is none
        name.rename(folder)
        raise
