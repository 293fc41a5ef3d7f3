"""Which parallelism wrote a checkpoint, and what is made of all its files together."""

from __future__ import annotations

import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Run, edit, save, small_model
from tests.support.model_parallel import truth, unequal, values
from tests.support.oracles import differences
from zexport.checkpoint.contents import Inventory, Parallelism, ZeroCheckpoint
from zexport.checkpoint.layouts.structure import Structure, recognise
from zexport.checkpoint.opening import open_checkpoint
from zexport.checkpoint.rank_files import RankFile, list_rank_files, parse_rank_file
from zexport.checkpoint.ranks import Save, read_ranks
from zexport.errors import DamagedCheckpointError, IncompleteCheckpointError
from zexport.options import ExportDType, ExportOptions, NameLayout
from zexport.ranges.replicas import Replica

FIXTURES = Path(__file__).parents[3] / "fixtures"
TAG = "global_step2"
PLAIN = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def _copy(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "ckpt")


def _files(*names: str) -> list[RankFile]:
    return [file for name in names if (file := parse_rank_file(Path(name))) is not None]


# --- what it is ---


@pytest.mark.parametrize(
    ("names", "structure"),
    [
        ((), Structure.DATA),
        (("layer_0_expert_0_mp_rank_00_model_states.pt",), Structure.EXPERTS),
        (("expp_rank_0_mp_rank_00_optim_states.pt",), Structure.EXPERTS),
        (("layer_00-model_states.pt",), Structure.PIPELINE),
        (("layer_00-model_01-model_states.pt",), Structure.PIPELINE),
    ],
)
def test_a_structure_is_known_by_the_names_of_its_files(
    names: tuple[str, ...], structure: Structure, tmp_path: Path
) -> None:
    assert recognise(Save(tmp_path, _files(*PLAIN, *names), {})) is structure


def test_a_second_model_parallel_index_is_tensor_parallelism(tmp_path: Path) -> None:
    cells = {index: read_ranks(tmp_path, []) for index in (0, 1)}
    assert recognise(Save(tmp_path, _files(*PLAIN), cells)) is Structure.TENSOR


def test_a_folder_of_weights_is_a_conversion_unless_optimizer_files_lie_beside_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "zero").mkdir()
    assert recognise(Save(tmp_path, _files(PLAIN[0]), {})) is Structure.UNIVERSAL
    assert recognise(Save(tmp_path, _files(*PLAIN), {})) is Structure.DATA


@pytest.mark.parametrize(
    ("state", "structure"),
    [
        ({"num_experts": [4]}, Structure.EXPERTS),
        ({"ds_autoep_layers": [{"num_experts": 4}]}, Structure.EXPERTS),
        ({"num_experts": []}, Structure.DATA),
        ({"mp_world_size": 2}, Structure.TENSOR),
        ({"mp_world_size": 1}, Structure.DATA),
    ],
)
def test_a_structure_is_known_by_what_the_files_say(
    state: dict[str, object], structure: Structure, tmp_path: Path
) -> None:
    folder = save(small_model(), Run(stage=2, client_state=state), tmp_path) / TAG
    files = list_rank_files(folder)
    assert recognise(Save(folder, files, {0: read_ranks(folder, files)})) is structure


def test_experts_that_are_striped_over_groups_are_known_by_the_optimizer_alone(
    tmp_path: Path,
) -> None:
    folder = save(small_model(), Run(stage=3), tmp_path) / TAG
    for path in folder.glob("*_optim_states.pt"):
        edit(path, lambda s: s["optimizer_state_dict"].update(ds_zero_partition_groups=[]))
    files = list_rank_files(folder)
    assert recognise(Save(folder, files, {0: read_ranks(folder, files)})) is Structure.EXPERTS


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("z0_w2_bf16", "ZeRO-0"),
        ("z3_w2_bf16", "ZeRO-3"),
        ("tp2_z2_w4_bf16", "ZeRO-2, 2 tensor ranks"),
        ("pp2_z1_w4_bf16_tied", "ZeRO-1, 2 pipeline stages"),
        ("pp2_tp2_z1_w8_bf16_tied", "ZeRO-1, 2 pipeline stages, 2 tensor ranks"),
        ("moe_z2_w4_ep2", "ZeRO-2, 2 expert ranks, 4 experts in each of 2 layers"),
        ("moe_z0_w4_ep4_bf16_residual", "ZeRO-0, 4 expert ranks, 4 experts in each of 2 layers"),
        ("autoep_z3_w4_ep2", "ZeRO-3, 2 expert ranks, 4 experts in each of 2 layers"),
        ("uni_z2_w2_bf16_odd", "universal checkpoint"),
    ],
)
def test_a_real_checkpoint_says_what_it_is(name: str, layout: str) -> None:
    assert open_checkpoint(FIXTURES / name / "ckpt").layout == layout


def test_experts_of_every_pipeline_stage_are_the_live_ones() -> None:
    case = FIXTURES / "stages_moe_z1_w4_ep2"
    checkpoint = open_checkpoint(case / "ckpt")
    assert checkpoint.problems == ()
    assert checkpoint.parallelism == Parallelism(stages=2, expert_ranks=(2,), experts=(4, 4))
    inventory = Inventory(checkpoint.tensors, checkpoint.aliases, checkpoint.left_out)
    assert differences(values(inventory), truth(case)) == []
    assert unequal(checkpoint.replicas) == []


