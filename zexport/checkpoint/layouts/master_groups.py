"""How an optimizer without ZeRO keeps its fp32 masters: under which key, in which groups."""

from __future__ import annotations

from collections.abc import Sequence

from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError
from zexport.formats.pickles import TensorRef

NAMED = "single_partition_of_fp32_groups"
"""Flat partitions with the names of what is in them: BF16_Optimizer's."""

UNFUSED = "fp32_groups"
"""A master for each parameter, without its name."""

FUSED = "fp32_groups_flat"
"""A flat master for each group, without the names of what is in it."""

Groups = list[list[TensorRef]]


def form_of(optimizer: Value) -> str | None:
    """The key under which an optimizer's state keeps masters; ``None`` where it keeps none."""
    return next((key for key in (NAMED, UNFUSED, FUSED) if optimizer.has(key)), None)


def unnamed_masters(optimizer: Value) -> Groups:
    """The masters of each parameter group that have no names; a fused group has one.

    Raises:
        DamagedCheckpointError: they are no floating-point tensors, or fewer or more than the
            parameters.
    """
    form = form_of(optimizer)
    groups = optimizer.get(form).items() if form in (UNFUSED, FUSED) else []
    masters = [
        [master_tensor(item) for item in (group.items() if form == UNFUSED else [group])]
        for group in groups
    ]
    if form in (UNFUSED, FUSED):
        _check_counts(optimizer, masters)
    return masters


def master_tensor(item: Value) -> TensorRef:
    """The tensor of masters that ``item`` must be, of floating-point numbers.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/fp16/`` and ``runtime/bf16_optimizer.py``: ``float()``
    of the weights.

    Raises:
        DamagedCheckpointError: it is no tensor, or one of another kind.
    """
    tensor = item.tensor()
    if not tensor.dtype.is_floating:
        item.fail("is of a type that no masters have", tensor.dtype.torch_name)
    return tensor


def _check_counts(optimizer: Value, groups: Groups) -> None:
    """Refuse a group with fewer or more masters than it has parameters in the inner optimizer.

    These are its masters (DeepSpeed 0.10 to 0.19, ``runtime/fp16/unfused_optimizer.py`` and
    ``fused_optimizer.py``, ``__init__``). Only groups that a run added later have none.
    """
    counts = [_count(group) for group in _inner_groups(optimizer)]
    if len(counts) < len(groups):
        return
    for number, (count, masters) in enumerate(zip(counts, groups or [[]], strict=False)):
        if count not in (None, len(masters)):
            raise DamagedCheckpointError(
                f"does not have an fp32 master for every parameter of group {number}",
                path=optimizer.path,
                found=len(masters),
                expected=f"{count}, as its param_groups say",
                hint="Copy the file again from where it was written",
            )


def _count(group: Value) -> int | None:
    params = group.mapping_or_empty().get("params")
    return len(params) if isinstance(params, list) else None


def expert_flags(optimizer: Value) -> list[bool]:
    """Which parameter groups are of experts, where the run has told DeepSpeed.

    Source: DeepSpeed 0.10 to 0.19, ``moe/utils.py`` (``is_moe_param_group``).
    """
    return [group.mapping_or_empty().get("moe") is True for group in _inner_groups(optimizer)]


def _inner_groups(optimizer: Value) -> Sequence[Value]:
    state = optimizer.get("optimizer_state_dict")
    return state.get("param_groups").items() if state.has("param_groups") else []
