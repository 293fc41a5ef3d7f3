"""Which weight each master without a name is of: by order, by kind, and by what they look like.

Source: DeepSpeed 0.10 to 0.19, ``runtime/fp16/unfused_optimizer.py`` (``fp32_groups``: the masters
of each parameter group, in the order in which the client gave the parameters).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import prod

from msgspec import Struct

from zexport.errors import LayoutError
from zexport.formats.inert import TensorRef
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Window

_Look = tuple[Hashable, Hashable]
"""What is known of a tensor from metadata, and a digest of samples of its values."""


class Weight(Struct, frozen=True):
    """A weight as the module keeps it, in the element type that it trained in.

    ``view`` is the tensor of the model file that it is; ``None`` if it was put together.
    """

    name: str
    shape: Shape
    dtype: DType
    source: ByteSource
    view: TensorRef | None = None
    of_experts: bool = False

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)


class Master(Struct, frozen=True):
    """The fp32 values of one weight."""

    source: ByteSource
    dtype: DType


class Masters(Struct, frozen=True):
    """The masters that are some weight's beyond doubt, by its name, and why others are not.

    ``all_fit`` says whether there may be a weight for every master; ``unlike`` are weights that no
    master is like, where there are masters like no weight: one of the two is not of this save.
    """

    found: Mapping[str, Master]
    doubt: str = ""
    all_fit: bool = True
    unlike: tuple[str, ...] = ()


class Run(Struct, frozen=True):
    """Elements that lie together: an unnamed master, or what of the module it may stand for.

    ``kind`` is what metadata tell of it; ``parts`` are the weights in it, and their places.
    """

    kind: Hashable
    source: ByteSource
    dtype: DType
    parts: tuple[tuple[Weight, int], ...] = ()


class Span(Struct, frozen=True):
    """The first and the last parameter, by index, that a master may belong to."""

    first: int
    last: int

    @property
    def is_certain(self) -> bool:
        """Whether only one is left."""
        return self.first == self.last


def match(
    units: Sequence[Run],
    groups: Sequence[Sequence[Run]],
    sample: Callable[[Sequence[Run], DType], Iterable[bytes]],
) -> Masters:
    """By kind and order; by samples where these leave a doubt; else what is like nothing else."""
    masters = [master for group in groups for master in group]
    misfit: LayoutError | None = None
    try:
        spans = match_in_order([u.kind for u in units], [[m.kind for m in g] for g in groups])
    except LayoutError as error:
        misfit, spans = error, []
    if not misfit and all(span.is_certain for span in spans):
        return Masters(_pair(units, masters, spans))
    runs = [*units, *masters]
    samples = sample(runs, _one_type(units))
    looks = [(run.kind, seen) for run, seen in zip(runs, samples, strict=True)]
    looks, of_masters = looks[: len(units)], looks[len(units) :]
    if misfit is not None:
        return _match_unordered(units, masters, (looks, of_masters), misfit)
    rest = iter(of_masters)
    spans = match_in_order(looks, [[next(rest) for _ in group] for group in groups])
    doubt = _ambiguity(units, spans)
    found = _pair(units, masters, spans)
    if not found and masters:
        raise LayoutError(doubt, "weights that are alike", "weights that differ")
    return Masters(found, doubt)


def _one_type(units: Iterable[Run]) -> DType:
    dtypes = {unit.dtype for unit in units}
    if len(dtypes) > 1:
        raise LayoutError(
            "the module's weights are of several types",
            ", ".join(sorted(dtype.torch_name for dtype in dtypes)),
            "one",
        )
    return next(iter(dtypes), DType.F32)


def _match_unordered(
    units: Sequence[Run],
    masters: Sequence[Run],
    looks: tuple[Sequence[_Look], Sequence[_Look]],
    misfit: LayoutError,
) -> Masters:
    """By samples alone; a weight and a master of one kind that are like nothing are at odds."""
    ends: dict[_Look, Span] = {}
    for at, look in enumerate(looks[0]):
        ends[look] = Span(ends[look].first if look in ends else at, at)
    claims = Counter(looks[1])
    spans = [ends.get(look) if claims[look] == 1 else None for look in looks[1]]
    found = _pair(units, masters, spans)
    if not found and masters:
        raise misfit
    if all(span is not None and span.is_certain for span in spans):
        return Masters(found, all_fit=False)
    like = [ends[look] for look in looks[1] if look in ends]
    alike = _ambiguity(units, like) if len(like) == len(masters) else ""
    doubt = alike or f"{misfit.problem} ({misfit.found})"
    unlike = tuple(weight.name for at in _unlike_any(*looks) for weight, _ in units[at].parts)
    return Masters(found, doubt, all_fit=False, unlike=unlike)


def _ambiguity(units: Sequence[Run], spans: Iterable[Span]) -> str:
    """Which weights look like one master, where some do."""
    for span in spans:
        if not span.is_certain:
            one, other = (units[at].parts[0][0].name for at in (span.first, span.last))
            return f"several weights look like one fp32 master ({one!r} and {other!r} alike)"
    return ""


def _pair(
    units: Sequence[Run], masters: Sequence[Run], spans: Iterable[Span | None]
) -> dict[str, Master]:
    """The masters whose unit is certain, cut into the masters of its weights."""
    found: dict[str, Master] = {}
    for span, master in zip(spans, masters, strict=True):
        if span is None or not span.is_certain:
            continue
        parts, itemsize = units[span.first].parts, master.dtype.itemsize
        for weight, offset in parts:
            window = Window(master.source, offset * itemsize, weight.numel * itemsize)
            source = master.source if len(parts) == 1 else window
            found[weight.name] = Master(source, master.dtype)
    return found


def match_in_order(
    parameters: Sequence[Hashable], groups: Sequence[Sequence[Hashable]]
) -> list[Span]:
    """Which parameter each master of all groups belongs to, as far as kind and order tell.

    A master belongs to a parameter of its own kind (whatever is known of both: a shape, say), two
    masters never to the same one, and the masters of a group come in the order of the parameters.
    Parameters may be left over. A certain span is then the only possibility. It errs towards doubt:
    a span may be uncertain although a search through all combinations would leave one.
    """
    matching = _Matching(parameters, groups)
    while any(matching.narrow(number) for number in range(len(groups))):
        pass
    return [span for group in matching.spans for span in group]


class _Matching:
    """Spans that shrink from both ends until nothing more follows from kind and order.

    A place is a parameter's index, counted upwards from the first (direction 1) or, below zero,
    upwards to the last (direction -1), so that both ends are narrowed alike.
    """

    def __init__(
        self, parameters: Sequence[Hashable], groups: Sequence[Sequence[Hashable]]
    ) -> None:
        self._groups = groups
        self.spans = [[Span(0, len(parameters) - 1)] * len(group) for group in groups]
        self._free: dict[tuple[Hashable, int], list[int]] = {}
        for index, kind in enumerate(parameters):
            self._free.setdefault((kind, 1), []).append(index)
        for index, kind in reversed([*enumerate(parameters)]):
            self._free.setdefault((kind, -1), []).append(-index)
        self._claimed: set[tuple[int, int]] = set()

    def narrow(self, number: int) -> bool:
        """Narrow one group's spans; whether that changed any."""
        before = self.spans[number]
        firsts = self._lowest(number, 1, [span.first for span in before])
        lasts = self._lowest(number, -1, [-span.last for span in reversed(before)])
        after = [Span(one, -other) for one, other in zip(firsts, reversed(lasts), strict=True)]
        self.spans[number] = after
        for index, (span, kind) in enumerate(zip(after, self._groups[number], strict=True)):
            if span.first > span.last:
                raise _misfit(number, index)
            if span.is_certain and (number, index) not in self._claimed:
                self._claimed.add((number, index))
                self._free[kind, 1].remove(span.first)
                self._free[kind, -1].remove(-span.first)
        return before != after

    def _lowest(self, number: int, direction: int, bounds: Sequence[int]) -> list[int]:
        """The lowest place of each master, none below its bound, each above the one before."""
        kinds, places = self._groups[number], list[int]()
        for nth, bound in enumerate(bounds):
            index = nth if direction > 0 else len(kinds) - 1 - nth
            lowest = max(bound, places[-1] + 1) if places else bound
            if (number, index) not in self._claimed:
                free = self._free.get((kinds[index], direction), [])
                at = bisect_left(free, lowest)
                if at == len(free):
                    raise _misfit(number, index)
                lowest = free[at]
            places.append(lowest)
        return places


def _misfit(number: int, index: int) -> LayoutError:
    return LayoutError(
        "the fp32 masters do not fit the module's weights, taken in order",
        f"no weight for master {index} of group {number}",
        "for each master a weight of its shape, in the same order",
    )


def _unlike_any(
    parameters: Sequence[tuple[Hashable, Hashable]], masters: Sequence[tuple[Hashable, Hashable]]
) -> list[int]:
    """Which parameters are left over although there is a master of their kind that is like none.

    They contradict each other: one of the two comes from elsewhere. Parameters that are only alike,
    and so cannot be told apart, do not. Indices of those that no master is like come alone.
    """
    looks = set(parameters)
    strange = {kind for kind, look in masters if (kind, look) not in looks}
    surplus = Counter(parameters) - Counter(masters)
    left = [at for at, one in enumerate(parameters) if one in surplus and one[0] in strange]
    claimed = set(masters)
    return [at for at in left if parameters[at] not in claimed] or left
