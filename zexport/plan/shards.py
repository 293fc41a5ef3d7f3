"""The safetensors files of an output, laid out to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from zexport.checkpoint.contents import Role, StoredTensor, source_of
from zexport.formats.safetensors_file import HeaderEntry, build_header
from zexport.model.heads import is_value_head
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
HEAD_FILE = "value_head.safetensors"
OTHER_FILE = "other_weights.safetensors"
FILES_APART = (HEAD_FILE, OTHER_FILE)
"""Where weights lie that the model's class does not know: beside the model and not in its index.

The first name is the one that LLaMA-Factory writes and looks for (``extras/constants.py``), so
nothing but a value head gets it. Neither begins as the files do that llama.cpp's converter takes
for the model's.
"""


def plan_shards(
    tensors: Mapping[str, StoredTensor], target: DType, max_shard_nbytes: int
) -> tuple[FilePlan, ...]:
    """The files of a model, split as huggingface_hub splits a state dict."""
    from huggingface_hub import split_state_dict_into_shards_factory  # noqa: PLC0415 - 30 ms

    dtypes = {name: tensor.output_dtype(target) for name, tensor in tensors.items()}
    split = split_state_dict_into_shards_factory(
        {name: tensor.numel * dtypes[name].itemsize for name, tensor in tensors.items()},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_nbytes,
    )
    return tuple(
        plan_shard(filename, {name: tensors[name] for name in names}, dtypes)
        for filename, names in split.filename_to_tensors.items()
    )


def files_apart(names: Iterable[str]) -> dict[str, list[str]]:
    """File to those of the weights in it that the model's class does not know."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(HEAD_FILE if is_value_head(name) else OTHER_FILE, []).append(name)
    return files


def plan_heads(tensors: Mapping[str, StoredTensor], target: DType) -> tuple[FilePlan, ...]:
    """The files of the weights that the model does not know, if there are any."""
    dtypes = {name: tensor.output_dtype(target) for name, tensor in tensors.items()}
    return tuple(
        plan_shard(file, {name: tensors[name] for name in names}, dtypes)
        for file, names in files_apart(tensors).items()
    )


def plan_shard(
    filename: str, tensors: Mapping[str, StoredTensor], dtypes: Mapping[str, DType]
) -> FilePlan:
    """One file: widest elements first, then by name, as safetensors itself orders them.

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


def index_file(shards: Sequence[FilePlan], tensors: Mapping[str, StoredTensor]) -> bytes:
    """The index as transformers 5 writes it: sorted, two spaces, a newline at the end."""
    planned = [(tensor, shard) for shard in shards for tensor in shard.tensors]
    parameters = [t for t, _ in planned if tensors[t.name].role is not Role.BUFFER]
    content = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in parameters),
            "total_size": sum(tensor.nbytes for tensor, _ in planned),
        },
        "weight_map": {tensor.name: shard.filename for tensor, shard in planned},
    }
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
