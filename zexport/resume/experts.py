"""A training with experts as a state: for each expert-parallel rank, all weights and its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.layouts.expert_groups import sharing_of_experts
from zexport.checkpoint.layouts.expert_layers import (
    ExpertLayers,
    expert_groups,
    find_layers,
    read_autoep_layers,
    without_experts,
)
from zexport.checkpoint.layouts.module_files import ModuleFile, module_file
from zexport.checkpoint.layouts.zero import bind_trained, owners_of, with_untrained
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.rank_files import RankFile, RankFileKind, parse_rank_file
from zexport.checkpoint.ranks import RankStates, is_zero0, no_first_model
from zexport.errors import UnsupportedError
from zexport.formats.torch_file import TorchFile
from zexport.ranges.copies import Replica
from zexport.ranges.dtypes import DType
from zexport.resume.cells import cell_files, said_by, without_groups
from zexport.resume.expert_files import expert_files, has_frozen_experts
from zexport.resume.groups import GroupReader
from zexport.resume.state import CellState
from zexport.resume.unsharded_experts import read_unsharded

Read = tuple[list[CellState], list[Replica]]


def read_experts(checkpoint: ZeroCheckpoint) -> Read:
    """The state of every expert-parallel rank of every stage, and copies that must be equal.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``,
    ``load_moe_state_dict``): the files of experts are of the whole layer, so that they stay as they
    are; ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` partition a group of experts over the
    ranks that have the same, and all else over all ranks.
    """
    cells, replicas = [], []
    for index, ranks in sorted(checkpoint.cells.items()):
        model = ranks.first_model
        if model is None:
            raise no_first_model(checkpoint.location.tag_dir, index)
        named = [*_named(checkpoint, index)]
        layers = find_layers(ranks, model, _module_files(named))
        if is_zero0(ranks):
            masters = {
                name.rank: file
                for name, file in named
                if name.kind is RankFileKind.EXPERT_OPTIMIZER
            }
            read = read_unsharded(checkpoint, index, model, layers, masters)
        else:
            read = _read_sharded(index, ranks, layers, checkpoint.module_dtype)
        cells += read[0]
        replicas += read[1]
    return cells, replicas


def _named(checkpoint: ZeroCheckpoint, index: int) -> Iterable[tuple[RankFile, TorchFile]]:
    """The files of one model-parallel index, with what their names say."""
    for file in checkpoint.torch_files:
        name = parse_rank_file(file.path)
        if name is not None and name.mp_rank == index:
            yield name, file


def _module_files(named: Iterable[tuple[RankFile, TorchFile]]) -> list[ModuleFile]:
    return [module_file(*one) for one in named if one[0].kind is RankFileKind.EXPERT]


def _read_sharded(index: int, ranks: RankStates, layers: ExpertLayers, dtype: DType | None) -> Read:
    """The states of the expert-parallel ranks of one stage under ZeRO."""
    model, owners = cell_files(index, ranks)
    world_size, is_zero3 = len(owners), ranks.is_zero3
    named = with_parameter_names(without_experts(model, layers))
    numbers = expert_groups(model, layers)
    bound = bind_trained(
        owners_of(ranks, world_size), named, is_zero3=is_zero3, shapes=model.param_shapes,
        others=numbers,
    )  # fmt: skip
    inventory = with_untrained(bound, ranks, named, world_size)
    sets = _sets(ranks, model, numbers, world_size)
    trained = {name for shapes in model.param_shapes for name in shapes}
    state = without_groups(index, ranks, (model, owners), named, inventory)
    frozen = None if has_frozen_experts(model, layers, trained) else state.frozen
    whole = with_parameter_names(model)
    cells, replicas = [], []
    for expert_rank, sharing in enumerate(sets):
        sharers = [owners[rank] for rank in sharing]
        own = dict.fromkeys(numbers, sharers)
        reader = GroupReader(owners, whole, is_zero3=is_zero3, sharing=own)
        cell = replace(
            state,
            groups=reader.read(),
            frozen=frozen,
            model=said_by(ranks.model.get(sharing[0], model)),
            expert_rank=expert_rank,
            expert_ranks=len(sets),
        )
        if is_zero3:
            files = expert_files(cell, read_autoep_layers(model), dtype or DType.F32)
            cell = replace(cell, expert_files=tuple(files))
        cells.append(cell)
        replicas += reader.replicas
    return cells, replicas


def _sets(
    ranks: RankStates, model: ModelStates, numbers: Sequence[int], world_size: int
) -> Sequence[Sequence[int]]:
    """For each expert-parallel rank, who has its experts; one set where none are trained."""
    found = sharing_of_experts(ranks, model, numbers, world_size)
    if any([*map(list, one)] != [*map(list, found[0])] for one in found):
        raise UnsupportedError(
            "cannot be resharded: has layers of several expert-parallel sizes",
            path=model.file.path,
            found=", ".join(str(len(one)) for one in found),
            expected="one size, as DeepSpeed looks for experts by the largest",
            hint="Resume it with as many ranks as wrote it",
        )
    return found[0] if found else [range(world_size)]
