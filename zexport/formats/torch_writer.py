"""A zip file of ``torch.save``'s form, laid out before its tensors' bytes are known.

Records are stored, each tensor's at a multiple of 64 bytes as torch has it, so that it may be
mapped. Their CRC-32 are known when the bytes have passed: the record's own headers and the zip's
directory are written after them, into the room that was left.

Source of the records and their order: torch 2.13, ``torch/serialization.py`` (``_save``) and
``caffe2/serialize/inline_container.cc``. Left out are ``.format_version``, by which torch would
work out offsets instead of reading them, and ``.data/serialization_id``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

from msgspec import Struct

from zexport.formats.leaves import TensorLeaf, tensors_in
from zexport.formats.pickle_writer import dump

_ALIGNMENT = 64

_LOCAL = struct.Struct("<4sHHHHHLLLHH")
_CENTRAL = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_END = struct.Struct("<4sHHHHLLH")
_END64 = struct.Struct("<4sQHHLLQQQQ")
_LOCATOR64 = struct.Struct("<4sLQL")
_SIZES64 = struct.Struct("<HHQQ")
_PADDING = struct.Struct("<HH")
_PADDING_ID = int.from_bytes(b"FB", "little")
_ZIP64_ID = 1
_UTF8 = 0x800
_VERSION, _VERSION64 = 20, 45
_DATE = 0x21  # 1980-01-01, the first that a zip can tell
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


class Record(Struct, frozen=True):
    """A record of the zip: where its header begins, where its bytes do, and how many there are."""

    name: str
    begin: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.offset + self.nbytes


class PlacedLeaf(Struct, frozen=True):
    """A tensor that has bytes: its name, none other's in the file, and its first byte there."""

    name: str
    leaf: TensorLeaf
    offset: int


