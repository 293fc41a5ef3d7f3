"""Optimizer states of FSDP checkpoints equal live training, and damage is refused."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Size, distributed
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard as Strided

import zexport
from tests.fuzz.runner import run_plain
from tests.fuzz.states import target_of
from tests.support import fsdp_checkpoints
from tests.support.oracles import Tensors, differences
from zexport import DamagedCheckpointError, IncompleteCheckpointError, UnsafeError, ZexportError
from zexport.checkpoint.boxes import state_replicas
from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import TrainingState, raise_problems
from zexport.inspect.strips import strips
from zexport.ranges.compare import Replica
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader

pytestmark = pytest.mark.slow  # torch makes them on four ranks


def opened(folder: Path) -> TrainingState:
    state = open_checkpoint(folder)
    raise_problems(state)
    return state


def contents(state: TrainingState) -> tuple[Tensors, Tensors]:
    """The weights under all their names, and the optimizer states, read with their checksums."""
    bound = {
        (one.name, slot): (one.source(slot), dtype, one.shape)
        for one in state.parameters.values()
        for slot, dtype in one.slots.items()
    }
    found: dict[tuple[str, str], torch.Tensor] = {}
    with SourceReader(state.torch_files) as reader:
        for key, (source, dtype, shape) in bound.items():
            data = bytearray(source.nbytes)
            reader.read_into(source, 0, memoryview(data))
            found[key] = _tensor(data, dtype, shape)
        for replica in (*state.replicas, *state_replicas([state.whole])):
            assert isinstance(replica, Replica)
            both = [bytearray(one.nbytes) for one in (replica.kept, replica.other)]
            for one, data in zip((replica.kept, replica.other), both, strict=True):
                reader.read_into(one, 0, memoryview(data))
            assert both[0] == both[1], replica.name
        reader.finish()
    weights = {name: found[name, one.value_slot] for name, one in state.parameters.items()}
    weights |= {alias: weights[name] for alias, name in state.aliases.items()}
    states = {
        f"{name}|{slot}": value
        for (name, slot), value in found.items()
        if slot not in ("fp32", "module")
    }
    return weights, states


def _tensor(data: bytearray, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype.torch_name)
    flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape)


@pytest.mark.parametrize("form", fsdp_checkpoints.FORMS)
def test_state_equals_live_training(form: str, fsdp: Path) -> None:
    weights, states = contents(opened(fsdp / form / "ckpt"))
    assert differences(weights, load_file(fsdp / form / "truth.safetensors")) == []
    live = load_file(fsdp / form / "optim.safetensors")
    live = {name: one for name, one in live.items() if not name.endswith("|step")}
    assert differences(states, live) == []


def test_replicas_are_compared_and_flattened_states_left_out(fsdp: Path, tmp_path: Path) -> None:
    state = opened(fsdp / "hsdp_ranks" / "ckpt")
    assert {one.name for one in state.replicas} == {*state.parameters} - {"empty"}
    copies = {one.name for one in state_replicas([state.whole])}
    assert copies >= {"up.weight (exp_avg)", "embed.weight (exp_avg_sq)"}
    folder = shutil.copytree(fsdp / "fsdp1_ranks" / "ckpt", tmp_path / "ckpt")
    pieces = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": [{"params": [0]}]}
    for path in folder.glob("optim_*"):
        torch.save(pieces, path)  # the first piece has the shape of a weight
    state = opened(folder)
    assert all("exp_avg" not in one.slots for one in state.parameters.values())
    assert any("FSDP1" in note for note in state.notes)


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _swap_files(folder: Path) -> None:
    one, other = sorted(folder.glob("*model*_rank*"))[1:3]
    kept = one.read_bytes()
    shutil.copyfile(other, one)
    other.write_bytes(kept)


def _other_step(folder: Path) -> None:
    torch.save({"lr_scheduler": {"last_epoch": 9}}, folder / "extra_state_world_size_4_rank_2.pt")


def _no_config(folder: Path) -> None:
    (folder / _SHARD.format(4)).unlink()
    shutil.rmtree(folder / "optimizer")
    (folder / "config.json").write_text('{"vocab_size": 11}')


def _metadata(old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / ".metadata"
        assert old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new))

    return damage


def _truncated(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def _flipped(folder: Path) -> None:
    """One bit of a weight; the archive's CRC-32 is its only checksum."""
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(b"archive/data/0")
    (extra,) = struct.unpack_from("<H", data, at - 2)
    data[at + len(b"archive/data/0") + extra] ^= 1
    path.write_bytes(data)


