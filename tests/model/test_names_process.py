"""transformers is asked for names in a subprocess, and its answers are cached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import Mamba2Config

from tests.support.exports import edit_json, export, manifest_of, read_json, refused, warns
from tests.support.hf_models import tiny_config, tiny_model, write_run

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and no answer in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return checkpoint(tmp_path / "run", "LlamaForCausalLM", tiny_config("Llama"))


def checkpoint(root: Path, architecture: str, config: Any) -> Path:
    return write_run(tiny_model(architecture, config), root, architecture)


@contextmanager
def broken_torch(folder: Path, text: str) -> Iterator[None]:
    """Processes that are started meanwhile import a module with this text as ``torch``."""
    (folder / "torch.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        yield


def test_names_are_cached_and_never_guessed(root: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "modules").mkdir()
    with broken_torch(folder, "raise OSError('no libc10')"):
        refused(root, tmp_path / "out", kind="missing_extra", word="no libc10")
    export(root, tmp_path / "first")
    with broken_torch(folder, "raise OSError('no libc10')"):
        export(root, tmp_path / "out")
    first, second = (tmp_path / out / "model.safetensors" for out in ("first", "out"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_text('{"candidates": [{}]}'),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["truncated", "another", "pipe"],
)
def test_damaged_cache_is_replaced(
    spoil: Callable[[Path], object], root: Path, tmp_path: Path
) -> None:
    export(root, tmp_path / "out")
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    assert files
    for path in files:
        spoil(path)
    assert export(root, tmp_path / "out", "--overwrite")["loadable"]
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["OwnForCausalLM"]},
        {"hidden_size": "x"},
        {"vocab_size": 10**30},
        {"architectures": [5]},
    ],
    ids=str,
)
def test_impossible_config_causes_a_warning_and_runs_no_code(
    change: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    own = "import pathlib\npathlib.Path(__file__).with_name('PWNED').touch()\n"
    (root / "modeling_own.py").write_text(own)
    auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_json(root / "config.json", auto_map=auto_map, **change)
    report = export(root, tmp_path / "out")
    assert not manifest_of(tmp_path / "out")["loadable"]
    assert warns(report)
    assert not any("\n" in one for one in report["warnings"])
    assert not list(tmp_path.rglob("PWNED"))


def test_config_does_not_choose_kernels(root: Path, tmp_path: Path) -> None:
    keys = dict.fromkeys(("_attn_implementation", "attn_implementation"), "owner/kernels")
    edit_json(root / "config.json", **keys)
    assert export(root, tmp_path / "out")["loadable"]


def test_infinite_limit_is_read_as_transformers_wrote_it(tmp_path: Path) -> None:
    """transformers 5 writes a tag, 4 wrote a word that is not JSON."""
    sizes = {"hidden_size": 8, "num_heads": 4, "head_dim": 4, "n_groups": 1, "state_size": 4}
    config = Mamba2Config(**sizes, vocab_size=11, num_hidden_layers=1)
    root = checkpoint(tmp_path / "run", "Mamba2ForCausalLM", config)
    limit = read_json(root / "config.json")["time_step_limit"]
    assert limit == [0.0, {"__float__": "Infinity"}]
    for out, value in (("tagged", limit[1]), ("plain", float("inf"))):
        edit_json(root / "config.json", time_step_limit=[0.0, value])
        assert export(root, tmp_path / out)["loadable"]
