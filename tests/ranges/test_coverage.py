"""What coverage says was read, compared with the bytes that were."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from zlib import crc32

from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zexport.ranges.coverage import Coverage, FileCoverage, Ranges
from zexport.ranges.source import Record

_DATA = bytes(value * 7 % 251 for value in range(4096))
_PATH = Path("rank.pt")
_RANGES = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 900)), max_size=30)


@st.composite
def _records(draw: st.DrawFn) -> list[Record]:
    """Neighbors, gaps between records, and empty records."""
    edges = sorted(draw(st.lists(st.integers(0, 4096), min_size=2, max_size=9)))
    kept = [pair for pair in pairwise(edges) if draw(st.booleans())]
    return [Record(f"data/{n}\udcff", a, b - a, crc32(_DATA[a:b])) for n, (a, b) in enumerate(kept)]


def _check(own: FileCoverage, records: list[Record]) -> set[int]:
    """Return the bytes that it has; each range must be within a record and have its CRC-32."""
    found = [*own.ranges()]
    assert len(own.ranges()) == len(found)
    for start, stop, crc in found:
        assert any(one.offset <= start < stop <= one.offset + one.nbytes for one in records)
        assert crc == crc32(_DATA[start:stop])
    begins = {one.offset for one in records}
    for (_, stop, _), (start, _, _) in pairwise(found):
        assert stop < start or (stop == start and start in begins)  # neighbors are joined
    covered = {at for start, stop, _ in found for at in range(start, stop)}
    of_record = {one: {*range(one.offset, one.offset + one.nbytes)} for one in records}
    assert own.touched() == [one for one in records if of_record[one] & covered]
    return covered


@given(
    records=_records(),
    reads=_RANGES,
    limit=st.integers(1, 999),
    again=st.sampled_from(["", "in digest", "not"]),
)
@example(records=[Record("data/0", 0, 10, crc32(_DATA[:10]))], reads=[(10, 5)], limit=1, again="")
@settings(max_examples=50, deadline=None)
def test_every_byte_is_counted_once_and_gaps_are_the_others(
    records: list[Record], reads: list[tuple[int, int]], limit: int, again: str
) -> None:
    coverage = Coverage({_PATH: records})
    own, entered, had = coverage.of(_PATH), set[int](), set[int]()
    within = {at for one in records for at in range(one.offset, one.offset + one.nbytes)}
    for number, (start, nbytes) in enumerate(reads):
        data = _DATA[start : start + nbytes]
        new = {*range(start, start + len(data))}
        own.enter(start, memoryview(data))
        if number % 3 == 0:
            has = _check(own, records)
            assert had <= has  # what was read stays, and what overlaps nothing is added
            assert entered & new or within & new <= has
            had = has
        entered |= new
    if again:  # a restart
        kept = coverage.ranges()
        coverage = Coverage({_PATH: records})
        coverage.add(kept, in_digest=again == "in digest")
        own = coverage.of(_PATH)
    covered, touched = _check(own, records), own.touched()
    assert covered <= entered
    for record in records:
        rest = {*range(record.offset, record.offset + record.nbytes)} - covered
        gaps = [*own.gaps(record, limit)]
        assert sorted(at for start, stop in gaps for at in range(start, stop)) == sorted(rest)
        assert all(0 < stop - start <= limit for start, stop in gaps)
        for start, stop in reversed(gaps):
            own.enter(start, memoryview(_DATA[start:stop]))
        if record.nbytes:
            assert [*own.gaps(record, limit)] == []
            assert own.crc(record) == record.crc32
    digest = blake3()
    for one in touched:
        line = f"{one.name} {one.offset} {one.nbytes} {one.crc32:08x}\n"
        digest.update(line.encode(errors="backslashreplace"))
    assert own.digest() == (digest.hexdigest() if again == "in digest" and touched else None)


def test_ranges_that_end_outside_of_a_record_are_not_taken_from_others() -> None:
    coverage = Coverage({_PATH: [Record("a", 10, 10, None), Record("b", 20, 10, None)]})
    coverage.add({_PATH: Ranges([(15, 25, 1), (5, 15, 2), (20, 31, 3), (11, 12, 4)])})
    assert [*coverage.of(_PATH).ranges()] == [(11, 12, 4)]
    coverage.of(_PATH).enter(0, memoryview(b"a"))  # of no record
    coverage.of(_PATH).enter(22, memoryview(b"a"))
    coverage.add({_PATH: [(20, 25, 5)]})
    assert [*coverage.of(_PATH).ranges()] == [(11, 12, 4), (22, 23, crc32(b"a"))]
    assert [path for path, _ in coverage.files()] == [_PATH]


def test_reads_of_neighbors_in_any_order_become_one_range() -> None:
    record = Record("a", 0, 4096, crc32(_DATA))
    own = Coverage({_PATH: [record]}).of(_PATH)
    for at in [*range(0, 4096, 2), *range(1, 4096, 2)]:
        own.enter(at, memoryview(_DATA[at : at + 1]))
    assert [*own.ranges()] == [(0, 4096, record.crc32)]
