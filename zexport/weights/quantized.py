"""Weights that mean nothing without the scales beside them: none may be taken from a base alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zexport.checkpoint.contents import StoredTensor
from zexport.errors import UnsupportedError
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.printable import some
from zexport.ranges.dtypes import DType
from zexport.weights.base import Base

_AFTER_WEIGHT = re.compile(
    r"(?P<weight>.+?)(?:_scale|_scales|_scale_inv|_global_scale|_zero_point|_packed|_shape|_g_idx"
    r"|_blocks|_qdata|\._data|\._scale|\.absmax|\.quant_map|\.nested_absmax|\.nested_quant_map"
    r"|\.quant_state\..+)"
)
_IN_MODULE = re.compile(r"(?P<module>.+)\.(?:SCB|weight_format|qweight|qzeros|scales|g_idx)")
"""Names of scales: after a weight's own, or beside it in its module.

Source: transformers 5.23 (``integrations/finegrained_fp8.py``, ``integrations/mxfp4.py``) and the
forms that bitsandbytes, compressed-tensors, GPTQ, AWQ and torchao write.
"""

_PACKED = frozenset({DType.I8, DType.U8, DType.F8_E4M3, DType.F8_E5M2})
_NUMBERS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16, DType.C64})


def check_plain(
    taken: Iterable[StoredTensor],
    base: Base,
    names: ModelNames | NamesUnknown,
    absent: Iterable[str] = (),
) -> None:
    """Refuse weights taken from a base that are no numbers as they stand.

    Where the model's names are not known a weight may be a buffer; then wide integers are taken
    for what they are.

    Args:
        taken: those weights, under their names in the base.
        base: that base.
        names: the model; what it has itself is no packer's.
        absent: weights that are wanted as well, and that the base does not have by their names.
    """
    is_known = isinstance(names, ModelNames)
    scales = _scales(
        base.tensors, names.all_names if isinstance(names, ModelNames) else frozenset()
    )
    packed: dict[str, str] = {}
    for tensor in taken:
        name, dtype = tensor.name, tensor.dtype
        if dtype in _PACKED or (is_known and dtype not in _NUMBERS):
            packed[name] = dtype.torch_name
        elif name in scales or name in scales.values():
            packed[name] = f"scaled by {scales.get(name, name)}"
    packed |= {name: f"there is {scales[name]}" for name in absent if name in scales}
    if packed:
        raise UnsupportedError(
            "the base model's weights are quantized, and some would be taken without their scales",
            path=base.path,
            found=some(tuple(f"{name} ({what})" for name, what in packed.items())),
            expected="a floating-point type, with no scales beside it",
            hint="Give the model before its quantization with --base, or leave these weights out "
            "with --exclude-frozen",
        )


def _scales(base: Iterable[str], own: frozenset[str]) -> dict[str, str]:
    """Name of a weight to that of what scales it, but for what is the model's own."""
    scales: dict[str, str] = {}
    for name in base:
        if name in own:
            continue
        if found := _AFTER_WEIGHT.fullmatch(name):
            scales[found["weight"]] = name
        elif found := _IN_MODULE.fullmatch(name):
            scales[f"{found['module']}.weight"] = name
    return scales
