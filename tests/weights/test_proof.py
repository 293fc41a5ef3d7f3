"""Every road to a checkpoint's weights refuses those that an export refuses, in the same words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs

import zexport
from tests.support.checkpoints import optimizer_file, small_model
from tests.support.expert_checkpoints import rewrite
from tests.support.published import check
from tests.support.real_cases import copied, facts, file_of
from zexport import compat
from zexport.checkpoint.open import open_checkpoint
from zexport.cli.main import cli
from zexport.errors import DamagedCheckpointError, UnsupportedError, ZexportError
from zexport.options import CheckMode, ExportOptions, NameLayout
from zexport.ranges import reader
from zexport.ranges.extents import Window
from zexport.ranges.replicas import CastReplica, compare_casts
from zexport.weights import proof
from zexport.weights.proof import WeightReader

_MEMORY = ExportOptions(layout=NameLayout.MEMORY)


def _doubled(state: dict[str, Any]) -> None:
    root = state["optimizer_state_dict"]
    for flat in root.get("fp32_flat_groups") or root["single_partition_of_fp32_groups"]:
        flat.data.mul_(2)


def _with_doubled_masters(name: str, tmp_path: Path) -> Path:
    """A checkpoint whose first rank's masters are twice what they were, with the right CRCs."""
    root = copied(name, tmp_path)
    rewrite(file_of(root, "*rank_0_mp_rank_00_optim*"), _doubled)
    return root


def _refusal(root: Path, out: Path) -> ZexportError:
    with pytest.raises(DamagedCheckpointError) as caught:
        zexport.consolidate(root, out, _MEMORY)
    assert not out.exists()
    return caught.value


def _converted(root: Path, out: Path, **options: bool) -> None:
    try:
        compat.convert_zero_checkpoint_to_fp32_state_dict(root, out, **options)
    finally:
        assert not list(out.iterdir())


