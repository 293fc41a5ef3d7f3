"""Plans are the same only if everything that they compare by is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from zexport.plan.plan import FilePlan, TensorPlan
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Chain, Extent, Striped, Window
from zexport.run.fingerprint import fingerprint

RANKS = (Chain((Extent(Path("a"), 0, 40),)), Chain((Extent(Path("b"), 0, 40),)))
TENSOR = TensorPlan("x", (4,), DType.F32, "y", DType.F32, Striped(RANKS, 8, 8, 16), 0)
SHARD = FilePlan("model.safetensors", b"header", (TENSOR, replace(TENSOR, name="z")))


def test_the_same_plan_made_twice_has_one_fingerprint() -> None:
    again = replace(SHARD, tensors=tuple(replace(one) for one in SHARD.tensors))
    assert fingerprint("v", again) == fingerprint("v", SHARD)


@pytest.mark.parametrize(
    "other",
    [
        replace(SHARD, head=b"Header"),
        replace(SHARD, tensors=SHARD.tensors[:1]),
        replace(SHARD, tensors=SHARD.tensors[::-1]),
        replace(SHARD, tensors=(replace(TENSOR, dtype=DType.BF16), SHARD.tensors[1])),
        replace(SHARD, tensors=(replace(TENSOR, shape=(2, 2)), SHARD.tensors[1])),
        replace(SHARD, tensors=(replace(TENSOR, source=Striped(RANKS, 12, 8, 16)), TENSOR)),
        replace(SHARD, tensors=(replace(TENSOR, source=Striped(RANKS[::-1], 8, 8, 16)), TENSOR)),
        replace(SHARD, tensors=(replace(TENSOR, source=Window(RANKS[0], 8, 16)), TENSOR)),
    ],
)
def test_any_difference_shows(other: FilePlan) -> None:
    assert fingerprint("v", other) != fingerprint("v", SHARD)
    assert fingerprint("w", SHARD) != fingerprint("v", SHARD)


def test_parts_cannot_be_taken_for_others() -> None:
    assert fingerprint("a", "b") != fingerprint("ab", "")
    assert fingerprint(("a",), "b") != fingerprint(("a", "b"))
    assert fingerprint(1, "1") != fingerprint("1", 1)
    assert fingerprint(b"1") != fingerprint(1)


@dataclass(frozen=True)
class _Many:
    shared: tuple[Extent, ...]
    number: int


def test_what_many_share_is_looked_into_once() -> None:
    reads: list[str] = []

    class Counted(Extent):
        def __getattribute__(self, name: str) -> object:
            reads.append(name)
            return super().__getattribute__(name)

    shared = (Counted(Path("a"), 0, 1),)
    fingerprint(*(_Many(shared, number) for number in range(100)))
    assert reads.count("offset") == 1
