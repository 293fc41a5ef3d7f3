"""The small files of an export beside the shards: what they hold, and writing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from zexport.errors import CheckpointError
from zexport.plan.plan import SideFile
from zexport.run.manifest import FileEntry
from zexport.store.disk import OutputFile, blocks
from zexport.store.files import open_regular
from zexport.store.retries import steadily

_COPY_NBYTES = 1 << 20


def side_nbytes(side: SideFile) -> int:
    """Size of a side file.

    Raises:
        CheckpointError: the file to copy cannot be looked at.
    """
    if side.origin is None:
        return len(side.content or b"")
    with _reading(side.origin):
        return steadily(side.origin.stat).st_size


def side_content(side: SideFile) -> Iterator[bytes]:
    """The bytes of a side file, in pieces.

    Raises:
        CheckpointError: the file to copy cannot be read.
    """
    if side.origin is None:
        yield side.content or b""
        return
    with _reading(side.origin), open_regular(side.origin) as file:
        while data := steadily(lambda: file.read(_COPY_NBYTES)):
            yield data


def write_file(path: Path, content: Iterable[bytes]) -> FileEntry:
    """Write a file; what a manifest says of it. It is not yet on the disk.

    Raises:
        OutputError: it cannot be written.
    """
    digest = blake3()
    nbytes = 0
    with OutputFile(path, is_new=True) as file:
        for offset, data in blocks(content):
            file.write(data, offset)
            digest.update(data)
            nbytes = offset + len(data)
    return FileEntry(nbytes, digest.hexdigest())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror}", path=path) from cause
