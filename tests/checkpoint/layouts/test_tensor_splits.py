"""Where shards belong, and which names a pattern means, against torch and ``re``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from zexport.checkpoint.layouts.boxes import (
    Joined,
    Piece,
    box_start,
    concatenated,
    interleaved,
    placed,
    replicated,
)
from zexport.checkpoint.layouts.patterns import MAX_LENGTH, MAX_WILD, PatternTable
from zexport.errors import DamagedCheckpointError, LayoutError, UnsupportedError

_FILE = Path("mp_rank_00_model_states.pt")


def laid(joined: Joined, shards: list[torch.Tensor]) -> torch.Tensor:
    """The whole, box after box; -1 where there is none."""
    whole = torch.full(joined.shape, -1)
    for piece in joined.pieces:
        _box(whole, piece.start, piece)[...] = _box(shards[piece.rank], piece.origin, piece)
    return whole


def _box(tensor: torch.Tensor, start: tuple[int, ...], piece: Piece) -> torch.Tensor:
    ranges = zip(start, piece.shape, strict=True)
    return tensor[tuple(slice(at, at + size) for at, size in ranges)]


@given(
    rows=st.integers(1, 4),
    dim=st.integers(0, 1),
    widths=st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3
        )
    ),
)
def test_fused_parts_go_back_where_they_were_cut_out(
    rows: int, dim: int, widths: list[list[int]]
) -> None:
    whole = torch.arange(rows * sum(map(sum, widths))).view(rows, -1)
    whole = whole if dim == 1 else whole.t().contiguous()
    parts = torch.split(whole, [sum(row) for row in widths], dim)
    pieces = [torch.split(part, row, dim) for part, row in zip(parts, widths, strict=True)]
    shards = [torch.cat(own, dim) for own in zip(*pieces, strict=True)]
    joined = interleaved([tuple(shard.shape) for shard in shards], dim, widths)
    assert torch.equal(laid(joined, shards), whole)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_uneven_shards_follow_one_another(sizes: list[int]) -> None:
    shards = list(torch.split(torch.arange(sum(sizes) * 3).view(-1, 3), sizes))
    joined = concatenated([tuple(shard.shape) for shard in shards], 0)
    assert torch.equal(laid(joined, shards), torch.cat(shards))


@given(
    whole=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    data=st.data(),
)
def test_a_strided_view_is_the_box_that_torch_sees(
    whole: tuple[int, ...], data: st.DataObject
) -> None:
    starts = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
    box = tuple(
        data.draw(st.integers(1, size - at)) for size, at in zip(whole, starts, strict=True)
    )
    tensor = torch.zeros(whole)
    view = tensor[tuple(slice(at, at + n) for at, n in zip(starts, box, strict=True))]
    assert box_start(box, whole, int(view.storage_offset()), view.stride()) == starts


@pytest.mark.parametrize(
    ("box", "offset", "strides"),
    [
        ((2, 2), 0, (1, 4)),  # transposed
        ((2, 2), 3, (4, 1)),  # runs over the end of a row
        ((2, 2), 0, (8, 1)),  # every second row
        ((2, 2), -1, (4, 1)),
        ((4,), 0, (1,)),
        ((3, 4), 4, (4, 1)),  # runs over the last row
    ],
)
def test_a_view_that_is_no_box_is_known(
    box: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> None:
    assert box_start(box, (3, 4), offset, strides) is None


def test_a_box_without_elements_may_begin_at_the_end_of_a_row() -> None:
    """As DeepSpeed 0.19 records a rank's shard where there are fewer heads than ranks."""
    assert box_start((3, 0), (3, 4), 4, (4, 1)) == (0, 0)
    assert box_start((3, 0), (3, 4), 4, (1,)) is None


def test_copies_are_kept_once_and_named_in_pairs() -> None:
    joined = replicated([(2, 3)] * 3)
    assert [piece.rank for piece in joined.pieces] == [0]
    assert [(kept.rank, other.rank) for kept, other in joined.copies] == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    "join",
    [
        lambda: replicated([(2, 3), (3, 2)]),
        lambda: concatenated([(2, 3), (2, 4)], 0),
        lambda: concatenated([(2,), (2,)], 1),
        lambda: concatenated([(), ()], 0),
        lambda: interleaved([(4, 1), (4, 1)], 0, [[2, 2], [1, 2]]),
        lambda: interleaved([(4, 1), (4, 1)], 0, [[5, 5], [-1, -1]]),
        lambda: interleaved([(4, 1), (4, 1)], 0, [[4]]),
        lambda: placed((4,), [(2,), (2,)], [Piece(0, (0,), (0,), (2,))]),
    ],
)
def test_shards_that_cannot_belong_together_are_refused(join: object) -> None:
    assert callable(join)
    with pytest.raises(LayoutError):
        join()


