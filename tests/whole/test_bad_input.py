"""What a user can get wrong: one clear message, the documented exit code, nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from zexport.errors import OutputError, ZexportError
from zexport.options import ExportOptions

_TAG = "global_step2"
_RANK_1 = "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@dataclass(frozen=True)
class Bad:
    """A way to spoil the checkpoint of three ZeRO-3 ranks, and what it must be answered with.

    ``path`` is the path in the message, below the checkpoint; ``words`` are in it.
    """

    spoil: Callable[[Path], object]
    exit_code: int
    kind: str
    path: str
    words: tuple[str, ...]


def _other_save(run: Run) -> Callable[[Path], object]:
    def spoil(root: Path) -> None:
        other = save(small_model(), run, root.parent / "another")
        shutil.copy(other / _RANK_1, root / _RANK_1)
        shutil.rmtree(other)

    return spoil


def _no_checkpoint(root: Path) -> None:
    shutil.rmtree(root / _TAG)
    (root / "latest").unlink()


def _two_tags(root: Path) -> None:
    shutil.copytree(root / "global_step2", root / "global_step4")
    (root / "latest").unlink()


def _shorter_groups(root: Path) -> None:
    for path in root.glob("*/*_optim_states.pt"):
        edit(path, lambda state: state["optimizer_state_dict"]["fp32_flat_groups"].pop())


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes(content)


def _cut(part: float) -> Callable[[Path], object]:
    def spoil(root: Path) -> None:
        path = root / _RANK_1
        os.truncate(path, int(path.stat().st_size * part))

    return spoil


def _flip(root: Path) -> None:
    """Turn over one bit of the first weight; the flat group is the file's first tensor record."""
    checkpoint = zexport.open_checkpoint(root)
    source = checkpoint.tensors[0].source
    assert source is not None
    extent = next(source.extents(0, 4))
    with extent.path.open("r+b") as file:
        file.seek(extent.offset)
        byte = file.read(1)[0]
        file.seek(extent.offset)
        file.write(bytes([byte ^ 1]))


_ALL = {
    "no checkpoint": Bad(
        _no_checkpoint,
        3,
        "not_a_checkpoint",
        "",
        ("contains no ZeRO checkpoint", "global_step100"),
    ),
    "two tags": Bad(_two_tags, 2, "ambiguous_tag", "", ("--tag global_step4",)),
    "latest names nothing": Bad(
        _write("latest", b"global_step9"),
        3,
        "checkpoint",
        "latest",
        ("'global_step9'", "--tag global_step2"),
    ),
    "latest leaves": Bad(
        _write("latest", b"../../x"), 5, "unsafe", "latest", ("'../../x'", "--tag")
    ),
    "missing ranks": Bad(
        lambda root: [(root / _RANK_1.replace("_1_", f"_{r}_")).unlink() for r in (1, 2)],
        3,
        "incomplete",
        _TAG,
        ("ranks 1-2", "1 of 3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ),
    "another world size": Bad(
        _other_save(Run(world_size=2)),
        3,
        "damaged",
        _TAG,
        ("partition count differs",),
    ),
    "another step": Bad(
        _other_save(Run(world_size=3, steps=9)),
        3,
        "damaged",
        _RANK_1,
        ("optimizer step differs", "found 9.0"),
    ),
    "empty file": Bad(_write(_RANK_1, b""), 3, "damaged", _RANK_1, ("is empty",)),
    "text file": Bad(_write(_RANK_1, b"<html>"), 3, "damaged", _RANK_1, ("torch.save",)),
    "truncated file": Bad(_cut(0.5), 3, "damaged", _RANK_1, ("found",)),
    "last byte missing": Bad(_cut(0.9999), 3, "damaged", _RANK_1, ("found",)),
    "groups that do not add up": Bad(
        _shorter_groups,
        3,
        "damaged",
        _TAG,
        ("parameter groups", "found", "expected"),
    ),
    "a flipped bit": Bad(_flip, 3, "damaged", _RANK_1.replace("_1_", "_0_"), ("CRC-32",)),
    "a broken config": Bad(
        _write("config.json", b"{"),
        3,
        "damaged",
        "config.json",
        ("not a JSON object",),
    ),
}


def _tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("bad", _ALL.values(), ids=_ALL.keys())
def test_bad_input_gets_one_clear_message_and_leaves_nothing_behind(
    bad: Bad, zero3: Path, tmp_path: Path
) -> None:
    bad.spoil(zero3)
    before = _tree(tmp_path)
    with pytest.raises(ZexportError) as caught:
        zexport.consolidate(zero3, tmp_path / "new" / "out")
    error = caught.value
    assert (error.exit_code, error.kind) == (bad.exit_code, bad.kind)
    assert error.path == zero3 / bad.path
    assert [word for word in bad.words if word not in str(error)] == []
    assert error.hint
    assert "\n" not in str(error)
    assert _tree(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_an_output_with_something_in_it_is_not_touched(zero3: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "precious").write_text("kept")
    before = _tree(tmp_path)
    with pytest.raises(OutputError, match="--overwrite") as caught:
        zexport.consolidate(zero3, out)
    assert (caught.value.exit_code, caught.value.path) == (6, out)
    assert _tree(tmp_path) == before


def test_a_full_disk_is_noticed_before_anything_is_written(
    zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    monkeypatch.setattr(
        "zexport.run.part._write_stretches", lambda *_, **__: pytest.fail("writing began")
    )
    before = _tree(tmp_path)
    with pytest.raises(OutputError, match="no room") as caught:
        zexport.consolidate(zero3, tmp_path / "out")
    assert caught.value.exit_code == 6
    assert (caught.value.found, caught.value.hint != "") == ("0 bytes free", True)
    assert _tree(tmp_path) == before


def test_an_output_inside_the_checkpoint_is_refused(zero3: Path) -> None:
    before = _tree(zero3)
    with pytest.raises(OutputError, match="outside the checkpoint"):
        zexport.consolidate(zero3, zero3 / "global_step2" / "out")
    assert _tree(zero3) == before


def test_an_output_that_may_not_be_written_is_refused(
    zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (locked := tmp_path / "locked").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked and access(path, mode))
    with pytest.raises(OutputError, match="Permission denied") as caught:
        zexport.consolidate(zero3, locked / "out")
    assert (caught.value.exit_code, caught.value.path) == (6, locked)
    assert list(locked.iterdir()) == []


def test_a_base_that_is_not_there_is_named(zero3: Path, tmp_path: Path) -> None:
    with pytest.raises(ZexportError, match="--base") as caught:
        zexport.consolidate(zero3, tmp_path / "out", ExportOptions(base=tmp_path / "nothing"))
    assert caught.value.path == tmp_path / "nothing"
