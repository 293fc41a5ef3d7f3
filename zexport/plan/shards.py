"""The safetensors files of an output, laid out to the byte."""

from __future__ import annotations

from collections.abc import Mapping

from zexport.checkpoint.contents import StoredTensor, source_of
from zexport.formats.safetensors_file import HeaderEntry, build_header
from zexport.options import ExportDType
from zexport.plan.plan import FilePlan, TensorPlan, qualified
from zexport.ranges.dtypes import DType

DTYPES = {
    ExportDType.FP32: DType.F32,
    ExportDType.BF16: DType.BF16,
    ExportDType.FP16: DType.F16,
}
"""The element types that can be asked for by name."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def plan_file(
    filename: str, tensors: Mapping[str, StoredTensor], dtypes: Mapping[str, DType]
) -> FilePlan:
    """One file of safetensors: widest elements first, then by name, as its own library has it.

    Args:
        filename: its path below the output folder. That of a file in a folder of its own stands
            before its tensors' names in the plan, where each name is one tensor's; not in the file.
        tensors: by their names in the file.
        dtypes: element types in the file.
    """
    order = sorted(tensors, key=lambda name: (-dtypes[name].itemsize, name))
    header, offsets = build_header(
        [HeaderEntry(name, dtypes[name], tensors[name].shape) for name in order]
    )
    planned = tuple(
        TensorPlan(
            name=qualified(filename, name),
            shape=tensors[name].shape,
            dtype=dtypes[name],
            stored_name=tensors[name].name,
            stored_dtype=tensors[name].dtype,
            source=source_of(tensors[name]),
            offset=len(header) + offset,
        )
        for name, offset in zip(order, offsets, strict=True)
    )
    return FilePlan(filename, header, planned)
