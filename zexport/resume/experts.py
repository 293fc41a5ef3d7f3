"""A training with experts as a state: for each expert-parallel rank, all weights and its own."""

from __future__ import annotations

from msgspec.structs import replace

from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.layouts.expert_groups import experts_of_ranks
from zexport.checkpoint.layouts.expert_layers import (
    ExpertLayers,
    expert_groups,
    read_autoep_layers,
    without_experts,
)
from zexport.checkpoint.layouts.zero import bind_trained, owners_of, with_untrained
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.ranks import is_zero0
from zexport.errors import UnsupportedError
from zexport.ranges.copies import Replica
from zexport.resume.cells import cell_files, without_groups
from zexport.resume.groups import GroupReader
from zexport.resume.state import CellState

_NATIVE = ExpertLayers({}, {}, {})
"""DeepSpeed-MoE's experts, which their names tell."""


def read_experts(checkpoint: ZeroCheckpoint) -> tuple[list[CellState], list[Replica]]:
    """The state of every expert-parallel rank under ZeRO-1/2, and copies that must be equal.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``,
    ``load_moe_state_dict``): the files of experts are of the whole layer, so that they stay as they
    are; ``runtime/zero/stage_1_and_2.py`` partitions a group of experts over the ranks that have
    the same, and all else over all ranks.
    """
    (index, ranks), *others = checkpoint.cells.items()
    if is_zero0(ranks):
        raise _refused(checkpoint, "has experts and no ZeRO", "ZeRO-0")
    model, owners = files = cell_files(index, ranks)
    _check(checkpoint, model, others)
    named = with_parameter_names(without_experts(model, _NATIVE))
    numbers = expert_groups(model, _NATIVE)
    bound = bind_trained(
        owners_of(ranks, len(owners)), named, is_zero3=False, shapes=model.param_shapes,
        others=numbers,
    )  # fmt: skip
    inventory = with_untrained(bound, ranks, named, len(owners))
    state = without_groups(index, ranks, files, named, inventory)
    groups, placement = experts_of_ranks(ranks, model, numbers, len(owners))
    degrees = {group.ep_size for group in groups}
    if len(degrees) > 1:
        raise _refused(checkpoint, "has layers of several expert-parallel sizes", sorted(degrees))
    degree = max(degrees, default=1)
    whole = with_parameter_names(model)
    cells, replicas = [], []
    for expert_rank, sharing in enumerate(placement.sets(degree, len(owners))):
        sharers = [owners[rank] for rank in sharing]
        own = dict.fromkeys(numbers, sharers)
        reader = GroupReader(owners, whole, is_zero3=False, sharing=own)
        read = reader.read()
        cells.append(replace(state, groups=read, expert_rank=expert_rank, expert_ranks=degree))
        replicas += reader.replicas
    return cells, replicas


def _check(checkpoint: ZeroCheckpoint, model: ModelStates, others: object) -> None:
    """Refuse what is no plain DeepSpeed-MoE."""
    if read_autoep_layers(model):
        raise _refused(checkpoint, "has experts of AutoEP", "AutoEP")
    if others:
        raise _refused(checkpoint, "has experts within the stages of a pipeline", "a pipeline")
    held = {*model.module, *(model.frozen_shapes or ())}
    if any(map(_NATIVE.has, held)):
        raise _refused(checkpoint, "has experts that are not trained", "frozen experts")


def _refused(checkpoint: ZeroCheckpoint, why: str, found: object) -> UnsupportedError:
    return UnsupportedError(
        f"cannot be resharded: {why}",
        path=checkpoint.location.tag_dir,
        found=found,
        expected="DeepSpeed-MoE under ZeRO-1 or 2, all of whose experts are trained",
        hint="Resume it with as many ranks as wrote it",
    )
