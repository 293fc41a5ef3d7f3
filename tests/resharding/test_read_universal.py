"""Universal checkpoints that ``zexport reshard`` makes: whole, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zexport
from tests.support.checkpoints import edit
from tests.support.oracles import same
from tests.support.published import check
from tests.support.raw_states import States, plain, raw_states, universal_states
from tests.support.real_cases import FIXTURES, copied
from zexport import (
    ReshardOptions,
    TrainingState,
    VerifyMode,
    ZexportError,
    diff_states,
    open_checkpoint,
    run_export,
    verify_export,
)
from zexport.export.plan import ExportPlan

_SOURCES = {  # and the stage and number of ranks that each goes on to
    "z0_w2_bf16_groups": (1, 3),
    "z1_w2_bf16_frozen": (3, 3),
    "z1_w2_bf16opt": (2, 1),
    "z2_w2_fp16": (1, 3),
    "z2_w3_bf16_odd": (3, 2),
    "z3_w3_bf16_tied": (1, 2),
    "uni_z3_w2_bf16_frozen": (2, 2),
}


def _root(name: str) -> Path:
    return FIXTURES / name / "ckpt"


def _plan(root: Path, out: Path, **options: Any) -> ExportPlan:
    chosen = {"format": "universal", **options}
    return zexport.plan_reshard(open_checkpoint(root), out, ReshardOptions(**chosen))


def _universal(root: Path, out: Path, **options: Any) -> TrainingState:
    run_export(_plan(root, out, **options), verify=VerifyMode.NONE)
    return open_checkpoint(out)


def _native(root: Path, out: Path, **options: Any) -> TrainingState:
    return _universal(root, out, format="native", **options)


def _differing(one: States, other: States) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


def _known(checkpoint: TrainingState) -> dict[str, Any]:
    return {one.name: (one.shape, one.role) for one in checkpoint.tensors}


@pytest.mark.parametrize("name", _SOURCES)
def test_universal_checkpoint_has_every_state_and_reshards_again(name: str, tmp_path: Path) -> None:
    stage, world_size = _SOURCES[name]
    source, direct = open_checkpoint(_root(name)), tmp_path / "direct"
    found = _universal(_root(name), tmp_path / "universal")
    assert (found.layout, found.problems) == ("universal checkpoint", ())
    assert (_known(found), found.aliases) == (_known(source), source.aliases)
    options = {"stage": stage, "world_size": world_size}
    expected = _native(_root(name), direct, **options)
    states = raw_states(expected.location.tag_dir)
    assert not _differing(states, universal_states(found.location.tag_dir))
    again = _native(tmp_path / "universal", tmp_path / "again", **options)
    assert not _differing(states, raw_states(again.location.tag_dir))
    for one, other in zip(*(_model_files(it) for it in (direct, tmp_path / "again")), strict=True):
        assert plain(one) == plain(other)


def _model_files(root: Path) -> list[Any]:
    """What the model files hold; a run's ``ds_config`` stays its own in a universal checkpoint."""
    return [torch.load(path) for path in sorted(root.glob("*/*_model_states.pt"))]


def test_universal_checkpoint_is_verified_and_compared(tmp_path: Path) -> None:
    source = _root("z3_w2_bf16_frozen")
    _universal(source, tmp_path / "out", for_deepspeed="0.19.8")
    assert verify_export(tmp_path / "out", against=source).ok
    assert diff_states(source, tmp_path / "out").is_equal
    manifest = json.loads((tmp_path / "out" / "zexport_manifest.json").read_text())
    assert manifest["settings"] is None
    assert manifest["universal"] == {"for_deepspeed": "0.19.8", "stage": None}
    check("reshard_manifest", manifest)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("z1_w2_bf16_frozen", ["10 frozen weights"]),
        ("z2_w3_bf16_odd", ["5 buffers"]),
        ("pp2_z1_w4_bf16_tied", ["a pipeline's layer files"]),
        ("z2_w2_bf16_groups", ["groups differ in weight_decay", "one step count"]),
    ],
)
def test_state_that_deepspeed_does_not_load_is_warned_about(
    name: str, words: list[str], tmp_path: Path
) -> None:
    plan = _plan(_root(name), tmp_path / "out", world_size=3, stage=2)
    told = "\n".join(plan.warnings)
    assert [word for word in words if word not in told] == []


