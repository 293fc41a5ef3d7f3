"""The manifest: the file beside the weights that says what they are and what they came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from blake3 import blake3

from zexport.errors import VerificationError
from zexport.findings import Finding, FindingKind
from zexport.ranges.dtypes import DType
from zexport.store.files import read_regular
from zexport.store.json import Json
from zexport.version import __version__

MANIFEST_NAME = "zexport_manifest.json"
SCHEMA = 1
_NBYTES_MAX = 128 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the output; ``blake3`` is the digest of its bytes as they lie in the shard."""

    dtype: DType
    shape: tuple[int, ...]
    shard: str
    blake3: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the output.

    ``blake3`` is the digest of its bytes; that of a shard is made of its header and its tensors'
    digests (``zexport.ranges.digests.digest_shard``), which stand for every byte of it.
    """

    nbytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One file that was read.

    Attributes:
        path: its path below the checkpoint, or its name if it lies elsewhere.
        nbytes: its size.
        mtime_ns: when it was last modified, in nanoseconds since 1970.
        blake3: digest of what was read of it to be exported
            (``zexport.ranges.ledger.FileLedger.digest``); ``None`` for a file whose values
            were only compared with others.
    """

    path: str
    nbytes: int
    mtime_ns: int
    blake3: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an export says of itself.

    Nothing in it varies by run: the same sources, in whichever folder, give the same bytes.

    Attributes:
        version: of the zexport that wrote it.
        provenance: what the plan says of the checkpoint and the options.
        sources: the files that were read.
        tensors: by name.
        files: by name, everything in the folder but the manifest.
        findings: what was remarkable, and exported all the same.
    """

    version: str
    provenance: Mapping[str, Json]
    sources: tuple[SourceEntry, ...]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    findings: tuple[Finding, ...]

    def lines(self) -> Iterator[bytes]:
        """The file's content, line by line; equal manifests give equal bytes.

        JSON with sorted keys, and one tensor, file, source or finding a line, so that neither the
        text nor the memory it takes is larger than it must be. One line has the digest of all the
        others.
        """
        hasher = blake3()
        for line in self._lines({}):
            hasher.update(line)
        yield from self._lines({"blake3": hasher.hexdigest()})

    def _lines(self, more: Mapping[str, Json]) -> Iterator[bytes]:
        tables: dict[str, Iterator[str]] = {
            "files": (_member(name, asdict(self.files[name])) for name in sorted(self.files)),
            "findings": (_json(asdict(finding)) for finding in self.findings),
            "sources": (_json(asdict(source)) for source in self.sources),
            "tensors": (
                _member(name, _tensor_json(self.tensors[name])) for name in sorted(self.tensors)
            ),
        }
        values = {**self.provenance, **more, "schema": SCHEMA, "zexport_version": self.version}
        keys = sorted([*tables, *values])
        yield b"{\n"
        for key in keys:
            ending = "\n" if key == keys[-1] else ",\n"
            if key in tables:
                yield from _block(key, "{}" if key in _BY_NAME else "[]", tables[key], ending)
            else:
                yield f"  {_member(key, values[key])}{ending}".encode()
        yield b"}\n"


_BY_NAME = frozenset({"files", "tensors"})
_OWN_KEYS = frozenset(
    {"schema", "zexport_version", "sources", "tensors", "files", "findings", "blake3"}
)
_DIGEST_LINE = re.compile(rb'^  "blake3": "([0-9a-f]{64})",\n', re.MULTILINE)


def new_manifest(
    *,
    provenance: Mapping[str, Json],
    sources: Iterable[SourceEntry],
    tensors: Mapping[str, TensorEntry],
    files: Mapping[str, FileEntry],
    findings: tuple[Finding, ...],
) -> Manifest:
    """A manifest of this zexport.

    Raises:
        ValueError: the provenance uses a key that the manifest needs for itself.
    """
    if taken := _OWN_KEYS & provenance.keys():
        raise ValueError(f"provenance keys already taken: {sorted(taken)}")
    ordered = tuple(sorted(sources, key=lambda source: source.path))
    return Manifest(__version__, provenance, ordered, tensors, files, findings)


def read_manifest(out_dir: Path) -> Manifest:
    """The manifest of an exported folder.

    Raises:
        VerificationError: there is none, or it is not one that this zexport understands.
    """
    path = out_dir / MANIFEST_NAME
    try:
        content = read_regular(path, _NBYTES_MAX)
        table = None if content is None else json.loads(content)
        if not isinstance(table, dict) or table.get("schema") != SCHEMA:
            raise VerificationError(
                "has another schema than this zexport understands",
                path=path,
                found=table.get("schema") if isinstance(table, dict) else type(table).__name__,
                expected=SCHEMA,
            )
        return _from_json(table)
    except OSError as cause:
        raise VerificationError(
            f"cannot be read: {cause.strerror}",
            path=path,
            hint="Name a folder that zexport consolidate has written",
        ) from cause
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise VerificationError(
            "is not a manifest", path=path, found=f"{type(cause).__name__}: {cause}"
        ) from cause


def is_as_written(out_dir: Path) -> bool:
    """Whether a folder's manifest, which can be read, is to the byte what an export wrote."""
    content = read_regular(out_dir / MANIFEST_NAME, _NBYTES_MAX) or b""
    rest = _DIGEST_LINE.sub(b"", content)
    return _DIGEST_LINE.findall(content) == [blake3(rest).hexdigest().encode()]


