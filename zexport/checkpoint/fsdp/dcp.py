"""torch.distributed.checkpoint (DCP): ``.metadata`` has the place of every box of every tensor.

Each tensor entry of a ``.distcp`` file is a ``torch.save`` archive with a CRC-32 of its record.

Source: torch 2.13, ``distributed/checkpoint/filesystem.py`` and ``metadata.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.boxes import join_boxes
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
from zexport.checkpoint.state import Role
from zexport.errors import IncompleteCheckpointError, UnsupportedError
from zexport.formats.pickle_reader import load
from zexport.formats.pickle_values import DTYPES, Global, Opaque, OpaqueKey
from zexport.formats.pickle_view import PickleView
from zexport.formats.torch_file import data_offset, read_directory, read_record, tensor_source
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource, Extent, Record
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
_PICKLE_NBYTES_MAX, _NAME_NBYTES_MAX = 1 << 16, 255


@dataclass(frozen=True)
class DataFile:
    """A ``.distcp`` file, and the records in it that have been bound."""

    path: Path
    version: Version
    bound: dict[int, Record] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(self.bound[at] for at in sorted(self.bound))


class InArchive(Struct, frozen=True):
    """A box of a tensor in an archive: the bytes ``entry`` of a file."""

    file: DataFile
    entry: Extent
    shape: Shape
    dtype: DType

    def bind(self) -> ByteSource:
        """Raise unless the archive contains the tensor that ``.metadata`` describes."""
        path, entry, name = self.file.path, self.entry, "archive/data.pkl"
        with reading(path), open_input(path) as file:
            records = read_directory(file, path, entry.offset + entry.nbytes)
            pickle = load(read_record(file, path, records, name, _PICKLE_NBYTES_MAX), path=path)
            ref = PickleView(path, name, pickle.value).tensor()
            record = records.get(f"archive/data/{ref.storage.key}")
            offset = 0 if record is None else data_offset(file, path, record)
        is_own = record is None or (record.is_stored and record.header_offset >= entry.offset)
        nbytes = 0 if record is None else record.nbytes
        kind = ref.shape, ref.dtype, ref.storage.nbytes
        if not is_own or kind != (self.shape, self.dtype, nbytes):
            found = f"{list(ref.shape)} at byte {entry.offset}"
            raise damaged("tensor differs from its description in .metadata", path, found)
        if record is not None:
            self.file.bound[offset] = Record(record.name, offset, record.nbytes, record.crc32)
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
    pickle = load(read_whole(path), path=path)
    refuse_unknown(path, pickle.unknown_globals, _KNOWN)
    top = fields(PickleView(path, METADATA, pickle.value), "Metadata")
    files: dict[Path, DataFile] = {}
    entries = _entries(folder, top.need("storage_data"), files)
    paths = dict(top.get("planner_data").entries())
    tensors: dict[Keys, Joined] = {}
    others: dict[Keys, object] = {}
    for name, one in top.need("state_dict_metadata").entries():
        parts = paths[name].items() if name in paths else ()
        keys = tuple(part.text_or(None) or str(count(part)) for part in parts) or (name,)
        callee = one.value.callee if isinstance(one.value, Opaque) else None
        if isinstance(callee, Global) and callee.name == "BytesStorageMetadata":
            others[keys] = None
        else:
            tensors[keys] = _tensor(name, fields(one, "TensorStorageMetadata"), entries)
    return Tree(tensors, others, tuple(files.values()), "torch DCP")


def _entries(
    folder: Path, storage: PickleView, files: dict[Path, DataFile]
) -> dict[tuple[str, Shape], tuple[DataFile, Extent]]:
    """Return the place of every tensor entry by name and first index; fill ``files``."""
    found: dict[tuple[str, Shape], tuple[DataFile, Extent]] = {}
    for key, value in storage.mapping().items():
        plain = key.value if isinstance(key, OpaqueKey) else key
        index = fields(PickleView(storage.path, "MetadataIndex", plain), "MetadataIndex")
        info = fields(PickleView(storage.path, "_StorageInfo", value), "_StorageInfo")
        name = info.need("relative_path").text()
        if "/" in name or "\\" in name or len(name.encode(errors="replace")) > _NAME_NBYTES_MAX:
            raise unsafe("names a file that cannot be in its folder", storage.path, repr(name[:99]))
        if info.get("transform_descriptors").value is not None:
            raise UnsupportedError(
                "entries are compressed or otherwise transformed",
                path=storage.path,
                hint="Save again without transforms",
            )
        path = folder / name
        if path not in files:
            if not is_file(path):
                raise missing("a file that .metadata lists is missing", folder, None, name)
            files[path] = DataFile(path, version(path))
        start = index.get("offset")
        if start.value is not None:  # else not a tensor
            place = Extent(path, count(info.need("offset")), count(info.need("length")))
            found[index.need("fqn").text(), start.shape()] = (files[path], place)
    return found


def _tensor(
    name: str, entry: PickleView, entries: Mapping[tuple[str, Shape], tuple[DataFile, Extent]]
) -> Joined:
    """Return a tensor joined from its chunks; empty ones have no entry."""
    state = getattr(entry.need("properties").value, "state", None)
    kind = state[0] if isinstance(state, tuple) and state else None
    dtype = DTYPES.get(kind) if isinstance(kind, Global) else None
    if dtype is None:
        raise UnsupportedError(
            f"dtype of {name!r} is not supported", path=entry.path, hint="Save it in another dtype"
        )
    chunks = [fields(one, "ChunkStorageMetadata") for one in entry.need("chunks").items()]
    boxes = [(one.need("offsets").shape(), one.need("sizes").shape()) for one in chunks]
    pieces = [
        piece(name, start, size, InArchive(*entries[name, start], size, dtype))
        for start, size in boxes
        if (name, start) in entries
    ]
    return join_boxes(name, entry.need("size").shape(), Role.TRAINABLE, pieces)
