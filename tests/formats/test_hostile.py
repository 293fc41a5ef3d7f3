"""Malicious files: nothing in them runs, and they are exported exactly or refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.forked import typed
from tests.support.malice import inject, text, tricks
from zexport import DamagedCheckpointError, ExportOptions, NameLayout, UnsafeError, ZexportError
from zexport.formats import pickle_reader
from zexport.storage import json as storage_json

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


def _listed(root: Path) -> dict[Path, set[str]]:
    """Return the unknown globals that `inspect` lists, by file."""
    files = zexport.open_checkpoint(root).files
    return {file.path: {str(one) for one in file.unknown_globals} for file in files}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# --- pickles ---


def test_python_runs_the_tricks(tmp_path: Path) -> None:
    """Or else the other tests would prove nothing."""
    seen = tmp_path / "seen"
    source = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    for name in ("reduce", "stack global", "partial"):
        data = b"\x80\x04" + _tricks(seen)[name] + b"N."
        subprocess.run([sys.executable, "-c", source], input=data, timeout=60, check=False)
        for _ in range(100):
            if seen.exists():
                break
            subprocess.run(["sleep", "0.05"], check=False)  # Popen does not wait
        assert seen.exists(), name
        seen.unlink()


@pytest.mark.parametrize("place", _PLACES)
def test_malicious_pickle_in_any_file_is_listed_and_changes_no_weight(
    place: str, tmp_path: Path
) -> None:
    case, pattern = _PLACES[place]
    root = _copy(case, tmp_path)
    zexport.consolidate(root, tmp_path / "clean", _OPTIONS)
    victim = sorted(root.glob(pattern))[0]
    inject(victim, b"".join(_tricks(tmp_path / "seen").values()))
    if place != "universal weight":
        assert {named for _, named in _TRICKS.values()} <= _listed(root)[victim]
    zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    clean, out = _weights(tmp_path / "clean"), _weights(tmp_path / "out")
    assert clean.keys() == out.keys()
    assert all(torch.equal(clean[name], out[name]) for name in clean)
    assert not (tmp_path / "seen").exists()


def test_malicious_pickle_in_a_legacy_file_changes_no_weight(tmp_path: Path) -> None:
    root = save(small_model(), Run(legacy=True), tmp_path / "run")
    zexport.consolidate(root, tmp_path / "clean", _OPTIONS)
    for path in root.glob("*/*.pt"):
        inject(path, b"".join(_tricks(tmp_path / "seen").values()))
    zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    clean, out = _weights(tmp_path / "clean"), _weights(tmp_path / "out")
    assert all(torch.equal(clean[name], out[name]) for name in clean)
    assert not (tmp_path / "seen").exists()


class _Harmful:
    """Loading it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_malicious_client_state_is_listed_and_noted(tmp_path: Path) -> None:
    state = {"mine": [_Harmful(f"touch {tmp_path / 'seen'}")]}
    root = save(small_model(), Run(stage=2, client_state=state), tmp_path / "run")
    assert any("posix.system" in listed for listed in _listed(root).values())
    notes = zexport.consolidate(root, tmp_path / "out", _OPTIONS).notes
    assert any("posix.system" in note for note in notes)
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    "key", ["param_shapes", "module", "buffer_names", "shared_params", "frozen_param_shapes"]
)
def test_call_instead_of_a_needed_value_is_unsafe(key: str, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=2), tmp_path / "run")
    path = next(root.glob("*/mp_rank_00_model_states.pt"))
    edit(path, lambda state: state.update({key: _Harmful(f"touch {tmp_path / 'seen'}")}))
    with pytest.raises(UnsafeError) as caught:
        zexport.consolidate(root, tmp_path / "out", _OPTIONS)
    assert (caught.value.exit_code, caught.value.path) == (5, path)
    assert not (tmp_path / "seen").exists()


_SYSTEM = b"cposix\nsystem\n"
_FLOODS = {
    "lists": b"]" * 30_000,
    "memo": b"N" + b"\x94" * 300_000,
    "wide texts": b"(" + (text("\U0001f600" + "a" * 200) + b"0") * 3_000 + b"1N",
    "calls": _SYSTEM + b"q\x00" + b"h\x00)R" * 12_000,
    "storages": b"".join(
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(f"{i}") + text("cpu") + b"K\x06tQ"
        for i in range(3_000)
    ),
    "copies of a list": b"](" + b"K\x07" * 1_000 + b"eq\x00"
    + b"cbuiltins\nset\nq\x01" + b"h\x01h\x00\x85R" * 100,
    "copies of a tuple": b"](" + b"K\x07" * 1_000 + b"eq\x00"
    + b"ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 1000,
    "one long text": b"X" + struct.pack("<I", 4 << 20),
}  # fmt: skip


