"""BLAKE3 of files, of ranges of files, and of shards, through one small buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from blake3 import blake3

from zexport.store.files import InputFile, open_input

_CHUNK_NBYTES = 1 << 20
"""Few enough that the bytes are still in the processor's cache when they are digested."""


def digest_file(path: Path) -> str:
    """The BLAKE3 digest of a file, as 64 hexadecimal digits."""
    with open_input(path) as file:
        nbytes = file.version().nbytes
        file.expect([(0, nbytes)])
        return _take_in(blake3(), file, 0, nbytes).hexdigest()


def digest_of_parts(
    path: Path,
    nbytes: int,
    ranges: Iterable[tuple[int, int]],
    digests: Iterable[str],
) -> str:
    """The digest of a file of tensors: BLAKE3 of all that is no tensor's, and of their digests.

    This stands for every byte of the file, as the root of a hash tree does, and costs no second
    pass over the tensors.

    Args:
        path: the file.
        nbytes: its size.
        ranges: (offset, nbytes) of each tensor, by offset.
        digests: theirs, in the same order.
    """
    digest = blake3()
    with open_input(path) as file:
        between = [*_between(ranges, nbytes)]
        file.expect(between)
        for start, stop in between:
            _take_in(digest, file, start, stop - start)
    for tensor_digest in digests:
        digest.update(bytes.fromhex(tensor_digest))
    return digest.hexdigest()


def _between(ranges: Iterable[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """What of a file of ``nbytes`` lies in none of the ranges: from, to."""
    position = 0
    for offset, count in chain(ranges, [(nbytes, 0)]):
        if position < offset:
            yield position, offset
        position = offset + count


def digest_ranges(
    path: Path,
    ranges: Iterable[tuple[int, int]],
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[str, ...]:
    """The BLAKE3 digests of ranges of a file.

    Args:
        path: the file.
        ranges: (offset, nbytes) of each.
        on_bytes: told the count of each run of bytes after it was taken in.
    """
    ranges = list(ranges)
    with open_input(path) as file:
        file.expect((offset, offset + nbytes) for offset, nbytes in ranges if nbytes)
        taken = (_take_in(blake3(), file, *one, on_bytes) for one in ranges)
        return tuple(digest.hexdigest() for digest in taken)


def _take_in(
    digest: blake3,
    file: InputFile,
    offset: int,
    nbytes: int,
    on_bytes: Callable[[int], None] | None = None,
) -> blake3:
    """The digest with ``nbytes`` bytes more, or with what there is of them."""
    buffer = memoryview(bytearray(min(_CHUNK_NBYTES, max(nbytes, 1))))
    while nbytes > 0 and (count := file.read(offset, buffer[:nbytes])):
        digest.update(buffer[:count])
        offset += count
        nbytes -= count
        if on_bytes is not None:
            on_bytes(count)
    return digest
