"""Tied layers of a pipeline without ZeRO in fp32: steps of a weight that lies in another's file.

There nothing names what is stepped, and the second use of a tied layer has no layer file. That it
is one, and no file is missing, is known by the optimizer's moments: every stage that uses the layer
steps the same weight by the same gradients. They have the weights' shapes as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from zexport.checkpoint.layouts.layer_files import LayerFile
from zexport.checkpoint.states import ModelStates
from zexport.errors import DamagedCheckpointError
from zexport.formats.pickles import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.copies import fingerprint
from zexport.ranges.dtypes import Shape
from zexport.ranges.extents import ByteSource
from zexport.ranges.reader import SourceReader

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_ADAM = {*_MOMENTS, "step", "max_exp_avg_sq"}
_Look = tuple[Shape, tuple[bytes, ...]]
"""A shape, and digests of samples of what has it."""


def count_uses_without_file(stages: Sequence[ModelStates], layers: Sequence[LayerFile]) -> int:
    """How many weights later stages step that earlier ones step and have the files of.

    None where that cannot be told: moments that are all zero are alike without being of one
    weight, and so may be those of a tied layer that has two files.

    Args:
        stages: the model states of every stage, with the optimizer of Adam's kind inside.
        layers: all layer files.
    """
    with SourceReader([*(model.file for model in stages), *(one.file for one in layers)]) as reader:
        looks = [Counter(_looks_of_moments(model, reader)) for model in stages]
        shared = [look for look in set().union(*looks) if sum(look in one for one in looks) > 1]
        if any(one[look] > 1 for look in shared for one in looks):
            return 0
        if _has_copies(layers, {shape for shape, _ in shared}, reader):
            return 0
    return sum(sum(look in one for one in looks) - 1 for look in shared)


def check_shapes(tag_dir: Path, stages: Sequence[ModelStates], held: Mapping[Shape, int]) -> None:
    """Refuse layer files that hold fewer weights of a shape than all stages together step.

    Every weight that a stage steps is in a layer file with its shape (DeepSpeed 0.10 to 0.19,
    ``runtime/pipe/module.py``, ``save_state_dict``): in its own layer's, or a tied layer's first.

    Args:
        tag_dir: the tag folder.
        stages: the model states of every stage.
        held: how many weights of each shape the layer files hold.

    Raises:
        DamagedCheckpointError: a layer file is of another run.
    """
    stepped = Counter(tensors[0].shape for model in stages for tensors in _adams_moments(model))
    scarce = {shape for shape, count in stepped.items() if count > held.get(shape, 0)}
    distinct = _count_distinct(stages, scarce) if scarce else {}
    for shape, count in sorted(distinct.items()):
        if count > held.get(shape, 0):
            raise DamagedCheckpointError(
                f"has layer files of another run: too few weights of the shape {list(shape)}",
                path=tag_dir,
                found=held.get(shape, 0),
                expected=f"{count}, as the optimizers step",
                hint="Copy all layer files of one save again",
            )


def _count_distinct(stages: Sequence[ModelStates], shapes: Container[Shape]) -> Counter[Shape]:
    """At least how many different weights of these shapes all stages together step.

    What one stage steps are different weights, and so are those with different moments.
    """
    with SourceReader([model.file for model in stages]) as reader:
        looks = [
            Counter(
                (tensors[0].shape, tuple(_digest(model.file, one, reader) for one in tensors))
                for tensors in _adams_moments(model)
                if tensors[0].shape in shapes
            )
            for model in stages
        ]
    distinct: Counter[Shape] = Counter()
    for look in set().union(*looks):
        distinct[look[0]] += max(one[look] for one in looks)
    return distinct


def _adams_moments(model: ModelStates) -> Iterator[list[TensorRef]]:
    """Both moments of every parameter that has what Adam keeps, and nothing else.

    Such moments have the parameter's shape; other optimizers may project them.
    """
    for state in _states(model):
        moments = [state.get(key) for key in _MOMENTS]
        tensors = [moment for moment in moments if isinstance(moment, TensorRef)]
        alike = len({tensor.shape for tensor in tensors}) == 1
        if len(tensors) == len(_MOMENTS) and alike and state.keys() <= _OF_ADAM:
            yield tensors


def _states(model: ModelStates) -> Iterator[dict[object, object]]:
    optimizer = model.optimizer
    states = optimizer.get("state").mapping() if optimizer.has("state") else {}
    yield from (state for state in states.values() if isinstance(state, dict))


def _looks_of_moments(model: ModelStates, reader: SourceReader) -> Iterator[_Look]:
    for state in _states(model):
        moments = [state.get(key) for key in _MOMENTS]
        tensors = [moment for moment in moments if isinstance(moment, TensorRef)]
        if len(tensors) == len(_MOMENTS) and not _are_zero(model.file, tensors, reader):
            yield tensors[0].shape, tuple(_digest(model.file, one, reader) for one in tensors)


def _has_copies(layers: Iterable[LayerFile], shapes: set[Shape], reader: SourceReader) -> bool:
    """Whether two layer files have a weight of one of these shapes that looks the same."""
    looks = [
        (tensor.shape, _digest(layer.file, tensor, reader))
        for layer in layers
        for tensor in layer.tensors.values()
        if tensor.shape in shapes
    ]
    return len(set(looks)) < len(looks)


def _are_zero(file: TorchFile, tensors: Iterable[TensorRef], reader: SourceReader) -> bool:
    return all(_digest(file, one, reader) == _digest(file, one, _Zeros()) for one in tensors)


def _digest(file: TorchFile, tensor: TensorRef, reader: SourceReader | _Zeros) -> bytes:
    return fingerprint(reader, file.source(tensor), tensor.dtype, tensor.dtype)


class _Zeros:
    """Reads zeros, whatever the source has."""

    def read_into(self, source: ByteSource, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with zeros."""
        del source, start
        buffer[:] = bytes(len(buffer))
