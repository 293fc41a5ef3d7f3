"""The manifest: an export's files and tensors with their digests, and the files it came from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec
from blake3 import blake3
from msgspec import Struct, field
from msgspec.structs import replace

from zexport.errors import VerificationError
from zexport.export.plan import ExportPlan
from zexport.filenames import MANIFEST_NAME
from zexport.findings import Finding
from zexport.ranges.dtypes import DType
from zexport.storage.files import read_regular
from zexport.storage.json import Natural, as_table, plain_of
from zexport.storage.os_errors import reading

SCHEMA = 1
_NBYTES_MAX = 128 << 20
_DIGEST_LINE = re.compile(rb'^  "blake3": "([0-9a-f]{64})",\n', re.MULTILINE)
_encoded = json.JSONEncoder(sort_keys=True).encode


class TensorEntry(Struct, frozen=True, gc=False):
    """One tensor of the output.

    Attributes:
        dtype: its dtype, as safetensors names it.
        shape: its shape.
        shard: the file that contains it.
        blake3: digest of its bytes.
    """

    dtype: DType
    shape: tuple[Natural, ...]
    shard: str
    blake3: str


class FileEntry(Struct, frozen=True):
    """One file of the output.

    Attributes:
        nbytes: its size.
        blake3: digest of its bytes; of a file of tensors, digest of all bytes outside of tensors
            (such as the header) and then of the tensors' digests.
    """

    nbytes: Natural
    blake3: str

    @classmethod
    def of(cls, content: bytes) -> FileEntry:
        return cls(len(content), blake3(content).hexdigest())


class SourceEntry(Struct, frozen=True):
    """One file that was read.

    Attributes:
        path: its path below the checkpoint, or its name if it is elsewhere.
        nbytes: its size.
        mtime_ns: its modification time, in nanoseconds since 1970.
        blake3: digest of what was exported of it; ``None`` if it was only compared with others.
    """

    path: str
    nbytes: Natural
    mtime_ns: Natural
    blake3: str | None


class Manifest(Struct, frozen=True):
    """Contents of a manifest; the same sources give the same bytes, in any folder.

    Attributes:
        zexport_version: version of zexport that wrote it.
        sources: the files that were read, sorted.
        tensors: by name.
        files: by name: every file of the folder except the manifest.
        findings: anomalies, accepted or harmless.
        provenance: checkpoint and options, from the plan; the file has these keys at the top level.
    """

    zexport_version: str
    sources: tuple[SourceEntry, ...]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    findings: tuple[Finding, ...]
    provenance: Mapping[str, object] = field(default_factory=dict)

    @property
    def shards(self) -> set[str]:
        """Return the names of the files that contain tensors."""
        return {entry.shard for entry in self.tensors.values()}

    def encode(self) -> bytes:
        """Return the file: JSON with sorted keys, and a digest of all other lines.

        Each tensor, file, source and finding has its own line.
        """
        entries = {key: _json(value) for key, value in self.provenance.items()}
        entries |= {"schema": _json(SCHEMA), "zexport_version": _json(self.zexport_version)}
        for name in ("files", "tensors", "findings", "sources"):
            entries[name] = _listed(getattr(self, name))
        entries["blake3"] = _json(blake3(_object(entries)).hexdigest())
        return _object(entries)


def _object(entries: Mapping[str, str]) -> bytes:
    lines = (f"{_json(key)}: {entries[key]}" for key in sorted(entries))
    return (_lines("{}", lines, "") + "\n").encode()


def _listed(entries: Mapping[str, object] | Sequence[object]) -> str:
    if isinstance(entries, Mapping):
        return _lines("{}", (f"{_json(n)}: {_json(entries[n])}" for n in sorted(entries)), "  ")
    return _lines("[]", map(_json, entries), "  ")


def _lines(brackets: str, entries: Iterable[str], indent: str) -> str:
    inner = f",\n{indent}  ".join(entries)
    return f"{brackets[0]}\n{indent}  {inner}\n{indent}{brackets[1]}" if inner else brackets


def _json(value: object) -> str:
    return _encoded(plain_of(value))


def source_entries(plan: ExportPlan, digests: Mapping[Path, str]) -> tuple[SourceEntry, ...]:
    """Return the manifest entries of the files that were read, by path."""
    names = plan.source_names
    entries = (
        SourceEntry(
            names[one.path], one.version.nbytes, one.version.mtime_ns, digests.get(one.path)
        )
        for one in plan.sources
    )
    return tuple(sorted(entries, key=lambda entry: entry.path))


def read_manifest(out_dir: Path) -> Manifest:
    """Return the manifest of an exported folder.

    Raises:
        VerificationError: it is missing, cannot be read, or is not a manifest.
    """
    path = out_dir / MANIFEST_NAME
    with reading(path, VerificationError, "Pass a folder that zexport consolidate has written"):
        try:
            content = read_regular(path, _NBYTES_MAX) or b""
        except FileNotFoundError as cause:
            raise VerificationError(
                "does not exist, so its folder is missing or not a finished export",
                path=path,
                hint="Pass a folder that zexport consolidate wrote, or export again",
            ) from cause
    try:
        table = as_table(json.loads(content))
        if table.get("schema") != SCHEMA:
            raise VerificationError(
                "has another schema than this version of zexport reads",
                path=path,
                found=table.get("schema"),
                expected=SCHEMA,
            )
        manifest = msgspec.convert(table, Manifest)
        for name in {*manifest.files, *manifest.shards}:
            check_inside(name)
    except (ValueError, RecursionError) as cause:
        raise VerificationError("is not a manifest", path=path, found=cause) from cause
    own = {*Manifest.__struct_fields__, "schema", "blake3"}
    return replace(manifest, provenance={k: v for k, v in table.items() if k not in own})


def is_as_written(out_dir: Path) -> bool:
    """Whether the bytes of a readable manifest match the digest in it."""
    content = read_regular(out_dir / MANIFEST_NAME, _NBYTES_MAX) or b""
    rest = _DIGEST_LINE.sub(b"", content)
    return _DIGEST_LINE.findall(content) == [blake3(rest).hexdigest().encode()]


def check_inside(name: str) -> None:
    """Raise ``ValueError`` if a name leads out of the folder; ``sub/x.jinja`` does not."""
    path = PurePosixPath(name)
    os.fsencode(name)  # raises for names that no file can have
    if name != str(path) or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r}, which is not a file in the folder")
