"""All of a file that is no tensor's, written as soon as what it tells of the tensors is known."""

from __future__ import annotations

from threading import Lock

from blake3 import blake3

from zexport.plan.plan import FilePlan
from zexport.store.files import OutputFile


class FrameWriter:
    """A file's frame on its way; what stands before a tensor is there when those before it are.

    So a file can be sent from its first byte to its last, though some of its bytes follow from the
    tensors'. May be told from any thread.
    """

    def __init__(self, output: OutputFile, file: FilePlan) -> None:
        self._output = output
        self._names = [tensor.name for tensor in file.tensors]
        self._crc32s: dict[str, int] = {}
        self._pieces = file.frame.pieces(self._crc32s[name] for name in self._names)
        self._digest = blake3()
        self._passed = 0
        self._lock = Lock()
        self._write_next()

    def passed(self, name: str, crc32: int) -> None:
        """All bytes of a tensor are known."""
        with self._lock:
            self._crc32s[name] = crc32
            while self._passed < len(self._names) and self._names[self._passed] in self._crc32s:
                self._passed += 1
                self._write_next()

    def _write_next(self) -> None:
        if (piece := next(self._pieces, None)) is not None:
            offset, data = piece
            self._output.write(data, offset)
            self._digest.update(data)

    def file_digest(self, digests: bytes) -> str:
        """BLAKE3 of the frame, now that it is whole, and of its tensors' digests, end to end."""
        if self._passed != len(self._names):
            raise AssertionError(f"{self._output.path}: its frame is not whole")
        return self._digest.update(digests).hexdigest()
