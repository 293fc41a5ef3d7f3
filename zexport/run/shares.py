"""Dividing a plan among workers: shares of equal bytes, cut where it costs least.

Where the nodes of a cluster keep the rank files on their own disks, each one's share is what its
files hold of every output file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from zexport.export.plan import ExportPlan, FilePlan, TensorPlan
from zexport.ranges.extents import Extent, Window
from zexport.store.address import Address

_SLACK = 50
"""A share may end at the border of a tensor that is within this part of a share's size."""

_RANGES_MAX = 1 << 12
"""A tensor that is gathered from more ranges is one node's work, which asks the others for them."""


class Share(Struct, frozen=True):
    """Which worker it is: ``number`` of ``count``, from 1; alone, it does everything."""

    number: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class Stretch(Struct, frozen=True):
    """What one worker writes of a file: bytes ``start`` to ``stop`` (half-open) of its tensors.

    They are counted through the tensors alone, in file order, whatever lies between them.
    ``tensors`` are these bytes' own: of one that is cut, the elements within, one after another.
    What a node writes of its own files lies scattered (``is_scattered``): then there are no such
    bounds, and a tensor may stand there several times, with the elements of one run each.
    """

    file: FilePlan
    start: int
    stop: int
    tensors: tuple[TensorPlan, ...]
    is_scattered: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of tensors."""
        if self.is_scattered:
            return sum(tensor.nbytes for tensor in self.tensors)
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the file, so that who writes it completes the file."""
        return len(self.tensors) == len(self.file.tensors) and self.nbytes == self.file.data_nbytes

    @property
    def edges(self) -> frozenset[str]:
        """The tensors that may go on in another stretch."""
        if self.is_whole or not self.tensors:
            return frozenset()
        if self.is_scattered:
            return frozenset(tensor.name for tensor in self.tensors)
        return frozenset({self.tensors[0].name, self.tensors[-1].name})

    @property
    def name(self) -> str:
        """Its name in the unfinished folder, which no other stretch has."""
        name = self.file.filename
        if self.is_scattered and not self.is_whole:
            places = "".join(f"{one.name} {one.offset} {one.numel}\n" for one in self.tensors)
            return f"{name}@{blake3(places.encode(errors='backslashreplace')).hexdigest(16)}"
        return name if self.is_whole else f"{name}@{self.start}-{self.stop}"


def whole(file: FilePlan) -> Stretch:
    """A file as one stretch."""
    return Stretch(file, 0, file.data_nbytes, file.tensors)


def shares_of(plan: ExportPlan, count: int) -> list[tuple[Stretch, ...]]:
    """What each of ``count`` workers writes of a plan: everything once, the same on every machine.

    Where nodes keep the sources, the first workers are these, and any others have nothing to do.
    An object is written by one alone.
    """
    if nodes := nodes_of(plan):
        shares = _by_node(plan.shards, nodes)
        return shares + [()] * (count - len(shares))
    return divide(plan.shards, count, within_files=not isinstance(plan.out_dir, Address))


def nodes_of(plan: ExportPlan) -> tuple[str, ...]:
    """The nodes of a cluster that keep what a plan reads, by their ids, in its sources' order."""
    paths = (source.path for source in plan.sources)
    return tuple(dict.fromkeys(node for path in paths if (node := _node_of(path))))


def _node_of(path: Path) -> str:
    """The node of a cluster that a file lies on; nothing where it is no node's own."""
    return path.parts[1] if isinstance(path, Address) and path.is_on_node else ""


def _by_node(files: Iterable[FilePlan], nodes: Sequence[str]) -> list[tuple[Stretch, ...]]:
    """For each node what it has on its disk of every file, as one stretch of each."""
    found: dict[str, list[Stretch]] = {node: [] for node in nodes}
    for file in files:
        held: dict[str, list[TensorPlan]] = {}
        for tensor in file.tensors:
            for node, part in _parts(tensor):
                held.setdefault(node or nodes[0], []).append(part)
        for node, tensors in held.items():
            found[node].append(
                Stretch(file, 0, file.data_nbytes, tuple(tensors), is_scattered=True)
            )
    return [*map(tuple, found.values())]


