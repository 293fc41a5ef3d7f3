"""Damage whose lengths all fit: found before anything is written, told whole, allowed by name."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import zexport
from tests.support.checkpoints import Model, Run, edit, save, values
from tests.support.expert_checkpoints import rewrite
from tests.support.oracles import differences
from tests.support.real_cases import copied, file_of
from zexport.cli.main import cli
from zexport.errors import CheckpointError, DamagedCheckpointError
from zexport.findings import FindingKind
from zexport.options import CheckMode, ExportOptions, NameLayout
from zexport.run.manifest import read_manifest

_MEMORY = ExportOptions(layout=NameLayout.MEMORY)

Edit = Callable[[dict[str, Any]], object]


def _flats(state: dict[str, Any]) -> list[torch.Tensor]:
    root = state["optimizer_state_dict"]
    key = "fp32_flat_groups" if "fp32_flat_groups" in root else "single_partition_of_fp32_groups"
    flats: list[torch.Tensor] = root[key]
    return flats


def _trained_on(state: dict[str, Any]) -> None:
    for flat in _flats(state):
        flat.data.mul_(1.5).add_(0.25)


def _allowing(*kinds: FindingKind, check: CheckMode = CheckMode.SAMPLED) -> ExportOptions:
    return ExportOptions(layout=NameLayout.MEMORY, allow=frozenset(kinds), check=check)


def _refused(root: Path, out: Path, options: ExportOptions = _MEMORY) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        zexport.consolidate(root, out, options)
    assert not out.exists()
    assert caught.value.exit_code == 3
    return caught.value


# --- masters against the module's rounded copies ---


def _scaled(state: dict[str, Any]) -> None:
    for tensor in state.get("module", state).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.mul_(1.25)


@pytest.mark.parametrize(
    ("changed", "of_layer"),
    [
        ("layer_0_expert_0_*", "layers.0.mlp.experts"),
        ("layer_1_expert_3_*", "layers.1.mlp.experts"),
        ("mp_rank_00_model_states.pt", "layers.0.self_attn"),
    ],
)
def test_weights_of_another_save_are_known_by_unnamed_masters_in_an_order_of_their_own(
    changed: str, of_layer: str, tmp_path: Path
) -> None:
    root = copied("autoep_z0_w2_ep2", tmp_path)
    rewrite(file_of(root, changed), _scaled)
    error = _refused(root, tmp_path / "out")
    assert "match no weight of the module" in str(error)
    assert "go on all the same with --allow cast-mismatch" in str(error)
    assert of_layer in str(error.found)
    assert zexport.open_checkpoint(root).problems
    report = zexport.consolidate(root, tmp_path / "out", _allowing(FindingKind.CAST_MISMATCH))
    assert {(one.kind, one.accepted) for one in report.findings} == {
        (FindingKind.CAST_MISMATCH, True)
    }
    assert "rounded as in the module" in str(report.warnings)


@pytest.mark.parametrize("check", list(CheckMode))
@pytest.mark.parametrize(
    ("name", "changed", "held_against"),
    [
        ("z1_w2_bf16", "*rank_1_mp_rank_00_optim*", "mp_rank_00_model_states.pt"),
        ("z1_w2_bf16opt", "*rank_0_mp_rank_00_optim*", "mp_rank_00_model_states.pt"),
        ("z2_w2_fp16", "*rank_1_mp_rank_00_optim*", "mp_rank_00_model_states.pt"),
        ("z2_w3_bf16_odd", "*rank_2_mp_rank_00_optim*", "mp_rank_00_model_states.pt"),
        ("moe_z2_w4_ep2", "*rank_3_mp_rank_00_optim*", "layer_1_expert_3_mp_rank_00"),
        ("autoep_z2_w4_ep2", "*rank_1_mp_rank_00_optim*", "layer_0_expert_2_mp_rank_00"),
        ("tp2_z1_w2_bf16_tied", "*rank_0_mp_rank_01_optim*", "mp_rank_01_model_states.pt"),
        ("pp2_z1_w4_bf16_tied", "*rank_1_mp_rank_01_optim*", "layer_04-model_states.pt"),
    ],
)
def test_masters_of_another_step_are_known_by_the_modules_own_weights(
    name: str, changed: str, held_against: str, check: CheckMode, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    path = file_of(root, changed)
    rewrite(path, _trained_on)
    error = _refused(root, tmp_path / "out", _allowing(check=check))
    assert "--allow cast-mismatch" in str(error)
    assert path.name in str(error.found)
    options = _allowing(FindingKind.CAST_MISMATCH, FindingKind.REPLICA_MISMATCH, check=check)
    report = zexport.consolidate(root, tmp_path / "out", options)
    told = [f for f in report.findings if f.kind is FindingKind.CAST_MISMATCH]
    assert all(finding.accepted and finding.count for finding in told)
    assert any(held_against in finding.detail for finding in told)
    assert read_manifest(tmp_path / "out").findings == report.findings
    assert zexport.verify_export(tmp_path / "out", against=root).ok


def test_a_universal_weight_is_held_against_the_copied_model_file(tmp_path: Path) -> None:
    root = copied("uni_z2_w2_bf16_odd", tmp_path)
    model = next(root.glob("*/mp_rank_00_model_states.pt"))

    def change(state: dict[str, Any]) -> None:
        state["module"]["inner.weight"].add_(1)

    rewrite(model, change)
    assert _refused(root, tmp_path / "out").finding is FindingKind.CAST_MISMATCH


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("place", [0, -1])
def test_samples_reach_into_what_each_rank_holds_of_every_weight(
    rank: int, place: int, tmp_path: Path
) -> None:
    model = Model([{"w": values((3, 10_000), 1)}], dtype=torch.float16)
    root = save(model, Run(stage=2, world_size=3), tmp_path / "ckpt")

    def change(state: dict[str, Any]) -> None:
        _flats(state)[0][place] += 1

    edit(file_of(root, f"*rank_{rank}_mp*optim*"), change)
    error = _refused(root, tmp_path / "out")
    assert f"zero_pp_rank_{rank}_mp" in str(error.found)
    assert "w (1 of 2304 compared)" in str(error.found)


def test_every_element_is_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    root = save(Model([{"w": values((30_000,), 1)}]), Run(stage=2), tmp_path / "ckpt")

    def change(state: dict[str, Any]) -> None:
        _flats(state)[0][4321] += 1

    edit(file_of(root, "*rank_0_mp*optim*"), change)
    zexport.consolidate(root, tmp_path / "sampled", _MEMORY)
    error = _refused(root, tmp_path / "full", _allowing(check=CheckMode.FULL))
    assert "w (1 of 30000 compared)" in str(error.found)
    with pytest.raises(DamagedCheckpointError, match="1 of 30000"):
        zexport.verify_export(tmp_path / "sampled", against=root, check=CheckMode.FULL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_beyond_the_narrower_type_are_no_difference(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, -0.0, 1e-42, 0.0])
    root = save(Model([{"w": odd}], dtype=dtype), Run(stage=2), tmp_path / "ckpt")
    for check in CheckMode:
        report = zexport.consolidate(root, tmp_path / check.value, _allowing(check=check))
        assert {finding.kind for finding in report.findings} == {FindingKind.NAN, FindingKind.INF}


def test_a_shape_that_the_module_contradicts_is_refused(tmp_path: Path) -> None:
    root = save(Model([{"w": values((4, 6), 1)}]), Run(stage=2), tmp_path / "ckpt")
    edit(
        file_of(root, "*model_states*"),
        lambda state: state["param_shapes"][0].update(w=torch.Size([6, 4])),
    )
    error = _refused(root, tmp_path / "out")
    assert "'w' is not a rounded copy of its master weights" in error.problem
    assert error.finding is None


# --- what may be allowed ---


def test_files_of_different_steps_are_exported_where_that_is_allowed(tmp_path: Path) -> None:
    model = Model([{"w": values((5,), 1)}], buffers={"b": torch.ones(2)})
    root = save(model, Run(world_size=2), tmp_path / "ckpt")
    edit(file_of(root, "*rank_1_*model*"), lambda state: state.update(global_steps=9))
    error = _refused(root, tmp_path / "out")
    assert error.hint.endswith("or go on all the same with --allow mixed-steps")
    report = zexport.consolidate(root, tmp_path / "out", _allowing(FindingKind.MIXED_STEPS))
    (found,) = report.findings
    assert (found.kind, found.tensor, found.accepted) == (FindingKind.MIXED_STEPS, "", True)
    assert "found 9, expected 2" in found.detail
    assert str(tmp_path) not in (tmp_path / "out" / "zexport_manifest.json").read_text()
    assert differences(load_file(tmp_path / "out" / "model.safetensors"), model.tensors) == []


def test_files_beyond_the_world_size_are_left_alone_where_that_is_allowed(tmp_path: Path) -> None:
    model = Model([{"w": values((50,), 1)}])
    root = save(model, Run(stage=3, world_size=2), tmp_path / "ckpt")
    larger = save(Model([{"w": values((50,), 2)}]), Run(world_size=3, steps=1), tmp_path / "other")
    shutil.copy(file_of(larger, "*rank_2_*optim*"), root / "global_step2")
    assert _refused(root, tmp_path / "out").finding is FindingKind.STRAY_FILES
    report = zexport.consolidate(root, tmp_path / "out", _allowing(FindingKind.STRAY_FILES))
    assert [finding.kind for finding in report.findings] == [FindingKind.STRAY_FILES]
    assert differences(load_file(tmp_path / "out" / "model.safetensors"), model.tensors) == []


def test_copies_on_several_ranks_may_differ_where_that_is_allowed(tmp_path: Path) -> None:
    root = copied("tp2_z1_w2_bf16_tied", tmp_path)
    buffer = file_of(root, "mp_rank_01_model*")

    def change(state: dict[str, Any]) -> None:
        state["module"]["extra"] = torch.zeros(2)
        state["buffer_names"].append("extra")

    rewrite(buffer, change)
    rewrite(file_of(root, "mp_rank_00_model*"), change)
    rewrite(buffer, lambda state: state["module"]["extra"].add_(1))
    assert _refused(root, tmp_path / "out").finding is FindingKind.REPLICA_MISMATCH
    report = zexport.consolidate(root, tmp_path / "out", _allowing(FindingKind.REPLICA_MISMATCH))
    (found,) = (f for f in report.findings if f.kind is FindingKind.REPLICA_MISMATCH)
    assert (found.tensor, found.accepted) == ("extra", True)


@pytest.mark.parametrize(
    ("step", "told"), [(0.0, True), (1.0, True), (2.0, False), (3.0, False), (4.0, True)]
)
def test_an_optimizer_that_counts_other_steps_than_the_model_files_is_told(
    step: float, told: bool, tmp_path: Path
) -> None:
    run = Run(optimizer_step=torch.tensor(step))
    root = save(Model([{"w": values((5,), 1)}]), run, tmp_path / "ckpt")
    report = zexport.consolidate(root, tmp_path / "out", _MEMORY)
    assert [f.kind for f in report.findings] == [FindingKind.STEP_MISMATCH] * told
    if told:
        assert not report.findings[0].accepted
        assert "found" in report.findings[0].detail


def test_steps_that_an_overflow_skipped_are_none_of_the_optimizers(tmp_path: Path) -> None:
    run = Run(steps=7, optimizer_step=torch.tensor(4.0), client_state={"skipped_steps": 3})
    root = save(Model([{"w": values((5,), 1)}]), run, tmp_path / "ckpt")
    assert zexport.consolidate(root, tmp_path / "out", _MEMORY).findings == ()


def test_findings_about_values_are_marked_as_allowed_too(tmp_path: Path) -> None:
    root = save(Model([{"w": torch.zeros(5)}]), Run(), tmp_path / "ckpt")
    for kinds in ((), (FindingKind.ALL_ZERO,)):
        out = tmp_path / f"out{len(kinds)}"
        (found,) = zexport.consolidate(root, out, _allowing(*kinds)).findings
        assert found.accepted is bool(kinds)


def test_all_zero_and_nan_are_named_for_frozen_weights_and_buffers_as_well(tmp_path: Path) -> None:
    nan = torch.tensor([1.0, float("nan")])
    model = Model(
        [{"w": values((5,), 1)}],
        frozen={"f": torch.zeros(3, dtype=torch.bfloat16), "g": nan.bfloat16()},
        buffers={"b": torch.zeros(2), "c": nan, "n": torch.zeros(2, dtype=torch.int64)},
    )
    root = save(model, Run(stage=2), tmp_path / "ckpt")
    report = zexport.consolidate(root, tmp_path / "out", _MEMORY)
    assert {(f.kind.value, f.tensor, f.count) for f in report.findings} == {
        ("all-zero", "f", 3),
        ("nan", "g", 1),
        ("all-zero", "b", 2),
        ("nan", "c", 1),
    }


def test_the_command_line_takes_kinds_and_lists_them(tmp_path: Path) -> None:
    root = save(Model([{"w": values((5,), 1)}]), Run(), tmp_path / "ckpt")
    edit(file_of(root, "*rank_1_*model*"), lambda state: state.update(global_steps=9))
    words = ["consolidate", str(root), str(tmp_path / "out"), "--json"]
    run = CliRunner()
    unknown = run.invoke(cli, [*words, "--allow", "anything"])
    assert unknown.exit_code == 2
    listed = {kind for kind in FindingKind if f"'{kind.value}'" in unknown.output}
    assert listed == {kind for kind in FindingKind if kind.is_refused}
    done = run.invoke(cli, [*words, "--allow", "nan", "--allow", "mixed-steps", "--check", "full"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["options"]["allow"] == ["mixed-steps", "nan"]
    assert [finding["accepted"] for finding in told["findings"]] == [True]


# --- never allowed ---


def _shorten(state: dict[str, Any]) -> None:
    flats = _flats(state)
    flats[0] = flats[0][:-4].clone()


def _as_integers(state: dict[str, Any]) -> None:
    flats = _flats(state)
    flats[:] = [flat.view(torch.int32) for flat in flats]


def _reordered(state: dict[str, Any]) -> None:
    shapes = state["param_shapes"][0]
    state["param_shapes"][0] = OrderedDict(reversed(shapes.items()))


@pytest.mark.parametrize(
    ("name", "pattern", "change", "match"),
    [
        ("z2_w2_bf16_tied", "*rank_0_*optim*", _shorten, "add up|wrong length"),
        ("z3_w2_bf16", "*rank_1_*optim*", _shorten, "add up"),
        ("z2_w2_bf16_tied", "*rank_1_*optim*", _as_integers, "one floating-point dtype"),
        ("z3_w2_bf16", "*rank_1_*optim*", _as_integers, "one floating-point dtype"),
        ("z3_w2_bf16", "*rank_1_*model*", _reordered, "list of weights differs"),
    ],
)
def test_contradictions_in_lengths_types_and_names_are_never_allowed(
    name: str, pattern: str, change: Edit, match: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    rewrite(file_of(root, pattern), change)
    with pytest.raises(DamagedCheckpointError, match=match):
        zexport.consolidate(root, tmp_path / "out", _allowing(*FindingKind))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["z1_w2_bf16", "z2_w2_fp16", "z1_w2_bf16opt"])
def test_exchanged_rank_files_are_known_by_their_values_where_nothing_else_tells(
    name: str, tmp_path: Path
) -> None:
    root = copied(name, tmp_path)
    one, other = (file_of(root, f"*rank_{rank}_mp*optim*") for rank in (0, 1))
    kept: dict[Path, Any] = {}
    for path in (one, other):
        rewrite(path, lambda state, path=path: kept.update({path: dict(state)}))
    for path, source in ((one, kept[other]), (other, kept[one])):

        def change(state: dict[str, Any], source: dict[str, Any] = source) -> None:
            state.update(source)
            state["optimizer_state_dict"]["param_slice_mappings"] = []

        rewrite(path, change)
    error = _refused(root, tmp_path / "out")
    if error.finding is None:
        assert "wrong length" in error.problem or "add up" in error.problem
    else:
        assert "--allow cast-mismatch" in str(error)


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    root = save(Model([{"w": values((5,), 1)}]), Run(world_size=4), tmp_path / "ckpt")
    edit(file_of(root, "*rank_1_*model*"), lambda state: state.update(global_steps=9))
    edit(file_of(root, "*rank_3_*optim*"), lambda state: state.update(ds_version="0.1"))
    file_of(root, "*rank_2_*optim*").unlink()
    error = _refused(root, tmp_path / "out", _allowing(FindingKind.MIXED_STEPS))
    assert "2 problems" in error.problem
    assert "DeepSpeed version differs" in str(error.found)
    assert "optimizer states files of rank 2" in str(error.found)


# --- shapes that only the config tells ---


def _transposed(state: dict[str, Any]) -> None:
    shapes = state["param_shapes"][0]
    shapes["model.layers.0.mlp.up_proj.weight"] = shapes["model.layers.0.mlp.down_proj.weight"]


@pytest.mark.parametrize("layout", list(NameLayout))
def test_dimensions_in_another_order_are_known_by_the_config(
    layout: NameLayout, tmp_path: Path
) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    for rank in (0, 1):
        rewrite(file_of(root, f"*rank_{rank}_*model*"), _transposed)
    error = _refused(root, tmp_path / "out", ExportOptions(layout=layout))
    assert error.finding is FindingKind.SHAPE_MISMATCH
    assert "model.layers.0.mlp.up_proj.weight [" in str(error.found)
    allow = frozenset({FindingKind.SHAPE_MISMATCH})
    report = zexport.consolidate(root, tmp_path / "out", ExportOptions(layout=layout, allow=allow))
    told = [(f.kind, f.tensor, f.accepted) for f in report.findings]
    assert told == [(FindingKind.SHAPE_MISMATCH, "model.layers.0.mlp.up_proj.weight", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [("vocab_size", 300, False), ("num_key_value_heads", 1, True), ("intermediate_size", 40, True)],
)
def test_a_config_of_another_model_is_refused_and_one_of_another_vocabulary_is_not(
    key: str, value: int, is_refused: bool, tmp_path: Path
) -> None:
    root = copied("z3_w2_bf16", tmp_path)
    (root / "zexport_source.json").unlink()
    config = json.loads((root / "config.json").read_text())
    assert config[key] != value
    (root / "config.json").write_text(json.dumps(config | {key: value}))
    if is_refused:
        assert _refused(root, tmp_path / "out").finding is FindingKind.SHAPE_MISMATCH
    else:
        assert zexport.consolidate(root, tmp_path / "out", _MEMORY).findings == ()


# --- weights gathered beside the checkpoint ---


def _gathered(tmp_path: Path) -> tuple[Path, Model]:
    model = Model([{"w": values((6, 5), 1), "v": values((3,), 2)}], tied={"t": "w"})
    root = save(model, Run(stage=3), tmp_path / "ckpt")
    weights = {name: value.bfloat16() for name, value in model.masters.items()}
    save_file(weights, root / "model.safetensors")
    return root, model


def test_exchanged_ranks_of_zero3_are_told_by_weights_that_were_gathered(tmp_path: Path) -> None:
    root, model = _gathered(tmp_path)
    assert zexport.consolidate(root, tmp_path / "out", _MEMORY).findings == ()
    kept: list[list[torch.Tensor]] = []
    for rank in (0, 1):
        edit(file_of(root, f"*rank_{rank}_*optim*"), lambda s: kept.append(list(_flats(s))))
    for rank in (0, 1):

        def change(state: dict[str, Any], flats: list[torch.Tensor] = kept[1 - rank]) -> None:
            _flats(state)[:] = flats

        edit(file_of(root, f"*rank_{rank}_*optim*"), change)
    report = zexport.consolidate(root, tmp_path / "wrong", _MEMORY)
    found = {finding.tensor: finding for finding in report.findings}
    assert found["w"].kind is FindingKind.GATHERED_MISMATCH
    assert (found["w"].count, found["w"].accepted) == (30, False)
    assert found["w"].detail == "of 30 compared with model.safetensors"
    assert model.masters.keys() >= found.keys()


@pytest.mark.parametrize("tensors", [{"w": (6, 5)}, {"w": (6, 5), "v": (4,)}, {"w": (0,)}])
def test_weights_beside_that_are_not_surely_the_models_are_not_compared(
    tensors: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    root, _ = _gathered(tmp_path)
    other = {name: torch.zeros(shape) for name, shape in tensors.items()}
    save_file(other, root / "model.safetensors")
    assert zexport.consolidate(root, tmp_path / "out", _MEMORY).findings == ()


def test_weights_beside_several_tags_are_not_compared(tmp_path: Path) -> None:
    root, model = _gathered(tmp_path)
    zeros = {name: torch.zeros_like(value) for name, value in model.masters.items()}
    save_file(zeros, root / "model.safetensors")
    assert len(zexport.consolidate(root, tmp_path / "one", _MEMORY).findings) == 2
    save(model, Run(stage=3), root, tag="global_step1")
    (root / "latest").write_text("global_step2")
    assert zexport.consolidate(root, tmp_path / "two", _MEMORY).findings == ()


def test_unreadable_weights_beside_are_left_alone(tmp_path: Path) -> None:
    root, _ = _gathered(tmp_path)
    (root / "model.safetensors").write_bytes(b"\xff" * 20)
    assert zexport.consolidate(root, tmp_path / "out", _MEMORY).findings == ()
