"""Files made to do harm: nothing of them runs, and they are read exactly or refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.forked import typed
from tests.support.malice import call, inject, injected, text, tricks
from zexport import (
    DamagedCheckpointError,
    ExportOptions,
    NameLayout,
    UnsafeError,
    UnsupportedError,
    ZexportError,
)
from zexport.formats.pickle_reader import load
from zexport.formats.torch_file import read_torch_file
from zexport.inspect.inspect import inspect_checkpoint
from zexport.storage import contents as json_files

FIXTURES = Path(__file__).parents[2] / "fixtures"
_COMMAND = "touch {seen}"
_CODE = "open({seen!r}, 'w')"
_OPTIONS = ExportOptions(layout=NameLayout.MEMORY)
_PLACES = {
    "model file": ("z2_w2_bf16_tied", "*/mp_rank_00_model_states.pt"),
    "optimizer file": ("z2_w2_bf16_tied", "*/*zero_pp_rank_1_*optim_states.pt"),
    "model file of one rank": ("z3_w2_bf16_frozen", "*/zero_pp_rank_1_*_model_states.pt"),
    "ZeRO-0": ("z0_w2_bf16", "*/mp_rank_00_model_states.pt"),
    "expert file": ("moe_z2_w2_ep2_frozen", "*/layer_0_expert_1_*.pt"),
    "expert optimizer file": ("moe_z0_w2_ep2_bf16", "*/expp_rank_0_*.pt"),
    "layer file": ("pp2_z1_w4_bf16_tied", "*/layer_01-model_states.pt"),
    "universal weight": ("uni_z2_w2_bf16_odd", "*/zero/*/fp32.pt"),
    "tensor-parallel file": ("tp2_z1_w2_bf16_fused", "*/mp_rank_01_model_states.pt"),
}
_TRICKS = tricks("true", "1")


def _tricks(seen: Path) -> dict[str, bytes]:
    command, code = _COMMAND.format(seen=seen), _CODE.format(seen=str(seen))
    return {name: piece for name, (piece, _) in tricks(command, code).items()}


def _copy(case: str, tmp_path: Path) -> Path:
    root = shutil.copytree(FIXTURES / case / "ckpt", tmp_path / "ckpt")
    for path in root.glob("*.json"):
        path.unlink()
    return root


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# --- pickles ---


@pytest.mark.parametrize("name", _TRICKS)
def test_what_torch_would_run_is_named_and_not_run(name: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    piece, named = _tricks(seen)[name], _TRICKS[name][1]
    found = load(injected(b"\x80\x02}" + text("w") + b"K\x01s.", piece), path=Path("rank.pt"))
    assert found.value == {"w": 1}
    assert named in map(str, found.unknown_globals)
    assert not seen.exists()


def test_the_tricks_do_run_where_pickles_are_run(tmp_path: Path) -> None:
    """Otherwise that they do nothing here would say nothing."""
    seen = tmp_path / "seen"
    source = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    for name in ("reduce", "stack global", "partial"):
        pickle = b"\x80\x04" + _tricks(seen)[name] + b"N."
        subprocess.run([sys.executable, "-c", source], input=pickle, timeout=60, check=False)
        for _ in range(100):
            if seen.exists():
                break
            subprocess.run(["sleep", "0.05"], check=False)  # Popen does not wait
        assert seen.exists(), name
        seen.unlink()


@pytest.mark.parametrize("place", _PLACES)
def test_a_hostile_pickle_in_any_file_is_listed_and_changes_no_weight(
    place: str, tmp_path: Path
) -> None:
    case, pattern = _PLACES[place]
    root = _copy(case, tmp_path)
    zexport.consolidate(root, tmp_path / "clean", _OPTIONS)
    victim = sorted(root.glob(pattern))[0]
    inject(victim, b"".join(_tricks(tmp_path / "seen").values()))
    inspection = inspect_checkpoint(root)
    assert inspection.checkpoint is not None
    if place != "universal weight":
        listed = {f.path: f.unknown_globals for f in inspection.checkpoint.files}[victim]
        assert {named for _, named in _TRICKS.values()} <= set(map(str, listed))
    zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    clean, out = _weights(tmp_path / "clean"), _weights(tmp_path / "out")
    assert clean.keys() == out.keys()
    assert all(torch.equal(clean[name], out[name]) for name in clean)
    assert not (tmp_path / "seen").exists()


def test_a_hostile_pickle_in_the_old_container_changes_nothing(tmp_path: Path) -> None:
    root = save(small_model(), Run(legacy=True), tmp_path / "run")
    zexport.consolidate(root, tmp_path / "clean", _OPTIONS)
    for path in root.glob("*/*.pt"):
        inject(path, b"".join(_tricks(tmp_path / "seen").values()))
    zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    clean, out = _weights(tmp_path / "clean"), _weights(tmp_path / "out")
    assert all(torch.equal(clean[name], out[name]) for name in clean)
    assert not (tmp_path / "seen").exists()


class _Harmful:
    """An object of a client's own whose loading runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_hostile_client_state_is_listed_and_changes_nothing(tmp_path: Path) -> None:
    state = {"mine": [_Harmful(f"touch {tmp_path / 'seen'}")]}
    root = save(small_model(), Run(stage=2, client_state=state), tmp_path / "run")
    inspection = inspect_checkpoint(root)
    assert inspection.checkpoint is not None
    listed = [str(known) for f in inspection.checkpoint.files for known in f.unknown_globals]
    assert "posix.system" in listed
    notes = zexport.consolidate(root, tmp_path / "out", _OPTIONS).notes
    assert any("posix.system" in note for note in notes)
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    "key", ["param_shapes", "module", "buffer_names", "shared_params", "frozen_param_shapes"]
)
def test_code_in_the_place_of_a_value_that_is_needed_is_unsafe(key: str, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=2), tmp_path / "run")
    path = next(root.glob("*/mp_rank_00_model_states.pt"))
    edit(path, lambda state: state.update({key: _Harmful(f"touch {tmp_path / 'seen'}")}))
    with pytest.raises(UnsafeError) as caught:
        zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    assert (caught.value.exit_code, caught.value.path) == (5, path)
    assert not (tmp_path / "seen").exists()