def test_zero3_gets_the_settings_that_all_groups_share(tmp_path: Path) -> None:
    tag_dir = _universal(_root("z2_w2_bf16_groups"), tmp_path / "out").location.tag_dir
    state = torch.load(tag_dir / "zero" / "optimizer_state.pt", weights_only=False)
    (inner,) = state["optimizer_state_dict"]["param_groups"]
    assert {"lr", "betas"} <= inner.keys()
    assert "weight_decay" not in inner
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    names = [name for group in state["param_groups"] for name in group["params"]]
    assert {*names} == {state.split("|")[0] for state in universal_states(tag_dir)}
    assert not _differing(universal_states(tag_dir), raw_states(_tag("z2_w2_bf16_groups")))


def _tag(name: str) -> Path:
    return open_checkpoint(_root(name)).location.tag_dir


def test_older_deepspeed_gets_the_form_of_its_stage(tmp_path: Path) -> None:
    source, expected = _root("z3_w2_bf16"), raw_states(_tag("z3_w2_bf16"))
    flat = _universal(source, tmp_path / "flat", for_deepspeed="0.19.2")
    value = torch.load(next(flat.location.tag_dir.glob("zero/*q_proj.weight/fp32.pt")))
    assert (value.ndim, flat.problems) == (1, ())
    assert not _differing(universal_states(flat.location.tag_dir), expected)
    again = _native(tmp_path / "flat", tmp_path / "again", world_size=3)
    assert not _differing(raw_states(again.location.tag_dir), expected)
    older = {
        version: [
            told
            for told in _plan(source, tmp_path / "older", for_deepspeed=version).warnings
            if "wrongly on several nodes" in told
        ]
        for version in ("0.17.6", "0.18.0")
    }
    assert {version: len(told) for version, told in older.items()} == {"0.17.6": 1, "0.18.0": 0}
    whole = _plan(source, tmp_path / "whole", for_deepspeed="0.17.6", stage=2)
    shapes = {len(one.shape) for file in whole.shards for one in file.tensors if "fp32" in one.name}
    assert shapes == {1, 2}


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("z3_w2_bf16", {"for_deepspeed": "newest"}, 2, "loads no universal checkpoint"),
        ("z3_w2_bf16", {"for_deepspeed": "0.14.4"}, 2, "0.14.5 or newer"),
        ("z3_w2_bf16", {"stage": 4}, 2, "resharded to ZeRO-4"),
        ("z0_w2_bf16", {"for_deepspeed": "0.18.0"}, 2, "resharded to ZeRO-0"),
        (
            "z3_w2_bf16",
            {"format": "native", "world_size": 2, "for_deepspeed": "0.18.0"},
            2,
            "only for universal",
        ),
        ("z2_w2_bf16_groups", {"for_deepspeed": "0.17.6", "stage": 3}, 4, "several groups"),
        ("tp2_z3_w4_bf16", {"for_deepspeed": "0.19.2"}, 4, "with tensor ranks"),
        ("moe_z2_w2_ep1", {}, 4, "experts of DeepSpeed-MoE, which every rank numbers"),
        ("stages_moe_z1_w4_ep2", {}, 4, "experts of DeepSpeed-MoE, which every rank numbers"),
        ("autoep_z2_w2_ep2_frozen", {}, 4, "experts with frozen weights"),
        ("autoep_z3_w4_ep2", {"for_deepspeed": "0.19.2"}, 4, "with experts"),
    ],
)
def test_impossible_universal_checkpoint_is_rejected(
    name: str, options: dict[str, Any], code: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ZexportError) as refused:
        _plan(_root(name), tmp_path / "out", **options)
    assert words in str(refused.value)
    assert refused.value.exit_code == code


@pytest.mark.parametrize("name", ["../outside", "optimizer_state.pt", "x" * 300])
def test_parameter_name_that_is_no_folder_name_is_unsafe(name: str, tmp_path: Path) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    for path in root.glob("*/*_model_states.pt"):
        edit(path, lambda model: _renamed(model, "model.norm.weight", name))
    with pytest.raises(ZexportError, match="folder name") as refused:
        _plan(root, tmp_path / "out")
    assert refused.value.exit_code == 5


def _renamed(model: Any, old: str, new: str) -> None:
    for table in (*model["param_shapes"], model["module"]):
        items = [*table.items()]
        table.clear()
        table.update((new if name == old else name, one) for name, one in items)


def test_steps_that_differ_within_a_group_are_refused(tmp_path: Path) -> None:
    tag_dir = _universal(_root("z2_w2_bf16_groups"), tmp_path / "out").location.tag_dir
    steps = sorted(tag_dir.glob("zero/*/step.pt"))
    for path in steps:
        torch.save(2, path)
    options = {"world_size": 2, "stage": 2, "format": "native"}
    assert _plan(tmp_path / "out", tmp_path / "again", **options).shards
    torch.save(3, steps[0])
    with pytest.raises(ZexportError, match="differs within its group"):
        _plan(tmp_path / "out", tmp_path / "again", **options)
