"""Weights that lie beside a tag folder: real ones, or ZeRO-3's empty placeholders.

Without gathering on save, ZeRO-3's module holds a tensor of no elements for every parameter, and a
framework that saves the module saves those.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

from msgspec import Struct

from zexport.errors import ZexportError
from zexport.formats.pickles import Global, TensorRef
from zexport.formats.safetensors_file import read_header
from zexport.formats.torch_file import read_torch_file
from zexport.store.boundary import Boundary
from zexport.store.files import version
from zexport.store.folders import is_file, matching

_PATTERNS = (
    "model*.safetensors",
    "adapter_model*.safetensors",
    "pytorch_model*.bin",
    "adapter_model*.bin",
)


class WeightFile(Struct, frozen=True):
    """One file of weights, from its header or pickle alone.

    Attributes:
        path: the file.
        nbytes: its size.
        tensors: how many tensors it holds.
        placeholders: names of those that should have elements and have none.
        unknown_globals: names in its pickle that are outside the closed list.
        problem: why it cannot be read; empty where it can.
    """

    path: Path
    nbytes: int
    tensors: int
    placeholders: tuple[str, ...]
    unknown_globals: tuple[Global, ...] = ()
    problem: str = ""


def list_weight_files(
    root: Path, empty: Container[str], boundary: Boundary
) -> tuple[WeightFile, ...]:
    """The weight files directly in ``root``, by name; no tensor data is read.

    ``empty`` names the tensors that have no elements by nature.
    """
    paths = {path for pattern in _PATTERNS for path in matching(root, pattern) if is_file(path)}
    for path in sorted(paths):
        boundary.check(path)
    return tuple(_read(path, empty) for path in sorted(paths))


def _read(path: Path, empty: Container[str]) -> WeightFile:
    nbytes = version(path).nbytes
    unknown: tuple[Global, ...] = ()
    try:
        if path.suffix == ".safetensors":
            shapes = {name: tensor.shape for name, tensor in read_header(path).tensors.items()}
        else:
            file = read_torch_file(path)
            unknown = file.unknown_globals
            shapes = dict(_shapes(file.value))
    except ZexportError as error:
        return WeightFile(path, nbytes, 0, (), problem=error.problem)
    placeholders = tuple(n for n, shape in shapes.items() if 0 in shape and n not in empty)
    return WeightFile(path, nbytes, len(shapes), placeholders, unknown)


def _shapes(value: object) -> Iterable[tuple[str, tuple[int, ...]]]:
    for name, tensor in value.items() if isinstance(value, dict) else ():
        if isinstance(name, str) and isinstance(tensor, TensorRef):
            yield name, tensor.shape
