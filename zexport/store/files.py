"""Files: opened without ever waiting for one, read and written by range, put on the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Protocol, Self, TypeAlias, TypeVar

from zexport.errors import CheckpointError, OutputError, ZexportError
from zexport.store import objects
from zexport.store.address import Address
from zexport.store.client import cure_of
from zexport.store.object_files import ObjectInput, ObjectOutput, ObjectReader
from zexport.store.retries import steadily, synced
from zexport.store.versions import Version

_T = TypeVar("_T")

OpenFile: TypeAlias = FileIO | ObjectReader
"""A file that is open for reading, without a buffer."""


def version(path: Path) -> Version:
    """The version of a file."""
    if isinstance(path, Address):
        return objects.head(path)
    status = steadily(path.stat)
    return Version(status.st_size, status.st_mtime_ns)


def listed_version(path: Path) -> Version:
    """The version of a file; of an object as its folder lists it, comparable with such alone."""
    if not isinstance(path, Address):
        return version(path)
    if (found := objects.listed(path)) is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", path)
    return found


def changed_ns(path: Path) -> int | None:
    """When anything of a file last changed, which no copy can set; ``None`` if it is not there.

    An object that changes has another ETag, too.
    """
    try:
        if isinstance(path, Address):
            return (objects.listed(path) or objects.head(path)).mtime_ns
        return steadily(path.stat).st_ctime_ns
    except OSError:
        return None


def version_of(file: OpenFile) -> Version:
    """The version of an open file."""
    return file.version if isinstance(file, ObjectReader) else _version_of(file.fileno())


def _version_of(descriptor: int) -> Version:
    status = os.fstat(descriptor)
    return Version(status.st_size, status.st_mtime_ns)


class _OpenFile:
    """An open file, used by any number of threads, and opened again where the storage falters."""

    def __init__(self, path: Path, descriptor: int, flags: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._flags = flags | os.O_CLOEXEC
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _steadily(self, act: Callable[[], _T]) -> _T:
        return steadily(act, recover=self._reopen)

    def _reopen(self) -> None:
        """Open the path anew under the same number, in one step for all threads that use it."""
        fresh = os.open(self.path, self._flags)
        try:
            os.dup2(fresh, self._descriptor, inheritable=False)
        finally:
            os.close(fresh)


def open_input(path: Path, known: Version | None = None) -> InputFile:
    """A file to be read by range; of an object only what is of the version that is known of it."""
    return ObjectInput(path, known) if isinstance(path, Address) else LocalInput(path)


class LocalInput(_OpenFile):
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, steadily(lambda: open_descriptor(path)), os.O_RDONLY)

    def version(self) -> Version:
        """What it is now."""
        return _version_of(self._descriptor)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """The system reads ahead by itself."""

    def read(self, offset: int, part: memoryview) -> int:
        """How many bytes from ``offset`` on were read into ``part``: 0 only at the end."""
        try:
            return _preadv(self._descriptor, part, offset)
        except OSError:
            return self._steadily(lambda: _preadv(self._descriptor, part, offset))

    def forget(self) -> None:
        """Put the file on the disk and have the system forget it: the next reading starts there.

        A file system may refuse to forget, which is no error.
        """
        synced(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


InputFile: TypeAlias = LocalInput | ObjectInput
"""A file that is being read by range, from any number of threads."""


if hasattr(os, "preadv"):

    def _preadv(descriptor: int, part: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [part], offset)

else:  # pragma: no cover - macOS before 11 lacks preadv

    def _preadv(descriptor: int, part: memoryview, offset: int) -> int:
        data = os.pread(descriptor, part.nbytes, offset)
        part[: len(data)] = data
        return len(data)


def read_at(file: OpenFile, offset: int, nbytes: int) -> bytes:
    """Bytes of an open file, or what there is of them; its position stays where it is."""
    if isinstance(file, ObjectReader):
        return file.read_at(offset, nbytes)
    return os.pread(file.fileno(), nbytes, offset)


def size_now(file: FileIO) -> int:
    """Bytes of an open file, which another process may be writing."""
    return os.fstat(file.fileno()).st_size


def open_regular(path: Path) -> OpenFile:
    """The file, open for reading, without a buffer.

    A pipe, a device or a socket is refused at once: to open one may wait for ever, or give bytes
    without end.
    """
    if isinstance(path, Address):
        return ObjectReader(path)
    return FileIO(path, opener=lambda name, _: open_descriptor(Path(name)))


def open_descriptor(path: Path) -> int:
    """The same as a descriptor, which is the caller's to close."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


