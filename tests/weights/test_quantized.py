"""A base whose weights are packed: none is taken as if its packed numbers were the weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import zexport
from tests.support.checkpoints import Model, Run, save
from tests.support.live_models import files_of, in_training, live_model
from tests.support.real_cases import facts
from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import UnsupportedError
from zexport.model.fit import ModelNames, NamesUnknown, as_it_is
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.weights.base_model import Base, check_plain

Weights = dict[str, torch.Tensor]
Packing = Callable[[Weights, str], None]


def _fp8_blocks(weights: Weights, name: str) -> None:
    scale = weights[name].abs().max() / 448
    weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)


def _fp8_alone(weights: Weights, name: str) -> None:
    weights[name] = weights[name].to(torch.float8_e4m3fn)


def _int8_bitsandbytes(weights: Weights, name: str) -> None:
    scale = weights[name].abs().amax(1)
    weights[name.replace("weight", "SCB")] = scale
    weights[name] = (weights[name] / scale[:, None] * 127).round().to(torch.int8)


def _int8_compressed(weights: Weights, name: str) -> None:
    scale = weights[name].abs().amax(1, keepdim=True) / 127
    weights[f"{name}_scale"] = scale
    weights[name] = (weights[name] / scale).round().to(torch.int8)


def _scaled_in_bf16(weights: Weights, name: str) -> None:
    weights[name] = (weights[name] / 2).bfloat16()
    weights[f"{name}_scale"] = torch.full((1,), 2.0)


def _int4_gptq(weights: Weights, name: str) -> None:
    outputs, inputs = weights.pop(name).shape
    module = name.removesuffix(".weight")
    weights[f"{module}.qweight"] = torch.zeros((inputs // 8, outputs), dtype=torch.int32)
    weights[f"{module}.qzeros"] = torch.zeros((1, outputs // 8), dtype=torch.int32)
    weights[f"{module}.scales"] = torch.ones((1, outputs), dtype=torch.float16)


_PACKINGS = [
    _fp8_blocks,
    _fp8_alone,
    _int8_bitsandbytes,
    _int8_compressed,
    _scaled_in_bf16,
    _int4_gptq,
]


def _packed_base(plain: Path, packed: Path, names: Iterable[str], pack: Packing) -> Path:
    weights = files_of(plain)
    for name in names:
        pack(weights, name)
    shutil.copytree(plain, packed)
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    return packed


@pytest.mark.slow
@pytest.mark.parametrize("layout", NameLayout)
@pytest.mark.parametrize("pack", _PACKINGS)
def test_a_frozen_weight_is_not_filled_in_without_its_scale(
    pack: Packing, layout: NameLayout, tmp_path: Path
) -> None:
    model = live_model("llama")
    frozen = tuple(name for name, _ in model.named_parameters() if "mlp" in name)
    trained = in_training(model, frozen=frozen)
    root = save(trained, Run(stage=3, exclude_frozen=True), tmp_path / "run")
    model.save_pretrained(tmp_path / "plain")
    base = _packed_base(tmp_path / "plain", tmp_path / "base", frozen, pack)
    with pytest.raises(UnsupportedError, match="quantized") as caught:
        zexport.consolidate(root, tmp_path / "out", ExportOptions(base=base, layout=layout))
    assert "gate_proj.weight" in str(caught.value.found)
    assert caught.value.path == base
    options = ExportOptions(base=tmp_path / "plain", layout=layout)
    zexport.consolidate(root, tmp_path / "out", options)
    assert facts(files_of(tmp_path / "out")) == facts(files_of(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.parametrize("pack", _PACKINGS)
def test_a_scale_goes_with_its_weight_where_the_base_is_the_model_inside(
    pack: Packing, tmp_path: Path
) -> None:
    model = live_model("llama")
    frozen = tuple(name for name, _ in model.named_parameters() if "mlp" in name)
    trained = in_training(model, frozen=frozen)
    root = save(trained, Run(stage=3, exclude_frozen=True), tmp_path / "run")
    model.config.save_pretrained(root)
    model.model.save_pretrained(tmp_path / "plain")
    inner = [name.removeprefix("model.") for name in frozen]
    base = _packed_base(tmp_path / "plain", tmp_path / "base", inner, pack)
    with pytest.raises(UnsupportedError, match="quantized"):
        zexport.consolidate(root, tmp_path / "out", ExportOptions(base=base))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pack", "module", "found"),
    [
        (_fp8_blocks, "down_proj", r"down_proj\.weight \(float8_e4m3fn"),
        (_int4_gptq, "down_proj", r"down_proj\.weight \(there is .*down_proj\.(qw|qz|scales)"),
        (_int4_gptq, "q_proj", r"q_proj\.weight \(there is .*q_proj\.(qw|qz|scales)"),
    ],
)
def test_a_merge_takes_no_packed_weight(
    pack: Packing, module: str, found: str, tmp_path: Path
) -> None:
    model = live_model("llama")
    model.save_pretrained(tmp_path / "plain")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    parameters = {name: value.detach() for name, value in adapted.named_parameters()}
    trained = {name: value for name, value in parameters.items() if "lora_" in name}
    frozen = {name: value for name, value in parameters.items() if name not in trained}
    whole = Model([trained], frozen=frozen, dtype=torch.float32)
    root = save(whole, Run(stage=3, exclude_frozen=True), tmp_path / "run")
    adapted.peft_config["default"].save_pretrained(root)
    names = [name for name in files_of(tmp_path / "plain") if module in name]
    base = _packed_base(tmp_path / "plain", tmp_path / "base", names, pack)
    with pytest.raises(UnsupportedError, match=found):
        zexport.consolidate(root, tmp_path / "out", ExportOptions(base=base))


def _tensor(name: str, dtype: DType) -> StoredTensor:
    return StoredTensor(name, (2,), dtype, Role.FROZEN, Extent(Path("base"), 0, 0))


_UNKNOWN = NamesUnknown("there is no config.json")


def _base(*names: str) -> Base:
    return Base(None, {name: _tensor(name, DType.F32) for name in names})


def test_what_the_model_has_itself_is_no_packers_scale() -> None:
    shapes = {"logit": (2,), "logit_scale": (2,)}
    names = ModelNames("Small", shapes, frozenset(), {}, (as_it_is(shapes),), "a test")
    check_plain([_tensor("logit", DType.F32)], _base(*shapes), names)
    with pytest.raises(UnsupportedError, match="scaled by logit_scale"):
        check_plain([_tensor("logit", DType.F32)], _base(*shapes), _UNKNOWN)


def test_where_names_are_not_known_integers_may_be_buffers() -> None:
    check_plain([_tensor("position_ids", DType.I64)], _base("position_ids"), _UNKNOWN)
    with pytest.raises(UnsupportedError, match="uint8"):
        check_plain([_tensor("proj.weight", DType.U8)], _base("proj.weight"), _UNKNOWN)


@pytest.mark.parametrize(
    "scale", ["proj.qweight", "proj.SCB", "proj.weight.quant_state.bitsandbytes__nf4"]
)
def test_a_scale_is_not_filled_in_beside_a_trained_weight(scale: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{scale} .scaled by"):
        check_plain([_tensor(scale, DType.F32)], _base("proj.weight", scale), _UNKNOWN)
