"""Hostile pickles for the inert machine."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.fuzz.runner import main
from tests.fuzz.target import Target
from zexport.formats.pickle_reader import load

FIXTURES = Path(__file__).parents[2] / "fixtures"
_SEED_NBYTES_MAX = 6000


@cache
def seeds() -> Sequence[bytes]:
    """Pickles of real rank files, and every opcode that plain values use."""
    value = {"a": [1, -1, 2**70, 1.5, "ü", b"x", None, True, (1, 2, 3, 4)], (1,): {"b": {3}}}
    made = [pickle.dumps(value, protocol) for protocol in range(2, 6)]
    return [*made, *(data for data in real_pickles() if len(data) <= _SEED_NBYTES_MAX)][:60]


@cache
def real_pickles() -> Sequence[bytes]:
    """The object pickles of all fixtures, each once."""
    found: dict[bytes, None] = {}
    for path in sorted(FIXTURES.glob("*/ckpt/**/*.pt")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                found[archive.read(name)] = None
    return list(found)


def read(data: bytes, folder: Path) -> object:
    """The pickle's value."""
    return load(data, path=folder / "rank.pt")


TARGET = Target("pickles", seeds, read)

if __name__ == "__main__":
    main(TARGET)
