"""The sealed plan: a file in the unfinished folder that every part loads instead of planning.

It is a list of rows, each after the rows that it refers to, so that a source below ten thousand
tensors (such as a flat partition) is stored once. Paths are relative to what the user passed
(checkpoint, base, ...), since another machine may mount it elsewhere.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from msgspec import Struct, structs

from zexport import __version__
from zexport.errors import OutputError
from zexport.export.plan import (
    ExportPlan,
    FilePlan,
    Form,
    Origin,
    SideFile,
    SourceFile,
    TensorPlan,
)
from zexport.findings import Finding, FindingKind
from zexport.formats.safetensors import SafetensorsFrame
from zexport.formats.torch_writer import PlannedRecord, TorchFrame, TorchRecords
from zexport.model.hub_cache import GivenBase
from zexport.options import CheckMode
from zexport.ranges import compare, computed, source
from zexport.ranges.dtypes import DType
from zexport.storage.files import changed_ns, real
from zexport.storage.location import place
from zexport.storage.storage import Version
from zexport.storage.symlink_policy import Boundary

_FORMAT = "zexport plan 3"


class Request(Struct, frozen=True):
    """What a job was asked for.

    Attributes:
        anchors: folders that are read, which each part may see under other paths; the checkpoint's
            is first.
        choices: checkpoint and options, equal for all parts.
        follow_symlinks: read links that lead outside the anchors.
    """

    anchors: tuple[str, ...]
    choices: Mapping[str, Any]
    follow_symlinks: bool = False


class FileSize(Struct, frozen=True):
    """Size of a planned file, known without its tensors."""

    filename: str
    nbytes: int
    data_nbytes: int


class SealedPlan(Struct, frozen=True):
    """A plan as it is in a file: its shards are decoded one at a time.

    Attributes:
        plan: the plan.
        sizes: of its shards, in order.
        digest: of all that decides the output's bytes: BLAKE3, as 64 hexadecimal digits.
        request: what the plan was made for.
        content: the file.
        nbytes: size of the plan, unpacked.
    """

    plan: ExportPlan
    sizes: tuple[FileSize, ...]
    digest: str
    request: Request
    content: bytes
    nbytes: int

    @property
    def filenames(self) -> set[str]:
        sides = {one.filename for one in self.plan.side_files}
        return {*sides, *(one.filename for one in self.sizes)}


_RECORDS: tuple[type, ...] = (
    *(FilePlan, TensorPlan, SideFile, SourceFile, Origin, Form, GivenBase, Finding, Version),
    *(SafetensorsFrame, TorchRecords, PlannedRecord, DType, FindingKind, CheckMode),
    *(source.Extent, source.Chain, source.Window, source.Partitioned, source.Record),
    *(computed.Elements, computed.Recast, computed.ScaledSum, computed.Factors, computed.Zeros),
    *(computed.LowRankUpdate, computed.Partitions, computed.Partition, source.Mosaic, source.Tile),
    *(compare.Replica, compare.CastReplica),
)
"""All types in a plan except plain values; a record starts with its number in this list."""

_NUMBERS = {kind: number for number, kind in enumerate(_RECORDS)}
_ROW, _TUPLE, _SET, _PATH = -1, -2, -3, -4
_PLAIN = (str, int, float, bool, type(None), bytes)
_OWN_ROW = (SourceFile, computed.Partitions)
_DECIDES = (
    *("side_files", "sources", "replicas", "gathered", "check", "allow", "findings", "pruned"),
)
"""Fields of a plan, besides shards and provenance, that decide the output or its proof."""

_INFORMS = (
    *("origin", "form", "base", "warnings", "notes", "left_out", "overwrite", "jobs"),
    "chunk_nbytes",
)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, Struct):
        return tuple(kind.__struct_fields__)
    return tuple(one.name for one in fields(kind) if one.init)


class _Encoder:
    """The rows of a plan; what may be shared gets one row, by its identity."""

    def __init__(self, anchors: tuple[str, ...]) -> None:
        self.rows = bytearray()
        self._count = 0
        self._known: dict[object, tuple[object, int]] = {}  # with the object, so that its id stays
        self._folders = [
            (here.parent if up else here, number, up)
            for number, anchor in enumerate(map(place, anchors))
            for up in ("", "../")
            for here in (anchor, real(anchor))
        ]

    def add(self, row: object) -> int:
        data = msgspec.msgpack.encode(row)
        self.rows += len(data).to_bytes(4, "little") + data
        self._count += 1
        return self._count - 1

    def wire(self, value: Any) -> object:
        """Return a plain value as it is, any other as a list that starts with its type."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Path):
            return self._shared(value, value, self._relative)
        if kind is tuple:
            is_shared = bool(value) and hasattr(value[0], "constituents")
            return self._shared(id(value), value, self._items) if is_shared else self._items(value)
        if kind is frozenset:
            return [_SET, *map(self.wire, sorted(value))]
        if isinstance(value, Enum):
            return [_NUMBERS[kind], value.value]
        if hasattr(value, "constituents") or kind in _OWN_ROW:
            return self._shared(id(value), value, self.record)
        return self.record(value)

    def _items(self, value: tuple[object, ...]) -> list[object]:
        return [_TUPLE, *map(self.wire, value)]

    def record(self, value: object) -> list[object]:
        kind: Any = type(value)
        return [_NUMBERS[kind], *(self.wire(getattr(value, name)) for name in _names(kind))]

    def _shared(self, key: object, value: Any, row: Callable[[Any], list[object]]) -> list[int]:
        if key not in self._known:
            self._known[key] = value, self.add(row(value))
        return [_ROW, self._known[key][1]]

    def _relative(self, path: Path) -> list[object]:
        """Return a path relative to an anchor or to the folder around it, else in full."""
        for folder, number, up in self._folders:
            if path.is_relative_to(folder) and len(folder.parts) > 1:
                return [_PATH, number, f"{up}{path.relative_to(folder).as_posix()}"]
        return [_PATH, -1, str(path)]


