"""The local file system. No other module changes it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, TypeVar

from zexport.storage.os_errors import steadily, synced, writing
from zexport.storage.storage import Entry, InputFile, Kind, OutputFile, Stat, Storage, Version

_T = TypeVar("_T")

_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})
_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_HELD = {errno.EAGAIN, errno.EACCES}
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


def _kind_of(mode: int) -> Kind:
    return Kind.FILE if stat.S_ISREG(mode) else Kind.FOLDER if stat.S_ISDIR(mode) else Kind.OTHER


def _kind_of_entry(entry: os.DirEntry[str]) -> Kind:
    return Kind.FOLDER if entry.is_dir() else Kind.FILE if entry.is_file() else Kind.OTHER


def _version_of(status: os.stat_result) -> Version:
    return Version(status.st_size, status.st_mtime_ns)


def _open_regular(path: Path) -> int:
    """Open a regular file; refuse pipes and devices, which may block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


class LocalStorage(Storage[Path]):
    def stat(self, path: Path) -> Stat | None:
        try:
            status = steadily(path.stat)
        except ValueError:  # a null byte
            return None
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise
        return Stat(_kind_of(status.st_mode), _version_of(status), status.st_ctime_ns)

    def entries(self, folder: Path) -> list[Entry]:
        with os.scandir(folder) as found:
            return [Entry(one.name, _kind_of_entry(one), one.is_symlink()) for one in found]

    def version(self, path: Path) -> Version:
        return _version_of(steadily(path.stat))

    def open(self, path: Path, known: Version | None) -> LocalInput:  # noqa: ARG002
        return LocalInput(path)

    def create(self, path: Path, *, is_new: bool, nbytes: int) -> LocalOutput:  # noqa: ARG002
        return LocalOutput(path, is_new=is_new)

    def put(self, path: Path, content: bytes, *, is_new: bool) -> None:  # noqa: ARG002
        fresh = path.with_name(f".{path.name}.new")
        self.make_folder(path.parent)
        try:
            fresh.write_bytes(content)
            self.sync(fresh)
            fresh.replace(path)
        except OSError:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
        self.sync(path.parent)

    def delete(self, paths: list[Path]) -> None:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def make_folder(self, path: Path) -> None:
        missing = [*takewhile(lambda one: not one.exists(), (path, *path.parents))]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:  # to flush a folder does not flush its own name
            self.sync(folder.parent)

    def sync(self, path: Path) -> None:
        descriptor = steadily(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        try:
            synced(descriptor)
        finally:
            os.close(descriptor)

    def real(self, path: Path) -> Path:
        return Path(os.path.realpath(path))

    def free_nbytes(self, folder: Path) -> int | None:
        status = steadily(lambda: os.statvfs(folder))
        return status.f_bavail * status.f_frsize


LOCAL = LocalStorage()


class _Opened:
    """An open file; reopened when a network file system drops it."""

    def __init__(self, path: Path, descriptor: int, flags: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._flags = flags | os.O_CLOEXEC
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _steadily(self, act: Callable[[], _T]) -> _T:
        return steadily(act, recover=self._reopen)

    def _reopen(self) -> None:
        """Open the path again under the same number, in one step for all threads."""
        fresh = os.open(self.path, self._flags)
        try:
            os.dup2(fresh, self._descriptor, inheritable=False)
        finally:
            os.close(fresh)


class LocalInput(_Opened, InputFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, steadily(lambda: _open_regular(path)), os.O_RDONLY)

    def version(self) -> Version:
        return _version_of(os.fstat(self._descriptor))

    def read(self, offset: int, part: memoryview) -> int:
        return self._steadily(lambda: os.preadv(self._descriptor, [part], offset))

    def read_at(self, offset: int, nbytes: int) -> bytes:
        data = b""
        while more := self._steadily(
            partial(os.pread, self._descriptor, nbytes - len(data), offset + len(data))
        ):
            data += more
        return data

    def forget(self) -> None:
        synced(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class LocalOutput(_Opened, OutputFile):
    def __init__(self, path: Path, *, is_new: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else 0)
        if is_new:
            path.parent.mkdir(parents=True, exist_ok=True)  # such as a checkpoint's tag
        super().__init__(path, steadily(lambda: os.open(path, flags, 0o666)), os.O_WRONLY)

    def reserve(self, nbytes: int) -> None:
        with writing(self.path):
            if os.fstat(self._descriptor).st_size == nbytes:
                return  # already allocated
            self._steadily(lambda: os.ftruncate(self._descriptor, nbytes))
            if nbytes:
                self._steadily(lambda: _allocate(self._descriptor, nbytes))

    def write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        done = 0
        with writing(self.path):
            while done < view.nbytes:
                rest = partial(os.pwrite, self._descriptor, view[done:], offset + done)
                done += self._steadily(rest)

    def sync(self) -> None:
        if self._is_open:
            with writing(self.path):  # macOS has no fdatasync
                synced(self._descriptor, getattr(os, "fdatasync", os.fsync))


def _allocate(descriptor: int, nbytes: int) -> None:
    """Allocate a file's first bytes if the file system can (Linux).

    Where it cannot, such as NFS before 4.2, ``os.posix_fallocate`` would write every block.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or not fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        return
    number = ctypes.get_errno()
    if number not in _CANNOT_ALLOCATE:
        raise OSError(number, os.strerror(number))


def rename(path: Path, name: Path) -> None:
    """Rename a file or folder; an existing file is replaced."""
    path.replace(name)


def rename_durably(folder: Path, name: Path) -> None:
    """Rename a folder and flush the new name, or undo the rename."""
    folder.rename(name)
    try:
        LOCAL.sync(name.parent)
    except BaseException:  # Ctrl-C too: a name that may not survive a power cut does not count
        name.rename(folder)
        raise


def hard_link(path: Path, link: Path) -> None:
    os.link(path, link)


def link_or_copy(path: Path, link: Path) -> bool:
    """Make a hard link, or a copy on a file system without; return whether it is a link."""
    try:
        hard_link(path, link)
    except OSError:
        shutil.copy2(path, link)
        return False
    return True


def copy_attributes(path: Path, of: Path) -> None:
    """Give ``path`` the mode and times of another file or folder."""
    shutil.copystat(of, path)


def symlink(path: Path, link: Path) -> None:
    link.symlink_to(path)


def remove_if_possible(path: Path) -> None:
    """Remove a file or folder, if it exists and can be removed."""
    with suppress(OSError):
        LOCAL.delete([path])


def append_durably(path: Path, content: bytes) -> None:
    """Append to a file and flush it."""
    with path.open("ab", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def open_log(path: Path) -> IO[str]:
    """Open a text file to append to."""
    return path.open("a", encoding="utf-8")


def copy_mode(path: Path, of: Path) -> None:
    """Give a file the mode of another: safetensors lets only the owner read."""
    path.chmod(of.stat().st_mode)


def remove_empty(folders: list[Path]) -> None:
    """Remove those folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def set_times(paths: list[Path], now_ns: int) -> None:
    """Set access and modification times if the file system can."""
    for path in paths:
        with suppress(OSError):
            os.utime(path, ns=(now_ns, now_ns))


def try_lock(path: Path, *, create: bool = True) -> int | None:
    """Return a descriptor that holds a file's lock; ``None`` if another process holds it.

    On a file system without locks, the lock always succeeds.
    """
    descriptor = os.open(path, _LOCK_FLAGS | (os.O_CREAT if create else 0), 0o666)
    is_held = False
    try:
        is_held = _lock(descriptor, path)
    finally:
        if not is_held:
            os.close(descriptor)
    return descriptor if is_held else None


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the lock is held, on a file that its last owner has not removed meanwhile.

    NFS renames such a file while it is open, so compare its name, not its link count.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as refusal:
        if refusal.errno in _LOCK_HELD:
            return False
        if refusal.errno not in _NO_LOCKS:
            raise
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def unlock(descriptor: int, path: Path | None = None) -> None:
    """Release a lock, also if a forked child has the descriptor; remove its file ``path``."""
    if path is not None:
        with suppress(OSError):  # left behind, the next export takes it
            path.unlink()
    with suppress(OSError):  # no locks here
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
