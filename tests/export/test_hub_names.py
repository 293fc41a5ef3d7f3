"""An export has the names and values that ``save_pretrained`` of the live model writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import Model, Run, Tensors, save
from tests.support.exports import export, refused, verify
from tests.support.hf_models import load
from tests.support.live_models import checkpoint_of, files_of, in_training, live_model
from tests.support.real_cases import facts

pytestmark = pytest.mark.slow


def saved(model: Any, folder: Path) -> Tensors:
    model.save_pretrained(folder)
    return files_of(folder)


def write(tensors: Tensors, folder: Path) -> Tensors:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def saved_with_prefixes(model: Any, folder: Path) -> Tensors:
    """As a model that was loaded from files with every prefix is saved."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    return saved(model, folder)


def saved_transposed(model: Any, folder: Path) -> Tensors:
    """With experts as Qwen3-VL-MoE has them on the Hub."""
    each = saved(model, folder).items()
    turned = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in each}
    return write(turned, folder)


OTHER_LAYOUTS = [("gemma3", saved_with_prefixes), ("qwen3-vl-moe", saved_transposed)]


@pytest.mark.parametrize(("family", "save_base"), OTHER_LAYOUTS)
def test_base_decides_between_several_layouts(
    family: str, save_base: Callable[[Any, Path], Tensors], tmp_path: Path
) -> None:
    model = live_model(family)
    default = saved(model, tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run")
    expected = save_base(model, tmp_path / "base")
    assert facts(expected) != facts(default)
    options = ("--base", tmp_path / "base")
    export(root, tmp_path / "out", *options)
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert verify(tmp_path / "out", "--against", root, *options)["ok"]
    assert load(tmp_path / "out")[1] == {}
    export(root, tmp_path / "default")
    assert facts(files_of(tmp_path / "default")) == facts(default)


@pytest.mark.parametrize(("family", "save_hub"), [("mixtral", saved), *OTHER_LAYOUTS])
def test_weights_that_have_hub_names_keep_them(
    family: str, save_hub: Callable[[Any, Path], Tensors], tmp_path: Path
) -> None:
    model = live_model(family)
    expected = save_hub(model, tmp_path / "live")
    trained = Model([expected], dtype=torch.float32)
    root = checkpoint_of(model, tmp_path / "run", trained=trained)
    export(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert load(tmp_path / "out")[1] == {}


def test_weights_that_transformers_keeps_in_fp32_stay_fp32(tmp_path: Path) -> None:
    model = live_model("deepseek-v3")
    expected = saved(model, tmp_path / "live")
    export(checkpoint_of(model, tmp_path / "run"), tmp_path / "out", "--dtype", "bf16")
    as_loaded = type(model).from_pretrained(tmp_path / "live", dtype=torch.bfloat16).state_dict()
    wide = {name for name, value in as_loaded.items() if value.dtype == torch.float32}
    assert wide
    cast = {name: value if name in wide else value.bfloat16() for name, value in expected.items()}
    assert facts(files_of(tmp_path / "out")) == facts(cast)


# --- frozen weights from a base in the Hub's layout ---


def without_frozen(family: str, part: str, tmp_path: Path) -> tuple[Any, Path]:
    """A model, and its checkpoint without the weights whose names contain ``part``."""
    model = live_model(family)
    whole = in_training(model).trained
    frozen = {name: value for name, value in whole.items() if part in name}
    trained = {name: value for name, value in whole.items() if part not in name}
    state = replace(in_training(model), groups=[trained], frozen=frozen)
    root = save(state, Run(stage=3, exclude_frozen=True), tmp_path / "run")
    model.config.save_pretrained(root)
    return model, root


def inner(model: Any, base: Path) -> None:
    """As GPT-2 is on the Hub: no ``transformer.`` before its names, a mask, a stale name."""
    more = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.old.weight": torch.ones(2)}
    write({**saved(model.transformer, base), **more}, base)


def of_berts_time(model: Any, base: Path) -> None:
    """transformers reads gamma and beta as weight and bias."""
    tensors = saved(model, base)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {key.replace(new, name): value for key, value in tensors.items()}
    write(tensors, base)


@pytest.mark.parametrize(
    ("family", "part", "write_base"),
    [("mixtral", ".experts.", saved), ("gpt2", ".h.0.", inner), ("bert", "er.0.", of_berts_time)],
)
def test_base_supplies_frozen_weights_under_its_own_names(
    family: str, part: str, write_base: Callable[[Any, Path], object], tmp_path: Path
) -> None:
    model, root = without_frozen(family, part, tmp_path)
    expected = saved(model, tmp_path / "live")
    refused(root, tmp_path / "out", kind="frozen_left_out", word="0")
    write_base(model, tmp_path / "base")
    assert export(root, tmp_path / "out", "--base", tmp_path / "base")["from_base"]
    assert facts(files_of(tmp_path / "out")) == facts(expected)
    assert load(tmp_path / "out")[1] == {}
    assert verify(tmp_path / "out", "--against", root, "--base", tmp_path / "base")["ok"]
    export(root, tmp_path / "rest", "--exclude-frozen")
    rest = {name: value for name, value in expected.items() if part not in name}
    assert facts(files_of(tmp_path / "rest")) == facts(rest)


# --- asking transformers ---


def test_libraries_may_print_while_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, transformers\n"
        "os.write(1, b'{}\\n' * 3)\n"
        "os.write(2, b'null\\n')\n"
        "atexit.register(os.write, 1, b'{}\\n')\n"
        "init = transformers.MixtralForCausalLM.__init__\n"
        "def printing_init(self, config):\n"
        "    os.write(1, b'{}\\n' * 3)\n"
        "    print('{}', flush=True)\n"
        "    init(self, config)\n"
        "transformers.MixtralForCausalLM.__init__ = printing_init\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = live_model("mixtral")
    assert export(checkpoint_of(model, tmp_path / "run"), tmp_path / "out")["loadable"]
    assert facts(files_of(tmp_path / "out")) == facts(saved(model, tmp_path / "live"))
