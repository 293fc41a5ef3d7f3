"""A zip file of ``torch.save``'s form, laid out before its tensors' bytes are known.

Records are stored, each tensor's at a multiple of 64 bytes as torch has it, so that it may be
mapped. A tensor's CRC-32 is known when its bytes have passed: it stands behind them and in the
zip's directory, and nowhere before, so that a file can be written from its first byte to its last.

Source of the records, their order and what stands behind each: torch 2.13,
``torch/serialization.py`` (``_save``), ``caffe2/serialize/inline_container.cc`` and
``third_party/miniz-3.0.2/miniz.c`` (``mz_zip_writer_add_mem_ex_v2``). Left out are
``.format_version``, by which torch would work out offsets instead of reading them, and
``.data/serialization_id``.
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
_BEHIND = struct.Struct("<4sLLL")
_BEHIND64 = struct.Struct("<4sLQQ")
_PADDING = struct.Struct("<HH")
_PADDING_ID = int.from_bytes(b"FB", "little")
_ZIP64_ID = 1
_UTF8 = 0x800
_TOLD_BEHIND = 0x8
"""A record's CRC-32 and size stand behind its bytes, and not in its header."""
_VERSION, _VERSION64 = 20, 45
_DATE = 0x21  # 1980-01-01, the first that a zip can tell
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_PATH_LENGTH_MAX = 400
"""Characters of a path beyond which it is not made longer: a value may be nested to any depth."""

T = TypeVar("T")


class Record(Struct, frozen=True):
    """A record of the zip: where its header begins, where its bytes do, and how many there are.

    ``content`` is there where it is known beforehand, as no tensor's is.
    """

    name: str
    begin: int
    offset: int
    nbytes: int
    content: bytes | None = None

    @property
    def end(self) -> int:
        """The byte after the last of its bytes, which what stands behind them follows."""
        return self.offset + self.nbytes

    @property
    def flags(self) -> int:
        """What a reader of the zip has to know of it."""
        is_ascii, is_known = self.name.isascii(), self.content is not None
        return (0 if is_ascii else _UTF8) | (0 if is_known else _TOLD_BEHIND)

    @property
    def is_large(self) -> bool:
        """Whether its size needs more than 32 bits."""
        return self.nbytes >= _MAX32


class PlacedLeaf(Struct, frozen=True):
    """A tensor that has bytes: its name, none other's in the file, and its first byte there."""

    name: str
    leaf: TensorLeaf
    offset: int


