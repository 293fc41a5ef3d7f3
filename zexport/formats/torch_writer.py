"""Write zip files of ``torch.save``, planned before the bytes of tensors are known.

Tensors begin at multiples of 64 bytes, as torch writes them, so that files can be memory-mapped. A
tensor's CRC-32 follows its bytes and is in the directory, but not in its header, so that a file is
written from start to end.

Source: torch 2.13, ``torch/serialization.py`` (``_save``),
``caffe2/serialize/inline_container.cc``, ``third_party/miniz-3.0.2/miniz.c``
(``mz_zip_writer_add_mem_ex_v2``). Two records are left out: ``.format_version``, with which torch
computes offsets instead of reading them, and ``.data/serialization_id``.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from msgspec import Struct

from zexport.formats.pickle_values import Opaque, OpaqueKey, Ordered, TensorLeaf
from zexport.formats.pickle_writer import dump
from zexport.ranges.dtypes import DType
from zexport.text import printable

_ALIGNMENT = 64
_LOCAL = struct.Struct("<4sHHHHHLLLHH")
_CENTRAL = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_END = struct.Struct("<4sHHHHLLH")
_END64 = struct.Struct("<4sQHHLLQQQQ")
_LOCATOR64 = struct.Struct("<4sLQL")
_SIZES64 = struct.Struct("<HHQQ")
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4sLLL"), struct.Struct("<4sLQQ")
_PADDING = struct.Struct("<2sH")
_ZIP64_ID = 1
_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8
_VERSION, _VERSION64 = 20, 45
_DATE = 0x21  # 1980-01-01, the earliest in a zip file
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_NAME_LENGTH_MAX = 400
"""Longer names of tensors are not extended: values may be nested to any depth."""

_ATTRIBUTES = ("args", "callee", "items", "pairs", "state")
T = TypeVar("T")


class PlannedRecord(Struct, frozen=True):
    """A zip record: its header begins at ``begin``, its bytes at ``offset``.

    ``content`` is ``None`` for tensors.
    """

    name: str
    begin: int
    offset: int
    nbytes: int
    content: bytes | None = None

    @property
    def end(self) -> int:
        """The byte after its bytes, where a descriptor may follow."""
        return self.offset + self.nbytes

    @property
    def flags(self) -> int:
        descriptor = _HAS_DESCRIPTOR if self.content is None else 0
        return descriptor if self.name.isascii() else descriptor | _UTF8


class PlacedLeaf(Struct, frozen=True):
    """A tensor with elements: its name, unique in the file, and its first byte."""

    name: str
    leaf: TensorLeaf
    offset: int


class TorchRecords(Struct, frozen=True):
    """All records of a file by offset; ``nbytes`` counts bytes outside of tensors."""

    records: tuple[PlannedRecord, ...]
    nbytes: int

    def pieces(self, crc32s: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes before the first tensor, between tensors, and after the last.

        ``crc32s`` are those of the tensors; each is taken after its tensor was written.
        """
        given = iter(crc32s)
        found: list[int] = []
        begin, run = 0, b""
        for record in self.records:
            if record.content is None:
                yield begin, run + _header(record, 0)
                found.append(next(given))
                begin, run = record.end, _descriptor(record, found[-1])
            else:
                found.append(zlib.crc32(record.content))
                run += _header(record, found[-1]) + record.content
        yield begin, run + _directory(self.records, found)


