"""The safetensors format: the header that is written, and the header that is read and believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TypeGuard

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError, ZexportError
from zexport.formats.pickle_values import MAX_NDIM, MAX_SIZE
from zexport.ranges.dtypes import DType
from zexport.ranges.source import Extent, Member
from zexport.storage.contents import LFS_POINTER, read_json_object
from zexport.storage.files import open_input
from zexport.storage.json import as_table
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version

HEADER_NBYTES_LIMIT = 100_000_000
"""Largest JSON header any reader accepts (safetensors 0.8, ``tensor.rs``, ``MAX_HEADER_SIZE``)."""

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class HeaderEntry(Struct, frozen=True, gc=False):
    """One tensor as a header describes it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements (one element for a scalar)."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFrame(Struct, frozen=True):
    """Everything of a safetensors file but its tensors' bytes: the header, known beforehand."""

    header: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the header."""
        return len(self.header)

    def pieces(self, crc32s: Iterable[int]) -> Iterator[tuple[int, bytes]]:  # noqa: ARG002
        """The header, at the beginning of the file."""
        yield 0, self.header


class FileTensor(HeaderEntry, frozen=True, gc=False):
    """One tensor of an existing file; ``offset`` counts from the first byte of the file."""

    offset: int


class SafetensorsHeader(Struct, frozen=True):
    """What a safetensors file says of itself, with every invariant of the format checked.

    ``tensors`` are in file order; ``metadata`` is what stands under ``__metadata__``.
    """

    path: Path
    version: Version
    data_offset: int
    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str]

    @property
    def members(self) -> tuple[Member, ...]:
        """Its tensors as records, by ascending offset; nothing covers their bytes with a CRC."""
        return tuple(
            Member(tensor.name, tensor.offset, tensor.nbytes, None)
            for tensor in self.tensors.values()
            if tensor.nbytes
        )

    def source(self, name: str) -> Extent:
        """Where the bytes of a tensor lie."""
        tensor = self.tensors[name]
        return Extent(self.path, tensor.offset, tensor.nbytes)


def build_header(entries: Sequence[HeaderEntry]) -> tuple[bytes, tuple[int, ...]]:
    """The first bytes of a file (length, JSON, blanks up to 8 bytes), and each tensor's offset.

    Offsets count from the end of the header; every tensor begins where the one before it ends.
    Equal entries give equal bytes.
    """
    text = bytearray(b'{"%b":{"format":"pt"}' % _METADATA.encode())
    offsets, position = [], 0
    names = {_METADATA}
    for entry in entries:
        if entry.name in names:
            raise UnsupportedError(
                f"a safetensors file cannot hold a tensor named {entry.name!r} here",
                hint="Give the tensor another name with --rename",
            )
        names.add(entry.name)
        text += b"," + _member(entry, position)
        offsets.append(position)
        position += entry.nbytes
    return _framed(text + b"}"), tuple(offsets)


def _member(entry: HeaderEntry, begin: int) -> bytes:
    """One tensor in the JSON; there may be a hundred thousand, so it is text at once."""
    shape, end = ",".join(map(str, entry.shape)), begin + entry.nbytes
    fields = f'"dtype":"{entry.dtype.value}","shape":[{shape}],"data_offsets":[{begin},{end}]'
    try:
        return f"{_quoted(entry.name)}:{{{fields}}}".encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            "a tensor's name is not valid Unicode",
            found=ascii(error.object[error.start : error.end]),
            hint="Give the tensor another name with --rename",
        ) from error


def _framed(text: bytearray) -> bytes:
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > HEADER_NBYTES_LIMIT:
        raise UnsupportedError(
            "the header of a shard is too long",
            found=f"{len(text)} bytes",
            expected=f"at most {HEADER_NBYTES_LIMIT}",
            hint="Choose a smaller --max-shard-size",
        )
    return _LENGTH.pack(len(text)) + text


def read_header(
    path: Path, *, error: type[ZexportError] = DamagedCheckpointError
) -> SafetensorsHeader:
    """The header of a file, with every invariant of the format checked; no tensor byte is read.

    ``error`` is raised where the bytes break the format: the fault lies with the checkpoint for an
    input, with the export for an output.
    """
    with reading(path, error), open_input(path) as file:
        version = file.version()
        prefix = file.read_at(0, _LENGTH.size)
        _check_no_pointer(path, prefix, error)
        nbytes = _header_nbytes(path, prefix, version.nbytes, error)
        text = file.read_at(_LENGTH.size, nbytes)
    data_offset = len(prefix) + len(text)
    table, metadata = _parsed(path, text, error)
    tensors = _checked(path, table, (data_offset, version.nbytes), error)
    by_name = {tensor.name: tensor for tensor in tensors}
    return SafetensorsHeader(path, version, data_offset, by_name, metadata)


def read_index(path: Path, hint: str) -> dict[Path, set[str]]:
    """The files that an index names, in order, each with the tensors that it places there.

    Nothing where it has no ``weight_map``; ``hint`` is for one who has an index of other folders.
    """
    weight_map = as_table(read_json_object(path).get("weight_map"))
    placed: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or "/" in name:
            raise UnsafeError(
                "names a file that does not lie beside it",
                path=path,
                found=repr(name),
                expected="the name of a safetensors file",
                hint=hint,
            )
        placed.setdefault(path.with_name(name), set()).add(tensor)
    return dict(sorted(placed.items()))


def _check_no_pointer(path: Path, start: bytes, error: type[ZexportError]) -> None:
    if start and LFS_POINTER.startswith(start):
        raise error(
            "is a git-lfs pointer, and not the file that it stands for",
            path=path,
            hint="Fetch the file itself: git lfs pull",
        )


def _header_nbytes(path: Path, prefix: bytes, file_nbytes: int, error: type[ZexportError]) -> int:
    if len(prefix) < _LENGTH.size:
        raise error("is too short for a safetensors file", path=path, found=f"{file_nbytes} bytes")
    nbytes: int = _LENGTH.unpack(prefix)[0]
    limit = min(HEADER_NBYTES_LIMIT, file_nbytes - _LENGTH.size)
    if nbytes > limit:
        raise error(
            "claims a header longer than it can be",
            path=path,
            found=nbytes,
            expected=f"at most {limit}",
        )
    return nbytes


def _parsed(
    path: Path, text: bytes, error: type[ZexportError]
) -> tuple[dict[str, object], dict[str, str]]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise error("has a header that names something twice", path=path)
        return table

    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as cause:
        raise error("has a header that is not JSON", path=path, found=str(cause)) from cause
    if not isinstance(table, dict):
        raise error("has a header that is not a JSON object", path=path)
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise error(f"has {_METADATA} that is not a table of strings", path=path)
    return table, metadata


def _checked(
    path: Path, table: Mapping[str, object], data: tuple[int, int], error: type[ZexportError]
) -> list[FileTensor]:
    """Tensors in file order, each beginning where the last ended, the last at the end of the file.

    The same rules as safetensors 0.8 (``tensor.rs``, ``Metadata::validate``): without holes, no
    byte of a file is outside a tensor, and no two tensors share one.
    """
    first, last = data
    entries = sorted(
        (_entry(path, name, fields, error) for name, fields in table.items()),
        key=lambda item: item[:2],
    )
    position = 0
    for begin, end, entry in entries:
        if begin != position:
            raise error(
                f"tensor {entry.name!r} does not begin where the one before it ends",
                path=path,
                found=begin,
                expected=position,
            )
        if end - begin != entry.nbytes:
            raise error(
                f"tensor {entry.name!r} has a length that does not fit its shape",
                path=path,
                found=f"{end - begin} bytes",
                expected=f"{entry.nbytes} for {entry.dtype.value} {list(entry.shape)}",
            )
        position = end
    if position != last - first:
        raise error(
            "has another size than its header says",
            path=path,
            found=f"{last - first} bytes of data",
            expected=position,
        )
    return [FileTensor(one.name, one.dtype, one.shape, first + begin) for begin, _, one in entries]


def _entry(
    path: Path, name: str, fields: object, error: type[ZexportError]
) -> tuple[int, int, HeaderEntry]:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise error(f"tensor {name!r} is not described by dtype, shape and data_offsets", path=path)
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not (_are_naturals(shape) and _are_naturals(offsets)) or len(offsets) != 2:
        raise error(
            f"tensor {name!r} has a shape or offsets that are not natural numbers", path=path
        )
    if len(shape) > MAX_NDIM or prod(filter(None, shape)) > MAX_SIZE:
        raise error(f"tensor {name!r} has a shape beyond every memory", path=path)
    begin, end = offsets
    return begin, end, HeaderEntry(name, _dtype(path, name, fields["dtype"]), tuple(shape))


def _are_naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _dtype(path: Path, name: str, value: object) -> DType:
    try:
        return DType(value)
    except ValueError as cause:
        raise UnsupportedError(
            f"tensor {name!r} has an element type that zexport does not know",
            path=path,
            found=value,
        ) from cause
