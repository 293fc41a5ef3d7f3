"""Runs cut into stripes, one for each rank: how ZeRO-3 lays out what a rank holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from msgspec import Struct

from zexport.ranges.computed import Zeros
from zexport.ranges.extents import ByteSource, Extent


@dataclass(frozen=True, slots=True)
class Stripes:
    """Several runs, each cut into stripes of ``nbytes`` of its own; all ranks' stripes share it."""

    runs: tuple[ByteSource, ...]
    nbytes: tuple[int, ...]
    ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(accumulate(self.nbytes)))


class Stripe(Struct, frozen=True):
    """Stripe ``rank`` of every run, end to end; where a run has ended, zeros fill it up."""

    of: Stripes
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of one rank, padding included."""
        return self.of.ends[-1] if self.of.ends else 0

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The ranges of a window, run after run."""
        index = bisect_right(self.of.ends, start)
        while start < stop:
            run, size, end = self.of.runs[index], self.of.nbytes[index], self.of.ends[index]
            until = min(stop, end)
            first = self.rank * size + start - (end - size)
            last = first + until - start
            kept = min(last, run.nbytes)
            if first < kept:
                yield from run.extents(first, kept)
            if (lacking := last - max(first, kept)) > 0:
                yield from Zeros(lacking).extents(0, lacking)
            start = max(start, until)
            index += 1

    def constituents(self) -> tuple[ByteSource, ...]:
        """The runs."""
        return self.of.runs
