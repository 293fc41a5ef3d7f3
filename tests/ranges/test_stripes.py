"""Stripes of several runs against lists that are cut and padded by hand."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from zexport.ranges.computed import ComputedExtent, Stripe, Stripes
from zexport.ranges.source import Extent

_CONTENT = bytes(range(1, 201))


def _bytes_of(stripe: Stripe, start: int, stop: int) -> bytes:
    return b"".join(
        bytes(part.nbytes)
        if isinstance(part, ComputedExtent)
        else _CONTENT[part.offset : part.offset + part.nbytes]
        for part in stripe.extents(start, stop)
    )


@given(
    lengths=st.lists(st.integers(0, 40), max_size=5),
    world_size=st.integers(1, 5),
    data=st.data(),
)
def test_a_window_of_a_stripe_is_a_slice_of_all_runs_cut_and_filled_up(
    lengths: list[int], world_size: int, data: st.DataObject
) -> None:
    runs = [Extent(Path("a"), 3 * index, length) for index, length in enumerate(lengths)]
    sizes = [-(-length // world_size) for length in lengths]
    for rank in range(world_size):
        whole = b"".join(
            _CONTENT[run.offset : run.offset + run.nbytes].ljust(size * world_size, b"\0")[
                rank * size : (rank + 1) * size
            ]
            for run, size in zip(runs, sizes, strict=True)
        )
        stripe = Stripe(Stripes(tuple(runs), tuple(sizes)), rank)
        assert stripe.nbytes == len(whole)
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        assert _bytes_of(stripe, start, stop) == whole[start:stop]