class TorchFrame(Struct, frozen=True):
    """Everything of a torch file but its tensors' bytes.

    Attributes:
        value: what ``torch.load`` gives, with a ``TensorLeaf`` for every tensor.
        root: the top folder of the zip, the file's name without ``.pt``.
        nbytes: bytes of the file that are no tensor's.
    """

    value: object
    root: str
    nbytes: int

    @property
    def has_crc32(self) -> bool:
        """The CRC-32 of every tensor is part of it."""
        return True

    def pieces(self, crc32s: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Its bytes by ascending offset, given the CRC-32 of each tensor in file order."""
        layout = _Layout(self.value, self.root)
        return layout.frame(crc32s)


def lay_out(value: object, root: str) -> tuple[TorchFrame, tuple[PlacedLeaf, ...]]:
    """The file that holds ``value``, and its tensors that have bytes, in file order.

    Empty ones of one element type share an empty record, as they share nothing else.
    """
    layout = _Layout(value, root)
    placed = layout.placed
    nbytes = layout.nbytes - sum(one.leaf.nbytes for one in placed)
    return TorchFrame(value, root, nbytes), placed


class _Layout:
    """The records of a file, and what goes between its tensors."""

    def __init__(self, value: object, root: str) -> None:
        leaves = list(tensors_in(value, TensorLeaf))
        stored = [(name, leaf) for name, leaf in leaves if leaf.nbytes]
        empty = dict.fromkeys(leaf.dtype for _, leaf in leaves if not leaf.nbytes)
        places: dict[object, int] = {id(leaf): at for at, (_, leaf) in enumerate(stored)}
        places |= {dtype: len(stored) + at for at, dtype in enumerate(empty)}
        keys = {
            id(leaf): str(places[id(leaf) if leaf.nbytes else leaf.dtype]) for _, leaf in leaves
        }
        contents = [("data.pkl", dump(value, keys)), ("byteorder", b"little")]
        self._root = root
        self._position = 0
        self._contents = [(self._place(name, len(data)), data) for name, data in contents]
        self._stored = [self._place(f"data/{i}", leaf.nbytes) for i, (_, leaf) in enumerate(stored)]
        rest = [*((f"data/{places[dtype]}", b"") for dtype in empty), ("version", b"3\n")]
        self._contents += [(self._place(name, len(data)), data) for name, data in rest]
        self._start = self._position
        self.placed = tuple(
            PlacedLeaf(name, leaf, record.offset)
            for (name, leaf), record in zip(stored, self._stored, strict=True)
        )

    def _place(self, name: str, nbytes: int) -> Record:
        """The next record, its bytes at a multiple of the alignment."""
        path = f"{self._root}/{name}"
        begin = self._position
        least = begin + _LOCAL.size + len(path.encode()) + _extra_nbytes(nbytes) + _PADDING.size
        record = Record(path, begin, -(-least // _ALIGNMENT) * _ALIGNMENT, nbytes)
        self._position = record.end
        return record

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._start + len(self._directory([0] * len(self._stored)))

    def frame(self, crc32s: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """What is no tensor's, by ascending offset."""
        contents = {record.begin: data for record, data in self._contents}
        for record, crc in self._records(crc32s):
            yield record.begin, _header(record, crc) + contents.get(record.begin, b"")
        yield self._start, self._directory(crc32s)

    def _records(self, crc32s: Sequence[int]) -> list[tuple[Record, int]]:
        """Every record with its CRC-32, in file order."""
        known = [(record, zlib.crc32(data)) for record, data in self._contents]
        records = [*known, *zip(self._stored, crc32s, strict=True)]
        return sorted(records, key=lambda item: item[0].begin)

    def _directory(self, crc32s: Sequence[int]) -> bytes:
        records = self._records(crc32s)
        rows = b"".join(_row(record, crc) for record, crc in records)
        return rows + _end(self._start, len(rows), len(records))


def _extra_nbytes(nbytes: int) -> int:
    return _SIZES64.size if nbytes >= _MAX32 else 0


def _version(*numbers: int) -> int:
    return _VERSION64 if max(numbers) >= _MAX32 else _VERSION


def _flags(name: str) -> int:
    return 0 if name.isascii() else _UTF8


def _header(record: Record, crc: int) -> bytes:
    """A record's own header, padded up to its first byte."""
    name = record.name.encode()
    size, version = min(record.nbytes, _MAX32), _version(record.nbytes)
    extra = b""
    if size == _MAX32:
        extra = _SIZES64.pack(_ZIP64_ID, 16, record.nbytes, record.nbytes)
    room = record.offset - record.begin - _LOCAL.size - len(name) - len(extra)
    extra += _PADDING.pack(_PADDING_ID, room - _PADDING.size).ljust(room, b"Z")
    fields = version, _flags(record.name), 0, 0, _DATE, crc, size, size, len(name), len(extra)
    return _LOCAL.pack(b"PK\x03\x04", *fields) + name + extra


def _row(record: Record, crc: int) -> bytes:
    """A record's row in the directory."""
    name = record.name.encode()
    large = [n for n in (record.nbytes, record.nbytes, record.begin) if n >= _MAX32]
    extra = struct.pack(f"<HH{len(large)}Q", _ZIP64_ID, 8 * len(large), *large) if large else b""
    size, version = min(record.nbytes, _MAX32), _version(record.nbytes, record.begin)
    fields = version, version, _flags(record.name), 0, 0, _DATE, crc, size, size, len(name)
    rest = len(extra), 0, 0, 0, 0, min(record.begin, _MAX32)
    return _CENTRAL.pack(b"PK\x01\x02", *fields, *rest) + name + extra


def _end(start: int, nbytes: int, count: int) -> bytes:
    """What stands after the directory, which begins at ``start``."""
    end = b""
    if max(start, nbytes) >= _MAX32 or count >= _MAX16:
        end = _END64.pack(
            b"PK\x06\x06",
            _END64.size - 12,
            _VERSION64,
            _VERSION64,
            0,
            0,
            count,
            count,
            nbytes,
            start,
        ) + _LOCATOR64.pack(b"PK\x06\x07", 0, start + nbytes, 1)
    counts, places = min(count, _MAX16), (min(nbytes, _MAX32), min(start, _MAX32))
    return end + _END.pack(b"PK\x05\x06", 0, 0, counts, counts, *places, 0)
