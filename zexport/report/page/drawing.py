"""Strips as paths: the pieces of each, in few marks for thousands of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from zexport.inspect.strips import Piece, Strip

WIDTH = 1000.0
_STRIPS = 1024
"""As many are drawn; of more, the page tells the number."""
_NARROWEST = 2.0
_TALL, _LOW = 14, 5
_TALL_MAX = 48


class Cut(Struct, frozen=True):
    """The pieces of one strip, or of several that are alike.

    ``pieces`` have colour, first and last tensor and bytes of each; ``paths`` colour and outline of
    all pieces that are coloured so.
    """

    pieces: tuple[tuple[int, int, int, int], ...]
    paths: tuple[tuple[int, str], ...]
    nbytes: int


class Drawn(Struct, frozen=True):
    """Every strip below the other.

    ``cuts`` are the different ones; ``strips`` have of each its file, its offset, and the number of
    its cut. ``step`` is the points from one strip to the next, ``hidden`` how many are not drawn.
    """

    cuts: tuple[Cut, ...]
    strips: tuple[tuple[str, int | None, int], ...]
    step: int
    hidden: int

    @property
    def is_labelled(self) -> bool:
        """Whether each has room for its name."""
        return self.step == _TALL

    @property
    def height(self) -> int:
        """Points of all of them."""
        return self.step * len(self.strips)


def draw(strips: Sequence[Strip], color_of: Callable[[Piece], int]) -> Drawn:
    """The strips, all to one scale; ``color_of`` chooses the colour of each piece."""
    shown = strips[:_STRIPS]
    step = _TALL if len(shown) <= _TALL_MAX else _LOW
    longest = max((strip.nbytes for strip in shown), default=0)
    different = dict.fromkeys(strip.pieces for strip in shown)
    numbers = {pieces: number for number, pieces in enumerate(different)}
    cuts = tuple(_cut(pieces, color_of, longest, step - 1) for pieces in numbers)
    listed = tuple((strip.file, strip.offset, numbers[strip.pieces]) for strip in shown)
    return Drawn(cuts, listed, step, len(strips) - len(shown))


def _cut(
    pieces: Sequence[Piece], color_of: Callable[[Piece], int], longest: int, height: int
) -> Cut:
    colored = [(color_of(piece), piece) for piece in pieces]
    nbytes = sum(piece.nbytes for piece in pieces)
    width = max(_NARROWEST, WIDTH * nbytes / longest) if longest else 0.0
    outlines: dict[int, list[str]] = {}
    at = 0
    for color, piece in colored:
        left, right = (round(width * edge / nbytes, 1) for edge in (at, at + piece.nbytes))
        gap = 0.2 if right - left > 1 else 0.0  # a line between neighbours that are wide enough
        outline = f"M{left:g} 0h{right - left - gap:.4g}v{height}H{left:g}z"
        outlines.setdefault(color, []).append(outline)
        at += piece.nbytes
    return Cut(
        tuple((color, piece.first, piece.last, piece.nbytes) for color, piece in colored),
        tuple((color, "".join(parts)) for color, parts in outlines.items()),
        nbytes,
    )