def seal(plan: ExportPlan, request: Request) -> bytes:
    encoder = _Encoder(request.anchors)
    shards, sizes = [], []
    for file in plan.shards:
        frame = file.frame.records() if isinstance(file.frame, TorchFrame) else file.frame
        shards.append(encoder.add(encoder.record(structs.replace(file, frame=frame))))
        sizes.append((file.filename, file.nbytes, file.data_nbytes))
    # Without checksums, two base models may have equal names, sizes and times.
    bare = (s for s in plan.sources if not s.records or any(r.crc32 is None for r in s.records))
    unproven = [[str(real(one.path)), changed_ns(one.path)] for one in bare]
    decides = [encoder.wire(getattr(plan, name)) for name in _DECIDES]
    provenance = json.dumps(dict(plan.provenance), sort_keys=True)
    context = [__version__, plan.reference is None, unproven]
    encoder.add([shards, sizes, decides, provenance, context])
    informs = [encoder.wire(getattr(plan, name)) for name in _INFORMS]
    encoder.add([informs, msgspec.to_builtins(request)])
    packed = zlib.compress(encoder.rows, 1)
    digest = blake3(packed, derive_key_context=_FORMAT).digest()
    return _FORMAT.encode() + b"\n" + digest + packed


def unseal(content: bytes, path: Path, out_dir: Path, request: Request | None = None) -> SealedPlan:
    """Return the plan in a file at ``path``; its sources are at the anchors of ``request``, if any.

    Raises:
        OutputError: the file is damaged, or of another zexport.
        UnsafeError: a source is a link that leads outside the anchors.
    """
    head = len(_FORMAT) + 1
    digest, packed = content[head : head + 32], memoryview(content)[head + 32 :]
    is_ours = content.startswith(f"{_FORMAT}\n".encode())
    if not is_ours or blake3(packed, derive_key_context=_FORMAT).digest() != digest:
        raise _not_ours(path, "a damaged plan, or one of another zexport")
    rows = _Rows(packed)
    informs, requested = rows[-2]
    shards, sizes, decides, provenance, context = rows[-3]
    if context[0] != __version__:
        raise _not_ours(path, f"a plan of zexport {context[0]}")
    recorded = msgspec.convert(requested, Request)
    decoder = _Decoder(rows, request or recorded)
    known: dict[int, object] = {}
    decoded = (decoder.value(one, known) for one in (*decides, *informs))
    plan = ExportPlan(
        out_dir=out_dir,
        shards=_SealedShards(decoder, shards),
        provenance=json.loads(provenance),
        **dict(zip((*_DECIDES, *_INFORMS), decoded, strict=True)),
    )
    files = tuple(FileSize(*one) for one in sizes)
    return SealedPlan(plan, files, rows.digest, recorded, content, rows.nbytes)


def _not_ours(path: Path, found: str) -> OutputError:
    return OutputError(
        "is not a plan of this zexport",
        path=path,
        found=found,
        expected=f"a plan of zexport {__version__}",
        hint="Use the same zexport for all parts; or stop them and remove the folder",
    )


class _Rows:
    """Rows by number, each decoded when asked for.

    Attributes:
        digest: BLAKE3 of all rows but the last, which does not decide the output.
        nbytes: of all rows, unpacked.
    """

    def __init__(self, packed: memoryview) -> None:
        self._data = memoryview(zlib.decompress(packed))
        self._starts = array("Q")
        self.nbytes, at = len(self._data), 0
        while at < self.nbytes:
            self._starts.append(at + 4)
            at += 4 + int.from_bytes(self._data[at : at + 4], "little")
        self.digest = blake3(self._data[: self._starts[-1] - 4]).hexdigest()
        self._starts.append(self.nbytes + 4)

    def __getitem__(self, number: int) -> Any:
        start, stop = self._starts[number], self._starts[number + 1] - 4
        return msgspec.msgpack.decode(self._data[start:stop])


class _Decoder:
    """Values of rows; paths are below the request's anchors."""

    def __init__(self, rows: _Rows, request: Request) -> None:
        self._rows = rows
        self._path = cache(self._read_path)
        self._anchors = [place(one) for one in request.anchors]
        folders = (*self._anchors, *(one.parent for one in self._anchors))
        self._boundary = Boundary.of(*folders, follow=request.follow_symlinks)

    def value(self, wired: Any, known: dict[int, Any]) -> Any:
        """Return the value for which ``_Encoder.wire`` returned ``wired``.

        ``known`` are the rows decoded so far, by number, so that a shared value is decoded once.
        """
        if type(wired) is not list:
            return wired
        code, *rest = wired
        if code == _ROW:
            if rest[0] not in known:
                known[rest[0]] = self.value(self._rows[rest[0]], known)
            return known[rest[0]]
        if code == _PATH:
            return self._path(*rest)
        values = [self.value(one, known) for one in rest]
        if code == _TUPLE:
            return tuple(values)
        return frozenset(values) if code == _SET else _RECORDS[code](*values)

    def _read_path(self, anchor: int, text: str) -> Path:
        if anchor < 0:
            return place(text)
        folder, below = self._anchors[anchor], text.removeprefix("../")
        path = (folder if below == text else folder.parent) / below
        self._boundary.check(path)
        return path


class _SealedShards(Sequence[FilePlan]):
    """The files of a plan, each decoded when asked for and not kept."""

    def __init__(self, decoder: _Decoder, rows: list[int]) -> None:
        self._decoder = decoder
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        return self._decoder.value([_ROW, self._rows[place]], {})
