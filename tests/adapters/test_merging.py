"""Adapters that cannot be merged, or not even kept: made up, so that each has one thing wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import Model, Run, save, values
from zexport import ExportOptions, consolidate
from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    NotACheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from zexport.findings import FindingKind
from zexport.options import AdapterMode, Engine, ExportDType

PREFIX = "base_model.model"
MERGE = ExportOptions(adapter=AdapterMode.MERGE)


def factors(module: str, inputs: int, outputs: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """Both factors of a module's update."""
    return {
        f"{PREFIX}.{module}.lora_A.default.weight": values((rank, inputs), 1),
        f"{PREFIX}.{module}.lora_B.default.weight": values((outputs, rank), 2),
    }


def made_up(
    folder: Path,
    trained: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    **config: object,
) -> Path:
    """A checkpoint that holds its base too; names of the base are those within peft's prefix."""
    frozen = {f"{PREFIX}.{name}": value for name, value in base.items()}
    root = save(
        Model([dict(trained)], frozen), Run(stage=2, exclude_frozen=not base), folder / "run"
    )
    keys = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}
    (root / "adapter_config.json").write_text(json.dumps(keys))
    return root


def test_a_weight_of_another_shape_is_no_base(tmp_path: Path) -> None:
    base = {"x.base_layer.weight": values((5, 4), 3)}
    root = made_up(tmp_path, factors("x", inputs=4, outputs=6), base)
    with pytest.raises(DamagedCheckpointError, match=r"does not fit x\.weight"):
        consolidate(root, tmp_path / "out", MERGE)


@pytest.mark.parametrize("mode", [AdapterMode.MERGE, AdapterMode.KEEP])
def test_an_adapter_that_changes_nothing_is_told(tmp_path: Path, mode: AdapterMode) -> None:
    base = {"x.base_layer.weight": values((6, 4), 3)}
    trained = factors("x", inputs=4, outputs=6)
    for number, told in enumerate((0, 1)):
        if told:
            trained[f"{PREFIX}.x.lora_B.default.weight"] = torch.zeros(6, 2)
        root = made_up(tmp_path / str(number), trained, base, target_modules=["x"])
        out = tmp_path / f"out {number}"
        warnings = consolidate(root, out, ExportOptions(adapter=mode)).warnings
        assert sum("the adapter changes nothing" in one for one in warnings) == told


@pytest.mark.parametrize(("scaling", "is_told"), [(1e-5, True), (1.0, False)])
def test_an_update_that_the_dtype_rounds_away_is_told(
    tmp_path: Path, scaling: float, *, is_told: bool
) -> None:
    base = values((24, 40), 3).bfloat16()
    trained = factors("x", inputs=40, outputs=24)
    config = {"target_modules": ["x"], "lora_alpha": 2 * scaling}
    root = made_up(tmp_path, trained, {"x.base_layer.weight": base}, **config)
    unlike, details = {}, {}
    for dtype in ExportDType.FP32, ExportDType.BF16:
        out = tmp_path / dtype.value
        report = consolidate(root, out, ExportOptions(adapter=AdapterMode.MERGE, dtype=dtype))
        merged = load_file(out / "model.safetensors")["x.weight"]
        unlike[dtype] = int((merged != base).sum())
        details[dtype] = [f.detail for f in report.findings if f.kind is FindingKind.UPDATE_LOST]
    share = 100 * unlike[ExportDType.BF16] / unlike[ExportDType.FP32]
    assert not details[ExportDType.FP32]
    told = [f"as bf16, {share:.1f} % of what the adapter changes differs from the base"]
    assert details[ExportDType.BF16] == (told if is_told else [])


def test_a_quantized_weight_is_not_added_to(tmp_path: Path) -> None:
    base = {"x.base_layer.weight": torch.zeros((6, 4), dtype=torch.uint8)}
    root = made_up(tmp_path, factors("x", inputs=4, outputs=6), base)
    with pytest.raises(UnsupportedError, match=r"quantized weight x\.weight"):
        consolidate(root, tmp_path / "out", MERGE)


