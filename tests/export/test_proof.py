"""Every element is used once and all replicas are equal, or nothing is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zexport
from tests.support.checkpoints import edit
from tests.support.exports import export, invoke, refused
from tests.support.real_cases import FIXTURES, copied, file_of
from zexport import compat

MEMORY = ("--layout", "memory")
FLAT = sorted(
    {path.parts[-4] for path in FIXTURES.glob("*/ckpt/*/*zero_pp_rank_*_optim_states.pt")}
)


# --- coverage ---


def flats_of(state: dict[str, Any]) -> list[torch.Tensor]:
    inner = state.get("optimizer_state_dict") or {}
    for key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
        if key in inner:
            return list(inner[key])
    return []


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", FLAT)
def test_every_trained_element_is_accounted_for(name: str, tmp_path: Path) -> None:
    root = FIXTURES / name / "ckpt"
    plan = invoke("consolidate", root, tmp_path / "out", "--dry-run", *MEMORY, "--exclude-frozen")
    found = plan["accounting"]
    files = [torch.load(path, weights_only=False) for path in root.rglob("*optim_states.pt")]
    total = sum(flat.numel() for state in files for flat in flats_of(state))
    assert found.pop("total") == total == sum(found.values())
    assert {*map(type, found.values())} == {int}
    stored = zexport.open_checkpoint(root).tensors
    trained = sum(tensor.numel for tensor in stored if tensor.role is zexport.Role.TRAINABLE)
    assert (found["used"], found["left_out"]) == (trained, 0)


@pytest.mark.parametrize(
    ("name", "lost"), [("z2_w2_bf16_groups", "tensors"), ("tp2_z1_w2_bf16_fused", "replicas")]
)
def test_lost_tensor_or_uncompared_replica_is_refused(name: str, lost: str, tmp_path: Path) -> None:
    checkpoint = zexport.open_checkpoint(FIXTURES / name / "ckpt")
    options = zexport.ExportOptions(layout=zexport.NameLayout.MEMORY)
    kept = {"tensors": checkpoint.tensors[1:], "replicas": ()}[lost]
    lacking = replace(checkpoint, **{lost: kept})
    with pytest.raises(zexport.ZexportError) as caught:
        zexport.plan_export(lacking, tmp_path / "out", options)
    assert (caught.value.kind, caught.value.exit_code) == ("unsupported", 4)
    assert "elements" in str(caught.value.found)


# --- replicas ---


def double(state: dict[str, Any]) -> None:
    """Double the fp32 master weights; the file's CRCs are right."""
    for flat in flats_of(state):
        flat.data.mul_(2)


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """A checkpoint whose first rank has other master weights than the module has."""
    root = copied("z2_w2_bf16_groups", tmp_path)
    edit(file_of(root, "*rank_0_mp_rank_00_optim*"), double)
    return root


def test_master_weights_that_differ_from_the_module_are_refused(
    doubled: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    error = refused(doubled, out, *MEMORY, kind="damaged", word="11", finding="cast-mismatch")
    stats = invoke("inspect", doubled, "--stats")
    assert stats["verdict"]["exportable"] is False
    assert [one["message"] for one in stats["problems"]] == [str(error)]
    report = export(doubled, out, *MEMORY, "--allow", "cast-mismatch")
    found = {(one["kind"], one["accepted"]) for one in report["findings"]}
    assert found == {("cast-mismatch", True)}


@pytest.mark.parametrize(
    "read",
    [
        lambda root, _: compat.get_fp32_state_dict_from_zero_checkpoint(root),
        lambda root, _: compat.load_state_dict_from_zero_checkpoint(torch.nn.Linear(1, 1), root),
        compat.convert_zero_checkpoint_to_fp32_state_dict,
    ],
    ids=["get", "load", "convert"],
)
def test_compat_refuses_what_an_export_refuses(
    read: Callable[[Path, Path], object], doubled: Path, tmp_path: Path
) -> None:
    error = refused(doubled, tmp_path / "m", *MEMORY, kind="damaged", finding="cast-mismatch")
    with pytest.raises(ValueError, match="master") as caught:
        read(doubled, tmp_path / "out")
    assert str(caught.value) == str(error)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def read_errors(lazy: Mapping[str, Any]) -> dict[str, str]:
    """The errors of reading each lazy tensor."""
    errors = {}
    for name, tensor in lazy.items():
        try:
            tensor.contiguous()
        except ValueError as error:
            errors[name] = str(error)
    return errors


def test_lazy_tensors_are_refused_when_they_are_read(doubled: Path) -> None:
    lazy = compat.get_fp32_state_dict_from_zero_checkpoint(doubled, lazy_mode=True)
    errors = read_errors(lazy)
    assert errors.keys() == lazy.keys()
    assert all("11 of" in error for error in errors.values())


def test_replicated_weights_of_experts_and_tensor_ranks_are_compared(tmp_path: Path) -> None:
    root = copied("autoep_z2_w4_ep2", tmp_path / "experts")
    expert = file_of(root, "layer_0_expert_2_mp_rank_00_model_states.pt")
    edit(expert, lambda state: [value.add_(1) for value in state.values()])
    word = "experts"
    refused(root, tmp_path / "out", *MEMORY, kind="damaged", word=word, finding="cast-mismatch")

    root = copied("tp2_z1_w2_bf16_tied", tmp_path / "tensor")
    for rank in range(2):

        def add_buffer(state: dict[str, Any], value: int = rank) -> None:
            state["module"]["extra"] = torch.full((2,), float(value))
            state["buffer_names"].append("extra")

        edit(file_of(root, f"mp_rank_0{rank}_model*"), add_buffer)
    word = "extra"
    refused(root, tmp_path / "out", *MEMORY, kind="damaged", word=word, finding="replica-mismatch")
