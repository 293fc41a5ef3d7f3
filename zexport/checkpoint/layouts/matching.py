"""ZeRO-0: whole fp32 masters without names, told apart by their order and by what they look like.

Source: DeepSpeed 0.10 to 0.19, ``runtime/fp16/unfused_optimizer.py`` (``fp32_groups``: the masters
of each parameter group, in the order in which the client gave the parameters) and
``runtime/fp16/fused_optimizer.py`` (``fp32_groups_flat``: one flat master a group, whose layout is
that of the flat tensor that the group's 16-bit weights are views of).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from zexport.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Span:
    """The first and the last parameter, by index, that a master may belong to."""

    first: int
    last: int

    @property
    def is_certain(self) -> bool:
        """Whether only one is left."""
        return self.first == self.last


def match_in_order(
    parameters: Sequence[Hashable], groups: Sequence[Sequence[Hashable]]
) -> list[list[Span]]:
    """Which parameter each master belongs to, as far as kind and order tell.

    A master belongs to a parameter of its own kind (whatever is known of both: a shape, say), two
    masters never to the same one, and the masters of a group come in the order of the parameters.
    Parameters may be left over. A certain span is then the only possibility. It errs towards doubt:
    a span may be uncertain although a search through all combinations would leave one.

    Args:
        parameters: the kind of each parameter, in the model's order.
        groups: the kinds of each group's masters, in the optimizer's order.

    Raises:
        LayoutError: the masters cannot be laid over the parameters in this way.
    """
    matching = _Matching(parameters, groups)
    while any(matching.narrow(number) for number in range(len(groups))):
        pass
    return matching.spans


class _Matching:
    """Spans that shrink from both ends until nothing more follows from kind and order."""

    def __init__(
        self, parameters: Sequence[Hashable], groups: Sequence[Sequence[Hashable]]
    ) -> None:
        self.groups = groups
        self.spans = [[Span(0, len(parameters) - 1)] * len(group) for group in groups]
        self._free: dict[Hashable, list[int]] = {}
        for index, kind in enumerate(parameters):
            self._free.setdefault(kind, []).append(index)
        self._claimed: set[tuple[int, int]] = set()

    def narrow(self, number: int) -> bool:
        """Narrow one group's spans; whether that changed any."""
        before = self.spans[number]
        firsts = self._firsts(number)
        lasts = self._lasts(number)
        after = [Span(first, last) for first, last in zip(firsts, lasts, strict=True)]
        self.spans[number] = after
        for index, span in enumerate(after):
            if span.first > span.last:
                raise _misfit(number, index)
            if span.is_certain and (number, index) not in self._claimed:
                self._claimed.add((number, index))
                self._free[self.groups[number][index]].remove(span.first)
        return before != after

    def _firsts(self, number: int) -> list[int]:
        """The lowest parameter of each master, each above the one before."""
        firsts, lowest = list[int](), 0
        for index, kind in enumerate(self.groups[number]):
            first = max(lowest, self.spans[number][index].first)
            if (number, index) not in self._claimed:
                places = self._free.get(kind, [])
                place = bisect_left(places, first)
                if place == len(places):
                    raise _misfit(number, index)
                first = places[place]
            firsts.append(first)
            lowest = first + 1
        return firsts

    def _lasts(self, number: int) -> list[int]:
        """The highest parameter of each master, each below the one after."""
        lasts, highest = list[int](), None
        for index in reversed(range(len(self.groups[number]))):
            last = self.spans[number][index].last
            last = last if highest is None else min(last, highest)
            if (number, index) not in self._claimed:
                places = self._free.get(self.groups[number][index], [])
                place = bisect_right(places, last)
                if place == 0:
                    raise _misfit(number, index)
                last = places[place - 1]
            lasts.append(last)
            highest = last - 1
        return lasts[::-1]


def _misfit(number: int, index: int) -> LayoutError:
    return LayoutError(
        "the fp32 masters do not fit the module's weights, taken in order",
        f"no weight for master {index} of group {number}",
        "for each master a weight of its shape, in the same order",
    )


def match_unique(parameters: Sequence[Hashable], masters: Sequence[Hashable]) -> list[Span | None]:
    """Which parameter each master belongs to, whatever the order: where no other is like either.

    ``None`` for a master that is like no parameter, or like several, or like another master.
    """
    counts = Counter(parameters), Counter(masters)
    places = {kind: index for index, kind in enumerate(parameters)}
    return [
        Span(places[kind], places[kind]) if counts[0][kind] == counts[1][kind] == 1 else None
        for kind in masters
    ]


def unlike_any(
    parameters: Sequence[tuple[Hashable, Hashable]], masters: Sequence[tuple[Hashable, Hashable]]
) -> list[int]:
    """Which parameters are left over although there is a master of their kind that is like none.

    They contradict each other: one of the two comes from elsewhere. Parameters that are only alike,
    and so cannot be told apart, do not.

    Args:
        parameters: the kind of each parameter, and what it looks like.
        masters: the same of each master.

    Returns:
        Their indices: of those that no master is like, where there are any.
    """
    looks = set(parameters)
    strange = {kind for kind, look in masters if (kind, look) not in looks}
    surplus = Counter(parameters) - Counter(masters)
    left = [at for at, one in enumerate(parameters) if one in surplus and one[0] in strange]
    claimed = set(masters)
    return [at for at in left if parameters[at] not in claimed] or left


def is_tiled(views: Sequence[tuple[int, int]], numel: int) -> bool:
    """Whether views, as (offset, numel) pairs, cover a storage of ``numel`` elements once each."""
    ordered = sorted(view for view in views if view[1])
    ends = [0, *(offset + count for offset, count in ordered)]
    return [offset for offset, _ in ordered] == ends[:-1] and ends[-1] == numel
