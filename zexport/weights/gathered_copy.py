"""Weights that ZeRO-3 gathered when the checkpoint was saved: a second copy, of the same step.

The Hugging Face Trainer writes them beside the tag folder where
``stage3_gather_16bit_weights_on_model_save`` is on. Nothing in them says which step they are of, so
that a difference is told and not refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from zexport.checkpoint.candidates import list_tags
from zexport.checkpoint.contents import Role, StoredTensor, ZeroCheckpoint
from zexport.checkpoint.states import ZERO3
from zexport.formats.safetensors_file import SafetensorsHeader
from zexport.ranges.copies import CastReplica


def may_be_gathered(checkpoint: ZeroCheckpoint) -> bool:
    """Whether weights beside the checkpoint can only be of its own step: there is no other tag."""
    root = checkpoint.location.root
    return checkpoint.stage == ZERO3 and len(list_tags(root)) == 1


def gathered_copies(
    checkpoint: ZeroCheckpoint, headers: Iterable[SafetensorsHeader]
) -> tuple[CastReplica, ...]:
    """The gathered copies of the masters; nothing unless all are there, and nothing unknown."""
    known = {tensor.name: tensor for tensor in checkpoint.tensors}
    known |= {a: known[n] for a, n in checkpoint.aliases.items() if n in known}
    copies: dict[str, CastReplica] = {}
    for header in headers:
        for name, copy in header.tensors.items():
            tensor = known.get(name)
            if tensor is None or tensor.shape != copy.shape:
                return ()
            replica = copy_of(tensor, header, name)
            if tensor.role is Role.TRAINABLE and replica is not None:
                copies[tensor.name] = replica
    trained = {t.name for t in checkpoint.of_role(Role.TRAINABLE) if t.numel}
    return tuple(copies.values()) if trained <= copies.keys() else ()


def copy_of(tensor: StoredTensor, header: SafetensorsHeader, name: str) -> CastReplica | None:
    """A file's tensor as the copy of a checkpoint's; ``None`` where its shape or type forbid it."""
    copy = header.tensors[name]
    is_narrower = copy.dtype.is_floating and copy.dtype.itemsize < tensor.dtype.itemsize
    if tensor.source is None or copy.shape != tensor.shape:
        return None
    if copy.dtype is not tensor.dtype and not is_narrower:
        return None
    return CastReplica(
        name=tensor.name,
        path=header.path,
        kept=tensor.source,
        kept_dtype=tensor.dtype,
        other=header.source(name),
        other_dtype=copy.dtype,
        names_it=False,
    )
