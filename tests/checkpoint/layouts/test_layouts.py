"""The arithmetic of the stages, on numbers alone, against partitions cut by hand."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import SHAPES
from zexport.checkpoint.layouts import zero3, zero12
from zexport.errors import LayoutError

_SHAPES = st.lists(SHAPES, max_size=5).map(
    lambda shapes: {f"p{index}": shape for index, shape in enumerate(shapes)}
)


@given(shapes=_SHAPES, world_size=st.integers(1, 6))
def test_stripes_hold_every_element_once_in_order(
    shapes: dict[str, tuple[int, ...]], world_size: int
) -> None:
    flats: list[list[object]] = [[] for _ in range(world_size)]
    for name, shape in shapes.items():
        elements: list[object] = [(name, index) for index in range(prod(shape))]
        while len(elements) % world_size:
            elements.append("padding")
        share = len(elements) // world_size
        for rank in range(world_size):
            flats[rank] += elements[rank * share : (rank + 1) * share]
    zero3.check_flat_numels([shapes], [len(flat) for flat in flats])
    for place in zero3.stripe_parameters([shapes], world_size):
        stop = place.offset + place.stripe_numel
        found = [element for flat in flats for element in flat[place.offset : stop]]
        assert found[: place.numel] == [(place.name, index) for index in range(place.numel)]
        assert set(found[place.numel :]) <= {"padding"}


@pytest.mark.parametrize("numels", [[3, 4], [4, 3], [5, 5], [3, 3]])
def test_a_stripe_too_long_or_too_short_is_a_contradiction(numels: list[int]) -> None:
    with pytest.raises(LayoutError, match="do not add up"):
        zero3.check_flat_numels([{"a": (7,)}], numels)


def test_parameters_of_a_group_follow_one_another() -> None:
    places = list(zero12.place_parameters({"a": (2, 3), "b": (), "c": (0, 4), "d": (5,)}))
    assert [(p.name, p.offset, p.numel) for p in places] == [
        ("a", 0, 6),
        ("b", 6, 1),
        ("c", 7, 0),
        ("d", 7, 5),
    ]


def test_alignment_padding_comes_after_its_parameter() -> None:
    places = list(zero12.place_parameters({"a": (5,), "b": (3,)}, [3, 0]))
    assert [p.offset for p in places] == [0, 8]


@pytest.mark.parametrize(
    ("numel", "partitions"),
    [
        (10, [4, 4, 2]),  # trimmed, as ZeRO-1/2 saves them
        (10, [4, 4, 4]),  # whole, as BF16_Optimizer does
        (3, [2, 1, 0, 0]),  # a group smaller than the world
        (4, [2, 2, 0, 0]),
        (1, [1]),
        (0, [0, 0]),
    ],
)
def test_partitions_that_deepspeed_saves_are_accepted(numel: int, partitions: list[int]) -> None:
    zero12.check_partitions({"a": (numel,)}, partitions)


@pytest.mark.parametrize(
    ("numel", "partitions"),
    [
        (10, [4, 4]),  # too few elements
        (10, [4, 2, 4]),  # a short partition in the middle would shift what follows
        (10, [3, 4, 4]),  # a short first one as well
        (10, [6, 6, 0]),  # more than the padding to twice the world size
        (10, [8, 2]),
        (10, [4, 6, 2]),
        (10, [4, 4, 5]),
        (3, [2, 0, 1, 0]),
        (4, [4, 4]),
    ],
)
def test_partitions_that_would_shift_a_parameter_are_a_contradiction(
    numel: int, partitions: list[int]
) -> None:
    with pytest.raises(LayoutError):
        zero12.check_partitions({"a": (numel,)}, partitions)


@pytest.mark.parametrize("paddings", [[1], [0, 0, 0], [-1, 1]])
def test_paddings_that_do_not_fit_the_parameters_are_a_contradiction(paddings: list[int]) -> None:
    with pytest.raises(LayoutError, match="param_alignment_paddings"):
        zero12.check_partitions({"a": (2,), "b": (2,)}, [4], paddings=paddings)


def test_padding_after_each_parameter_needs_its_room_in_the_partitions() -> None:
    shapes = {"a": (3,), "b": (3,)}
    zero12.check_partitions(shapes, [4, 4], paddings=[1, 1])
    with pytest.raises(LayoutError, match="wrong length"):
        zero12.check_partitions(shapes, [4, 3], paddings=[1, 1])


@given(numel=st.integers(0, 60), world_size=st.integers(1, 7))
def test_partitions_for_other_ranks_are_those_that_deepspeed_saves(
    numel: int, world_size: int
) -> None:
    padded = [*range(numel), *[None] * (-numel % (2 * world_size))]
    share = len(padded) // world_size
    cut = [padded[rank * share : (rank + 1) * share] for rank in range(world_size)]
    assert zero12.partition_numel(numel, world_size) == share
    paddings = [zero12.padding_in(numel, world_size, rank) for rank in range(world_size)]
    assert paddings == [part.count(None) for part in cut]
    zero12.check_partitions({"a": (numel,)}, [share - padding for padding in paddings])


def test_a_group_smaller_than_the_world_is_padding_on_several_ranks() -> None:
    assert [zero12.padding_in(7, 3, rank) for rank in range(3)] == [0, 1, 4]


def test_round_robin_deals_parameters_out_to_the_ranks() -> None:
    assert zero12.dealt_out(7, 3) == [0, 3, 6, 1, 4, 2, 5]
    assert zero12.dealt_out(2, 4) == [0, 1]


@pytest.mark.parametrize(
    ("size", "ends"),
    [
        (100, [5]),  # all of it is less than one
        (10, [5]),
        (9, [4, 5]),  # the stripes are 4, 1, 3, 1, 1
        (4, [1, 3, 5]),
        (1, [1, 2, 3, 4, 5]),
        (None, [5]),
    ],
)
def test_a_sub_group_is_full_when_its_stripes_reach_the_size(
    size: int | None, ends: list[int]
) -> None:
    found = zero3.sub_groups([7, 2, 6, 1, 2], world_size=2, size=size)
    assert [own.stop for own in found] == ends
    assert [index for own in found for index in own] == [*range(5)]


def test_parameters_that_a_rank_records_at_other_places_are_a_contradiction() -> None:
    places = [*zero12.place_parameters({"a": (2,), "b": (2,)})]
    zero12.check_fragments(places, 4, [{"a": (0, 2), "b": (2, 2)}])
    with pytest.raises(LayoutError, match="the partition of rank 0 is another"):
        zero12.check_fragments(places, 4, [{"a": (2, 2), "b": (0, 2)}])
