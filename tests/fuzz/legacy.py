"""Hostile files in torch's container from before zip."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tests.fuzz.runner import main
from tests.fuzz.target import Target
from tests.fuzz.zips import read, saved


@cache
def seeds() -> Sequence[bytes]:
    """Small files."""
    return saved(legacy=True)


TARGET = Target("legacy", seeds, read)

if __name__ == "__main__":
    main(TARGET)
