"""Bad input ends in one message with the documented exit code and leaves no files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import zexport
from zexport import OutputError, ZexportError

_TAG = "global_step2"
_RANK_1 = "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def _cut(root: Path) -> None:
    os.truncate(root / _RANK_1, (root / _RANK_1).stat().st_size - 1)


def _flip(root: Path) -> None:
    """Flip one bit of the first weight."""
    source = zexport.open_checkpoint(root).tensors[0].source
    assert source is not None
    extent = next(source.extents(0, 4))
    content = bytearray(extent.path.read_bytes())
    content[extent.offset] ^= 1
    extent.path.write_bytes(content)


def _tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("spoil", "code", "kind", "path", "word"),
    [
        (
            lambda root: (root / "latest").write_text("global_step9"),
            3,
            "checkpoint",
            "latest",
            "--tag global_step2",
        ),
        (lambda root: (root / "latest").write_text("../../x"), 5, "unsafe", "latest", "'../../x'"),
        (lambda root: (root / _RANK_1).unlink(), 3, "incomplete", _TAG, _RANK_1.split("/")[1]),
        (_cut, 3, "damaged", _RANK_1, "found"),
        (_flip, 3, "damaged", _RANK_1.replace("_1_", "_0_"), "CRC-32"),
        (
            lambda root: (root / "config.json").write_text("{"),
            3,
            "damaged",
            "config.json",
            "not a JSON object",
        ),
    ],
    ids=["latest", "latest outside", "missing rank", "truncated", "flipped bit", "config"],
)
def test_bad_input_is_refused_and_leaves_no_files(
    spoil: Callable[[Path], object],
    code: int,
    kind: str,
    path: str,
    word: str,
    zero3: Path,
    tmp_path: Path,
) -> None:
    spoil(zero3)
    before = _tree(tmp_path)
    with pytest.raises(ZexportError) as caught:
        zexport.consolidate(zero3, tmp_path / "new" / "out")
    error = caught.value
    assert (error.exit_code, error.kind, error.path) == (code, kind, zero3 / path)
    assert word in str(error)
    assert error.hint
    assert "\n" not in str(error)
    assert _tree(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_an_output_inside_the_checkpoint_is_refused(zero3: Path) -> None:
    before = _tree(zero3)
    with pytest.raises(OutputError, match="outside the checkpoint"):
        zexport.consolidate(zero3, zero3 / "global_step2" / "out")
    assert _tree(zero3) == before
