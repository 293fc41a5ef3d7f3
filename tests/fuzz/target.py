"""What a fuzzer feeds, and what must hold of every input: an answer or an error, in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zexport import ZexportError

SECONDS_MAX = 20.0
"""For one input, on a machine that does other things as well."""

_MESSAGE_LENGTH_MAX = 50_000
_EXIT_CODES = (2, 3, 4, 5)


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        name: its module.
        seeds: good inputs to start from.
        read: gives an input to the reader, in a folder that it may write to.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes, Path], object]

    def check(self, data: bytes, folder: Path) -> bool:
        """Whether the input was accepted; what must not happen is raised."""
        start = time.monotonic()
        refused = self._refusal(data, folder)
        took = time.monotonic() - start
        assert took < SECONDS_MAX, f"took {took:.1f} s"
        if refused is None:
            return True
        assert refused.exit_code in _EXIT_CODES, refused
        assert str(refused).isprintable(), ascii(str(refused))
        assert len(str(refused)) < _MESSAGE_LENGTH_MAX
        return False

    def _refusal(self, data: bytes, folder: Path) -> ZexportError | None:
        try:
            self.read(data, folder)
        except ZexportError as error:
            return error
        return None
