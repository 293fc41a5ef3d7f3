"""Files on their way to the disk: room taken first, bytes at their place, refusals explained."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from zexport.errors import OutputError
from zexport.store.retries import reopen, steadily, synced, write_some

HINTS = {
    errno.ENOSPC: "Free some space, or choose another disk",
    errno.EDQUOT: "Free some of your quota, or choose another disk",
    errno.EACCES: "Choose a folder you may write to",
    errno.EPERM: "Choose a folder you may write to",
    errno.EROFS: "Choose a disk that is not read-only",
}
_NO_ROOM_TO_TAKE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""What a file system says that cannot take room before there are bytes."""

_BLOCK_NBYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write into an ``OutputError`` about ``path``."""
    try:
        yield
    except OSError as cause:
        raise OutputError(
            f"cannot be written: {cause.strerror}",
            path=path,
            hint=HINTS.get(cause.errno or 0, ""),
        ) from cause


def check_space(folder: Path, nbytes: int) -> None:
    """Refuse a folder whose file system has no room for ``nbytes`` more bytes."""
    with writing(folder):
        status = steadily(lambda: os.statvfs(folder))
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise OutputError(
            "has no room for the output",
            path=folder,
            found=f"{free} bytes free",
            expected=f"at least {nbytes}",
            hint=HINTS[errno.ENOSPC],
        )


class OutputFile:
    """A file that is being written, from any number of threads.

    Every method raises ``OutputError`` where the system refuses. A storage that falters is tried
    again (``zexport.store.retries``).

    Args:
        path: the file.
        is_new: whether it must not be there yet; else it is written over, if it is there.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else 0)
        with writing(path):
            path.parent.mkdir(exist_ok=True)  # such as additional_chat_templates
            self._descriptor = steadily(lambda: os.open(path, flags, 0o666))
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def reserve(self, nbytes: int) -> None:
        """Give the file its size, and where the file system can, its room on the disk."""
        with writing(self.path):
            steadily(lambda: os.ftruncate(self._descriptor, nbytes), recover=self._reopen)
            if nbytes:
                steadily(lambda: _take_room(self._descriptor, nbytes), recover=self._reopen)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put ``data`` at its place; not yet on the disk."""
        view = memoryview(data)
        while view.nbytes:
            with writing(self.path):
                count = write_some(self.path, self._descriptor, offset, view)
            view = view[count:]
            offset += count

    def sync(self) -> None:
        """Return when what was written is on the disk; does nothing once the file is closed."""
        if self._is_open:
            with writing(self.path):
                synced(self._descriptor, _fdatasync)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _reopen(self) -> None:
        reopen(self.path, self._descriptor, os.O_WRONLY)


def _fdatasync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has no fdatasync


def sync_path(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = steadily(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    try:
        synced(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: Iterable[bytes]) -> None:
    """``path`` holds ``content``, on the disk; or what it held before."""
    fresh = path.with_name(f"{path.name}.new")
    with OutputFile(fresh, is_new=False) as file:
        file.reserve(0)
        for offset, data in blocks(content):
            file.write(data, offset)
        file.sync()
    with writing(path):
        fresh.replace(path)
        sync_path(path.parent)


def blocks(content: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """A file's content in few pieces, each with its place in the file."""
    offset, gathered = 0, bytearray()
    for data in content:
        gathered += data
        if len(gathered) >= _BLOCK_NBYTES:
            yield offset, bytes(gathered)
            offset += len(gathered)
            gathered.clear()
    yield offset, bytes(gathered)


class _Fallocate(Protocol):
    def __call__(self, descriptor: int, mode: int, offset: int, nbytes: int, /) -> int: ...


def _take_room(descriptor: int, nbytes: int) -> None:
    """Take the room of a file's first ``nbytes`` bytes, if the file system can.

    ``os.posix_fallocate`` will not do: where the file system cannot (NFS before 4.2), the C library
    writes into every block instead, which takes as long as the export.
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
