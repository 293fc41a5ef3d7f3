"""Elements that lie scattered in their source, such as a transposed matrix, fetched in few reads.

Read run by run, a transposed matrix would take a read for each element. So whatever lies close
together is read as one span, gaps and all, and its elements are put in their places in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from zexport.ranges.extents import ByteSource
from zexport.ranges.mosaic import Box, Mosaic

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_GAP_NBYTES = 64 << 10
"""A gap that is read costs about as much time as one more read."""

_SPAN_NBYTES_MIN = 64 << 10

Read = Callable[[ByteSource, int, memoryview], None]


def gather(mosaic: Mosaic, start: int, buffer: memoryview, read: Read) -> None:
    """Fill ``buffer`` with the bytes of ``mosaic`` from ``start`` on, both in whole elements.

    No span is longer than ``buffer``, or than 64 KiB where that is short; that much memory is held
    besides it for each level of mosaics within mosaics.
    """
    first = start // mosaic.itemsize
    last = first + buffer.nbytes // mosaic.itemsize
    window = _Window(buffer, mosaic.itemsize, max(buffer.nbytes, _SPAN_NBYTES_MIN), read)
    for box in mosaic.boxes(first, last):
        for span in _spans(box, window.span_nbytes // mosaic.itemsize, mosaic.itemsize):
            window.fill(span)


class _Window(Struct, frozen=True):
    """The memory that boxes are put into."""

    buffer: memoryview
    itemsize: int
    span_nbytes: int
    read: Read

    def fill(self, box: Box) -> None:
        """Read the span that a box lies in, and put its elements in their places."""
        begin, nbytes = box.offset * self.itemsize, _span(box) * self.itemsize
        if _is_run(box):
            out = box.out_offset * self.itemsize
            self.read(box.source, begin, self.buffer[out : out + nbytes])
            return
        scratch = memoryview(bytearray(nbytes))
        self.read(box.source, begin, scratch)
        placed = self._array(self.buffer, box.shape, box.out_offset, box.out_stride)
        placed[...] = self._array(scratch, box.shape, 0, box.stride)

    def _array(
        self, memory: memoryview, shape: tuple[int, ...], offset: int, stride: tuple[int, ...]
    ) -> npt.NDArray[np.void | np.unsignedinteger[Any]]:
        import numpy as np  # noqa: PLC0415 - most exports gather nothing

        kind = "u" if self.itemsize in (1, 2, 4, 8) else "V"
        return np.ndarray(
            shape,
            np.dtype(f"{kind}{self.itemsize}"),
            memory,
            offset * self.itemsize,
            tuple(step * self.itemsize for step in stride),
        )


def _spans(box: Box, limit: int, itemsize: int) -> Iterator[Box]:
    """The box in parts that each lie in a span of ``limit`` elements, without wide gaps."""
    if _is_run(box):
        yield box
        return
    dim = max(range(len(box.shape)), key=lambda d: (box.shape[d] > 1, box.stride[d]))
    step, count = box.stride[dim], box.shape[dim]
    within = _span(box) - (count - 1) * step
    wide = (step - within) * itemsize > _GAP_NBYTES
    if not wide and _span(box) <= limit:
        yield box
        return
    each = 1 if wide else max(1, (limit - within) // step + 1)
    for index in range(0, count, each):
        size = min(each, count - index)
        part = replace(
            box,
            shape=(*box.shape[:dim], size, *box.shape[dim + 1 :]),
            offset=box.offset + index * step,
            out_offset=box.out_offset + index * box.out_stride[dim],
        )
        yield from _spans(part, limit, itemsize)


def _span(box: Box) -> int:
    """Elements of the source from the box's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(box.shape, box.stride, strict=True))


def _is_run(box: Box) -> bool:
    """Whether its elements lie one after another, both where they are and where they belong."""
    dims = [d for d, count in enumerate(box.shape) if count > 1]
    dense = 1
    for dim in reversed(dims):
        if not box.stride[dim] == box.out_stride[dim] == dense:
            return False
        dense *= box.shape[dim]
    return dense == prod(box.shape)