def _parts(tensor: TensorPlan) -> Iterator[tuple[str, TensorPlan]]:
    """A tensor cut where its bytes go on on another node, each part with its node.

    What is worked out of other tensors, or gathered from very many ranges, is left whole.
    """
    ranges = [*islice(tensor.source.extents(0, tensor.source.nbytes), _RANGES_MAX + 1)]
    size = tensor.stored_dtype.itemsize
    runs: list[tuple[str, int]] = []  # nodes, and where in the stored bytes what they have ends
    for one in ranges:
        node, end = _node_of(one.path), (runs[-1][1] if runs else 0) + one.nbytes
        if runs and runs[-1][0] == node:
            runs.pop()
        runs.append((node, end))
    is_plain = all(type(one) is Extent for one in ranges) and len(ranges) <= _RANGES_MAX
    if len(runs) < 2 or not is_plain or any(end % size for _, end in runs):
        yield runs[0][0] if runs else "", tensor
        return
    begin = 0
    for node, end in runs:
        first, last = (at // size * tensor.dtype.itemsize for at in (begin, end))
        yield node, _cut(tensor, first, last, tensor.nbytes)
        begin = end


def divide(
    files: Sequence[FilePlan], count: int, *, within_files: bool = True
) -> list[tuple[Stretch, ...]]:
    """What each of ``count`` workers writes: everything once, in order, in shares of equal bytes.

    A share ends between two tensors where a border is near, so that few tensors are written by two
    workers, and else within one, between two elements; or between the two files that are nearest.
    Pure, and the same on every machine.
    """
    if count == 1:
        return [tuple(map(whole, files))]
    ends = [*accumulate(file.data_nbytes for file in files)]
    nbytes = ends[-1] if ends else 0
    slack = nbytes // count // _SLACK if within_files else nbytes
    units = (
        ((t.nbytes, t.dtype.itemsize) for file in files for t in file.tensors)
        if within_files
        else ((file.data_nbytes, 1) for file in files)
    )
    shares = []
    for first, last in pairwise(_cuts(_Borders(units), nbytes, count, slack)):
        own = []
        for file, end in zip(files, ends, strict=True):
            begin = end - file.data_nbytes
            if (first < end and begin < last) or (begin == end and first <= begin < last):
                own.append(_stretch(file, max(first - begin, 0), min(last, end) - begin))
        shares.append(tuple(own))
    return shares


def _stretch(file: FilePlan, start: int, stop: int) -> Stretch:
    """Some of a file; a tensor without bytes belongs to what follows it, if anything does."""
    tensors, begin = [], 0
    is_last = stop == file.data_nbytes
    for tensor in file.tensors:
        nbytes = tensor.nbytes
        first, last = max(start - begin, 0), min(stop - begin, nbytes)
        if first < last or (not nbytes and start <= begin and (begin < stop or is_last)):
            tensors.append(_cut(tensor, first, last, nbytes))
        begin += nbytes
    return Stretch(file, start, stop, tuple(tensors))


def _cut(tensor: TensorPlan, first: int, last: int, nbytes: int) -> TensorPlan:
    """Bytes ``first`` to ``last`` of a tensor, which begin and end between two elements."""
    if (first, last) == (0, nbytes):
        return tensor
    size, stored = tensor.dtype.itemsize, tensor.stored_dtype.itemsize
    numel = (last - first) // size
    source = Window(tensor.source, first // size * stored, numel * stored)
    return replace(tensor, shape=(numel,), source=source, offset=tensor.offset + first)


def _cuts(borders: _Borders, nbytes: int, count: int, slack: int) -> Iterator[int]:
    """Where shares begin and end, in bytes of all files together; at the end all that is left."""
    yield 0
    for number in range(1, count):
        yield borders.nearest(nbytes * number // count, slack)
    yield nbytes + 1


class _Borders:
    """Where tensors or files begin, in bytes of all together; asked in ascending order.

    Of each the bytes, and how many of them are not to be parted.
    """

    def __init__(self, units: Iterable[tuple[int, int]]) -> None:
        self._units = iter(units)
        self._begin = self._end = 0
        self._itemsize = 1

    def nearest(self, place: int, slack: int) -> int:
        """A border within ``slack`` of ``place``, else the element that lies there."""
        while self._end <= place and (unit := next(self._units, None)) is not None:
            self._begin, (nbytes, self._itemsize) = self._end, unit
            self._end += nbytes
        before, after = place - self._begin, self._end - place
        if min(before, after) <= slack:
            return self._begin if before <= after else self._end
        return place - before % self._itemsize