_NAMES = st.text("ab1.2_-\n\u00e9\u0663\ud800", max_size=12)
"""With a letter and a digit beyond ASCII, and half of a surrogate pair."""
_PLACES = st.sampled_from(
    ["a", "b", "1", "_", r"\.", ".", r"\d", r"\_", "[ab]", "[^a.]", "[0-9_]", r"[\db]", "[a-]"]
)
_ATOMS = st.tuples(_PLACES, st.sampled_from(["", "", "+", "*", "?", "+?", "*?", "??"])).map("".join)
_SEQUENCES = st.recursive(
    st.lists(_ATOMS, max_size=4).map("".join),
    lambda inner: st.tuples(
        inner,
        st.sampled_from(["(", "(?:"]),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.sampled_from([")", ")?"]),
        inner,
    ).map("".join),
    max_leaves=6,
)
_PATTERNS = st.tuples(st.sampled_from(["", "^"]), _SEQUENCES, st.sampled_from(["", "$"])).map(
    "".join
)


def matches(text: str, name: str) -> bool:
    return PatternTable.read([(text, True)], _FILE).get(name) is not None


_TEXTS = st.text(r"ab1.^$()[]|?*+\d-&~_{}:" + "\n\u00e9\u0663\ud800", max_size=9)


@given(_PATTERNS | _TEXTS, _NAMES)
@example(r"\d$", "\u0663")
@example("(a|ab)(c|bcd)$", "abcd")
@settings(deadline=None, max_examples=200)
@pytest.mark.filterwarnings("error::FutureWarning")  # sets of sets
def test_a_pattern_that_is_read_matches_what_re_would_match(text: str, name: str) -> None:
    assume(not name.endswith("\n"))
    try:
        table = PatternTable.read([(text, True)], _FILE)
    except UnsupportedError:
        return
    assert table.get(name) == (True if re.match(text, name) else None)


@given(_PATTERNS)
@settings(deadline=None, max_examples=50)
def test_a_pattern_of_the_grammar_is_read(text: str) -> None:
    PatternTable.read([(text, True)], _FILE)


@pytest.mark.parametrize("text", ["a$", "[a]$", "a+$"])
def test_a_name_ends_where_its_pattern_ends(text: str) -> None:
    """``re`` lets a line end there."""
    table = PatternTable.read([(text, True)], _FILE)
    assert (table.get("a"), table.get("a\n")) == (True, None)


@given(st.text(min_size=1, max_size=20), _NAMES)
@example("\\", "a")
def test_any_name_written_out_matches_itself_alone(name: str, other: str) -> None:
    assume(name != other)
    table = PatternTable.read([(f"^{re.escape(name)}$", 1)], _FILE)
    assert (table.get(name), table.get(other)) == (1, None)


@pytest.mark.parametrize(
    "text",
    [
        *("^(a+)+$", "(a)*", "(ab){2}", "a{2}", "a|b", r"\w+", "a++", "(?i)a", "(?=a)", "(?P<n>a)"),
        *(r"a\1", "a$b", "a\\", "(a", "a)", "[a", "[]", "[]a]", "[[a]", "[a--b]", r"[\w]", "*a"),
        *("a" * 5000, "(" * 2000, "(" * 500 + "a"),
    ],
)
def test_a_pattern_beyond_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError):
        PatternTable.read([(text, 1)], _FILE)


def test_patterns_that_take_long_with_backtracking_take_none_here() -> None:
    for part in (r"\d+", ".*", "(1+|1?)?"):
        table = PatternTable.read([(part * 120 + "x$", True)], _FILE)
        assert table.get("1" * 2000) is None


def test_a_pattern_that_takes_more_than_its_share_of_memory_is_refused() -> None:
    texts = [r"[^\d]" * (MAX_LENGTH // 5)] * MAX_WILD
    assert PatternTable.read([(texts[0], 1)], _FILE).get("a" * MAX_LENGTH) == 1
    with pytest.raises(UnsupportedError, match="beyond what is read"):
        PatternTable.read(((text, 1) for text in texts), _FILE)


def test_a_name_that_two_patterns_mean_is_refused() -> None:
    table = PatternTable.read([(r"\d+.a", 1), (r"^1\.a$", 2)], _FILE)
    assert table.get("2.a") == 1
    with pytest.raises(DamagedCheckpointError, match="2 ways"):
        table.get("1.a")


def test_endless_lists_of_patterns_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="too many"):
        PatternTable.read([(f"{n}.a", 1) for n in range(MAX_WILD + 1)], _FILE)