def _block(key: str, brackets: str, items: Iterator[str], ending: str) -> Iterator[bytes]:
    """A table or list, an item a line; the line before is ended when it is known what follows."""
    yield f"  {_json(key)}: {brackets[0]}".encode()
    separator = "\n"
    for item in items:
        yield f"{separator}    {item}".encode()
        separator = ",\n"
    closing = brackets[1] if separator == "\n" else f"\n  {brackets[1]}"
    yield f"{closing}{ending}".encode()


def _member(key: str, value: object) -> str:
    return f"{_json(key)}: {_json(value)}"


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _tensor_json(entry: TensorEntry) -> dict[str, object]:
    return {
        "dtype": entry.dtype.value,
        "shape": list(entry.shape),
        "shard": entry.shard,
        "blake3": entry.blake3,
    }


def _from_json(table: dict[str, Json]) -> Manifest:
    sources, tensors = _list(table["sources"]), _table(table["tensors"])
    files, findings = _table(table["files"]), _list(table["findings"])
    return Manifest(
        version=_text(table["zexport_version"]),
        provenance={key: value for key, value in table.items() if key not in _OWN_KEYS},
        sources=tuple(
            SourceEntry(
                _text(source["path"]),
                _count(source["nbytes"]),
                _count(source["mtime_ns"]),
                None if source["blake3"] is None else _text(source["blake3"]),
            )
            for source in map(_table, sources)
        ),
        tensors={name: _tensor_entry(_table(entry)) for name, entry in tensors.items()},
        files={
            _inside(name): FileEntry(_count(entry["nbytes"]), _text(entry["blake3"]))
            for name, entry in ((name, _table(entry)) for name, entry in files.items())
        },
        findings=tuple(
            Finding(
                FindingKind(_text(found["kind"])),
                _text(found["tensor"]),
                _count(found["count"]),
                _text(found["detail"]),
                found["accepted"] is True,
            )
            for found in map(_table, findings)
        ),
    )


def _tensor_entry(entry: dict[str, Json]) -> TensorEntry:
    return TensorEntry(
        dtype=DType(entry["dtype"]),
        shape=tuple(_count(dim) for dim in _list(entry["shape"])),
        shard=_inside(_text(entry["shard"])),
        blake3=_text(entry["blake3"]),
    )


def _table(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a table, found {value!r}")
    return value


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r}")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {value!r}")
    return value


def _inside(name: str) -> str:
    """A path that stays within the folder, such as ``additional_chat_templates/tools.jinja``."""
    path = PurePosixPath(name)
    if name != str(path) or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"expected a file in the folder, found {name!r}")
    return name


def _count(value: Json) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a count, found {value!r}")
    return value
