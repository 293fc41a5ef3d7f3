"""The manifest: its bytes, and what is refused as one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from blake3 import blake3

from zexport import __version__
from zexport.errors import VerificationError
from zexport.filenames import MANIFEST_NAME
from zexport.findings import Finding, FindingKind
from zexport.ranges.dtypes import DType
from zexport.run.manifest import (
    FileEntry,
    SourceEntry,
    TensorEntry,
    is_as_written,
    new_manifest,
    read_manifest,
)

MANIFEST = new_manifest(
    provenance={"tag": "global_step3", "options": {"dtype": "bf16"}},
    sources=[SourceEntry("b.pt", 2, 20, "bb"), SourceEntry("a.pt", 1, 10, "aa")],
    tensors={"x": TensorEntry(DType.BF16, (2, 3), "model.safetensors", "00")},
    files={"model.safetensors": FileEntry(20, "11")},
    findings=(Finding(FindingKind.NAN, "x", 2),),
)


def test_a_manifest_has_these_bytes() -> None:
    digest = '  "blake3": "DIGEST",\n'
    content = re.sub("[0-9a-f]{64}", "DIGEST", b"".join(MANIFEST.lines()).decode())
    assert content == (
        "{\n" + digest + ""
        '  "files": {\n    "model.safetensors": {"blake3": "11", "nbytes": 20}\n  },\n'
        '  "findings": [\n    {"accepted": false, "count": 2, "detail": "",'
        ' "kind": "nan", "tensor": "x"}\n  ],\n'
        '  "options": {"dtype": "bf16"},\n'
        '  "schema": 1,\n'
        '  "sources": [\n    {"blake3": "aa", "mtime_ns": 10, "nbytes": 1, "path": "a.pt"},\n'
        '    {"blake3": "bb", "mtime_ns": 20, "nbytes": 2, "path": "b.pt"}\n  ],\n'
        '  "tag": "global_step3",\n'
        '  "tensors": {\n    "x": {"blake3": "00", "dtype": "BF16", "shape": [2, 3],'
        ' "shard": "model.safetensors"}\n  },\n'
        f'  "zexport_version": "{__version__}"\n'
        "}\n"
    )


def test_the_digest_is_that_of_the_other_lines(tmp_path: Path) -> None:
    first, second, *others = b"".join(MANIFEST.lines()).splitlines(keepends=True)
    assert json.loads(first + second + b"".join(others))["blake3"] == (
        blake3(first + b"".join(others)).hexdigest()
    )
    (tmp_path / MANIFEST_NAME).write_bytes(first + second + b"".join(others))
    assert is_as_written(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(first + second + second + b"".join(others))
    assert not is_as_written(tmp_path)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(b"".join(MANIFEST.lines()))
    assert read_manifest(tmp_path) == MANIFEST


def test_a_folder_without_a_manifest_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="there is no manifest") as caught:
        read_manifest(tmp_path)
    assert caught.value.path == tmp_path / MANIFEST_NAME


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000], ids=["empty", "half", "bytes", "deep"]
)
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(VerificationError, match="is not a manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("table", [[], {}, {"schema": 2}, 3])
def test_another_schema_is_refused(tmp_path: Path, table: object) -> None:
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(table))
    with pytest.raises(VerificationError, match="another schema"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"../escape": {"nbytes": 1, "blake3": "00"}}},
        {"files": {"a": {"nbytes": -1, "blake3": "00"}}},
        {"files": {"a": {"nbytes": True, "blake3": "00"}}},
        {"files": {"a": {"nbytes": 1}}},
        {"tensors": {"x": {"dtype": "F99", "shape": [], "shard": "a", "blake3": "00"}}},
        {"tensors": {"x": {"dtype": "F32", "shape": 1, "shard": "a", "blake3": "00"}}},
        {"tensors": {"x": {"dtype": "F32", "shape": [], "shard": "/a", "blake3": "00"}}},
        {"tensors": {"x": {"dtype": ["F32"], "shape": [], "shard": "a", "blake3": "00"}}},
        {"tensors": {"x": 3}},
        {"sources": {}},
        {"findings": [3]},
        {"zexport_version": 3},
    ],
)
def test_a_manifest_of_the_wrong_shape_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    table = {**json.loads(b"".join(MANIFEST.lines())), **change}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(table))
    with pytest.raises(VerificationError, match="is not a manifest"):
        read_manifest(tmp_path)