HINTS = {
    errno.ENOENT: "Choose a folder that can be made, and that nothing removes meanwhile",
    errno.ENOSPC: "Free some space, or choose another disk",
    errno.EDQUOT: "Free some of your quota, or choose another disk",
    errno.EACCES: "Choose a folder you may write to",
    errno.EPERM: "Choose a folder you may write to",
    errno.EROFS: "Choose a disk that is not read-only",
}
_NO_ROOM_TO_TAKE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""What a file system says that cannot take room before there are bytes."""


@contextmanager
def reading(
    path: Path, error: type[ZexportError] = CheckpointError, hint: str = ""
) -> Iterator[None]:
    """Turn an operating system's refusal to read into an error about what it names, else ``path``.

    If a whole bucket or store refuses, it is about ``path``.
    What was not to be read is not for this block: refusals to write are for ``writing``.
    """
    try:
        yield
    except OSError as cause:
        cure = cure_of(cause)
        raise error(
            f"cannot be read: {cause.strerror or cause}",
            path=path if cure else _named(cause) or path,
            hint=cure or hint,
        ) from cause


def _named(cause: OSError) -> Path | None:
    """What the system's refusal is about, where it says so."""
    name = cause.filename
    if isinstance(name, Address):
        return name
    return Path(name) if isinstance(name, str | os.PathLike) else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write into an ``OutputError`` about ``path``."""
    try:
        yield
    except OSError as cause:
        raise OutputError(
            f"cannot be written: {cause.strerror}",
            path=path,
            hint=cure_of(cause) or HINTS.get(cause.errno or 0, ""),
        ) from cause


def free_nbytes(folder: Path) -> int:
    """How many bytes the file system of a folder has room for."""
    status = steadily(lambda: os.statvfs(folder))
    return status.f_bavail * status.f_frsize


def check_space(folder: Path, nbytes: int) -> None:
    """Refuse a folder whose file system has no room for ``nbytes`` more bytes; a store has room."""
    if isinstance(folder, Address):
        return
    with writing(folder):
        free = free_nbytes(folder)
    if free < nbytes:
        raise OutputError(
            "has no room for the output",
            path=folder,
            found=f"{free} bytes free",
            expected=f"at least {nbytes}",
            hint=HINTS[errno.ENOSPC],
        )


def open_output(path: Path, *, is_new: bool, nbytes: int = 0) -> OutputFile:
    """A file to be written, of ``nbytes`` at the most; unless ``is_new``, it may be there already.

    An object that is new is small, and held until it is complete.
    """
    if isinstance(path, Address):
        return ObjectOutput(path, is_new=is_new, nbytes=nbytes)
    return LocalOutput(path, is_new=is_new)


class LocalOutput(_OpenFile):
    """A file of this machine."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else 0)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)  # such as a checkpoint's tag
            descriptor = steadily(lambda: os.open(path, flags, 0o666))
        super().__init__(path, descriptor, os.O_WRONLY)

    def complete(self) -> None:
        """It is there from the beginning."""

    def reserve(self, nbytes: int) -> None:
        """Give the file its size, and where the file system can, its room on the disk."""
        with writing(self.path):
            self._steadily(lambda: os.ftruncate(self._descriptor, nbytes))
            if nbytes:
                self._steadily(lambda: _take_room(self._descriptor, nbytes))

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put ``data`` at its place; not yet on the disk."""
        view = memoryview(data)
        done = 0
        with writing(self.path):
            while done < view.nbytes:
                rest, at = view[done:], offset + done
                done += self._steadily(partial(os.pwrite, self._descriptor, rest, at))

    def sync(self) -> None:
        """Return when what was written is on the disk; does nothing once the file is closed."""
        if self._is_open:
            with writing(self.path):
                synced(self._descriptor, _fdatasync)


OutputFile: TypeAlias = LocalOutput | ObjectOutput
"""A file that is being written; what the system refuses is an ``OutputError``."""


def _fdatasync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has no fdatasync


def sync_path(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk; an object is there once it is complete."""
    if isinstance(path, Address):
        return
    descriptor = steadily(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    try:
        synced(descriptor)
    finally:
        os.close(descriptor)


class _Fallocate(Protocol):
    def __call__(self, descriptor: int, mode: int, offset: int, nbytes: int, /) -> int: ...


def _take_room(descriptor: int, nbytes: int) -> None:
    """Take the room of a file's first bytes, if the file system can.

    Where it cannot (NFS before 4.2), ``os.posix_fallocate`` would write into every block, which
    takes as long as the export.
    """
    fallocate = _fallocate()
    if fallocate is None or fallocate(descriptor, 0, 0, nbytes) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NO_ROOM_TO_TAKE:
        raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> _Fallocate | None:
    """Linux's own call; ``None`` on other systems."""
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    found: _Fallocate = function
    return found