def _of_accelerate(folder: Path) -> None:
    for path in folder.glob("model_*"):
        path.rename(folder / f"pytorch_model_fsdp_rank{path.stem[-1]}.bin")


def _three_of_accelerate(folder: Path) -> None:
    _of_accelerate(folder)
    (folder / "pytorch_model_fsdp_rank3.bin").unlink()


def _described(what: str, **fields: object) -> Callable[[Path], None]:
    """Set fields of a weight or of the place of an entry, or places, in .metadata."""

    def damage(folder: Path) -> None:
        one = FileSystemReader(folder).read_metadata()
        weight, (place, *_) = one.state_dict_metadata["model.up.weight"], one.storage_data.values()
        known = {"weight": vars(weight), "place": vars(place), "places": one.storage_data}
        (known | {"weights": one.state_dict_metadata})[what].update(fields)
        (folder / ".metadata").write_bytes(pickle.dumps(one))

    return damage


def _sharded(what: str, **fields: object) -> Callable[[Path], None]:
    """Set fields of the placements or of the mesh in rank files; ``None`` removes one."""

    def damage(folder: Path) -> None:
        for path in folder.glob("model_*"):
            state = torch.load(path, weights_only=False)
            del state["counts"], state["flags"]  # which are not sharded
            own = vars(getattr(state["down.weight"], what))
            own.update(fields)
            for key in [key for key, value in fields.items() if value is None]:
                del own[key]
            torch.save({"model": state, "step": 1}, path)

    return damage


D, I, X = DamagedCheckpointError, IncompleteCheckpointError, UnsafeError  # noqa: E741
U = zexport.UnsupportedError
_SHARD = "shard-0000{}-model-00001-of-00001.safetensors"
_DAMAGES = [
    ("fsdp2_dcp", _without(".metadata"), I, ".metadata is missing"),
    ("fsdp2_dcp", _without("__2_0.distcp"), I, "is missing"),
    ("fsdp2_dcp", _truncated, D, r"ends early .found \d+ bytes"),
    ("fsdp2_dcp", _flipped, D, "CRC-32"),
    ("fsdp2_dcp", _metadata(b"__1_0", b"../_0"), X, "cannot be in its folder"),
    ("fsdp2_dcp", _metadata(b"__1_0", rb"..\_0"), X, "cannot be in its folder"),
    ("fsdp2_dcp", _metadata(b"float32", b"float64"), D, "description.*at byte"),
    ("fsdp2_dcp", _metadata(b"BytesStorageMetadata", b"EvilStorageMetadata!"), X, "Evil"),
    ("fsdp2_dcp", _described("weight", dir=os.getcwd), X, "posix.getcwd"),
    ("fsdp2_dcp", lambda to: os.truncate(to / ".metadata", 129 << 20), U, "more than 128 MiB"),
    ("fsdp2_dcp", _described("weights", w=7), D, "is not a TensorStorageMetadata"),
    ("fsdp2_dcp", _described("place", offset="0"), D, "place of an entry is not made of whole"),
    ("fsdp2_dcp", _described("place", relative_path=7), D, "not text"),
    ("fsdp2_dcp", _described("place", relative_path="\ud800"), I, "lists is missing"),
    ("fsdp2_dcp", _described("weight", chunks=[ChunkStorageMetadata(7, 7)]), D, "of a chunk is"),
    ("fsdp2_dcp", _described("place", transform_descriptors=["zstd"]), U, "compressed"),
    ("fsdp2_dcp", _described("places", a=_StorageInfo("", 0, 1)), D, "entry of another kind"),
    ("fsdp2_dcp", _described("weight", chunks=["all"]), D, "another kind of item"),
    ("fsdp2_dcp", _described("weight", properties=Metadata({})), U, "dtype"),
    ("fsdp2_dcp", _described("weight", properties=TensorProperties([])), U, "dtype"),
    ("fsdp2_ranks", _three_of_accelerate, I, "ranks 0-2"),
    ("fsdp2_ranks", lambda to: [torch.save({}, o) for o in to.glob("model_*")], I, "no weights"),
    ("fsdp2_ranks", _sharded("_spec", dir=os.getcwd), X, "posix.getcwd"),
    ("fsdp2_ranks", _sharded("device_mesh", _coordinate_on_dim=(4,)), D, "its coordinate"),
    ("fsdp2_ranks", _sharded("_spec", placements=(Shard(2),)), D, "model.down.*dim 2"),
    ("fsdp2_ranks", _sharded("_spec", placements=(Strided(0, split_factor=0),)), D, "factor 0"),
    ("hsdp_ranks", _sharded("_spec", placements=(Strided(0, split_factor=3000),) * 2), D, "3000"),
    ("fsdp2_ranks", _sharded("_spec", placements=(Strided(0, split_factor=4096),)), D, "describe"),
    ("fsdp2_ranks", _without("model_world_size_4_rank_3.pt"), I, "ranks 0-2"),
    ("fsdp2_ranks", _swap_files, D, "another rank"),
    ("fsdp1_ranks", _swap_files, D, "another rank"),
    ("fsdp2_ranks", _other_step, D, "last_epoch differs"),
    ("fsdp2_safetensors", _without(_SHARD.format(2)), I, "ranks 1, 3-4"),
    ("fsdp2_safetensors", _without(_SHARD.format(4)), D, "shape"),
    ("fsdp2_safetensors", _no_config, I, "vocab_size"),
]


