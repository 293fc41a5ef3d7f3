"""The manifest: the file beside the weights that says what they are and what they came from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec
from blake3 import blake3
from msgspec import Struct, field
from msgspec.structs import replace

from zexport import __version__
from zexport.errors import VerificationError
from zexport.filenames import MANIFEST_NAME
from zexport.findings import Finding
from zexport.ranges.dtypes import DType
from zexport.store.contents import read_regular
from zexport.store.json import Json, Natural, plain_of

SCHEMA = 1
_NBYTES_MAX = 128 << 20


class TensorEntry(Struct, frozen=True, gc=False):
    """One tensor of the output.

    Attributes:
        dtype: safetensors' name of the element type.
        shape: its shape.
        shard: the file that holds it.
        blake3: digest of its bytes as they lie in the file.
    """

    dtype: DType
    shape: tuple[Natural, ...]
    shard: str
    blake3: str


class FileEntry(Struct, frozen=True):
    """One file of the output.

    Attributes:
        nbytes: its size.
        blake3: digest of its bytes; that of a file of tensors is made of all that is no tensor's
            (such as a header) and of its tensors' digests, which stand for every byte of it.
    """

    nbytes: Natural
    blake3: str


class SourceEntry(Struct, frozen=True):
    """One file that was read.

    Attributes:
        path: its path below the checkpoint, or its name if it lies elsewhere.
        nbytes: its size.
        mtime_ns: when it was last modified, in nanoseconds since 1970.
        blake3: digest of what was read of it to be exported; ``None`` for a file whose
            values were only compared with others.
    """

    path: str
    nbytes: Natural
    mtime_ns: Natural
    blake3: str | None


class Manifest(Struct, frozen=True):
    """What an export says of itself.

    Nothing in it varies by run: the same sources, in whichever folder, give the same bytes.

    Attributes:
        zexport_version: of the zexport that wrote it.
        sources: the files that were read, sorted.
        tensors: by name.
        files: by name: every file of the folder but the manifest.
        findings: what was remarkable, and exported all the same.
        provenance: what the plan says of the checkpoint and the options; in the file, these keys
            stand beside the others.
    """

    zexport_version: str
    sources: tuple[SourceEntry, ...]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    findings: tuple[Finding, ...]
    provenance: Mapping[str, object] = field(default_factory=dict)

    @property
    def shards(self) -> set[str]:
        """Names of the files that hold tensors."""
        return {entry.shard for entry in self.tensors.values()}

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

    def _lines(self, more: Mapping[str, object]) -> Iterator[bytes]:
        tables: dict[str, Iterator[str]] = {
            "files": (_member(name, self.files[name]) for name in sorted(self.files)),
            "findings": map(_json, self.findings),
            "sources": map(_json, self.sources),
            "tensors": (_member(name, self.tensors[name]) for name in sorted(self.tensors)),
        }
        own = {"schema": SCHEMA, "zexport_version": self.zexport_version}
        values = {**self.provenance, **more, **own}
        keys = sorted([*tables, *values])
        yield b"{\n"
        for key in keys:
            ending = "\n" if key == keys[-1] else ",\n"
            if key in tables:
                yield from _block(key, "{}" if key in _BY_NAME else "[]", tables[key], ending)
            else:
                yield f"  {_member(key, values[key])}{ending}".encode()
        yield b"}\n"


_encoded = json.JSONEncoder(sort_keys=True).encode
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
    """A manifest of this zexport."""
    if taken := _OWN_KEYS & provenance.keys():
        raise ValueError(f"provenance keys already taken: {sorted(taken)}")
    ordered = tuple(sorted(sources, key=lambda source: source.path))
    return Manifest(__version__, ordered, tensors, files, findings, provenance)


def read_manifest(out_dir: Path) -> Manifest:
    """The manifest of an exported folder."""
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
        return _manifest_of(table)
    except FileNotFoundError as cause:
        raise VerificationError(
            "there is no manifest, so nothing can be verified against it",
            path=path,
            hint="Compare the folder's weights with a checkpoint's: zexport diff FOLDER CKPT",
        ) from cause
    except OSError as cause:
        raise VerificationError(
            f"cannot be read: {cause.strerror}",
            path=path,
            hint="Name a folder that zexport consolidate has written",
        ) from cause
    except (ValueError, RecursionError) as cause:
        raise VerificationError("is not a manifest", path=path, found=cause) from cause


def _manifest_of(table: Mapping[str, object]) -> Manifest:
    """The manifest in a JSON object; what is not its own is provenance."""
    manifest = msgspec.convert(table, Manifest)
    for name in {*manifest.files, *manifest.shards}:
        check_inside(name)
    rest = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    return replace(manifest, provenance=rest)


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
    return _encoded(plain_of(value))


def check_inside(name: str) -> None:
    """Raise a ``ValueError`` for a name that leads out of the folder; ``sub/x.jinja`` does not."""
    path = PurePosixPath(name)
    os.fsencode(name)  # a ValueError where no file can have it
    if name != str(path) or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"expected a file in the folder, found {name!r}")
