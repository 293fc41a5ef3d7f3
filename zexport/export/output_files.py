"""Read which tensors an output file contains, as its readers find them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zexport.errors import OutputError, VerificationError, ZexportError
from zexport.export.plan import FilePlan, qualified, qualified_by_file
from zexport.formats.pickle_values import TensorRef
from zexport.formats.safetensors import FileTensor, read_header
from zexport.formats.torch_file import read_torch_file
from zexport.formats.torch_writer import tensors_in
from zexport.ranges.source import Extent


def is_safetensors(filename: str) -> bool:
    return filename.endswith(".safetensors")


def read_written(path: Path, filename: str) -> dict[str, FileTensor]:
    """Return the tensors of an output file in file order, by their names in the whole output.

    Raises:
        VerificationError: the file cannot be read, or is not a valid safetensors or torch file.
    """
    try:
        if is_safetensors(filename):
            header = read_header(path)
            return {qualified(filename, name): one for name, one in header.tensors.items()}
        found = sorted(_in_torch_file(path, filename), key=lambda one: one.offset)
        return {one.name: one for one in found}
    except ZexportError as cause:
        origin = cause.__cause__ if isinstance(cause.__cause__, OSError) else cause
        raise VerificationError(
            cause.problem, path=path, found=cause.found, expected=cause.expected, hint=cause.hint
        ) from origin


def _in_torch_file(path: Path, filename: str) -> Iterator[FileTensor]:
    """Yield the tensors that have bytes; each must be a record of its own."""
    file = read_torch_file(path)
    records = {(member.offset, member.nbytes) for member in file.members}
    for own, tensor in tensors_in(file.value, TensorRef):
        if not tensor.nbytes:
            continue
        source = file.source(tensor)
        name = qualified_by_file(filename, own)
        if not isinstance(source, Extent) or (source.offset, source.nbytes) not in records:
            raise VerificationError("tensor is not a record of its own", path=path, found=name)
        yield FileTensor(name, tensor.dtype, tensor.shape, source.offset)


def check_opens(path: Path, file: FilePlan) -> None:
    """Raise unless a file contains exactly the planned tensors.

    Raises:
        VerificationError: it contains others, or is damaged.
        OutputError: the system refuses to read it.
    """
    try:
        found = read_written(path, file.filename)
    except VerificationError as error:
        if isinstance(error.__cause__, OSError):
            raise OutputError(error.problem, path=path, hint=error.hint) from error.__cause__
        raise
    planned = {one.name: (one.dtype, one.shape, one.offset) for one in file.tensors}
    if planned != {name: (t.dtype, t.shape, t.offset) for name, t in found.items()}:
        raise VerificationError(
            "contains other tensors than planned",
            path=path,
            found=f"{len(found)} tensors",
            expected=len(file.tensors),
        )
