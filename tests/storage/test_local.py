"""Paths, links and disks of this machine: followed, refused, or retried."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import zexport
from tests.storage.conftest import files
from tests.support import cli
from tests.support.checkpoints import Run, save, small_model
from zexport import (
    ExportOptions,
    NameLayout,
    UnsafeError,
    VerificationError,
    ZexportError,
)

TAG = "global_step2"
RANK_0 = f"{TAG}/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
CONFIG = {"model_type": "odd", "architectures": ["Odd"], "auto_map": {"AutoModel": "code.Odd"}}
UNIVERSAL = Path(__file__).parents[2] / "fixtures" / "uni_z2_w2_bf16_odd" / "ckpt"


def _export(run: Path, out: Path, base: Path | None = None, **how: Any) -> None:
    options = ExportOptions(layout=NameLayout.MEMORY, base=base, overwrite=how.pop("over", False))
    zexport.consolidate(run, out, options, follow_symlinks=how.pop("follow", False), **how)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with config, tokenizer, code and license."""
    root = save(small_model(), Run(), tmp_path / "run")
    (root / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "code.py", "LICENSE"):
        (root / name).write_text("{}" if name.endswith("json") else "")
    return root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model with an index; ``lacking`` is a checkpoint without its frozen weights."""
    save(small_model(), Run(exclude_frozen=True), tmp_path / "lacking")
    (folder := tmp_path / "base").mkdir()
    tensors = {name: value.contiguous() for name, value in small_model().tensors.items()}
    save_file(tensors, folder / "a.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _move_out(path: Path) -> Path:
    """Move a file or folder elsewhere and leave a link."""
    elsewhere = path.parents[len(path.parts) - path.parts.index("run")] / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    return elsewhere / path.name


@pytest.mark.parametrize("name", ["latest", TAG, RANK_0, "config.json"])
def test_link_that_leads_outside_is_refused_unless_followed(
    name: str, run: Path, tmp_path: Path
) -> None:
    target = _move_out(run / name)
    for act in (
        lambda: _export(run, tmp_path / "out"),
        lambda: cli.run("inspect", run).or_raise(),
    ):
        with pytest.raises(UnsafeError, match="--follow-symlinks") as caught:
            act()
        assert (caught.value.path, caught.value.found) == (run / name, str(target))
    assert not (tmp_path / "out").exists()
    _export(run, tmp_path / "out", follow=True)
    if name != "latest":  # the manifest records which tag it was
        with pytest.raises(UnsafeError):
            zexport.verify_export(tmp_path / "out", against=run)
    assert zexport.verify_export(tmp_path / "out", against=run, follow_symlinks=True).ok


def test_links_within_the_run_and_to_the_run_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "store").mkdir()
    for name in (RANK_0, "config.json", "latest"):
        target = run / "store" / Path(name).name
        (run / name).rename(target)
        (run / name).symlink_to(os.path.relpath(target, (run / name).parent))
    (run / "runs").symlink_to("/")  # not read
    (run / "global_step1").symlink_to(tmp_path)
    (tmp_path / "mine").symlink_to(run)
    _export(tmp_path / "mine", tmp_path / "out")
    assert zexport.verify_export(tmp_path / "out", against=run).ok


def _snapshot(folder: Path, cache: Path) -> Path:
    """Copy a folder as huggingface_hub keeps it: a snapshot of links to blobs."""
    blobs, snapshot = cache / "models--org--name" / "blobs", cache / "models--org--name/snapshots/1"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_snapshot_in_the_hub_cache_is_read_and_leads_no_further(
    run: Path, base: Path, tmp_path: Path
) -> None:
    snapshot = _snapshot(run, tmp_path / "hub")
    _export(snapshot, tmp_path / "out")
    _export(tmp_path / "lacking", tmp_path / "filled", base=_snapshot(base, tmp_path / "bases"))
    (tmp_path / "hub" / "token").write_text("secret")
    (snapshot / "LICENSE").unlink()
    (snapshot / "LICENSE").symlink_to("../../../token")
    with pytest.raises(UnsafeError):
        _export(snapshot, tmp_path / "other")


@pytest.mark.parametrize("name", ["a.safetensors", "model.safetensors.index.json", "config.json"])
def test_base_with_a_link_to_elsewhere_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    (base / name).rename(tmp_path / name)
    (base / name).symlink_to(tmp_path / name)
    with pytest.raises(UnsafeError) as caught:
        _export(tmp_path / "lacking", tmp_path / "out", base=base)
    assert caught.value.path == base / name


def test_universal_weights_and_exports_are_not_read_through_links(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(UNIVERSAL, tmp_path / "run" / "universal")
    _move_out(next((run / "universal").glob("*/zero/*/fp32.pt")))
    with pytest.raises(UnsafeError):
        _export(run / "universal", tmp_path / "other")
    _export(run, out := tmp_path / "out")
    (out / "LICENSE").unlink()
    (out / "LICENSE").symlink_to("/etc/hostname")
    with pytest.raises(UnsafeError):
        zexport.verify_export(out)


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, _device, _circle])
@pytest.mark.parametrize("name", ["latest", RANK_0, "config.json"])
def test_pipes_devices_and_circular_links_neither_block_nor_fill_memory(
    name: str, make: Callable[[Path], None], run: Path, base: Path, tmp_path: Path
) -> None:
    _export(run, made := tmp_path / "made")
    for path in (run / name, made / "model.safetensors", base / "a.safetensors"):
        path.unlink()
        make(path)
    for follow in (False, True):
        try:
            _export(run, tmp_path / f"out{follow}", follow=follow)
        except ZexportError as error:
            assert error.exit_code in (3, 5)  # noqa: PT017 - an export without the file is right, too
    with pytest.raises(ZexportError) as caught:
        _export(tmp_path / "lacking", tmp_path / "filled", base=base)
    assert caught.value.exit_code in (3, 5)
    try:
        assert not zexport.verify_export(made).ok
    except (UnsafeError, VerificationError):
        assert make in (_device, _circle)


# --- disks that fail ---


def test_short_reads_and_writes_are_continued(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _export(run, tmp_path / "whole")
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:7]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    _export(run, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
