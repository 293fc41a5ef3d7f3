"""Whether fp32 masters and the 16-bit weights beside them are of one step: a cast tells."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from zexport.checkpoint.contents import CastReplica
from zexport.dtypes import DType
from zexport.errors import DamagedCheckpointError
from zexport.extents import ByteSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_SAMPLE_NUMEL = 1024
_CHUNK_NUMEL = 1 << 20


class Reads(Protocol):
    """Something that reads bytes of a source, such as ``zexport.streams.reader.SourceReader``."""

    def read_into(self, source: ByteSource, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``source`` from ``start`` on."""
        ...


def check_cast(replica: CastReplica, reader: Reads, chunk_numel: int = _CHUNK_NUMEL) -> None:
    """Compare every element; NaN equals NaN. Holds ``chunk_numel`` elements of both at a time.

    Raises:
        DamagedCheckpointError: some element of the wider copy does not become that of the narrower.
    """
    for start in range(0, replica.numel, chunk_numel):
        stop = min(start + chunk_numel, replica.numel)
        kept = _read(reader, replica.kept, replica.kept_dtype, start, stop)
        other = _read(reader, replica.other, replica.other_dtype, start, stop)
        as_other = _bits(kept, replica.kept_dtype, replica.other_dtype)
        different = (as_other != _bits(other, replica.other_dtype, replica.other_dtype)).nonzero()[
            0
        ]
        if different.size:
            raise DamagedCheckpointError(
                f"the fp32 master of {replica.name!r} does not belong to the module's weight",
                path=replica.path,
                found=f"element {start + int(different[0])} is another when rounded to "
                f"{replica.other_dtype.torch_name}",
                expected="the module's weight to be the master, rounded",
                hint="Parameters may have been given to the optimizer in another order than the "
                "model's, or weights changed after the last step: load the file's 'module' instead",
            )


def fingerprint(reader: Reads, source: ByteSource, stored: DType, seen_as: DType) -> bytes:
    """A digest of three short samples, as they are after a cast to ``seen_as``.

    Copies of one tensor have the same fingerprint; the reverse need not be so.
    """
    digest = blake2b(digest_size=16)
    numel = source.nbytes // stored.itemsize
    for start, stop in _samples(numel):
        elements = _read(reader, source, stored, start, stop)
        digest.update(_bits(elements, stored, seen_as).tobytes())
    return digest.digest()


def _samples(numel: int) -> Iterator[tuple[int, int]]:
    """The beginning, the middle and the end; all of a small tensor."""
    if numel <= 3 * _SAMPLE_NUMEL:
        yield 0, numel
        return
    for start in (0, (numel - _SAMPLE_NUMEL) // 2, numel - _SAMPLE_NUMEL):
        yield start, start + _SAMPLE_NUMEL


def _read(reader: Reads, source: ByteSource, dtype: DType, start: int, stop: int) -> bytearray:
    """Elements ``start`` to ``stop``."""
    buffer = bytearray((stop - start) * dtype.itemsize)
    reader.read_into(source, start * dtype.itemsize, memoryview(buffer))
    return buffer


def _bits(
    elements: bytearray, stored: DType, seen_as: DType
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The bits of the elements after a cast, with one pattern for every NaN.

    A NaN's other bits differ between a cast on a GPU and one on a CPU.
    """
    import numpy as np  # noqa: PLC0415 - opening most checkpoints reads no values

    from zexport.streams.casts import cast_into  # noqa: PLC0415

    result = elements
    if seen_as is not stored:
        result = bytearray(len(elements) // stored.itemsize * seen_as.itemsize)
        cast_into(memoryview(elements), stored, seen_as, memoryview(result))
    bits = np.frombuffer(result, np.dtype(f"u{seen_as.itemsize}"))
    infinity = _INFINITY[seen_as]
    bits[(bits & (_SIGN[seen_as] - 1)) > infinity] = infinity + 1
    return bits


_INFINITY = {
    DType.F64: 0x7FF << 52,
    DType.F32: 0xFF << 23,
    DType.BF16: 0xFF << 7,
    DType.F16: 0x1F << 10,
}
_SIGN = {dtype: 1 << (8 * dtype.itemsize - 1) for dtype in _INFINITY}
