"""Optimizer files written again without the optimizer's states: what is left suffices to export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from zexport.checkpoint.contents import Structure, ZeroCheckpoint
from zexport.checkpoint.optimizer_states import PRUNED, OptimizerStates, inner_key
from zexport.checkpoint.pruned import original_name
from zexport.checkpoint.untrusted import Value
from zexport.errors import UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.plan.plan import FilePlan, plan_torch_file
from zexport.resharding.state import Recorded
from zexport.resharding.values import unwritable, with_leaves

DELETE_BY_HAND = (
    "To free the disk, verify a complete fp32 export with zexport verify OUT --against CKPT, and "
    "remove the checkpoint yourself"
)

_ZERO = "optimizer_state_dict"
_DEPTH_MAX = 6
"""States of a parameter lie no deeper in an optimizer's dictionary, of any optimizer that is."""


class Rewriting(Struct, frozen=True):
    """One optimizer file as it is to be, its size now, and keys that cannot be written again."""

    file: FilePlan
    nbytes_before: int
    left_out: tuple[str, ...]


def without_moments(checkpoint: ZeroCheckpoint) -> tuple[Rewriting, ...]:
    """Every optimizer file of a checkpoint without problems, but those that were pruned before.

    Raises:
        UnsupportedError: the optimizer's states lie elsewhere than in such files.
        UnsafeError: what is needed of them cannot be written safely.
    """
    states = [one for cell in checkpoint.cells.values() for one in cell.optimizer.values()]
    if not states or checkpoint.structure is Structure.UNIVERSAL:
        raise UnsupportedError(
            "keeps the optimizer's states where they are not removed apart",
            path=checkpoint.location.tag_dir,
            found=checkpoint.layout,
            expected="optimizer files of ranks (*_optim_states.pt)",
            hint=DELETE_BY_HAND,
        )
    tag = original_name(checkpoint.location.tag)
    return tuple(_rewriting(one, tag) for one in states if not one.is_pruned)


def _rewriting(states: OptimizerStates, tag: str) -> Rewriting:
    file = states.file
    top = Value(file.path, "optimizer states", file.value)
    zero = top.need(_ZERO)
    key = inner_key(zero)
    inner = {PRUNED if k == key else k: v for k, v in zero.mapping().items()}
    inner[PRUNED] = _without_tensors(inner.get(PRUNED), 0)
    kept, dropped = _writable(Recorded(file, inner))
    rest, more = _writable(Recorded(file, {k: v for k, v in top.mapping().items() if k != _ZERO}))
    value = with_leaves({_ZERO: kept, **rest}, file)
    return Rewriting(
        plan_torch_file(f"{tag}/{file.path.name}", value),
        file.version.nbytes,
        (*dropped, *more),
    )


def _writable(said: Recorded) -> tuple[dict[object, object], tuple[str, ...]]:
    """What can be written safely, and the keys of the rest, which an export may do without."""
    dropped = unwritable(said, [key for key in said.values if isinstance(key, str)])
    return {k: v for k, v in said.values.items() if k not in dropped}, tuple(dropped)


def _without_tensors(value: object, depth: int) -> object:
    """An optimizer's dictionary with its settings, its steps and no tensor of several elements."""
    if depth > _DEPTH_MAX:
        return value
    if isinstance(value, dict):
        return dict(_kept(value.items(), depth))
    if isinstance(value, list):
        return [one for _, one in _kept(enumerate(value), depth)]
    return value


def _kept(items: Iterable[tuple[object, object]], depth: int) -> Iterator[tuple[object, object]]:
    for key, value in items:
        if not (isinstance(value, TensorRef) and value.shape):
            yield key, _without_tensors(value, depth + 1)
