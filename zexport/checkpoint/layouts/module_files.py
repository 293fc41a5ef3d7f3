"""Files that hold a part of the module each: one layer of a pipeline, or one expert of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from zexport.checkpoint.rank_files import RankFile, RankFileKind
from zexport.checkpoint.ranks import check_written_as_named
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError, LayoutError
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Chain


class ModuleFile(Struct, frozen=True):
    """The weights and buffers of one part as the module has them; numbers are its name's.

    Names are relative to a pipeline's layer, and whole for an expert. Source: DeepSpeed 0.10 to
    0.19, ``runtime/pipe/module.py`` (``save_state_dict``: every layer that has a state dict; a
    second use of a tied layer through a function of its own has none) and ``runtime/engine.py``
    (``_save_moe_checkpoint``).
    """

    file: TorchFile
    layer: int
    expert: int
    tensor_rank: int
    tensors: Mapping[str, TensorRef]


def read_module_files(files: Iterable[RankFile]) -> tuple[ModuleFile, ...]:
    """The contents of ``files``, by tensor rank, layer and expert."""
    read: dict[tuple[int, int, int], ModuleFile] = {}
    for file in files:
        torch_file = read_torch_file(file.path)
        check_written_as_named(torch_file)
        key = file.tensor_rank, file.layer, file.expert
        if key in read:
            raise DamagedCheckpointError(
                f"is a second file of the same {file.kind.value}",
                path=file.path,
                found=f"{read[key].file.path.name} beside it",
                hint="Remove the files of the other run",
            )
        read[key] = module_file(file, torch_file)
    return tuple(read[key] for key in sorted(read))


def module_file(name: RankFile, file: TorchFile) -> ModuleFile:
    """The content of a file that is read already."""
    where = "expert states" if name.kind is RankFileKind.EXPERT else "layer states"
    tensors = Value(file.path, where, file.value).tensors()
    return ModuleFile(file, name.layer, name.expert, name.tensor_rank, tensors)


def stack_slices(name: str, files: Sequence[ModuleFile]) -> tuple[Shape, DType, Chain]:
    """Shape, type and bytes of a weight of all experts of a layer, one slice out of each file."""
    slices: list[tuple[TensorRef, ByteSource]] = []
    for states in files:
        tensor = states.tensors.get(f"{name}.{states.expert}")
        if tensor is None:
            raise LayoutError(
                f"{states.file.path.name} lacks its part of {name!r}", "no such weight", "one"
            )
        slices.append((tensor, states.file.source(tensor)))
    kinds = {(tensor.shape, tensor.dtype) for tensor, _ in slices}
    if len(kinds) != 1:
        raise LayoutError(f"the experts of {name!r} are not alike", sorted(map(str, kinds)), "one")
    ((shape, dtype),) = kinds
    return (len(slices), *shape), dtype, Chain(tuple(part for _, part in slices))
