"""Read and write headers of safetensors files.

Source: safetensors 0.8, ``safetensors/src/tensor.rs`` (``Metadata::validate``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from zexport.errors import DamagedCheckpointError, UnsafeError, UnsupportedError, ZexportError
from zexport.formats.pickle_values import MAX_NDIM, MAX_SIZE
from zexport.ranges.dtypes import DType
from zexport.ranges.source import Extent, Record
from zexport.storage.files import LFS_POINTER, open_input
from zexport.storage.json import as_table, read_json_object
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version

HEADER_NBYTES_LIMIT = 100_000_000
"""The library refuses larger headers (``MAX_HEADER_SIZE``)."""

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_quoted = json.JSONEncoder(ensure_ascii=False).encode
_Size: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SIZE)]


class HeaderEntry(Struct, frozen=True, gc=False):
    """A tensor to write."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFrame(Struct, frozen=True):
    """The bytes of a safetensors file before its tensors."""

    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header)

    def pieces(self, crc32s: Iterable[int]) -> Iterator[tuple[int, bytes]]:  # noqa: ARG002
        """Yield offset and bytes of the header; see ``TorchFrame``."""
        yield 0, self.header


class FileTensor(HeaderEntry, frozen=True, gc=False):
    """A tensor of a file; ``offset`` counts from the start of the file."""

    offset: int


class SafetensorsHeader(Struct, frozen=True):
    """The header of a file: tensors by name, in file order, and ``__metadata__``."""

    path: Path
    version: Version
    data_offset: int
    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str]

    @property
    def records(self) -> tuple[Record, ...]:
        """The tensors as records, by offset; they have no checksums."""
        return tuple(
            Record(tensor.name, tensor.offset, tensor.nbytes, None)
            for tensor in self.tensors.values()
            if tensor.nbytes
        )

    def source(self, name: str) -> Extent:
        """Return the place of a tensor's bytes."""
        tensor = self.tensors[name]
        return Extent(self.path, tensor.offset, tensor.nbytes)


def build_header(entries: Sequence[HeaderEntry]) -> tuple[bytes, tuple[int, ...]]:
    """Return the bytes before the tensors, and each tensor's offset from the end of them.

    Equal entries result in equal bytes. Tensors follow each other without gaps.
    """
    text = bytearray(b'{"%b":{"format":"pt"}' % _METADATA.encode())
    offsets, begin = [], 0
    names = {_METADATA}
    for entry in entries:
        if entry.name in names:
            raise UnsupportedError(
                f"a safetensors file cannot contain another tensor {entry.name!r}",
                hint="Rename the tensor with --rename",
            )
        names.add(entry.name)
        shape, end = ",".join(map(str, entry.shape)), begin + entry.nbytes
        fields = f'"dtype":"{entry.dtype.value}","shape":[{shape}],"data_offsets":[{begin},{end}]'
        try:
            text += f",{_quoted(entry.name)}:{{{fields}}}".encode()
        except UnicodeEncodeError as error:
            raise UnsupportedError(
                "tensor name is not valid Unicode",
                found=ascii(error.object[error.start : error.end]),
                hint="Rename the tensor with --rename",
            ) from error
        offsets.append(begin)
        begin = end
    text += b"}"
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > HEADER_NBYTES_LIMIT:
        raise UnsupportedError(
            "header of a shard is too large",
            found=f"{len(text)} bytes",
            expected=f"at most {HEADER_NBYTES_LIMIT} bytes",
            hint="Choose a smaller --max-shard-size",
        )
    return _LENGTH.pack(len(text)) + text, tuple(offsets)


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in the JSON of a header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=MAX_NDIM)]
    data_offsets: tuple[_Size, _Size]


_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


def read_header(
    path: Path, *, error: type[ZexportError] = DamagedCheckpointError
) -> SafetensorsHeader:
    """Return the header of a file; reads no tensor.

    Like the library, it requires that the tensors cover the rest of the file without gaps.

    Raises:
        ZexportError: ``error``, if the bytes violate the format.
    """
    with reading(path, error), open_input(path) as file:
        version = file.version()
        prefix = file.read_at(0, _LENGTH.size)
        if prefix and LFS_POINTER.startswith(prefix):
            problem, hint = "is a Git LFS pointer, not the file", "Fetch the file: git lfs pull"
            raise error(problem, path=path, hint=hint)
        nbytes = int.from_bytes(prefix, "little")
        limit = min(HEADER_NBYTES_LIMIT, version.nbytes - _LENGTH.size)
        if nbytes > limit:
            problem, expected = "header exceeds the file", f"at most {max(limit, 0)} bytes"
            raise error(problem, path=path, found=f"{nbytes} bytes", expected=expected)
        text = file.read_at(_LENGTH.size, nbytes)
    name = _METADATA
    try:
        raw = _decode_names(text)
        metadata = _decode_metadata(raw.pop(_METADATA, b"{}"))
        entries = []
        for name, one in raw.items():
            entry = _decode_entry(one)
            entries.append((*entry.data_offsets, name, entry))
    except (msgspec.DecodeError, ValueError, RecursionError) as cause:
        problem = f"header is not valid at {name!r}: {cause}"
        raise error(problem, path=path) from cause
    entries.sort(key=lambda one: one[:2])
    data_offset = position = _LENGTH.size + len(text)
    tensors: dict[str, FileTensor] = {}
    for begin, end, name, entry in entries:
        try:
            dtype = DType(entry.dtype)
        except ValueError as cause:
            problem = f"dtype of tensor {name!r} is not supported"
            raise UnsupportedError(problem, path=path, found=entry.dtype) from cause
        tensor = FileTensor(name, dtype, entry.shape, position)
        if begin != position - data_offset or end - begin != tensor.nbytes:
            raise error(
                f"data offsets of tensor {name!r} do not match its shape or the tensor before",
                path=path,
                found=f"{begin} to {end}",
                expected=f"{tensor.nbytes} bytes from {position - data_offset}",
            )
        tensors[name] = tensor
        position += tensor.nbytes
    if position != version.nbytes:
        raise error(
            "size of the file does not match its header",
            path=path,
            found=f"{version.nbytes} bytes",
            expected=f"{position} bytes",
        )
    return SafetensorsHeader(path, version, data_offset, tensors, metadata)


def read_index(path: Path, hint: str) -> dict[Path, set[str]]:
    """Return the files that an index names, sorted, with the tensors in each.

    ``hint`` is the advice if a file is in another folder.
    """
    weight_map = as_table(read_json_object(path).get("weight_map"))
    found: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or "/" in name:
            raise UnsafeError(
                "index names a file outside its folder",
                path=path,
                found=repr(name),
                expected="the name of a safetensors file",
                hint=hint,
            )
        found.setdefault(path.with_name(name), set()).add(tensor)
    return dict(sorted(found.items()))
