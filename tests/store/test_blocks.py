"""Many small reads of objects become few large ones, in whatever order they are announced."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from zexport.ranges.ahead import announced
from zexport.store.blocks import Blocks, announcing, joined

_UNIT = 4 << 20
_LAYERS = 32


class _Object:
    """What may be fetched: each unit begins with its number."""

    def __init__(self) -> None:
        self.content = memoryview(bytearray(_LAYERS * _UNIT))
        for n in range(_LAYERS):
            self.content[n * _UNIT] = n
        self.fetched: list[tuple[int, int]] = []
        self.blocks = Blocks(self._fetch)

    def _fetch(self, start: int, stop: int) -> memoryview:
        self.fetched.append((start, stop))
        return self.content[start:stop]


def test_tensors_in_the_order_of_their_names_take_few_requests() -> None:
    """As of two ranks: layer 10 comes after layer 1, and 2 after 19; in the files, 2 is after 1."""
    ranks = [_Object(), _Object()]

    def expect(layers: Iterable[int]) -> None:
        with announcing():
            for n, rank in ((n, rank) for n in layers for rank in ranks):
                rank.blocks.expect([(n * _UNIT, (n + 1) * _UNIT)])

    part = memoryview(bytearray(_UNIT))
    for n in announced(sorted(range(_LAYERS), key=str), lambda _: 2 * _UNIT, lambda n: [n], expect):
        for rank in ranks:
            assert rank.blocks.read(n * _UNIT, part) == _UNIT
            assert part[0] == n
    ideal = len(list(joined([(0, _LAYERS * _UNIT)])))
    for rank in ranks:
        assert len(rank.fetched) <= 1.2 * ideal
        assert sorted(chain.from_iterable(range(*one, _UNIT) for one in rank.fetched)) == [
            *range(0, _LAYERS * _UNIT, _UNIT)
        ]