@pytest.mark.parametrize(
    "read",
    [
        lambda root, _: compat.get_fp32_state_dict_from_zero_checkpoint(root),
        lambda root, _: compat.load_state_dict_from_zero_checkpoint(torch.nn.Linear(1, 1), root),
        _converted,
        lambda root, out: _converted(root, out, safe_serialization=True),
    ],
    ids=["get", "load", "convert", "convert to safetensors"],
)
def test_the_functions_of_deepspeeds_names_refuse_doubled_masters_as_an_export_does(
    read: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    root = _with_doubled_masters("z2_w2_bf16_groups", tmp_path)
    told = _refusal(root, tmp_path / "model")
    assert "11 of 21 weights differ" in str(told.found)
    with pytest.raises(ValueError, match="holds other weights than the masters") as caught:
        read(root, tmp_path / "out")
    assert str(caught.value) == str(told)
    assert isinstance(caught.value.__cause__, DamagedCheckpointError)


def test_a_lazy_tensor_is_refused_when_it_is_made_and_whole_ones_are_not(tmp_path: Path) -> None:
    whole = compat.get_fp32_state_dict_from_zero_checkpoint(copied("z2_w2_bf16_groups", tmp_path))
    root = _with_doubled_masters("z2_w2_bf16_groups", tmp_path / "doubled")
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    told: dict[str, str] = {}
    for _ in range(2):
        for name, tensor in lazy.items():
            try:
                assert facts({name: tensor.contiguous()}) == facts({name: whole[name].contiguous()})
            except ValueError as error:
                told[name] = str(error)
        assert len(told) == 11
    assert all("found 1 of 1 weights differ" in sentence for sentence in told.values())
    assert all(f": {name} (" in sentence for name, sentence in told.items())


@pytest.mark.parametrize("name", ["z2_w2_bf16_tied", "autoep_z2_w4_ep2", "tp2_z1_w2_bf16_tied"])
def test_lazy_tensors_have_every_copy_compared_and_none_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[CastReplica] = []

    def spy(replicas: list[CastReplica], *args: object, **options: Any) -> object:
        compared.extend(replicas)
        return compare_casts(replicas, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(proof, "compare_casts", spy)
    root = copied(name, tmp_path)
    eager = compat.get_fp32_state_dict_from_zero_checkpoint(root)
    every = sorted(one.name for one in compared)
    compared.clear()
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    assert not compared
    for _ in range(2):
        assert facts({n: t.contiguous() for n, t in lazy.items()}) == facts(
            {n: t.contiguous() for n, t in eager.items()}
        )
        assert sorted(one.name for one in compared) == every


def test_an_expert_of_another_step_is_known_when_any_lazy_tensor_is_made(tmp_path: Path) -> None:
    root = copied("autoep_z2_w4_ep2", tmp_path)
    rewrite(
        file_of(root, "layer_0_expert_2_mp_rank_00_model_states.pt"),
        lambda state: [value.add_(1) for value in state.values()],
    )
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    with pytest.raises(ValueError, match="holds other weights than the masters"):
        next(iter(lazy.values())).contiguous()


def test_masters_without_names_are_compared_whole_when_a_lazy_tensor_is_made(
    tmp_path: Path,
) -> None:
    root = copied("z0_w2_bf16", tmp_path)

    def change(state: dict[str, Any]) -> None:
        weight = state["module"]["lm_head.weight"].clone()
        weight.view(-1)[1000] += 0.5
        state["module"]["lm_head.weight"] = weight

    rewrite(file_of(root, "mp_rank_00_model_states.pt"), change)
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    with pytest.raises(ValueError, match="does not belong to the module's weight"):
        lazy["lm_head.weight"].contiguous()
    assert lazy["model.embed_tokens.weight"].contiguous().isfinite().all()


def test_statistics_of_doubled_masters_come_with_the_refusal(tmp_path: Path) -> None:
    root = _with_doubled_masters("z2_w2_bf16_groups", tmp_path)
    told = _refusal(root, tmp_path / "model")
    plain = CliRunner().invoke(cli, ["inspect", str(root), "--json"])
    assert not json.loads(plain.stdout)["problems"]
    done = CliRunner().invoke(cli, ["inspect", str(root), "--stats", "--json"])
    assert done.exit_code == 0, done.output
    found = check("inspect", json.loads(done.stdout))
    assert [problem["message"] for problem in found["problems"]] == [str(told)]
    assert (found["verdict"]["outcome"], found["verdict"]["exportable"]) == (
        "not_exportable",
        False,
    )
    assert "holds other weights than the masters" in found["verdict"]["sentence"]
    assert all(tensor["statistics"] for tensor in found["checkpoint"]["tensors"])
    shown = CliRunner().invoke(cli, ["inspect", str(root), "--stats"]).stdout
    assert "11 of 21 weights differ" in " ".join(shown.split())


def test_an_export_is_not_held_against_doubled_masters(tmp_path: Path) -> None:
    root = copied("z2_w2_bf16_groups", tmp_path)
    zexport.consolidate(root, tmp_path / "model", _MEMORY)
    rewrite(file_of(root, "*rank_0_mp_rank_00_optim*"), _doubled)
    told = _refusal(root, tmp_path / "other")
    with pytest.raises(DamagedCheckpointError) as caught:
        zexport.verify_export(tmp_path / "model", against=root)
    assert str(caught.value) == str(told)


def _with_an_element_too_many(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Any], *modules: object
) -> None:
    def opened_with(*args: Any, **options: Any) -> zexport.TrainingState:
        checkpoint: zexport.TrainingState = opened(*args, **options)
        flat = checkpoint.flats[0]
        flats = (structs.replace(flat, padding=flat.padding + 1),)
        return replace(checkpoint, whole=structs.replace(checkpoint.whole, flats=flats))

    for module in modules:
        monkeypatch.setattr(module, "open_checkpoint", opened_with)


def test_trained_elements_that_are_in_no_account_are_refused_at_opening(
    zero2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zexport.inspect import inspect as inspection

    _with_an_element_too_many(monkeypatch, open_checkpoint, compat, inspection)
    for lazy_mode in (False, True):
        with pytest.raises(ValueError, match="not accounted for") as caught:
            compat.get_fp32_state_dict_from_zero_checkpoint(zero2, lazy_mode=lazy_mode)
        assert isinstance(caught.value.__cause__, UnsupportedError)
    with pytest.raises(ValueError, match="not accounted for"):
        compat.convert_zero_checkpoint_to_fp32_state_dict(zero2, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(cli, ["inspect", str(zero2), "--stats", "--json"])
    (problem,) = json.loads(done.stdout)["problems"]
    assert "not accounted for" in problem["message"]


def _flip(path: Path, some: bytes) -> None:
    content = path.read_bytes()
    assert some in content
    path.write_bytes(content.replace(some, bytes([some[0] ^ 1]) + some[1:]))


@pytest.mark.parametrize(("unread_nbytes", "is_made"), [(1 << 20, False), (4, True)])
def test_a_flipped_bit_is_known_when_nearly_all_of_its_record_was_made_into_lazy_tensors(
    unread_nbytes: int, is_made: bool, zero3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_GAP_CHUNK_NBYTES", unread_nbytes)
    some = small_model().masters["emb.weight"].reshape(-1)[31:40].numpy().tobytes()
    _flip(optimizer_file(zero3 / "global_step2", small_model(), 1), some)
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(zero3, lazy_mode=True)
    made = []

    def make_all() -> None:
        for name, tensor in lazy.items():
            tensor.contiguous()
            made.append(name)

    with pytest.raises(ValueError, match="CRC-32"):
        make_all()
    assert "mask" in made
    assert ("emb.weight" in made) is is_made


def test_weights_are_not_done_with_before_their_copies_are_compared(zero2: Path) -> None:
    checkpoint = open_checkpoint(zero2)
    source = checkpoint.tensors[0].source
    assert source is not None
    with WeightReader(checkpoint.torch_files, checkpoint.replicas) as weights:
        weights.read_into(Window(source, 0, 4), 0, memoryview(bytearray(4)))
        with pytest.raises(AssertionError, match="not compared"):
            weights.finish()
        assert weights.compare() == ()
        weights.finish()


@pytest.mark.parametrize("check", CheckMode)
def test_what_was_compared_does_not_stand_for_what_is_read_later(
    check: CheckMode, tmp_path: Path
) -> None:
    root = copied("z2_w2_fp16", tmp_path)
    plan = zexport.plan_export(
        open_checkpoint(root), tmp_path / "out", replace(_MEMORY, check=check)
    )
    tensor = next(t for file in plan.shards for t in file.tensors if t.numel > 100)
    extent = next(iter(tensor.source.extents(0, tensor.source.nbytes)))
    with WeightReader.of_plan(plan) as weights:
        weights.compare()
        status = extent.path.stat()
        content = bytearray(extent.path.read_bytes())
        content[extent.offset + 40] ^= 64
        extent.path.write_bytes(content)
        os.utime(extent.path, ns=(status.st_atime_ns, status.st_mtime_ns))
        ledger = weights.new_ledger()
        stored = memoryview(bytearray(tensor.source.nbytes))
        weights.read_into(tensor.source, 0, stored, ledger)
        weights.take(ledger.ranges())
        with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
            weights.finish()
