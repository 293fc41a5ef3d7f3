"""What a file written by ``torch.save`` holds, whichever of its two containers it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from zexport.errors import DamagedCheckpointError
from zexport.formats.inert import Global, StorageRef, TensorRef
from zexport.formats.pickles import Pickle
from zexport.formats.torch_legacy import read_legacy
from zexport.formats.torch_zip import COPY_AGAIN, opened, read_zip
from zexport.ranges.extents import ByteSource, Extent, Member
from zexport.ranges.mosaic import Mosaic, Tile
from zexport.store.files import Version, version_of

__all__ = ["Container", "Member", "TorchFile", "read_torch_file"]

_ZIP_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"


class Container(Enum):
    """The two file layouts of ``torch.save``."""

    ZIP = "zip"
    LEGACY = "legacy"


class _Records(Protocol):
    @property
    def root(self) -> str | None: ...

    def members(self) -> tuple[Member, ...]: ...

    def place(self, storage: StorageRef) -> int: ...


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file written by ``torch.save``, read without its tensor data.

    Attributes:
        path: the file.
        version: what it was when it was read.
        container: which layout it has.
        value: the object in it; see ``zexport.formats.pickles.Pickle``.
        unknown_globals: the globals of its pickle that are outside the closed list, sorted.
    """

    path: Path
    version: Version
    container: Container
    value: object
    unknown_globals: tuple[Global, ...]
    _records: _Records = field(repr=False, compare=False)

    @property
    def root(self) -> str | None:
        """The top folder of the zip: the file's name, less ``.pt``, when it was written.

        ``archive`` when it was written to a stream, ``None`` for the old container.
        """
        return self._records.root

    @property
    def members(self) -> tuple[Member, ...]:
        """The records that hold tensor bytes, by offset; the old container has no CRCs."""
        return self._records.members()

    def source(self, tensor: TensorRef) -> ByteSource:
        """Where the elements are, in row-major order; an ``Extent`` if they lie densely."""
        storage, itemsize = tensor.storage, tensor.dtype.itemsize
        begin = self._records.place(storage)
        if not tensor.numel:
            return Extent(self.path, begin, 0)
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        needed = (tensor.offset + last + 1) * itemsize
        if needed > storage.nbytes:
            raise DamagedCheckpointError(
                f"a tensor of shape {tensor.shape} reaches beyond its storage {storage.key!r}",
                path=self.path,
                found=f"{storage.nbytes} bytes",
                expected=f"at least {needed}",
                hint=COPY_AGAIN,
            )
        offset = begin + tensor.offset * itemsize
        if tensor.is_dense:
            return Extent(self.path, offset, tensor.nbytes)
        span = Extent(self.path, offset, (last + 1) * itemsize)
        start = (0,) * len(tensor.shape)
        return Mosaic(tensor.shape, itemsize, (Tile(start, tensor.shape, span, 0, tensor.stride),))


def read_torch_file(path: Path, known: dict[bytes, Pickle] | None = None) -> TorchFile:
    """What ``path`` holds, without its tensor data; no code in it runs.

    Args:
        path: the file.
        known: pickles of zip files that were read before, by their bytes, to which this one is
            added. The ranks of one save often write equal ones; those are read, and held in
            memory, once.
    """
    with opened(path) as file:
        version = version_of(file.fileno())
        start = file.read(len(_ZIP_START))
        container = _container(path, start, version.nbytes)
        pickle, records = (
            read_zip(file, path, known) if container is Container.ZIP else read_legacy(file, path)
        )
    return TorchFile(
        path=path,
        version=version,
        container=container,
        value=pickle.value,
        unknown_globals=pickle.unknown_globals,
        _records=records,
    )


def _container(path: Path, start: bytes, nbytes: int) -> Container:
    """The container whose first bytes these are."""
    if start == _ZIP_START:
        return Container.ZIP
    if start[:1] == _PICKLE_START:
        return Container.LEGACY
    problem = "is not a file that torch.save wrote" if nbytes else "is empty"
    hint = f"{COPY_AGAIN}, or leave it out if it does not belong to the checkpoint"
    raise DamagedCheckpointError(problem, path=path, found=f"{nbytes} bytes", hint=hint)
