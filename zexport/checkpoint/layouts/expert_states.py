"""What the files of a checkpoint with experts say about them, as typed records.

Source of the keys: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``),
``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py`` (``param_slice_mappings``),
``runtime/zero/stage3.py`` (``ds_zero_partition_groups``) and ``checkpoint/autoep_affine.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zexport.checkpoint.layouts.expert_placement import uniform
from zexport.checkpoint.rank_files import RankFile
from zexport.checkpoint.ranks import check_written_as_named
from zexport.checkpoint.states import ModelStates, OptimizerStates
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.pickles import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file

_NATIVE = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d{1,9})\.(.+)", re.ASCII)
_PLACEMENT_VERSION = 1
_PARTITIONED_VERSION = 1
_MAX_EXPERTS = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertStates:
    """What a ``layer_L_expert_E_mp_rank_MM_model_states.pt`` holds.

    Attributes:
        file: the file it was read from.
        layer: number of the layer among those with experts.
        expert: number of the expert in the whole layer.
        tensors: its weights and buffers in the module's element types, under whole names.
    """

    file: TorchFile
    layer: int
    expert: int
    tensors: Mapping[str, TensorRef]


@dataclass(frozen=True, slots=True)
class AutoEpLayer:
    """One layer that AutoEP replaced.

    Attributes:
        number: its number among the layers with experts.
        module: name of the layer in the module.
        experts: name of the experts in the module.
        ep_rank: expert-parallel rank of the rank that wrote this; ``None`` where it is not said.
        held: for each expert-parallel rank, the experts in the order of its tensors.
    """

    number: int
    module: str
    experts: str
    ep_rank: int | None
    held: tuple[tuple[int, ...], ...]

    @property
    def num_experts(self) -> int:
        """Number of experts in the whole layer."""
        return sum(len(experts) for experts in self.held)


@dataclass(frozen=True, slots=True)
class NativeName:
    """The name of an expert's weight in DeepSpeed-MoE: prefix, number of the expert, rest."""

    prefix: str
    number: int
    rest: str

    def renumbered(self, number: int) -> str:
        """The name of the same weight of another expert."""
        return f"{self.prefix}.{number}.{self.rest}"


def parse_native(name: str) -> NativeName | None:
    """``name`` taken apart, or ``None`` if it is no weight of a DeepSpeed-MoE expert."""
    match = _NATIVE.fullmatch(name)
    return NativeName(match[1], int(match[2]), match[3]) if match else None


def read_expert_states(files: Iterable[RankFile]) -> tuple[ExpertStates, ...]:
    """The typed records of the expert files, by layer and expert."""
    read: dict[tuple[int, int], ExpertStates] = {}
    for file in files:
        torch_file = read_torch_file(file.path)
        check_written_as_named(torch_file)
        key = file.layer, file.expert
        if key in read:
            raise DamagedCheckpointError(
                "is a second file of the same expert",
                path=file.path,
                found=f"{read[key].file.path.name} beside it",
                hint="Remove the files of the other run",
            )
        tensors = Value(file.path, "expert states", torch_file.value).tensors()
        read[key] = ExpertStates(torch_file, *key, tensors)
    return tuple(read[key] for key in sorted(read))


def read_expert_optimizers(files: Iterable[RankFile]) -> dict[int, TorchFile]:
    """The optimizer files by expert-parallel rank, which ZeRO-0 keeps its masters in."""
    read: dict[int, TorchFile] = {}
    for file in files:
        torch_file = read_torch_file(file.path)
        check_written_as_named(torch_file)
        read[file.rank] = torch_file
    return read


def read_blocks_option(model: ModelStates) -> bool | None:
    """Whether the run had ``use_data_before_expert_parallelism``; ``None`` where nothing says it.

    Source: DeepSpeed 0.19, ``runtime/constants.py``: off where the configuration does not name it.
    """
    if not model.ds_config:
        return None
    option = model.ds_config.get("use_data_before_expert_parallelism", False)
    return option if isinstance(option, bool) else None


def read_autoep_layers(model: ModelStates) -> tuple[AutoEpLayer, ...]:
    """The layers that AutoEP replaced; nothing where it did not run."""
    return tuple(_autoep_layer(entry) for entry in model.autoep_layers)


def _autoep_layer(entry: Value) -> AutoEpLayer:
    version = entry.get("checkpoint_format_version").value
    if version not in (None, _PARTITIONED_VERSION):
        raise _unknown_version(entry, "checkpoint_format_version", version)
    layer = AutoEpLayer(
        number=entry.need("moe_layer_id").number(),
        module=entry.need("module_path").text(),
        experts=entry.need("expert_key_prefix").text(),
        ep_rank=entry.get("ep_rank").number_or_none(),
        held=_held(entry),
    )
    stated = entry.need("num_experts").number(), entry.need("ep_size").number()
    if stated != (layer.num_experts, len(layer.held)):
        entry.fail(
            "contradicts its own placement of experts", f"{stated[0]} experts on {stated[1]}"
        )
    return layer


def _held(entry: Value) -> tuple[tuple[int, ...], ...]:
    """Who holds which expert; equal shares in the files of versions that do not write it down."""
    if not entry.has("expert_placement"):
        count, ep_size = entry.need("num_experts").number(), entry.need("ep_size").number()
        if not 0 < ep_size <= count <= _MAX_EXPERTS:
            entry.fail("states impossible numbers of experts", f"{count} experts on {ep_size}")
        shares = uniform(count, ep_size)
        return tuple(tuple(share) for share in shares)
    placement = entry.get("expert_placement")
    version = placement.need("version").number()
    if version != _PLACEMENT_VERSION:
        raise _unknown_version(entry, "expert_placement", version)
    ranks = {
        item.need("rank").number(): tuple(one.number() for one in item.need("experts").items())
        for item in placement.need("ranks").items()
    }
    if sorted(ranks) != list(range(len(ranks))):
        placement.fail("does not name each expert-parallel rank once", f"{sorted(ranks)}")
    return tuple(ranks[rank] for rank in sorted(ranks))


def _unknown_version(entry: Value, key: str, version: object) -> UnsupportedError:
    return UnsupportedError(
        "stores its experts in a form of AutoEP that this version does not know",
        path=entry.path,
        found=f"{key} {version}",
        expected="1",
        hint="Look for a newer zexport",
    )


def check_own_partition(rank: int, optimizer: OptimizerStates) -> None:
    """Refuse ZeRO-3 states under AutoEP that another rank wrote than their file is named for.

    Every flat group names the ranks that share it and which of these wrote the file: the same rank
    of the same process group (DeepSpeed 0.19, ``runtime/zero/stage3.py``).
    """
    for group in optimizer.shared_groups:
        part = group.part
        if part is None or group.ranks[part : part + 1] == (rank,):
            continue
        raise DamagedCheckpointError(
            "holds the states of another rank than its name says",
            path=optimizer.file.path,
            found=f"part {part} of those that ranks {list(group.ranks)} share",
            expected=f"rank {rank}'s part",
            hint="Give the rank files their own names back, or copy them again",
        )
