"""What the optimizers of a pipeline without ZeRO step in fp32, held against its layer files.

There nothing names what is stepped, and the second use of a tied layer has no layer file. That it
is one, and no file is missing, is known by the optimizer's moments: every stage that uses the layer
steps the same weight by the same gradients. They have the weights' shapes as well. They are read
without proof: damage to them can only set them apart, which is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.model_states import ModelStates, ModuleFile
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import Shape
from zexport.ranges.extents import ByteSource, Read
from zexport.ranges.reader import SourceReader
from zexport.ranges.replicas import fingerprint

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_ADAM = {*_MOMENTS, "step", "max_exp_avg_sq"}
_Look = tuple[Shape, tuple[bytes, ...]]
"""A shape, and digests of samples of what has it."""


class _Moments(Struct, frozen=True):
    """Both moments of one parameter, in a model file.

    ``are_adams``: they are all that Adam keeps, and nothing else is there. Such moments have the
    parameter's shape; other optimizers may project them.
    """

    file: TorchFile
    tensors: tuple[TensorRef, ...]
    are_adams: bool

    @property
    def shape(self) -> Shape:
        """Their shape."""
        return self.tensors[0].shape

    def look(self, read: Read) -> _Look:
        """What they look like."""
        return self.shape, tuple(_digest(self.file, one, read) for one in self.tensors)


def check_weights_are_there(
    tag_dir: Path, stages: Sequence[ModelStates], layers: Sequence[ModuleFile]
) -> None:
    """Refuse layer files that hold fewer weights than are stepped, where nothing names these.

    Every weight that a stage steps is in a layer file with its shape (DeepSpeed 0.10 to 0.19,
    ``runtime/pipe/module.py``, ``save_state_dict``): in its own layer's, or a tied layer's first.
    """
    buffers = {name for model in stages for name in model.buffer_names}
    held = Counter(
        tensor.shape
        for layer in layers
        for key, tensor in layer.tensors.items()
        if f"{layer.layer}.{key}" not in buffers
    )
    files = [*(model.file for model in stages), *(layer.file for layer in layers)]
    stepped = sum(_count_stepped(model) for model in stages)
    moments = [[*_moments(model)] for model in stages]
    with SourceReader(files) as reader:
        lacking = stepped - held.total()
        if lacking > 0 and lacking != _count_uses_without_file(moments, layers, reader):
            raise UnsupportedError(
                "holds fewer weights than its optimizers step: a layer file is missing, or a tied "
                "layer has none of its own, and nothing says which",
                path=tag_dir,
                found=f"{held.total()} weights in {len(layers)} layer files",
                expected=stepped,
                hint="Copy all layer files again; with tied layers, save with ZeRO-1",
            )
        distinct = _count_distinct(moments, held, reader)
    for shape, count in sorted(distinct.items()):
        if count > held[shape]:
            raise DamagedCheckpointError(
                f"has layer files of another run: too few weights of the shape {list(shape)}",
                path=tag_dir,
                found=held[shape],
                expected=f"{count}, as the optimizers step",
                hint="Copy all layer files of one save again",
            )


def _count_stepped(model: ModelStates) -> int:
    optimizer = model.optimizer
    groups = [] if optimizer.is_none else optimizer.need("param_groups").items()
    return sum(len(group.need("params").items()) for group in groups)


def _moments(model: ModelStates) -> Iterator[_Moments]:
    optimizer = model.optimizer
    states = optimizer.get("state").mapping() if optimizer.has("state") else {}
    for state in states.values():
        found = [state.get(key) for key in _MOMENTS] if isinstance(state, dict) else []
        tensors = tuple(moment for moment in found if isinstance(moment, TensorRef))
        if isinstance(state, dict) and len(tensors) == len(_MOMENTS):
            are_alike = len({tensor.shape for tensor in tensors}) == 1
            yield _Moments(model.file, tensors, are_alike and state.keys() <= _OF_ADAM)


def _count_uses_without_file(
    stages: Sequence[Sequence[_Moments]], layers: Sequence[ModuleFile], reader: SourceReader
) -> int:
    """How many weights later stages step that earlier ones step and have the files of.

    None where that cannot be told: moments that are all zero are alike without being of one
    weight, and so may be those of a tied layer that has two files.
    """
    looks = [
        Counter(
            look for one in stage if (look := one.look(reader.read_into)) != one.look(_read_zeros)
        )
        for stage in stages
    ]
    shared = [look for look in set().union(*looks) if sum(look in one for one in looks) > 1]
    if any(one[look] > 1 for look in shared for one in looks):
        return 0
    shapes = {shape for shape, _ in shared}
    copies = [
        (tensor.shape, _digest(layer.file, tensor, reader.read_into))
        for layer in layers
        for tensor in layer.tensors.values()
        if tensor.shape in shapes
    ]
    if len(set(copies)) < len(copies):
        return 0
    return sum(sum(look in one for one in looks) - 1 for look in shared)


def _count_distinct(
    stages: Sequence[Sequence[_Moments]], held: Mapping[Shape, int], reader: SourceReader
) -> Counter[Shape]:
    """At least how many different weights all stages together step, of shapes that seem scarce.

    What one stage steps are different weights, and so are those with different moments.
    """
    known = [[one for one in stage if one.are_adams] for stage in stages]
    stepped = Counter(one.shape for stage in known for one in stage)
    looks = [
        Counter(
            one.look(reader.read_into)
            for one in stage
            if stepped[one.shape] > held.get(one.shape, 0)
        )
        for stage in known
    ]
    distinct: Counter[Shape] = Counter()
    for look in set().union(*looks):
        distinct[look[0]] += max(one[look] for one in looks)
    return distinct


def _digest(file: TorchFile, tensor: TensorRef, read: Read) -> bytes:
    return fingerprint(read, file.source(tensor), tensor.dtype, tensor.dtype)


def _read_zeros(source: ByteSource, start: int, buffer: memoryview) -> None:
    """Read zeros, whatever the source has."""
    del source, start
    buffer[:] = bytes(len(buffer))
