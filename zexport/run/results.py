"""What was written of a shard: digests, what was seen of its values, and what was read for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zexport.ranges.casts import Statistics
from zexport.ranges.ledger import Range


@dataclass(frozen=True, slots=True)
class TensorResult:
    """What was written of one tensor."""

    blake3: str
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What was written of one shard.

    Attributes:
        filename: its name in the folder.
        nbytes: its size.
        blake3: its digest, as a manifest has it.
        tensors: by name.
        ranges: what was read for it, by file; the CRC-32 of each range is part of the proof that
            the whole record is what was saved.
    """

    filename: str
    nbytes: int
    blake3: str
    tensors: Mapping[str, TensorResult]
    ranges: Mapping[Path, list[Range]]
