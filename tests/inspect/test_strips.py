"""Where tensors lie in the files of the ranks: held against the account, and against the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zexport import TrainingState
from zexport.checkpoint.open import open_checkpoint
from zexport.inspect.strips import Fill, Piece, Strip, strips
from zexport.ranges.source import Mosaic

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = sorted(path.parent for path in FIXTURES.glob("*/case.json"))


def opened(case: Path) -> TrainingState:
    return open_checkpoint(case / "ckpt")


def pieces(found: tuple[Strip, ...], *fills: Fill) -> list[Piece]:
    return [piece for strip in found for piece in strip.pieces if piece.fill in fills]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_byte_that_an_export_reads_is_in_one_piece(case: Path) -> None:
    checkpoint = opened(case)
    found = strips(checkpoint)
    named = pieces(found, Fill.TRAINABLE, Fill.EXPERT, Fill.FROZEN, Fill.BUFFER)
    shared = sum(
        sum(part.nbytes for part in set(t.source.constituents())) - t.source.nbytes
        for t in checkpoint.tensors
        if isinstance(t.source, Mosaic)
    )
    assert sum(piece.nbytes for piece in named) == shared + sum(
        tensor.source.nbytes for tensor in checkpoint.tensors if tensor.source is not None
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flat_groups_are_shown_whole_with_the_padding_of_the_layouts_arithmetic(case: Path) -> None:
    checkpoint = opened(case)
    flat = tuple(strip for strip in strips(checkpoint) if strip.offset is not None)
    assert sum(strip.nbytes for strip in flat) == sum(f.source.nbytes for f in checkpoint.flats)
    padding = sum(piece.nbytes for piece in pieces(flat, Fill.PADDING))
    assert padding == sum(f.padding * f.dtype.itemsize for f in checkpoint.flats)
