"""Quantized weights of a base are never taken without their scales."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from tests.support.checkpoints import Model, Run, Tensors, save, values
from tests.support.exports import export, refused
from tests.support.live_models import files_of, in_training, live_model
from tests.support.real_cases import facts

pytestmark = pytest.mark.slow

Quantize = Callable[[Tensors, str], None]
WITHOUT_FROZEN = Run(stage=3, exclude_frozen=True)


def fp8_blocks(weights: Tensors, name: str) -> None:
    scale = weights[name].abs().max() / 448
    weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)


def int8_bitsandbytes(weights: Tensors, name: str) -> None:
    scale = weights[name].abs().amax(1)
    weights[name.replace("weight", "SCB")] = scale
    weights[name] = (weights[name] / scale[:, None] * 127).round().to(torch.int8)


def int4_gptq(weights: Tensors, name: str) -> None:
    outputs, inputs = weights.pop(name).shape
    module = name.removesuffix(".weight")
    weights[f"{module}.qweight"] = torch.zeros((inputs // 8, outputs), dtype=torch.int32)
    weights[f"{module}.qzeros"] = torch.zeros((1, outputs // 8), dtype=torch.int32)
    weights[f"{module}.scales"] = torch.ones((1, outputs), dtype=torch.float16)


def scaled_bf16(weights: Tensors, name: str) -> None:
    weights[name] = (weights[name] / 2).bfloat16()
    weights[f"{name}_scale"] = torch.full((1,), 2.0)


def quantized(plain: Path, folder: Path, part: str, quantize: Quantize) -> Path:
    """A copy of a base whose weights of modules with ``part`` in their names are quantized."""
    weights = files_of(plain)
    for name in [name for name in weights if part in name]:
        quantize(weights, name)
    shutil.copytree(plain, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("quantize", "form"),
    [
        (fp8_blocks, "hub"),
        (int8_bitsandbytes, "memory"),
        (scaled_bf16, "inner model"),
        (int4_gptq, "hub"),
    ],
)
def test_quantized_frozen_weights_are_refused(
    quantize: Quantize, form: str, tmp_path: Path
) -> None:
    model = live_model("llama")
    frozen = tuple(name for name, _ in model.named_parameters() if "mlp" in name)
    root = save(in_training(model, frozen=frozen), WITHOUT_FROZEN, tmp_path / "run")
    model.config.save_pretrained(root)
    options = ("--layout", "memory" if form == "memory" else "hub")
    base, plain = tmp_path / "base", tmp_path / "plain"
    (model.model if form == "inner model" else model).save_pretrained(plain)
    quantized(plain, base, "mlp", quantize)
    options = (*options, "--base")
    error = refused(root, tmp_path / "out", *options, base, kind="unsupported", word="gate_proj")
    assert error.path == base
    export(root, tmp_path / "out", *options, plain)
    assert facts(files_of(tmp_path / "out")) == facts(model.state_dict())


@pytest.mark.parametrize(("quantize", "module"), [(fp8_blocks, "down_proj"), (int4_gptq, "q_proj")])
def test_adapter_is_not_merged_into_a_quantized_base(
    quantize: Quantize, module: str, tmp_path: Path
) -> None:
    model = live_model("llama")
    model.save_pretrained(tmp_path / "plain")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    parameters = {name: value.detach() for name, value in adapted.named_parameters()}
    trained = {name: value for name, value in parameters.items() if "lora_" in name}
    frozen = {name: value for name, value in parameters.items() if name not in trained}
    root = save(Model([trained], frozen, dtype=torch.float32), WITHOUT_FROZEN, tmp_path / "run")
    adapted.peft_config["default"].save_pretrained(root)
    base = quantized(tmp_path / "plain", tmp_path / "base", module, quantize)
    refused(root, tmp_path / "out", "--base", base, kind="unsupported", word="q_proj.weight")


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("proj.weight", "proj.qweight"),
        ("proj.weight", "proj.weight.quant_state.bitsandbytes__nf4"),
    ],
)
@pytest.mark.parametrize("is_trained", [False, True])
def test_scales_are_recognized_without_a_config(
    name: str, scale: str, is_trained: bool, tmp_path: Path
) -> None:
    weight, other = {name: values((2, 2), 1)}, {"other": values((2,), 2)}
    groups, frozen = ([{**weight, **other}], {}) if is_trained else ([other], weight)
    root = save(Model(groups, frozen), WITHOUT_FROZEN, tmp_path / "run")
    (base := tmp_path / "base").mkdir()
    save_file({**weight, **other, scale: values((2,), 3)}, base / "model.safetensors")
    refused(root, tmp_path / "out", "--base", base, kind="unsupported", word=scale)
