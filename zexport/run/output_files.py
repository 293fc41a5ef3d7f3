"""Files of tensors as they lie in an output: what each says of its tensors, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from zexport.errors import (
    CheckpointError,
    OutputError,
    UnsafeError,
    UnsupportedError,
    VerificationError,
)
from zexport.export.plan import FilePlan, qualified, qualified_by_file
from zexport.formats.inert import TensorRef
from zexport.formats.safetensors_file import FileTensor, read_header
from zexport.formats.torch_file import read_torch_file
from zexport.formats.torch_writer import tensors_in
from zexport.ranges.extents import Extent
from zexport.store.address import Address
from zexport.store.files import reading

_SAFETENSORS, _TORCH = ".safetensors", ".pt"


def is_safetensors(filename: str) -> bool:
    """Whether a file is of safetensors, by its name."""
    return filename.endswith(_SAFETENSORS)


def is_of_tensors(filename: str) -> bool:
    """Whether a file is of a form that tensors are written in, by its name."""
    return filename.endswith((_SAFETENSORS, _TORCH))


class WrittenFile(Struct, frozen=True):
    """A file of tensors: these by their names in the whole output, in file order."""

    path: Path
    tensors: Mapping[str, FileTensor]


def read_written(path: Path, filename: str) -> WrittenFile:
    """What a file of an output says of its tensors; no tensor byte is read.

    Raises:
        VerificationError: it cannot be read, or breaks the rules of its form.
    """
    if is_safetensors(filename):
        header = read_header(path, error=VerificationError)
        tensors = {qualified(filename, name): one for name, one in header.tensors.items()}
        return WrittenFile(path, tensors)
    try:
        return WrittenFile(path, _in_torch_file(path, filename))
    except (CheckpointError, UnsupportedError, UnsafeError) as cause:
        origin = cause.__cause__ if isinstance(cause.__cause__, OSError) else cause
        raise VerificationError(cause.problem, path=path, found=cause.found) from origin


def _in_torch_file(path: Path, filename: str) -> dict[str, FileTensor]:
    """The tensors that have bytes, by offset; each is a record of its own."""
    file = read_torch_file(path)
    records = {(member.offset, member.nbytes) for member in file.members}
    found: dict[str, FileTensor] = {}
    for own, tensor in tensors_in(file.value, TensorRef):
        if not tensor.nbytes:
            continue
        source = file.source(tensor)
        name = qualified_by_file(filename, own)
        if not isinstance(source, Extent) or (source.offset, source.nbytes) not in records:
            problem = "holds a tensor that is no record of its own"
            raise VerificationError(problem, path=path, found=name)
        found[name] = FileTensor(name, tensor.dtype, tensor.shape, source.offset)
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def check_opens(path: Path, file: FilePlan) -> None:
    """Open a file as its readers do: it holds the planned tensors, and no others.

    Raises:
        VerificationError: it does not.
        OutputError: the system refuses to read it, which says nothing of what is in it.
    """
    try:
        found, holds = _found(path, file)
    except VerificationError as error:
        with reading(path, OutputError):
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
        raise
    if not holds:
        raise VerificationError(
            "was written, but holds other tensors than planned",
            path=path,
            found=f"{len(found)} tensors",
            expected=len(file.tensors),
        )


def _found(path: Path, file: FilePlan) -> tuple[list[str], bool]:
    """The tensors in a file, and whether they are the planned ones."""
    if is_safetensors(file.filename):
        found = _names_by_library(path, file.filename)
        names = {tensor.name for tensor in file.tensors}
        return found, len(found) == len(names) and names.issuperset(found)
    tensors = read_written(path, file.filename).tensors
    planned = {one.name: (one.dtype, one.shape, one.offset) for one in file.tensors}
    return [*tensors], planned == {n: (t.dtype, t.shape, t.offset) for n, t in tensors.items()}


def _names_by_library(path: Path, filename: str) -> list[str]:
    try:
        if isinstance(path, Address):
            return [*read_written(path, filename).tensors]
        with reading(path, VerificationError), safe_open(path, framework="np") as opened:
            return [qualified(filename, name) for name in opened.keys()]  # noqa: SIM118
    except SafetensorError as cause:
        raise VerificationError(
            "was written, but the safetensors library cannot open it", path=path, found=str(cause)
        ) from cause