class TorchRecords(Struct, frozen=True):
    """The bytes of a torch file around its tensors, as records of the zip.

    Attributes:
        records: all records, by offset; those of tensors have no content.
        start: first byte of the directory.
        nbytes: bytes of the file outside of tensors.
    """

    records: tuple[Record, ...]
    start: int
    nbytes: int

    def pieces(self, crc32s: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes before the first tensor, between each two, and after the last.

        ``crc32s`` are those of the tensors in file order; each is taken after its tensor's bytes.
        """
        given = iter(crc32s)
        found: list[int] = []
        begin, run = 0, b""
        for record in self.records:
            if record.content is None:
                yield begin, run + _header(record, 0)
                found.append(next(given))
                begin, run = record.end, _behind(record, found[-1])
            else:
                found.append(zlib.crc32(record.content))
                run += _header(record, found[-1]) + record.content
        yield begin, run + _directory(self.records, self.start, found)


class TorchFrame(Struct, frozen=True):
    """A torch file without its tensors' bytes; its pickle is made when needed, not held.

    Attributes:
        value: what ``torch.load`` returns, with a ``TensorLeaf`` for every tensor.
        root: the top folder of the zip, the file's name without ``.pt``.
        nbytes: bytes of the file outside of tensors.
    """

    value: object
    root: str
    nbytes: int

    def records(self) -> TorchRecords:
        layout = _Layout(self.value, self.root)
        return TorchRecords(tuple(layout.records), layout.start, self.nbytes)

    def pieces(self, crc32s: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """As of ``TorchRecords``."""
        return self.records().pieces(crc32s)


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
        stored: list[tuple[str, TensorLeaf]] = []
        empty: dict[DType, None] = {}
        for name, leaf in tensors_in(value, TensorLeaf):
            if leaf.nbytes:
                stored.append((name, leaf))
            else:
                empty[leaf.dtype] = None
        places: dict[object, int] = {id(leaf): at for at, (_, leaf) in enumerate(stored)}
        places |= {dtype: len(stored) + at for at, dtype in enumerate(empty)}
        self._root = root
        self._position = 0
        pickle = dump(value, lambda leaf: places[id(leaf) if leaf.nbytes else leaf.dtype])
        first = [("data.pkl", pickle), ("byteorder", b"little")]
        last = [*((f"data/{places[dtype]}", b"") for dtype in empty), ("version", b"3\n")]
        self.records = [self._known(name, content) for name, content in first]
        tensors = [self._place(f"data/{i}", leaf.nbytes) for i, (_, leaf) in enumerate(stored)]
        self.records += tensors
        self.records += [self._known(name, content) for name, content in last]
        self.start = self._position
        self.placed = tuple(
            PlacedLeaf(name, leaf, record.offset)
            for (name, leaf), record in zip(stored, tensors, strict=True)
        )

    def _known(self, name: str, content: bytes) -> Record:
        return self._place(name, len(content), content)

    def _place(self, name: str, nbytes: int, content: bytes | None = None) -> Record:
        """The next record, its bytes at a multiple of the alignment."""
        path = f"{self._root}/{name}"
        begin = self._position
        least = begin + _LOCAL.size + len(path.encode()) + _extra_nbytes(nbytes) + _PADDING.size
        offset = -(-least // _ALIGNMENT) * _ALIGNMENT
        record = Record(path, begin, offset, nbytes, content)
        self._position = record.end + len(_behind(record, 0))
        return record

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.start + len(_directory(self.records, self.start, [0] * len(self.records)))


def _directory(records: Sequence[Record], start: int, crc32s: Sequence[int]) -> bytes:
    rows = b"".join(map(_row, records, crc32s))
    return rows + _end(start, len(rows), len(records))


def _extra_nbytes(nbytes: int) -> int:
    return _SIZES64.size if nbytes >= _MAX32 else 0


def _version(*numbers: int) -> int:
    return _VERSION64 if max(numbers) >= _MAX32 else _VERSION


def _header(record: Record, crc: int) -> bytes:
    """A record's own header, padded up to its first byte."""
    name = record.name.encode()
    nbytes = 0 if record.content is None else record.nbytes
    extra = _SIZES64.pack(_ZIP64_ID, 16, record.nbytes, record.nbytes) if record.is_large else b""
    room = record.offset - record.begin - _LOCAL.size - len(name) - len(extra)
    extra += _PADDING.pack(_PADDING_ID, room - _PADDING.size).ljust(room, b"Z")
    version, sizes = _version(record.nbytes), (nbytes, nbytes, len(name), len(extra))
    return (
        _LOCAL.pack(b"PK\x03\x04", version, record.flags, 0, 0, _DATE, crc, *sizes) + name + extra
    )


def _behind(record: Record, crc: int) -> bytes:
    """What stands behind a tensor's bytes; behind others nothing."""
    if record.content is not None:
        return b""
    form = _BEHIND64 if record.is_large else _BEHIND
    return form.pack(b"PK\x07\x08", crc, record.nbytes, record.nbytes)


def _row(record: Record, crc: int) -> bytes:
    """A record's row in the directory."""
    name = record.name.encode()
    large = [n for n in (record.nbytes, record.nbytes, record.begin) if n >= _MAX32]
    extra = struct.pack(f"<HH{len(large)}Q", _ZIP64_ID, 8 * len(large), *large) if large else b""
    size, version = min(record.nbytes, _MAX32), _version(record.nbytes, record.begin)
    fields = version, version, record.flags, 0, 0, _DATE, crc, size, size, len(name)
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


def tensors_in(value: object, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The objects of ``kind`` in a tree, each once, and the path of the first place of each.

    A path is made of keys and indices with ``/`` between them, and is nobody else's. The same tree
    gives the same paths, whether its tensors are to be written or were read.
    """
    seen: set[int] = set()
    names = _Names()
    waiting: list[tuple[str, Iterator[tuple[object, object]]]] = [("", iter([("", value)]))]
    while waiting:
        above, parts = waiting[-1]
        if (part := next(parts, None)) is None:
            waiting.pop()
            continue
        key, one = part
        if id(one) in seen:
            continue
        if isinstance(one, kind):
            seen.add(id(one))
            yield names.free(_joined(above, key) or "tensor"), one
        elif isinstance(one, dict | list | tuple | Opaque):
            seen.add(id(one))
            waiting.append((_joined(above, key), iter(_parts(one))))


def _parts(
    value: dict[object, object] | list[object] | tuple[object, ...] | Opaque,
) -> Iterable[tuple[object, object]]:
    """What a value consists of that may be or hold tensors, by key, index or attribute."""
    if isinstance(value, Ordered) and value.attributes is not None:
        return chain(value.items(), (("attributes", value.attributes),))
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, Opaque):
        return ((name, getattr(value, name)) for name in ("args", "items", "pairs", "state"))
    return enumerate(value)


def _joined(path: str, key: object) -> str:
    if len(path) > _PATH_LENGTH_MAX:
        return path
    text = key if isinstance(key, str) else "*" if isinstance(key, OpaqueKey) else str(key)
    return f"{path}/{printable(text[:_PATH_LENGTH_MAX])}".lstrip("/")


class _Names:
    """Names that were given, and how often each was asked for."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._asked: Counter[str] = Counter()

    def free(self, name: str) -> str:
        """The name, numbered where it was given before."""
        free = name
        while free in self._taken:
            self._asked[name] += 1
            free = f"{name} ({self._asked[name] + 1})"
        self._taken.add(free)
        return free