def _dangerous() -> list[tuple[str, str]]:
    """Every global that picklescan knows to be dangerous; ``*`` stands for any name."""
    from picklescan import scanner

    table: dict[str, object] = scanner._unsafe_globals
    return [
        (module, name)
        for module, names in sorted(table.items())
        for name in (["anything"] if isinstance(names, str) else sorted(map(str, names)))  # type: ignore[call-overload]
    ]


def test_every_global_that_picklescan_calls_dangerous_is_listed_and_inert() -> None:
    dangerous = _dangerous()
    assert len(dangerous) > 80
    for module, name in dangerous:
        found = load(injected(b"\x80\x02N.", call(module, name, "x")), path=Path("rank.pt"))
        assert f"{module}.{name}" in map(str, found.unknown_globals), (module, name)


# --- zip files ---


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small file in the zip container."""
    path = tmp_path / "rank_0.pt"
    torch.save({"w": torch.arange(12.0)}, path)
    return path


def test_the_last_of_two_directories_is_the_one_that_counts(saved: Path, tmp_path: Path) -> None:
    """As for torch: what an earlier end of an archive says is no part of the file."""
    torch.save({"w": torch.zeros(12)}, other := tmp_path / "other.pt")
    both = other.read_bytes() + saved.read_bytes()
    (joined := tmp_path / "joined.pt").write_bytes(both)
    file = read_torch_file(joined)
    assert isinstance(file.value, dict)
    source = file.source(file.value["w"])
    (extent,) = source.extents(0, source.nbytes)
    content = both[extent.offset : extent.offset + extent.nbytes]
    assert content == torch.arange(12.0).numpy().tobytes()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", "C:\\x"])
def test_a_record_outside_the_archives_folder_is_damage(name: str, saved: Path) -> None:
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(DamagedCheckpointError, match="one folder at its top"):
        read_torch_file(saved)


def test_a_directory_of_very_many_records_is_not_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(saved, "a") as archive:
        for number in range(200):
            archive.writestr(f"rank_0/data/x{number}", b"")
    read_torch_file(saved)
    monkeypatch.setattr("zexport.formats.zip_directory.DIRECTORY_NBYTES_MAX", 4096)
    with pytest.raises(UnsupportedError, match="a zip directory of") as caught:
        read_torch_file(saved)
    assert caught.value.path == saved


# --- names ---

_NAMES = (
    "../../evil",
    "/etc/cron.d/x",
    "a/b/c",
    "x\0y",
    "line\nbreak",
    "\x1b]0;title\x07\x1b[2J",
    "\u202egnp.exe",
    "\u200b",
    " ",
    "n" * 300_000,
    "model.safetensors",
    "con",
    "__proto__",
)


def test_no_name_of_a_tensor_leads_anywhere_or_reaches_a_terminal(tmp_path: Path) -> None:
    model = small_model()
    model.groups[0].update({name: torch.ones(2) for name in _NAMES})  # type: ignore[attr-defined]
    root = save(model, Run(), tmp_path / "run")
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    for words in (
        ["inspect", root, "--tensors"],
        ["inspect", root, "--tensors", "--json"],
        ["consolidate", root, tmp_path / "out", "--layout", "memory"],
        ["consolidate", root, tmp_path / "out", "--layout", "memory", "--dry-run"],
        ["verify", tmp_path / "out"],
    ):
        done = typed(*words)
        assert done.returncode == 0, done.stderr[-2000:]
        for line in (done.stdout + done.stderr).split("\n"):
            assert line.isprintable(), ascii(line)[:200]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert set(_NAMES) <= set(file.keys())
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before


@pytest.mark.parametrize("tag", ["step\x1b[2J", "step\u202e2", " step ", "...", "-rf", "~"])
def test_a_tag_of_any_name_is_read_and_told_harmlessly(tag: str, tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / "run", tag)
    done = typed("inspect", root, "--tag", tag)
    assert done.returncode == 0, done.stderr
    assert all(line.isprintable() for line in (done.stdout + done.stderr).split("\n"))


def test_an_error_about_a_hostile_name_is_harmless_on_the_terminal_and_in_json(
    tmp_path: Path,
) -> None:
    root = save(small_model(), Run(stage=2), tmp_path / "run")
    name = "\x1b[31m" + "n" * 1_000_000
    path = next(root.glob("*/mp_rank_00_model_states.pt"))
    edit(path, lambda state: state["frozen_param_shapes"].update({name: torch.Size([3])}))
    done = typed("consolidate", root, tmp_path / "out", "--json")
    assert done.returncode == 3
    assert done.stderr.rstrip("\n").isprintable()
    assert len(done.stderr) < 10_000
    assert json.loads(done.stdout)["error"]["message"].isprintable()


# --- counts ---


def _ranks(key: str, root: Path) -> None:
    """Claim that millions of ranks saved the checkpoint."""
    for path in root.glob("*/*_model_states.pt"):
        edit(path, lambda state: state.update({key: 5_000_000}))


def _expert_rank(root: Path) -> None:
    last = next(root.glob("*/expp_rank_1_mp_rank_00_optim_states.pt"))
    last.rename(last.with_name("expp_rank_5000000_mp_rank_00_optim_states.pt"))
    for path in root.glob("*/expp_rank_*_optim_states.pt"):
        edit(path, _without_group_names)


def _without_group_names(state: Any) -> None:
    for group in state["optimizer"]["optimizer_state_dict"]["param_groups"]:
        group.pop("name", None)


@pytest.mark.parametrize(
    ("case", "claim", "word"),
    [
        ("z2_w2_bf16_tied", partial(_ranks, "mp_world_size"), "split is not recorded"),
        ("uni_z3_w2_bf16_frozen", partial(_ranks, "dp_world_size"), "of 5000000"),
        ("moe_z0_w2_ep2_bf16", _expert_rank, "expected 5000001"),
    ],
)
def test_absurd_number_of_ranks_is_refused_in_bounded_memory(
    case: str, claim: Callable[[Path], None], word: str, tmp_path: Path
) -> None:
    root = _copy(case, tmp_path)
    claim(root)
    tracemalloc.start()
    with pytest.raises(ZexportError, match=word):
        zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


# --- JSON ---


@pytest.mark.parametrize(
    "piece", [b"[],", b"{},", b'{"a":1},', b"1.5,", b'"\xf0\x9f\x98\x80' + b"a" * 1000 + b'",']
)
def test_a_json_file_takes_no_more_memory_than_it_may(
    piece: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as long until it is refused, and what is read before that takes less than the bound."""
    bound = 4 << 20
    monkeypatch.setattr(json_files, "_MEMORY_NBYTES_MAX", bound)
    path = tmp_path / "config.json"
    for length in (2**n for n in range(16, 24)):
        path.write_bytes(b'{"a":[' + piece * (length // len(piece)) + b"0]}")
        tracemalloc.start()
        try:
            kept = json_files.read_json_object(path)
        except DamagedCheckpointError as error:
            assert "MiB of memory" in str(error)  # noqa: PT017 - it comes once, at some length
            return
        finally:
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert kept
        assert taken < bound
    pytest.fail("never refused")
