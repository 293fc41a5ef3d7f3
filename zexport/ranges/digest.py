"""BLAKE3 digests and CRC-32 of files, read through one small buffer per thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from blake3 import blake3
from isal import isal_zlib
from msgspec import Struct

from zexport.storage.files import open_input
from zexport.storage.storage import InputFile

DIGEST_NBYTES = 32
_CHUNK_NBYTES = 1 << 20
"""Small enough for the processor's cache."""

_BATCH_NBYTES, _BATCH_RANGES = 32 << 20, 4096
"""Work of one task."""


class FileDigests(Struct, frozen=True):
    """Digests of a file of tensors.

    ``tensors`` has 32 bytes per tensor in file order. ``whole`` is BLAKE3 of the bytes outside of
    tensors, then of ``tensors``, so it covers every byte in one pass. ``crc32`` is of the file.
    """

    tensors: bytes
    whole: str
    crc32: int = 0

    def hex(self, number: int) -> str:
        """Return the digest of a tensor as 64 hexadecimal digits."""
        return self.tensors[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)].hex()


def digest_file(path: Path) -> str:
    """Return the BLAKE3 digest of a file as 64 hexadecimal digits."""
    with open_input(path) as file:
        nbytes = file.version().nbytes
        file.expect([(0, nbytes)])
        return _digest(blake3(), file, 0, nbytes, lambda _: None).hexdigest()


def digest_tensors(
    path: Path,
    ranges: Sequence[tuple[int, int]],
    workers: Executor,
    on_bytes: Callable[[int], None],
) -> FileDigests:
    """Return the digests of a file, read again.

    Args:
        path: the file.
        ranges: offset and nbytes of each tensor, by offset.
        workers: threads that read.
        on_bytes: called with the number of bytes after each read.
    """
    running = [workers.submit(_digest_batch, path, one, on_bytes) for one in _batches(ranges)]
    tensors = b"".join(batch.result() for batch in running)
    frame, at = blake3(), 0
    with open_input(path) as file:
        for offset, nbytes in (*ranges, (file.version().nbytes, 0)):
            _digest(frame, file, at, offset - at, lambda _: None)
            at = offset + nbytes
    return FileDigests(tensors, frame.update(tensors).hexdigest())


def _batches(ranges: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    first = nbytes = 0
    for last, (_, count) in enumerate(ranges, 1):
        nbytes += count
        if nbytes >= _BATCH_NBYTES or last - first == _BATCH_RANGES or last == len(ranges):
            yield ranges[first:last]
            first, nbytes = last, 0


def _digest_batch(
    path: Path, ranges: Sequence[tuple[int, int]], on_bytes: Callable[[int], None]
) -> bytes:
    with open_input(path) as file:
        file.expect((offset, offset + nbytes) for offset, nbytes in ranges if nbytes)
        return b"".join(_digest(blake3(), file, *one, on_bytes).digest() for one in ranges)


def _digest(
    digest: blake3, file: InputFile, offset: int, nbytes: int, on_bytes: Callable[[int], None]
) -> blake3:
    for data in _chunks(file, offset, nbytes):
        digest.update(data)
        on_bytes(data.nbytes)
    return digest


def crc32_of_file(path: Path, workers: Executor, on_bytes: Callable[[int], None]) -> int:
    """Return the CRC-32 of a file; arguments as of ``digest_tensors``."""
    with open_input(path) as file:
        end = file.version().nbytes
        file.expect([(0, end)])

        def batch(start: int) -> int:
            crc = 0
            for data in _chunks(file, start, min(_BATCH_NBYTES, end - start)):
                crc = isal_zlib.crc32(data, crc)
                on_bytes(data.nbytes)
            return crc

        whole = 0
        starts = range(0, end, _BATCH_NBYTES)
        for start, crc in zip(starts, workers.map(batch, starts), strict=True):
            whole = isal_zlib.crc32_combine(whole, crc, min(_BATCH_NBYTES, end - start))
        return whole


def _chunks(file: InputFile, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield up to ``nbytes`` bytes in one reused buffer."""
    buffer = memoryview(bytearray(min(_CHUNK_NBYTES, max(nbytes, 1))))
    while nbytes > 0 and (count := file.read(offset, buffer[:nbytes])):
        yield buffer[:count]
        offset += count
        nbytes -= count
