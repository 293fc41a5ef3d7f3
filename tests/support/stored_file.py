"""A file that grows by arrays, each a record with its CRC-32."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from zexport.checkpoint.boxes import Bound
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource, Extent, Record
from zexport.storage.files import version
from zexport.storage.storage import Version


class StoredFile:
    def __init__(self, path: Path) -> None:
        self.path, self.records = path, tuple[Record, ...]()
        path.write_bytes(b"")

    @property
    def version(self) -> Version:
        return version(self.path)

    def store(self, values: npt.ArrayLike, dtype: DType = DType.F32) -> Bound:
        """Append an array; ``dtype`` is what it is called, whatever it is."""
        data, at = np.asarray(values).tobytes(), self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(data)
        self.records += (Record(f"data/{at}", at, len(data), crc32(data)),)
        return Bound(dtype, Extent(self.path, at, len(data)))

    def read(self, source: ByteSource) -> bytes:
        buffer = bytearray(source.nbytes)
        with SourceReader([self]) as reader:
            reader.read_into(source, 0, memoryview(buffer))
            reader.finish()
        return bytes(buffer)
