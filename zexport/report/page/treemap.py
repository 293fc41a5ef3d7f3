"""A treemap: modules as boxes within boxes, each as large as its tensors together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from zexport.text import shown

WIDTH, HEIGHT = 1000.0, 420.0
_BOXES = 400
_ALIKE = 1.02
_PARTS = 64
"""Of one module; the smallest of more are one box."""


class Leaf(Struct, frozen=True):
    """One tensor: its name, how large it is, and a number that its box is coloured by."""

    name: str
    nbytes: int
    color: int


class Rect(Struct, frozen=True):
    """A place in the picture, in points."""

    x: float
    y: float
    width: float
    height: float


class Box(Struct, frozen=True):
    """A module, or a tensor, and where it is drawn."""

    name: str
    tensors: int
    nbytes: int
    color: int
    rect: Rect


def _modules(name: str) -> tuple[str, ...]:
    """The modules that a tensor is in, from the outermost, and its own last name."""
    return tuple(shown(name).split("."))


class _Node:
    """A module: its tensors by the next part of their names."""

    def __init__(self, name: str, leaves: Sequence[Leaf], depth: int) -> None:
        self.name, self.leaves, self.depth = name, leaves, depth
        self.nbytes = sum(leaf.nbytes for leaf in leaves)
        self.children: list[_Node] = []

    def split(self) -> list[_Node]:
        """Its parts, the largest first; a part with one part alone is that one."""
        depth, groups = self.depth, [list(self.leaves)]
        while len(groups) == 1 and len(self.leaves) > 1:
            by_name: dict[tuple[str, ...], list[Leaf]] = {}
            for leaf in self.leaves:
                by_name.setdefault(_modules(leaf.name)[: depth + 1], []).append(leaf)
            groups, depth = list(by_name.values()), depth + 1
            if max(len(_modules(leaf.name)) for leaf in self.leaves) < depth:
                break
        groups.sort(key=lambda group: -sum(leaf.nbytes for leaf in group))
        rest = [leaf for group in groups[_PARTS:] for leaf in group]
        found = [_Node(".".join(_modules(g[0].name)[:depth]), g, depth) for g in groups[:_PARTS]]
        if rest:
            found.append(_Node(self.name, rest, depth))
        return found if len(found) > 1 else []


def treemap(leaves: Sequence[Leaf], worst: Callable[[Sequence[int]], int]) -> tuple[Box, ...]:
    """The boxes of a picture of some tensors, the largest modules opened until there are enough.

    ``worst`` chooses the colour of a module by those of its tensors.
    """
    root = _Node("", [leaf for leaf in leaves if leaf.nbytes], 0)
    if not root.leaves:
        return ()
    waiting, count = [root], 1
    while waiting:
        alike = [node for node in waiting if node.nbytes * _ALIKE >= waiting[0].nbytes]
        parts = [node.split() for node in alike]
        count += sum(max(0, len(found) - 1) for found in parts)
        if count > _BOXES and waiting != [root]:
            break  # of modules of one size, all are opened or none
        for node, found in zip(alike, parts, strict=True):
            node.children = found
        opened = [child for found in parts for child in found]
        waiting = sorted([*waiting[len(alike) :], *opened], key=lambda node: -node.nbytes)
    return tuple(_drawn(root, Rect(0, 0, WIDTH, HEIGHT), worst))


def _drawn(node: _Node, rect: Rect, worst: Callable[[Sequence[int]], int]) -> Iterator[Box]:
    if not node.children:
        color = worst([leaf.color for leaf in node.leaves])
        yield Box(node.name, len(node.leaves), node.nbytes, color, rect)
        return
    for child, place in zip(node.children, _squarified(node.children, rect), strict=True):
        yield from _drawn(child, place, worst)


def _squarified(nodes: Sequence[_Node], rect: Rect) -> Iterator[Rect]:
    """Places of the right areas, as near to squares as rows of them can be.

    The rows are chosen as Bruls, Huizing and van Wijk do ("Squarified Treemaps", 2000): one grows
    as long as its worst box gets no narrower.
    """
    total = sum(node.nbytes for node in nodes)
    scale = rect.width * rect.height / total
    areas, begin = [node.nbytes * scale for node in nodes], 0
    while begin < len(areas):
        short = min(rect.width, rect.height)
        end = begin + 1
        while end < len(areas) and _ratio(areas[begin : end + 1], short) <= _ratio(
            areas[begin:end], short
        ):
            end += 1
        yield from _row(areas[begin:end], rect)
        thick = sum(areas[begin:end]) / short if short else 0.0
        if rect.width >= rect.height:
            rect = Rect(rect.x + thick, rect.y, max(0.0, rect.width - thick), rect.height)
        else:
            rect = Rect(rect.x, rect.y + thick, rect.width, max(0.0, rect.height - thick))
        begin = end


def _ratio(areas: Sequence[float], short: float) -> float:
    """The worst of the ratios of sides in a row along the shorter side."""
    total = sum(areas)
    if not short or not total or not min(areas):
        return 0.0
    return max(short**2 * max(areas) / total**2, total**2 / (short**2 * min(areas)))


def _row(areas: Sequence[float], rect: Rect) -> Iterator[Rect]:
    """Boxes beside one another along the shorter side."""
    is_wide = rect.width >= rect.height
    short = rect.height if is_wide else rect.width
    thick, at = (sum(areas) / short if short else 0.0), 0.0
    for area in areas:
        long = area / thick if thick else 0.0
        if is_wide:
            yield Rect(rect.x, rect.y + at, thick, long)
        else:
            yield Rect(rect.x + at, rect.y, long, thick)
        at += long
