"""Where every trained element went: into the output, or why not; the sum is exact or refused."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.contents import FlatData, Role, StoredTensor, ZeroCheckpoint
from zexport.errors import UnsupportedError
from zexport.ranges.extents import ByteSource
from zexport.store.json import Natural


class Accounting(Struct, frozen=True):
    """Elements of the flat partitions of all ranks, and of trained weights that lie elsewhere.

    Attributes:
        total: all of them, as the files have them.
        used: those of a tensor that is exported.
        padding: those that belong to no parameter, by the layout's arithmetic.
        replica: second copies, which are compared with what is exported.
        left_out: those of a tensor that is left out on purpose.
    """

    total: Natural
    used: Natural
    padding: Natural
    replica: Natural
    left_out: Natural

    @property
    def is_exact(self) -> bool:
        """Whether the parts make up the whole."""
        return self.total == self.used + self.padding + self.replica + self.left_out


def account(checkpoint: ZeroCheckpoint, exported: Iterable[StoredTensor]) -> Accounting:
    """The account of an export of some of a checkpoint's tensors.

    The whole is counted on the files' side, from the lengths of the partitions; the parts on the
    other, from the shapes of tensors. That no element is used twice within the parts is what the
    layouts see to: parameters of a group lie one after another, and the tiles of a split tensor
    cover it once.
    """
    flats = _Places(checkpoint.flats)
    trained = {id(t.source): t for t in checkpoint.tensors if flats.count(t.source, t.role)}
    used = _reached((tensor.source for tensor in exported), trained.keys())
    elsewhere = sum(t.numel for t in trained.values() if not flats.hold(t.source))
    result = Accounting(
        total=sum(flat.numel for flat in checkpoint.flats) + elsewhere,
        used=sum(tensor.numel for key, tensor in trained.items() if key in used),
        padding=sum(flat.padding for flat in checkpoint.flats),
        replica=sum(
            replica.other.nbytes // flats.itemsize
            for replica in checkpoint.replicas
            if flats.hold(replica.other)
        ),
        left_out=sum(tensor.numel for key, tensor in trained.items() if key not in used),
    )
    if not result.is_exact:
        parts = result.used + result.padding + result.replica + result.left_out
        raise UnsupportedError(
            "holds trained elements that are not accounted for",
            path=checkpoint.location.tag_dir,
            found=f"{result.total} elements in the partitions",
            expected=f"{parts}: {result.used} used, {result.padding} padding, {result.replica} "
            f"second copies, {result.left_out} left out",
            hint="Report this layout; an export of it could lack weights without a sign",
        )
    return result


def _reached(sources: Iterable[ByteSource | None], known: Set[int]) -> set[int]:
    """Which of the sources that are known by identity these are, or are made of."""
    waiting: list[ByteSource] = [source for source in sources if source is not None]
    seen: set[int] = set()
    while waiting:
        source = waiting.pop()
        if id(source) not in seen:
            seen.add(id(source))
            if id(source) not in known:
                waiting.extend(source.constituents())
    return seen & known


class _Places:
    """Where flat data lies: for a byte of a file, whether it is part of some."""

    def __init__(self, flats: Iterable[FlatData]) -> None:
        flats = tuple(flats)
        self.itemsize = max((flat.dtype.itemsize for flat in flats), default=1)
        spans: dict[Path, list[tuple[int, int]]] = {}
        for flat in flats:
            for extent in flat.source.extents(0, flat.source.nbytes):
                spans.setdefault(extent.path, []).append(
                    (extent.offset, extent.offset + extent.nbytes)
                )
        self._spans: Mapping[Path, list[tuple[int, int]]] = {
            path: sorted(found) for path, found in spans.items()
        }

    def hold(self, source: ByteSource | None) -> bool:
        """Whether a source begins in flat data; then it lies there as a whole."""
        if source is None or not source.nbytes:
            return False
        first = next(iter(source.extents(0, 1)))
        spans = self._spans.get(first.path, [])
        at = bisect_right(spans, (first.offset, 1 << 63)) - 1
        return at >= 0 and first.offset < spans[at][1]

    def count(self, source: ByteSource | None, role: Role) -> bool:
        """Whether a tensor is accounted for: a trained one, or one in flat data."""
        return source is not None and (role is Role.TRAINABLE or self.hold(source))