def test_a_missing_stage_of_a_pipeline_with_experts_is_missed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "stages_moe_z1_w4_ep2" / "ckpt", tmp_path / "run")
    for path in (tmp_path / "run" / "global_step2").glob("*mp_rank_01*"):
        path.unlink()
    (problem,) = open_checkpoint(tmp_path / "run").problems
    assert isinstance(problem, IncompleteCheckpointError)


# --- what is missing ---


@pytest.mark.parametrize("name", ["tp2_z2_w4_bf16", "tp2_z3_w4_bf16", "pp2_z1_w4_bf16_tied"])
@pytest.mark.parametrize("index", ["00", "01"])
def test_a_part_of_the_model_without_any_optimizer_file_is_named(
    name: str, index: str, tmp_path: Path
) -> None:
    root = _copy(name, tmp_path)
    for path in root.glob(f"*/*mp_rank_{index}_optim_states.pt"):
        path.unlink()
    with pytest.raises(IncompleteCheckpointError, match=f"rank_0_mp_rank_{index}_optim") as caught:
        zexport.consolidate(root, tmp_path / "out")
    assert "mixes files" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_pipeline_without_any_optimizer_file_lacks_those_of_every_stage(tmp_path: Path) -> None:
    root = _copy("pp2_z1_w4_bf16_tied", tmp_path)
    for path in root.glob("*/*_optim_states.pt"):
        path.unlink()
    problems = open_checkpoint(root).problems
    assert [(type(p), p.found) for p in problems] == [
        (IncompleteCheckpointError, "no *_mp_rank_00_optim_states.pt"),
        (IncompleteCheckpointError, "no *_mp_rank_01_optim_states.pt"),
    ]


@pytest.mark.parametrize("name", ["z0_w2_bf16", "pp2_z0_w4_fp32", "uni_z3_w2_bf16_frozen"])
def test_where_weights_lie_elsewhere_no_optimizer_file_is_missed(name: str) -> None:
    checkpoint = open_checkpoint(FIXTURES / name / "ckpt")
    assert (checkpoint.problems, checkpoint.missing_ranks) == ((), ())


# --- what is made of it ---


def test_a_pipeline_exports_in_the_type_its_layers_trained_in(tmp_path: Path) -> None:
    case = FIXTURES / "pp2_z1_w4_bf16_tied"
    options = ExportOptions(dtype=ExportDType.AUTO, layout=NameLayout.MEMORY)
    zexport.consolidate(case / "ckpt", tmp_path / "out", options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(case / "truth.safetensors")
    assert {t.dtype for t in found.values() if t.is_floating_point()} == {torch.bfloat16}
    for name, value in found.items():
        kind = torch.bfloat16 if truth[name].is_floating_point() else truth[name].dtype
        assert torch.equal(value, truth[name].to(kind))


def test_what_a_conversion_lost_is_told_and_stands_in_no_ones_way(tmp_path: Path) -> None:
    def forget(state: dict[str, Any]) -> None:
        del state["module"]["count"]

    root = _copy("uni_z2_w2_bf16_odd", tmp_path)
    for path in root.glob("*/mp_rank_*_model_states.pt"):
        edit(path, forget)
    shutil.rmtree(root / "global_step2_universal" / "zero" / "count")
    checkpoint = open_checkpoint(root)
    assert (checkpoint.problems, checkpoint.left_out) == ((), ())
    assert checkpoint.warnings == ("the conversion to universal lost the values of count",)


# --- second copies ---


def _first_replica(checkpoint: ZeroCheckpoint) -> Replica:
    return next(r for r in checkpoint.replicas if isinstance(r, Replica) and r.other.nbytes)


def _flip_with_crc(path: Path, offset: int) -> None:
    """Change one byte of a tensor, and the record's CRC-32, as if it had been saved so."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    info = max((i for i in infos if i.header_offset < offset), key=lambda i: i.header_offset)
    lengths = struct.unpack_from("<HH", content, info.header_offset + 26)
    begin = info.header_offset + 30 + sum(lengths)
    assert begin <= offset < begin + info.file_size
    old = struct.pack("<L", info.CRC)
    new = struct.pack("<L", zlib.crc32(content[begin : begin + info.file_size]))
    path.write_bytes(bytes(content).replace(old, new))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("name", ["tp2_z1_w2_bf16_tied", "tp2_z2_w4_bf16", "tp2_z3_w4_bf16"])
def test_copies_that_differ_in_one_byte_are_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    root = _copy(name, tmp_path)
    replica = _first_replica(open_checkpoint(root))
    extent = next(replica.other.extents(0, 1))
    _flip_with_crc(extent.path, extent.offset)
    with pytest.raises(DamagedCheckpointError, match="other values than the rank") as caught:
        zexport.consolidate(root, tmp_path / "out")
    assert caught.value.found == f"{replica.name} differ"
    assert caught.value.path == extent.path
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