def test_a_square_weight_is_not_guessed_to_be_one_way_or_the_other(tmp_path: Path) -> None:
    """Another is stored as the configuration says that none is."""
    base = {"x.base_layer.weight": values((4, 4), 3), "y.base_layer.weight": values((4, 6), 4)}
    trained = {**factors("x", inputs=4, outputs=4), **factors("y", inputs=4, outputs=6)}
    root = made_up(tmp_path, trained, base, fan_in_fan_out=False)
    with pytest.raises(UnsupportedError, match=r"how the square weight x\.weight is stored"):
        consolidate(root, tmp_path / "out", MERGE)


def test_two_parameters_of_one_shape_are_not_guessed_apart(tmp_path: Path) -> None:
    names = ("one", "two")
    base = {f"x.base_layer.base_layer.{name}": values((3, 6, 4), 3) for name in names}
    inner, outer = (factors(module, 4, 6, 6) for module in ("x.base_layer", "x"))
    targets = [f"x.{name}" for name in names]
    root = made_up(tmp_path, {**inner, **outer}, base, target_parameters=targets)
    with pytest.raises(UnsupportedError, match="which parameters of x"):
        consolidate(root, tmp_path / "out", MERGE)


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
def test_half_an_adapter_is_none(tmp_path: Path, mode: AdapterMode) -> None:
    """Of a frozen factor a save without frozen weights leaves no trace but the other one."""
    trained = factors("x", inputs=4, outputs=6)
    del trained[f"{PREFIX}.x.lora_A.default.weight"]
    root = made_up(tmp_path, trained, {"x.base_layer.weight": values((6, 4), 3)})
    with pytest.raises(FrozenLeftOutError, match="lora_A"):
        consolidate(root, tmp_path / "out", ExportOptions(adapter=mode))


def test_deepspeeds_converter_merges_nothing(tmp_path: Path) -> None:
    base = {"x.base_layer.weight": values((6, 4), 3)}
    root = made_up(tmp_path, factors("x", inputs=4, outputs=6), base)
    options = ExportOptions(adapter=AdapterMode.MERGE, engine=Engine.DEEPSPEED)
    with pytest.raises(UsageError, match="--engine"):
        consolidate(root, tmp_path / "out", options)


def test_a_configuration_that_is_given_has_to_be_there(tmp_path: Path) -> None:
    root = made_up(tmp_path, factors("x", inputs=4, outputs=6), {})
    with pytest.raises(NotACheckpointError, match="--adapter-config"):
        consolidate(root, tmp_path / "out", ExportOptions(adapter_config=tmp_path / "gone.json"))


def test_a_base_of_which_every_weight_is_updated_leaves_nothing_to_fill_in(tmp_path: Path) -> None:
    """Without a config too, where only the base's own names tell what is missing."""
    weight = values((6, 4), 3)
    root = made_up(tmp_path, factors("x", inputs=4, outputs=6), {})
    (tmp_path / "base").mkdir()
    save_file({"x.weight": weight}, tmp_path / "base" / "model.safetensors")
    options = ExportOptions(base=tmp_path / "base")
    consolidate(root, tmp_path / "out", options)
    a, b = factors("x", inputs=4, outputs=6).values()
    found = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(found["x.weight"], weight.bfloat16().float() + b @ a)


def test_an_adapters_name_leads_to_no_other_folder(tmp_path: Path) -> None:
    trained = {
        name.replace("default", "/elsewhere"): value
        for name, value in factors("x", inputs=4, outputs=6).items()
    }
    root = made_up(tmp_path, trained, {})
    with pytest.raises(UnsafeError, match="'/elsewhere'"):
        consolidate(root, tmp_path / "out")


def test_a_configuration_is_no_link_to_elsewhere(tmp_path: Path) -> None:
    root = made_up(tmp_path, factors("x", inputs=4, outputs=6), {})
    (root / "adapter_config.json").rename(tmp_path / "secret.json")
    (root / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(UnsafeError):
        consolidate(root, tmp_path / "out")
