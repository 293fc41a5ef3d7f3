"""JSON files that are none are told; whole ones, of whatever size, are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from zexport import consolidate
from zexport.model.sidecars import spoilt_files

_LARGE = json.dumps({f"word{number}": number for number in range(200_000)})


@pytest.mark.parametrize("ending", ["", "\n", " \r\n"])
@pytest.mark.parametrize("content", ["{}", "[1]", "5", _LARGE, f"[{_LARGE}]"])
def test_whole_json_is_not_told(content: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content + ending)
    assert list(spoilt_files({"a.json": path})) == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\0\xff" * 500, b"[" * 3_000_000, _LARGE[:-1].encode(), b"[" * 100_000]
)
def test_cut_or_foreign_bytes_are_told(content: bytes, tmp_path: Path) -> None:
    for name in ("a.json", "b.txt"):
        (tmp_path / name).write_bytes(content)
    copied = {name: tmp_path / name for name in ("a.json", "b.txt")}
    assert list(spoilt_files(copied)) == ["a.json"]


def test_an_export_tells_of_them_and_copies_them(tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / "run")
    (root / "tokenizer.json").write_text('{"version": "1.0", "added')
    (root / "tokenizer_config.json").write_text("{}")
    report = consolidate(root, tmp_path / "out")
    (told,) = (warning for warning in report.warnings if "whole JSON" in warning)
    assert told.startswith("tokenizer.json is copied as it is")
    assert (tmp_path / "out" / "tokenizer.json").read_text().endswith('"added')
