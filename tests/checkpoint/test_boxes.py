"""Tensors joined from boxes, and cut into them again, have the elements of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.stored_file import StoredFile
from zexport.checkpoint.boxes import Bound, Piece, cut_boxes, join_boxes, replicas_of
from zexport.checkpoint.boxes import state_replicas as states_of
from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, Parameter, Role
from zexport.errors import IncompleteCheckpointError, LayoutError
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource

F32, BF16 = DType.F32, DType.BF16


def _region(start: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


@st.composite
def _grids(draw: st.DrawFn) -> tuple[Shape, list[tuple[Shape, Shape]]]:
    """Return the shape of a tensor and boxes that cover it, in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    cuts = [sorted([0, n, *draw(st.lists(st.integers(0, n), max_size=2))]) for n in shape]
    grid = product(*map(pairwise, cuts))
    boxes = [(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in grid]
    return shape, draw(st.permutations(boxes))


@given(grid=_grids(), data=st.data())
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_joined_boxes_are_the_whole_and_are_cut_again(
    grid: tuple[Shape, list[tuple[Shape, Shape]]], data: st.DataObject, tmp_path: Path
) -> None:
    (shape, boxes), file = grid, StoredFile(tmp_path / "values")
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    pieces, forms = [], data.draw(st.sampled_from([[0], [1], [2], [0, 1, 2]]))
    for start, size in boxes:  # each in a part that is as large, larger, or the whole
        before, after = [
            ((0,) * len(size), (0,) * len(size)),
            ((1, 0, 2)[: len(size)], (0, 2, 1)[: len(size)]),
            (start, [n - a - b for n, a, b in zip(shape, start, size, strict=True)]),
        ][data.draw(st.sampled_from(forms))]
        extents = [a + n + b for a, n, b in zip(before, size, after, strict=True)]
        part = np.full(extents, -1, np.float32)
        part[_region(before, size)] = whole[_region(start, size)]
        slots = {MASTER: file.store(part), "exp_avg": file.store(-part)}
        pieces.append(Piece(Parameter("w", part.shape, Role.FROZEN, slots), start, before, size))
    filled = [one for one in pieces if math.prod(one.shape)]
    twice = [
        Piece(o.part, o.start, o.origin, o.shape) for o in filled[: data.draw(st.integers(0, 2))]
    ]
    assert join_boxes("w", shape, Role.TRAINABLE, [*pieces, *filled])[1] == []  # the same boxes
    joined, copies = join_boxes("w", shape, Role.TRAINABLE, [*pieces, *twice])
    assert (joined.name, joined.shape, joined.role) == ("w", shape, Role.TRAINABLE)
    assert file.read(joined.source(MASTER)) == whole.tobytes()
    assert file.read(joined.source("exp_avg")) == (-whole).tobytes()
    for copy, one in zip(copies, twice, strict=True):
        for own in (copy.kept, copy.other):
            assert file.read(own.source(MASTER)) == whole[_region(one.start, one.shape)].tobytes()
    for start, size in boxes:
        zero = (0,) * len(size)
        own = cut_boxes(joined, size, [Piece(joined, start, zero, size)])
        assert (own.name, own.shape, own.role) == ("w", size, Role.TRAINABLE)
        assert file.read(own.source("exp_avg")) == (-whole[_region(start, size)]).tobytes()


def _row(file: StoredFile, *slots: str, dtype: DType = F32) -> Parameter:
    stored = {slot: file.store(np.ones((2, 3), np.float32), dtype) for slot in slots}
    return Parameter("w", (2, 3), Role.TRAINABLE, stored)


def _stack(parts: Sequence[Parameter], rows: int = 4, step: int = 2) -> Parameter:
    pieces = [Piece(part, (n * step, 0), (0, 0), part.shape) for n, part in enumerate(parts)]
    return join_boxes("w", (rows, 3), Role.TRAINABLE, pieces)[0]


def test_boxes_with_gaps_overlaps_or_two_dtypes_are_refused(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "values")
    one, other = _row(file, "exp_avg", MASTER), _row(file, MASTER)
    assert [*_stack([one, other]).slots] == [*_stack([other, one]).slots] == [MASTER]
    for parts, rows, step, words in (
        ([one], 4, 2, "leave gaps"),
        ([one, other], 4, 1, "overlap"),
        ([one, other], 3, 2, "exceeds"),
        ([], 0, 2, "no file has a part"),
        ([one, _row(file, MASTER, dtype=BF16)], 4, 2, "different dtypes"),
    ):
        with pytest.raises(LayoutError, match=words):
            _stack(parts, rows, step)
    with pytest.raises(LayoutError, match="leave gaps"):
        cut_boxes(one, (2, 3), [Piece(one, (0, 0), (0, 0), (1, 3))])
    lost = Parameter("w", (2, 3), Role.TRAINABLE, {MASTER: Bound(F32, None)})
    with pytest.raises(IncompleteCheckpointError, match="partitions of a weight are missing"):
        _stack([one, lost]).source(MASTER)


@pytest.mark.parametrize(
    ("master", "module", "is_compared"),
    [
        (F32, BF16, True),
        (F32, F32, True),
        (BF16, F32, True),
        (BF16, DType.F16, False),  # neither is the other, rounded
        (F32, DType.I64, False),
    ],
)
def test_module_weights_are_compared_if_one_is_the_other_rounded(
    master: DType, module: DType, is_compared: bool, tmp_path: Path
) -> None:
    optim, model = (StoredFile(tmp_path / name) for name in ("optim", "model"))
    stored = {MASTER: optim.store(np.ones(3), master), MODULE: model.store(np.ones(3), module)}
    one = Parameter("w", (3,), Role.TRAINABLE, stored)
    pair = *(own.bind() for own in stored.values()), master, module
    for matched, path in ((frozenset[str](), model.path), (frozenset({"w"}), optim.path)):
        found = [*replicas_of(Cell({"w": one}, matched=matched))]
        assert [(r.kept, r.other, r.kept_dtype, r.other_dtype) for r in found] == [
            pair
        ] * is_compared  # type: ignore[union-attr]
        assert all((r.path, r.is_matched_by_value) == (path, bool(matched)) for r in found)  # type: ignore[union-attr]
    for role, left in ((Role.FROZEN, {}), (Role.TRAINABLE, {MASTER}), (Role.TRAINABLE, {MODULE})):
        kept = {slot: own for slot, own in stored.items() if slot not in left}
        assert [*replicas_of(Cell({"w": Parameter("w", (3,), role, kept)}))] == []


def _pairs(cell: Cell) -> list[tuple[ByteSource, ByteSource]]:
    return [(one.kept, one.other) for one in replicas_of(cell)]


def test_split_weights_are_compared_box_by_box(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "values")
    both = [_row(file, MASTER, MODULE, "exp_avg") for _ in range(2)]
    assert _pairs(Cell({"w": _stack(both)})) == [(o.source(MASTER), o.source(MODULE)) for o in both]
    wide = np.arange(10, dtype=np.float32).reshape(2, 5)
    part = Parameter("w", (2, 5), Role.TRAINABLE, {MASTER: file.store(wide)})
    pieces = [Piece(part, (0, 0), (0, 1), (2, 3)), Piece(both[0], (2, 0), (0, 0), (2, 3))]
    joined = join_boxes("w", (4, 3), Role.TRAINABLE, pieces)[0]  # one in a wider part
    assert file.read(joined.source(MASTER))[:24] == wide[:, 1:4].tobytes()
    halves = [_row(file, MODULE) for _ in range(2)]
    whole = {MASTER: file.store(np.arange(12, dtype=np.float32))}
    mixed = Parameter("w", (4, 3), Role.TRAINABLE, {**_stack(halves).stored, **whole})
    pairs = _pairs(Cell({"w": mixed}))
    assert [other for _, other in pairs] == [one.source(MODULE) for one in halves]
    data = b"".join(file.read(kept) for kept, _ in pairs)
    assert data == np.arange(12, dtype=np.float32).tobytes()


def test_boxes_may_turn_rows_around_or_be_empty(tmp_path: Path) -> None:
    file, rows = StoredFile(tmp_path / "values"), np.arange(2, dtype=np.float32)
    for values, *boxes in (
        (rows.reshape(2, 1), ((1, 0), (0, 0), (1, 1)), ((0, 0), (1, 0), (1, 1))),
        (rows[:1].reshape(1, 1), ((0, 0), (0, 0), (1, 1)), ((0, 1), (0, 1), (1, 0))),
    ):
        part = Parameter("w", values.shape, Role.TRAINABLE, {MASTER: file.store(values)})
        pieces = [Piece(part, *box) for box in boxes]
        joined = join_boxes("w", part.shape, Role.TRAINABLE, pieces)[0]
        for one in (joined, cut_boxes(part, part.shape, pieces)):
            assert file.read(one.source(MASTER)) == values[::-1].tobytes()


def test_second_copies_of_weights_and_states_are_compared(tmp_path: Path) -> None:
    file = StoredFile(tmp_path / "values")
    trained = _row(file, MASTER, "exp_avg", "step")
    other, module = _row(file, "exp_avg", MASTER), _row(file, MODULE, dtype=BF16)
    trained = Parameter("w", (2, 3), Role.TRAINABLE, {**trained.stored, **module.stored})
    again = _row(file, MODULE, dtype=BF16)
    lost = Parameter("w", (2, 3), Role.TRAINABLE, {MASTER: Bound(F32, None)})
    for kept, one, pairs in (
        (trained, other, [(trained.source(MASTER), other.source(MASTER))]),
        (trained, again, [(trained.source(MASTER), again.source(MODULE))]),
        (
            module,
            trained,
            [(module.source(MODULE),) * 2, (trained.source(MASTER), module.source(MODULE))],
        ),
        (module, again, [(module.source(MODULE), again.source(MODULE))]),
        (other, lost, []),
        (lost, other, []),
    ):
        assert _pairs(Cell({}, copies=(Copy(kept, one),))) == pairs
    states = [*states_of([Cell({}, copies=(Copy(trained, other), Copy(trained, trained)))])]
    assert [(one.name, one.kept, one.other) for one in states] == [
        ("w (exp_avg)", trained.source("exp_avg"), other.source("exp_avg")),
        ("w (exp_avg)", trained.source("exp_avg"), trained.source("exp_avg")),
        ("w (step)", trained.source("step"), trained.source("step")),
    ]
