"""torch.distributed.checkpoint (DCP): ``.metadata`` has the place of every box of every tensor.

Each tensor entry of a ``.distcp`` file is a ``torch.save`` archive with a CRC-32 of its record.

Source: torch 2.13, ``distributed/checkpoint/filesystem.py`` and ``metadata.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from msgspec import Struct

from zexport.checkpoint.boxes import Bound, join_boxes
from zexport.checkpoint.fsdp.tree import (
    Joined,
    Keys,
    Tree,
    count,
    damaged,
    fields,
    missing,
    piece,
    refuse_unknown,
    unsafe,
)
from zexport.checkpoint.state import MASTER, Parameter, Role
from zexport.errors import IncompleteCheckpointError, UnsupportedError
from zexport.formats.pickle_reader import Pickle, Rows, Share, load
from zexport.formats.pickle_values import DTYPES, Global, Opaque, PickleError, Row, is_sizes
from zexport.formats.pickle_view import PickleView
from zexport.formats.torch_file import data_offset, read_directory, read_record, tensor_source
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource, Record, Unread, check_cover
from zexport.storage.files import is_file, open_input, read_whole, version
from zexport.storage.os_errors import reading
from zexport.storage.storage import Version

METADATA = ".metadata"
_KNOWN = (
    "torch.distributed.checkpoint.metadata.",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.",
)
_METADATA_NBYTES_MAX, _PICKLE_NBYTES_MAX, _NAME_NBYTES_MAX = 128 << 20, 1 << 16, 255


@dataclass(frozen=True)
class DataFile:
    """A ``.distcp`` file, and the records in it of ``tensors``, which several files share."""

    path: Path
    version: Version
    tensors: list[Unread]
    bound: dict[int, Record] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Record, ...]:
        for tensor in self.tensors:
            tensor.source  # noqa: B018 - reads the places of its records
        return tuple(self.bound[at] for at in sorted(self.bound))


class Chunk(Row, frozen=True, gc=False):
    """A box of a tensor: its first index, and its shape."""

    start: Shape
    shape: Shape


class Index(Row, frozen=True, gc=False):
    """Names an entry: a tensor, and the first index of the chunk; ``None`` for other values."""

    name: str
    start: Shape | None


class Place(Row, frozen=True, gc=False):
    """Where an entry is; ``is_plain`` unless it was transformed, such as compressed."""

    file: str
    offset: int
    nbytes: int
    is_plain: bool


class Chunks(Struct, frozen=True):
    """A tensor in archives, one per chunk; ``bind`` reads none of them yet."""

    name: str
    shape: Shape
    dtype: DType
    chunks: tuple[Chunk, ...]
    places: tuple[Place, ...]
    files: Mapping[str, DataFile]
    tensors: list[Unread]
    pickles: dict[bytes, Pickle]

    def bind(self) -> ByteSource:
        source = Unread(prod(self.shape) * self.dtype.itemsize, self._read)
        self.tensors.append(source)
        return source

    def _read(self) -> ByteSource:
        pieces = [
            piece(self.name, chunk.start, chunk.shape, Bound(self.dtype, self._bound(chunk, place)))
            for chunk, place in zip(self.chunks, self.places, strict=True)
        ]
        return join_boxes(self.name, self.shape, Role.TRAINABLE, pieces)[0].source(MASTER)

    def _bound(self, chunk: Chunk, place: Place) -> ByteSource:
        """Raise unless the archive contains the tensor that ``.metadata`` describes."""
        data, name = self.files[place.file], "archive/data.pkl"
        path = data.path
        with reading(path), open_input(path) as file:
            records = read_directory(file, path, place.offset + place.nbytes)
            content = read_record(file, path, records, name, _PICKLE_NBYTES_MAX)
            if content not in self.pickles:
                self.pickles[content] = load(content, path=path)
            ref = PickleView(path, name, self.pickles[content].value).tensor()
            record = records.get(f"archive/data/{ref.storage.key}")
            offset = 0 if record is None else data_offset(file, path, record)
        is_own = record is None or (record.is_stored and record.header_offset >= place.offset)
        nbytes = 0 if record is None else record.nbytes
        kind = ref.shape, ref.dtype, ref.storage.nbytes
        if not is_own or kind != (chunk.shape, self.dtype, nbytes):
            found = f"{list(ref.shape)} at byte {place.offset}"
            raise damaged("tensor differs from its description in .metadata", path, found)
        if record is not None:
            data.bound[offset] = Record(record.name, offset, record.nbytes, record.crc32)
        return tensor_source(path, ref, offset)


def read_dcp(folder: Path) -> Tree:
    """Return the state dict in a folder with ``.metadata``."""
    path = folder / METADATA
    if not is_file(path):
        raise IncompleteCheckpointError(
            ".metadata is missing: torch writes it last, so the save did not finish",
            path=folder,
            hint="Use an earlier checkpoint",
        )
    if version(path).nbytes > _METADATA_NBYTES_MAX:
        raise UnsupportedError(
            f"has more than {_METADATA_NBYTES_MAX >> 20} MiB", path=path, hint="Save fewer chunks"
        )
    pickle = load(read_whole(path), path=path, rows=_ROWS)
    refuse_unknown(path, pickle.unknown_globals, _KNOWN)
    top = fields(PickleView(path, METADATA, pickle.value), "Metadata")
    storage = top.need("storage_data")
    unread: list[Unread] = []
    files = _files(folder, storage, unread)
    pickles: dict[bytes, Pickle] = {}
    paths = dict(top.get("planner_data").entries())
    tensors: dict[Keys, Joined] = {}
    others: dict[Keys, object] = {}
    for name, one in top.need("state_dict_metadata").entries():
        parts = paths[name].items() if name in paths else ()
        keys = tuple(part.text_or(None) or str(count(part)) for part in parts) or (name,)
        callee = one.value.callee if isinstance(one.value, Opaque) else None
        if isinstance(callee, Global) and callee.name == "BytesStorageMetadata":
            others[keys] = None
            continue
        entry = fields(one, "TensorStorageMetadata")
        shape, dtype = entry.need("size").shape(), _dtype(name, entry)
        placed = {
            chunk: place
            for chunk in dict.fromkeys(_chunks(entry.need("chunks")))
            if (place := storage.value.get(Index(name, chunk.start)))
            is not None  # else it is empty
        }
        check_cover(repr(name), shape, [(chunk.start, chunk.shape) for chunk in placed])
        stored = Chunks(name, shape, dtype, (*placed,), (*placed.values(),), files, unread, pickles)
        tensors[keys] = Parameter(name, shape, Role.TRAINABLE, {MASTER: stored}), ()
    return Tree(tensors, others, tuple(files.values()), "torch DCP")


def _chunk(state: dict[str, Any], share: Share) -> Row:
    row: Row = share(Chunk(_sizes(state["offsets"], share), _sizes(state["sizes"], share)))
    return row


def _index(state: dict[str, Any], share: Share) -> Row:
    start = state.get("offset")
    return Index(_text(state["fqn"], share), None if start is None else _sizes(start, share))


def _place(state: dict[str, Any], share: Share) -> Row:
    numbers = state["offset"], state["length"]
    if not is_sizes(numbers):
        raise PickleError("place of an entry is not made of whole numbers")
    is_plain = state.get("transform_descriptors") is None
    return Place(_text(state["relative_path"], share), numbers[0], numbers[1], is_plain)


def _sizes(value: object, share: Share) -> Shape:
    if not is_sizes(value):
        raise PickleError("place of a chunk is not made of whole numbers")
    sizes: Shape = share(tuple(value))
    return sizes


def _text(value: object, share: Share) -> str:
    if not isinstance(value, str):
        raise PickleError("name of a tensor or file is not text")
    return str(share(value))


_PACKAGE = "torch.distributed.checkpoint"
_ROWS: Rows = {
    Global(f"{_PACKAGE}.metadata", "ChunkStorageMetadata"): _chunk,
    Global(f"{_PACKAGE}.metadata", "MetadataIndex"): _index,
    Global(f"{_PACKAGE}.filesystem", "_StorageInfo"): _place,
}
"""What to keep of the objects of which .metadata has one per chunk."""


def _files(folder: Path, storage: PickleView, unread: list[Unread]) -> dict[str, DataFile]:
    """Return the files that contain entries, by name; each must reach the end of its last one."""
    ends: dict[str, int] = {}
    for key, place in storage.mapping().items():
        if not isinstance(key, Index) or not isinstance(place, Place):
            storage.fail("has an entry of another kind")
        if not place.is_plain:
            raise UnsupportedError(
                "entries are compressed or otherwise transformed",
                path=storage.path,
                hint="Save again without transforms",
            )
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.nbytes)
    files = {}
    for name in sorted(ends):
        if "/" in name or "\\" in name or len(name.encode(errors="replace")) > _NAME_NBYTES_MAX:
            raise unsafe("names a file that cannot be in its folder", storage.path, repr(name[:99]))
        if not is_file(folder / name):
            raise missing("a file that .metadata lists is missing", folder, None, name)
        files[name] = file = DataFile(folder / name, version(folder / name), unread)
        if file.version.nbytes < ends[name]:
            found = f"{file.version.nbytes} bytes"
            raise damaged("file ends early", file.path, found, f"{ends[name]} bytes")
    return files


def _dtype(name: str, entry: PickleView) -> DType:
    state = getattr(entry.need("properties").value, "state", None)
    kind = state[0] if isinstance(state, tuple) and state else None
    dtype = DTYPES.get(kind) if isinstance(kind, Global) else None
    if dtype is None:
        raise UnsupportedError(
            f"dtype of {name!r} is not supported", path=entry.path, hint="Save it in another dtype"
        )
    return dtype


def _chunks(chunks: PickleView) -> list[Chunk]:
    found = [one for one in chunks.value or () if isinstance(one, Chunk)]
    return (
        found if len(found) == len(chunks.value or ()) else chunks.fail("has another kind of item")
    )