_Damage = tuple[str, Callable[[Path], None], type[ZexportError], str]


@pytest.mark.parametrize("case", _DAMAGES, ids=lambda case: f"{case[0]}: {case[3]}")
def test_damaged_checkpoint_is_rejected(case: _Damage, fsdp: Path, tmp_path: Path) -> None:
    form, damage, kind, words = case
    folder = shutil.copytree(fsdp / form / "ckpt", tmp_path / "ckpt")
    damage(folder)
    with pytest.raises(kind, match=words) as caught:
        contents(opened(folder))
    assert caught.value.path is not None


_OLD = {"_flatten_mesh_list": (0, 1, 2, 3), "mesh": torch.arange(4).reshape(2, 2)}
_OLD |= dict.fromkeys(("_layout", "_flatten_rank_map", "_rank"))
_NO_RANK = _OLD | {"_flatten_mesh_list": ()}
_PART = {"_flatten_rank_map": (0, 1), "_root_mesh": object.__new__(DeviceMesh)}
vars(_PART["_root_mesh"])["_flatten_rank_map"] = (0, 1, 2, 3)


@pytest.mark.parametrize("fields", [_OLD, {"_flatten_rank_map": ()}, _PART, _NO_RANK])
def test_other_mesh_is_read(fields: dict[str, Any], fsdp: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fsdp / "hsdp_ranks" / "ckpt", tmp_path / "ckpt")
    _sharded("device_mesh", **fields)(folder)
    _of_accelerate(folder)
    truth = load_file(fsdp / "hsdp_ranks" / "truth.safetensors")
    del truth["counts"], truth["flags"]
    state = opened(folder)
    assert differences(contents(state)[0], truth) == []
    assert state.world_size == 4
    _swap_files(folder)
    if fields is not _NO_RANK:
        with pytest.raises(DamagedCheckpointError, match="another rank"):
            opened(folder)


def test_weight_with_two_boxes_in_a_file_is_drawn_once(fsdp: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fsdp / "fsdp2_tp_ranks" / "ckpt", tmp_path / "ckpt")
    _sharded("_spec", placements=(Strided(0, split_factor=2), Shard(1)))(folder)
    state = opened(folder)
    assert sum(one.nbytes for one in strips(state)) == sum(o.source.nbytes for o in state.tensors)


def test_files_with_other_values_end_in_an_answer_or_an_error(fsdp: Path, tmp_path: Path) -> None:
    figures = run_plain(target_of(fsdp), tmp_path, seed=1, more=lambda number: number < 20)
    assert figures.accepted < figures.executions


def test_metadata_of_a_thousand_ranks_opens_without_reading_their_files(tmp_path: Path) -> None:
    ranks, names = 1000, [f"layers.{number}.experts" for number in range(24)]
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name in names:
        chunks = [ChunkStorageMetadata(Size([n, 0]), Size([1, 8])) for n in range(ranks)]
        properties = TensorProperties(dtype=torch.bfloat16)
        tensors[name] = TensorStorageMetadata(properties, Size([ranks, 8]), chunks)
        for rank in range(ranks):
            place = _StorageInfo(f"__{rank}_0.distcp", len(places), 1000)
            places[MetadataIndex(name, Size([rank, 0]), rank)] = place
    for rank in range(ranks):
        with (tmp_path / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(len(places) + 1000)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, {}, places)))
    assert [(one.name, one.shape) for one in opened(tmp_path).tensors] == [
        (name, (ranks, 8)) for name in names
    ]
    with pytest.raises(DamagedCheckpointError, match="no directory at its end"):
        zexport.consolidate(tmp_path, tmp_path / "out")


