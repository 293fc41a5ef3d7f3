"""ZeRO-0: everything in one model file, the fp32 masters unnamed inside its optimizer.

Which values are exported:

1. fp32 masters, where the optimizer holds some, under the names that shape and order allow
   (``zexport.layouts.zero0``): by shape alone where that leaves one possibility, else by shape and
   by samples of the values, rounded. Where several possibilities are left, or none, the checkpoint
   is refused: a master under a wrong name is a wrong model.
2. The module's own values for buffers and for weights that no master belongs to (frozen ones), and
   for all weights where the optimizer holds no masters.

Every master is to be compared with the module's weight, by
``zexport.checkpoint.assembly.cast_check``, when it is exported: opening reads no values but the
samples, and those only where shapes do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from zexport.checkpoint.assembly.zero0_masters import find_masters
from zexport.checkpoint.contents import CastReplica, Role, StoredTensor
from zexport.checkpoint.states import ModelStates
from zexport.checkpoint.tensors import Inventory
from zexport.dtypes import DType
from zexport.errors import UnsupportedError
from zexport.layouts import LayoutError
from zexport.torchfile.pickles import TensorRef


def take_zero0_inventory(model: ModelStates) -> Inventory:
    """The tensors of a ZeRO-0 model file; see the module's docstring for which values are taken.

    Raises:
        UnsupportedError: it holds masters that cannot be told apart, or not all of them.
        DamagedCheckpointError: the optimizer is not what DeepSpeed writes.
    """
    weights, aliases = _distinct(model)
    try:
        masters = find_masters(model, weights)
    except LayoutError as error:
        raise _unattributable(model, error) from error
    if not masters and model.has_experts:
        _refuse_lost_masters(model, weights)
    trained, casts = [], []
    for name, master in masters.items():
        tensor = weights[name]
        trained.append(
            StoredTensor(name, tensor.shape, master.dtype, Role.TRAINABLE, master.source)
        )
        casts.append(
            CastReplica(
                name=name,
                path=model.file.path,
                kept=master.source,
                kept_dtype=master.dtype,
                other=model.file.source(tensor),
                other_dtype=tensor.dtype,
            )
        )
    # Without masters nothing says which weights were frozen, and none may be left out as such.
    rest_role = Role.FROZEN if masters else Role.TRAINABLE
    rest = [_own(model, name, rest_role) for name in weights if name not in masters]
    buffers = [
        _own(model, name, Role.BUFFER) for name in model.buffer_names if name in model.module
    ]
    return Inventory(
        tensors=(*trained, *rest, *buffers),
        aliases=aliases,
        left_out=tuple(name for name in model.buffer_names if name not in model.module),
        replicas=tuple(casts),
        notes=_notes(weights, len(masters)),
    )


def _refuse_lost_masters(model: ModelStates, weights: Mapping[str, TensorRef]) -> None:
    """Refuse 16-bit weights whose masters are in files by expert rank (``expp_rank_*``).

    Source: DeepSpeed 0.19, ``runtime/engine.py`` (``_save_moe_checkpoint``).
    """
    if any(tensor.dtype in (DType.BF16, DType.F16) for tensor in weights.values()):
        raise UnsupportedError(
            "lacks the fp32 masters of a model with experts, which lie in files by expert rank",
            path=model.file.path,
            expected="expp_rank_0_mp_rank_00_optim_states.pt and the like to be read",
            hint="Resume the run with ZeRO stage 1, save, and export that",
        )


def _notes(weights: Mapping[str, TensorRef], masters: int) -> tuple[str, ...]:
    if masters:
        others = len(weights) - masters
        of_module = f"; {others} frozen weights have the module's values" if others else ""
        return (f"ZeRO-0: {masters} weights have their fp32 masters' values{of_module}",)
    rounded = {t.dtype.torch_name for t in weights.values() if t.dtype is not DType.F32 and t.numel}
    if not rounded:
        return ()
    types = "/".join(sorted(rounded))
    return (f"ZeRO-0: there are no fp32 masters; the weights are the module's, in {types}",)


def _own(model: ModelStates, name: str, role: Role) -> StoredTensor:
    tensor = model.module[name]
    return StoredTensor(name, tensor.shape, tensor.dtype, role, model.file.source(tensor))


def _distinct(model: ModelStates) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """The module's weights, each once under its first name, and the further names of tied ones.

    ZeRO-0 fills no ``shared_params``; tied weights are the same view of the same storage.
    """
    weights: dict[str, TensorRef] = {}
    aliases: dict[str, str] = {}
    first: dict[TensorRef, str] = {}
    buffers = set(model.buffer_names)
    for name, tensor in model.module.items():
        if name in buffers:
            continue
        known = first.setdefault(tensor, name) if tensor.numel else name
        if known == name:
            weights[name] = tensor
        else:
            aliases[name] = known
    return weights, aliases


def _unattributable(model: ModelStates, error: LayoutError) -> UnsupportedError:
    return UnsupportedError(
        f"holds fp32 masters that cannot be told apart: {error.problem}",
        path=model.file.path,
        found=error.found,
        expected=error.expected,
        hint="Resume the run with ZeRO stage 1, save, and export that; for the 16-bit weights "
        "alone, take the file's 'module'",
    )