class TorchFrame(Struct, frozen=True):
    """A file without the bytes of its tensors; its pickle is written when needed.

    Attributes:
        value: what ``torch.load`` returns, with a ``TensorLeaf`` for every tensor.
        root: top folder of the zip: the file's name without ``.pt``.
        nbytes: bytes of the file outside of tensors.
    """

    value: object
    root: str
    nbytes: int

    def records(self) -> TorchRecords:
        return TorchRecords(_plan(self.value, self.root)[0], self.nbytes)

    def pieces(self, crc32s: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield as ``TorchRecords`` does."""
        return self.records().pieces(crc32s)


def lay_out(value: object, root: str) -> tuple[TorchFrame, tuple[PlacedLeaf, ...]]:
    """Return the file that contains ``value``, and its tensors with elements in file order.

    Raises:
        UnsafeError: a value cannot be written safely.
    """
    records, placed = _plan(value, root)
    directory = _directory(records, [0] * len(records))
    tensors_nbytes = sum(one.leaf.nbytes for one in placed)
    return TorchFrame(value, root, records[-1].end + len(directory) - tensors_nbytes), placed


def _plan(value: object, root: str) -> tuple[tuple[PlannedRecord, ...], tuple[PlacedLeaf, ...]]:
    """Return all records, and the tensors with elements.

    Empty tensors of one dtype share an empty record.
    """
    stored: list[tuple[str, TensorLeaf]] = []
    empty: dict[DType, None] = {}
    for name, leaf in tensors_in(value, TensorLeaf):
        if leaf.nbytes:
            stored.append((name, leaf))
        else:
            empty[leaf.dtype] = None
    numbers: dict[object, int] = {id(leaf): at for at, (_, leaf) in enumerate(stored)}
    numbers |= {dtype: at for at, dtype in enumerate(empty, len(stored))}
    pickle = dump(value, lambda leaf: numbers[id(leaf) if leaf.nbytes else leaf.dtype])
    contents: list[tuple[str, int, bytes | None]] = [
        ("data.pkl", len(pickle), pickle),
        ("byteorder", 6, b"little"),
        *((f"data/{at}", leaf.nbytes, None) for at, (_, leaf) in enumerate(stored)),
        *((f"data/{numbers[dtype]}", 0, b"") for dtype in empty),
        ("version", 2, b"3\n"),
    ]
    records: list[PlannedRecord] = []
    begin = 0
    for name, nbytes, content in contents:
        path = f"{root}/{name}"
        extra_nbytes = _PADDING.size + (_SIZES64.size if nbytes >= _MAX32 else 0)
        least = begin + _LOCAL.size + len(path.encode()) + extra_nbytes
        offset = -(-least // _ALIGNMENT) * _ALIGNMENT
        record = PlannedRecord(path, begin, offset, nbytes, content)
        records.append(record)
        begin = record.end + len(_descriptor(record, 0))
    placed = tuple(
        PlacedLeaf(name, leaf, record.offset)
        for (name, leaf), record in zip(stored, records[2:], strict=False)
    )
    return tuple(records), placed


def _header(record: PlannedRecord, crc: int) -> bytes:
    """Return a record's header, padded up to its first byte."""
    name = record.name.encode()
    nbytes, extra = (0 if record.content is None else record.nbytes), b""
    if record.nbytes >= _MAX32:
        extra = _SIZES64.pack(_ZIP64_ID, 16, record.nbytes, record.nbytes)
    room = record.offset - record.begin - _LOCAL.size - len(name) - len(extra)
    extra += _PADDING.pack(b"FB", room - _PADDING.size).ljust(room, b"Z")
    version = _VERSION64 if record.nbytes >= _MAX32 else _VERSION
    fields = version, record.flags, 0, 0, _DATE, crc, nbytes, nbytes, len(name), len(extra)
    return _LOCAL.pack(b"PK\x03\x04", *fields) + name + extra


def _descriptor(record: PlannedRecord, crc: int) -> bytes:
    """Return the bytes that follow a tensor."""
    if record.content is not None:
        return b""
    form = _DESCRIPTOR64 if record.nbytes >= _MAX32 else _DESCRIPTOR
    return form.pack(b"PK\x07\x08", crc, record.nbytes, record.nbytes)


def _directory(records: Sequence[PlannedRecord], crc32s: Sequence[int]) -> bytes:
    """Return the directory, which follows the last record."""
    rows = bytearray()
    for record, crc in zip(records, crc32s, strict=True):
        name = record.name.encode()
        large = [n for n in (record.nbytes, record.nbytes, record.begin) if n >= _MAX32]
        extra = b""
        if large:
            extra = struct.pack(f"<HH{len(large)}Q", _ZIP64_ID, 8 * len(large), *large)
        version, size = _VERSION64 if large else _VERSION, min(record.nbytes, _MAX32)
        fields = version, version, record.flags, 0, 0, _DATE, crc, size, size, len(name)
        rest = len(extra), 0, 0, 0, 0, min(record.begin, _MAX32)
        rows += _CENTRAL.pack(b"PK\x01\x02", *fields, *rest) + name + extra
    start, nbytes, count = records[-1].end, len(rows), len(records)
    if max(start, nbytes) >= _MAX32 or count >= _MAX16:
        numbers = count, count, nbytes, start
        rows += _END64.pack(b"PK\x06\x06", _END64.size - 12, _VERSION64, _VERSION64, 0, 0, *numbers)
        rows += _LOCATOR64.pack(b"PK\x06\x07", 0, start + nbytes, 1)
    counts, places = min(count, _MAX16), (min(nbytes, _MAX32), min(start, _MAX32))
    return bytes(rows + _END.pack(b"PK\x05\x06", 0, 0, counts, counts, *places, 0))


def tensors_in(value: object, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the objects of ``kind`` in nested values, each once, with unique names.

    A name consists of keys and indices joined with ``/``. It is the same whether the tensors are to
    be written or were read.
    """
    seen: set[int] = set()
    taken: set[str] = set()
    count: Counter[str] = Counter()
    waiting: list[tuple[str, Iterator[tuple[object, object]]]] = [("", iter([("", value)]))]
    while waiting:
        prefix, parts = waiting[-1]
        if (part := next(parts, None)) is None:
            waiting.pop()
            continue
        key, one = part
        if id(one) in seen:
            continue
        if isinstance(one, kind):
            seen.add(id(one))
            name = free = _joined(prefix, key) or "tensor"
            while free in taken:
                count[name] += 1
                free = f"{name} ({count[name] + 1})"
            taken.add(free)
            yield free, one
        elif isinstance(one, dict | list | tuple | Opaque):
            seen.add(id(one))
            waiting.append((_joined(prefix, key), iter(parts_of(one))))


def parts_of(
    value: dict[object, object] | list[object] | tuple[object, ...] | Opaque,
) -> Iterable[tuple[object, object]]:
    """Return key, index or attribute of everything in a value that may contain tensors."""
    if isinstance(value, Ordered) and value.attributes is not None:
        return chain(value.items(), (("attributes", value.attributes),))
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, Opaque):
        return ((name, getattr(value, name)) for name in _ATTRIBUTES)
    return enumerate(value)


def _joined(prefix: str, key: object) -> str:
    if len(prefix) > _NAME_LENGTH_MAX:
        return prefix
    text = key if isinstance(key, str) else "*" if isinstance(key, OpaqueKey) else str(key)
    return f"{prefix}/{printable(text[:_NAME_LENGTH_MAX])}".lstrip("/")