@pytest.mark.parametrize("flood", _FLOODS.values(), ids=_FLOODS.keys())
def test_memory_of_a_pickle_is_limited(flood: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 2 MiB: all costs are proportional, and tracing is slow."""
    limit = 2 << 20
    monkeypatch.setattr(pickle_reader, "MAX_NBYTES", limit)
    tracemalloc.start()
    with pytest.raises(ZexportError, match=r"MiB of memory|ends early"):
        pickle_reader.load(flood + b".", path=Path("x"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < limit


_CLASSES = (  # memo: 0 the class of a chunk, 1 torch.Size, 2 a list
    b"\x80\x04" + text("torch.distributed.checkpoint.metadata") + text("ChunkStorageMetadata")
    + b"\x93\x94" + text("torch") + text("Size") + b"\x93\x94" + b"]\x94"
)  # fmt: skip


def _chunk(first: int, ndim: int, extra: bytes = b"") -> bytes:
    size = (
        b"h\x01(" + b"".join(b"J" + struct.pack("<i", first + n) for n in range(ndim)) + b"t\x85R"
    )
    return b"h\x00)\x81}(" + extra + text("offsets") + size + text("sizes") + size + b"ub"


_CHUNK_FLOODS = {
    "chunks": _CLASSES + b"".join(_chunk(1000 * n, 40) for n in range(1_500)),
    "values kept by an older list": _CLASSES
    + _chunk(0, 1, b"h\x02" + text("a" * 200) + b"a0") * 12_000,
    "numbers read back": b"\x80\x04" + b"".join(b"j" + struct.pack("<I", n) for n in range(20_000)),
}


@pytest.mark.parametrize("flood", _CHUNK_FLOODS.values(), ids=_CHUNK_FLOODS.keys())
def test_memory_of_dcp_metadata_is_limited(
    flood: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(flood + b".")
    limit = 2 << 20
    monkeypatch.setattr(pickle_reader, "MAX_NBYTES", limit)
    tracemalloc.start()
    (problem,) = zexport.open_checkpoint(tmp_path).problems
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "MiB of memory" in str(problem)
    assert peak < limit + 2 * len(flood)


def test_size_and_opcodes_of_a_pickle_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_reader, "MAX_OPCODES", 10)
    assert pickle_reader.load(b"N0" * 4 + b"N.", path=Path("x")).value is None
    with pytest.raises(DamagedCheckpointError, match="more than 10 opcodes"):
        pickle_reader.load(b"N0" * 5 + b"N.", path=Path("x"))
    monkeypatch.setattr(pickle_reader, "MAX_PICKLE_NBYTES", 8)
    with pytest.raises(DamagedCheckpointError, match="too long"):
        pickle_reader.load(text("longer than that") + b".", path=Path("x"))


def test_deep_values_and_slow_keys_are_read_quickly() -> None:
    depth = 20_000
    from_type = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00"
    doubled = b"K\x01" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(200))
    for data in (
        b"]" * depth + b"a" * (depth - 1),
        b"(" * depth + b"t" * depth,
        _SYSTEM + b")R" * depth,
        from_type + b"(h\x00ctorch\nTensor\n" * depth + b")" + b"}t" * depth + b"R",
        b"}" + doubled + b"K\x01s",
        b"\x8f(" + doubled + b"\x90",
    ):
        assert pickle_reader.load(data + b".", path=Path("x"))


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


def test_tensor_names_write_no_file_and_no_control_character(tmp_path: Path) -> None:
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


def test_error_about_a_malicious_name_is_printable_and_short(
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
    for path in root.glob("*/*_model_states.pt"):
        edit(path, lambda state: state.update({key: 5_000_000}))


@pytest.mark.parametrize(
    ("case", "claim", "word"),
    [
        ("z2_w2_bf16_tied", partial(_ranks, "mp_world_size"), "split is not recorded"),
        ("uni_z3_w2_bf16_frozen", partial(_ranks, "dp_world_size"), "of 5000000"),
    ],
)
def test_absurd_number_of_ranks_is_refused_in_limited_memory(
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
def test_memory_of_a_json_file_is_limited(
    piece: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Double the length until it is refused."""
    limit = 4 << 20
    monkeypatch.setattr(storage_json, "_MEMORY_NBYTES_MAX", limit)
    path = tmp_path / "config.json"
    for length in (2**n for n in range(16, 24)):
        path.write_bytes(b'{"a":[' + piece * (length // len(piece)) + b"0]}")
        tracemalloc.start()
        try:
            kept = storage_json.read_json_object(path)
        except DamagedCheckpointError as error:
            assert "MiB of memory" in str(error)  # noqa: PT017 - it comes once, at some length
            return
        finally:
            taken, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert kept
        assert taken < limit
    pytest.fail("never refused")