def test_plain_rank_files_have_tied_and_nested_names(tmp_path: Path) -> None:
    name, one = "model_world_size_{}_rank_{}.pt", torch.ones(3)
    torch.save({"a": one, "b": one, "c": one[:0], "d": one[:0]}, tmp_path / name.format(1, 0))
    assert opened(tmp_path).aliases == {"b": "a"}
    torch.save(other := {"z": one.to(torch.complex128)}, tmp_path / "optim_world_size_1_rank_0.pt")
    assert opened(tmp_path).layout == "rank files"
    torch.save(other, tmp_path / name.format(1, 0))
    with pytest.raises(U, match="tensor 'z' is not supported"):
        opened(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    for rank in range(2):
        torch.save({"model": {"w": torch.ones(2 + rank)}}, tmp_path / name.format(2, rank))
    with pytest.raises(DamagedCheckpointError, match=r"a box of 'model\.w' exceeds it"):
        opened(tmp_path)
    for rank, path in enumerate(tmp_path.glob("model_*")):
        torch.save({}, path.rename(tmp_path / f"pytorch_model_fsdp_rank{rank}.bin"))
    assert open_checkpoint(tmp_path).world_size == 2


def test_dcp_folder_with_rare_contents_is_read(tmp_path: Path) -> None:
    one, name = torch.arange(6.0).reshape(3, 2), "n" * 255
    dcp.save({"w": one}, checkpoint_id=tmp_path, no_dist=True)
    metadata = FileSystemReader(tmp_path).read_metadata()
    ((index, place),) = metadata.storage_data.items()
    with ZipFile(tmp_path / place.relative_path) as old, ZipFile(tmp_path / name, "w") as new:
        for record in sorted(old.namelist(), key=lambda one: "data/0" not in one):  # the data first
            new.writestr(record, old.read(record))
    places = {index: _StorageInfo(name, 0, (tmp_path / name).stat().st_size)}
    places[MetadataIndex("nothing")] = _StorageInfo("nothing", 0, 0)
    (tmp_path / "nothing").touch()
    weight = metadata.state_dict_metadata["w"]
    weight.chunks.append(ChunkStorageMetadata(Size([3, 0]), Size([0, 2])))  # without a place

    def state() -> TrainingState:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": weight}, None, places)))
        os.truncate(tmp_path / ".metadata", 128 << 20)  # the limit
        return opened(tmp_path)

    assert contents(state())[0]["w"].equal(one)
    places[index] = _StorageInfo(name, 1, places[index].length - 1)  # after its first byte
    with pytest.raises(D, match="differs from its description"):
        contents(state())
    del places[index]
    with pytest.raises(D, match="leave gaps"):
        state()


def test_columns_of_a_sharded_tensor_are_read(tmp_path: Path) -> None:
    one, name = torch.arange(6.0).reshape(3, 2), "{}_world_size_1_rank_0.pt"
    columns = enumerate(one.split(1, dim=1))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    cut = [LocalShard.from_tensor_and_offsets(own.clone(), [0, n], 0) for n, own in columns]
    torch.save({"w": init_from_local_shards(cut, 3, 2)}, tmp_path / name.format("model"))
    distributed.destroy_process_group()
    states = {"state": {0: {"exp_avg": one}}, "param_groups": [{"params": [0]}]}
    torch.save(states, tmp_path / name.format("optim"))
    weights, kept = contents(opened(tmp_path))
    assert (weights["w"].equal(one), kept) == (True, {})  # FSDP1 flattens states


@pytest.mark.parametrize("config", ['{"vocab_size": 3}', '{"text_config": {"vocab_size": 3}}'])
def test_shard_file_with_few_rows_is_rejected(config: str, tmp_path: Path) -> None:
    info = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    save_file({"w": torch.randn(3, 5)}, path := tmp_path / _SHARD.format(1), info)
    assert "last rank's file may be missing" in str(opened(tmp_path).notes)
    (tmp_path / "config.json").write_text(config)
    assert opened(tmp_path).notes == ()
    for rows in (0, 2):
        save_file({"w": torch.randn(rows, 5)}, path, info)
        with pytest.raises(IncompleteCheckpointError, match=f"at most {rows} rows"):
            opened(tmp_path)
    for info, words in (({}, "not a dictionary"), ({"DCP_SHARDING_INFO": "{"}, "not JSON")):
        save_file({"w": torch.randn(3, 5)}, path, info)
        with pytest.raises(D, match=f": DCP_SHARDING_INFO is {words}"):
            opened(tmp_path)
    path.rename(tmp_path / path.name.replace("of-00001", "of-00002"))
    with pytest.raises(I, match="found parts 1, expected parts 1-2"):
        opened(tmp_path)
