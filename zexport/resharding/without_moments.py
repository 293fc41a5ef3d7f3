"""Optimizer states files without optimizer states, which suffice to export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from zexport.checkpoint.resolve import original_name
from zexport.checkpoint.state import Recorded, Structure, TrainingState
from zexport.checkpoint.zero.records import PRUNED, OptimizerStates
from zexport.errors import UnsupportedError
from zexport.export.plan import FilePlan, plan_torch_file
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import view
from zexport.resharding.values import unwritable, with_leaves

DELETE_BY_HAND = (
    "To free the disk, verify a complete fp32 export with zexport verify OUT --against CKPT, and "
    "remove the checkpoint yourself"
)

_ZERO = "optimizer_state_dict"
_DEPTH_MAX = 6
"""No known optimizer nests states of a parameter deeper."""


class Rewriting(Struct, frozen=True):
    """New content of an optimizer states file, its old size, and keys that cannot be written."""

    file: FilePlan
    nbytes_before: int
    left_out: tuple[str, ...]


def without_moments(checkpoint: TrainingState) -> tuple[Rewriting, ...]:
    """Return every optimizer states file of a checkpoint without problems, except pruned ones.

    Raises:
        UnsupportedError: optimizer states are in other files.
        UnsafeError: needed values cannot be written safely.
    """
    states = [one for cell in checkpoint.zero.values() for one in cell.optimizer.values()]
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
    top = view(file, "optimizer states")
    zero = top.need(_ZERO)
    key = "optimizer_state_dict" if zero.has("fp32_flat_groups") else "base_optimizer_state"
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
    """Return what can be written safely, and the keys of the rest, which no export needs."""
    dropped = unwritable(said, [key for key in said.values if isinstance(key, str)])
    return {k: v for k, v in said.values.items() if k not in dropped}, tuple(dropped)


def _without_tensors(value: object, depth: int) -> object:
    """Return an optimizer's dictionary with settings and steps, and no other tensors."""
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
