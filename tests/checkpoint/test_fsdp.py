"""Optimizer states of FSDP checkpoints equal live training, and damage is refused."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Size
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
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

_FORMS = (
    *("fsdp1_dcp", "fsdp1_ranks", "fsdp2_dcp", "fsdp2_ranks", "fsdp2_safetensors"),
    *("fsdp2_tp_dcp", "fsdp2_tp_ranks", "hsdp_ranks"),
)
pytestmark = pytest.mark.slow  # torch makes them on four ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fsdp_checkpoints.shared(tmp_path_factory)


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


@pytest.mark.parametrize("form", _FORMS)
def test_state_equals_live_training(form: str, checkpoints: Path) -> None:
    weights, states = contents(opened(checkpoints / form / "ckpt"))
    assert differences(weights, load_file(checkpoints / form / "truth.safetensors")) == []
    live = load_file(checkpoints / form / "optim.safetensors")
    live = {name: one for name, one in live.items() if not name.endswith("|step")}
    assert differences(states, live) == []


def test_replicas_are_compared_and_flattened_states_left_out(
    checkpoints: Path, tmp_path: Path
) -> None:
    state = opened(checkpoints / "hsdp_ranks" / "ckpt")
    assert {one.name for one in state.replicas} == {*state.parameters}
    copies = {one.name for one in state_replicas([state.whole])}
    assert copies >= {"up.weight (exp_avg)", "embed.weight (exp_avg_sq)"}
    folder = shutil.copytree(checkpoints / "fsdp1_ranks" / "ckpt", tmp_path / "ckpt")
    pieces = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": [{"params": [0]}]}
    for path in folder.glob("optim_*"):
        torch.save(pieces, path)  # the first piece has the shape of a weight
    state = opened(folder)
    assert all("exp_avg" not in one.slots for one in state.parameters.values())
    assert any("FSDP1" in note for note in state.notes)


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _swap_files(folder: Path) -> None:
    one, other = (folder / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2))
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


def _three_of_accelerate(folder: Path) -> None:
    for path in folder.glob("model_*"):
        path.rename(folder / f"pytorch_model_fsdp_rank{path.stem[-1]}.bin")
    (folder / "pytorch_model_fsdp_rank3.bin").unlink()


def _described(what: str, **fields: object) -> Callable[[Path], None]:
    """Set fields of a weight or of the place of an entry, or places, in .metadata."""

    def damage(folder: Path) -> None:
        one = FileSystemReader(folder).read_metadata()
        weight, (place, *_) = one.state_dict_metadata["model.up.weight"], one.storage_data.values()
        known = {"weight": vars(weight), "place": vars(place), "places": one.storage_data}
        known[what].update(fields)
        (folder / ".metadata").write_bytes(pickle.dumps(one))

    return damage


def _sharded(what: str, **fields: object) -> Callable[[Path], None]:
    """Set fields of the placements or of the mesh in rank files; ``None`` removes one."""

    def damage(folder: Path) -> None:
        for path in folder.glob("model_*"):
            state = torch.load(path, weights_only=False)
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
    ("fsdp2_dcp", lambda to: os.truncate(to / ".metadata", 129 << 20), U, "more than 128 MiB"),
    ("fsdp2_dcp", _described("place", relative_path=7), D, "not text"),
    ("fsdp2_dcp", _described("place", relative_path="\ud800"), I, "lists is missing"),
    (
        "fsdp2_dcp",
        _described("weight", chunks=[ChunkStorageMetadata(7, 7)]),
        D,
        "of a chunk is not",
    ),
    ("fsdp2_dcp", _described("place", transform_descriptors=["zstd"]), U, "compressed"),
    (
        "fsdp2_dcp",
        _described("places", a=_StorageInfo("__0_0.distcp", 0, 1)),
        D,
        "entry of another kind",
    ),
    ("fsdp2_dcp", _described("weight", chunks=["all"]), D, "another kind of item"),
    ("fsdp2_dcp", _described("weight", properties=Metadata({})), U, "dtype"),
    ("fsdp2_ranks", _three_of_accelerate, I, "ranks 0-2"),
    ("fsdp2_ranks", lambda to: [torch.save({}, o) for o in to.glob("model_*")], I, "no weights"),
    ("fsdp2_ranks", _sharded("_spec", dir=os.getcwd), X, "posix.getcwd"),
    ("fsdp2_ranks", _sharded("device_mesh", _coordinate_on_dim=(4,)), D, "its coordinate"),
    ("fsdp2_ranks", _sharded("_spec", placements=(Shard(2),)), D, "model.down.*dim 2"),
    ("fsdp2_ranks", _sharded("_spec", placements=(Strided(0, split_factor=0),)), D, "factor 0"),
    ("hsdp_ranks", _sharded("_spec", placements=(Strided(0, split_factor=3000),) * 2), D, "3000"),
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
def test_damaged_checkpoint_is_rejected(case: _Damage, checkpoints: Path, tmp_path: Path) -> None:
    form, damage, kind, words = case
    folder = shutil.copytree(checkpoints / form / "ckpt", tmp_path / "ckpt")
    damage(folder)
    with pytest.raises(kind, match=words) as caught:
        contents(opened(folder))
    assert caught.value.path is not None


_OLD = {"_flatten_mesh_list": (0, 1, 2, 3), "mesh": torch.arange(4).reshape(2, 2)}
_OLD |= dict.fromkeys(("_layout", "_flatten_rank_map", "_rank"))


@pytest.mark.parametrize("fields", [_OLD, {"_flatten_rank_map": ()}])
def test_other_mesh_is_read(fields: dict[str, Any], checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "hsdp_ranks" / "ckpt", tmp_path / "ckpt")
    _sharded("device_mesh", **fields)(folder)
    truth = load_file(checkpoints / "hsdp_ranks" / "truth.safetensors")
    assert differences(contents(opened(folder))[0], truth) == []
    _swap_files(folder)
    with pytest.raises(DamagedCheckpointError, match="another rank"):
        opened(folder)


def test_weight_with_two_boxes_in_a_file_is_drawn_once(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "fsdp2_tp_ranks" / "ckpt", tmp_path / "ckpt")
    _sharded("_spec", placements=(Strided(0, split_factor=2), Shard(1)))(folder)
    state = opened(folder)
    assert sum(one.nbytes for one in strips(state)) == sum(o.source.nbytes for o in state.tensors)


def test_files_with_other_values_end_in_an_answer_or_an_error(
    checkpoints: Path, tmp_path: Path
) -> None:
    figures = run_plain(target_of(checkpoints), tmp_path, seed=1, more=lambda number: number < 20)
    assert figures.accepted < figures.executions


def test_metadata_of_a_thousand_ranks_opens_without_reading_their_files(tmp_path: Path) -> None:
    ranks, names = 1000, [f"layers.{number}.experts" for number in range(24)]
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name in names:
        chunks = [ChunkStorageMetadata(Size([n, 0]), Size([1, 8])) for n in range(ranks)]
        chunks.insert(0, ChunkStorageMetadata(Size([ranks, 0]), Size([0, 8])))
        properties = TensorProperties(dtype=torch.bfloat16)
        tensors[name] = TensorStorageMetadata(properties, Size([ranks, 8]), chunks)
        for rank in range(ranks):
            place = _StorageInfo(f"__{rank}_0.distcp", len(places), 1000)
            places[MetadataIndex(name, Size([rank, 0]), rank)] = place
    for rank in range(ranks):
        with (tmp_path / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(len(places) + 1000)
    places[MetadataIndex("nothing")] = _StorageInfo("nothing", 0, 0)
    (tmp_path / "nothing").touch()
    metadata = Metadata(tensors, {}, places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert [(one.name, one.shape) for one in opened(tmp_path).tensors] == [
        (name, (ranks, 8)) for name in names
    ]
    with pytest.raises(DamagedCheckpointError, match="no directory at its end"):
        zexport.consolidate(tmp_path, tmp_path / "out")
    del places[MetadataIndex(names[0], Size([7, 0]))]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "leave gaps" in str(open_checkpoint(tmp_path).problems)


def test_plain_rank_files_have_tied_and_nested_names(tmp_path: Path) -> None:
    name, one = "model_world_size_{}_rank_{}.pt", torch.ones(3)
    torch.save({"a": one, "b": one, "c": one[:0], "d": one[:0]}, tmp_path / name.format(1, 0))
    assert opened(tmp_path).aliases == {"b": "a"}
    (tmp_path / name.format(1, 0)).unlink()
    for rank in range(2):
        torch.save({"model": {"w": torch.ones(2 + rank)}}, tmp_path / name.format(2, rank))
    with pytest.raises(DamagedCheckpointError, match=r"a box of 'model\.w' exceeds it"):
        opened(tmp_path)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("config", ['{"vocab_size": 3}', '{"text_config": {"vocab_size": 3}}'])
def test_shard_file_with_few_rows_is_rejected(rows: int, config: str, tmp_path: Path) -> None:
    info = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}'}
    save_file({"w": torch.randn(rows, 5)}, tmp_path / _SHARD.format(1), info)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(IncompleteCheckpointError, match=f"at most {rows} rows"):
        opened(tmp_path)
