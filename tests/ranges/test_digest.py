"""Digests of files, read in pieces, are those of the whole bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import pytest
from blake3 import blake3

from zexport.ranges import digest
from zexport.storage.local import LocalInput

_DATA = bytes(value * 7 % 251 for value in range(1000))


@pytest.mark.parametrize("end", [0, 1, 30, 100, 250, 1000])
@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 1000)],
        [(10, 40), (50, 60), (110, 0), (120, 1), (121, 300), (421, 99), (530, 1), (531, 9)],
        [(at, 1) for at in range(0, 990, 2)],
    ],
)
def test_digests_of_files_tensors_and_what_surrounds_them(
    end: int, ranges: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_CHUNK_NBYTES", 30), ("_BATCH_NBYTES", 100), ("_BATCH_RANGES", 3)):
        monkeypatch.setattr(digest, name, value)
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(LocalInput, "expect", lambda _, found: announced.extend(found))
    path, data, seen = tmp_path / "file", _DATA[:end], list[int]()
    path.write_bytes(data)
    ranges = [(at, nbytes) for at, nbytes in ranges if at + nbytes <= end]
    digests = [blake3(data[at : at + nbytes]).digest() for at, nbytes in ranges]
    inside = {at for start, nbytes in ranges for at in range(start, start + nbytes)}
    frame = bytes(value for at, value in enumerate(data) if at not in inside)
    assert digest.digest_file(path) == blake3(data).hexdigest()
    with ThreadPoolExecutor(2) as workers:
        assert digest.crc32_of_file(path, workers, seen.append) == crc32(data)
        assert (sum(seen), max(seen, default=0)) == (end, min(end, 30))
        found = digest.digest_tensors(path, ranges, workers, seen.append)
    assert [found.hex(number) for number in range(len(ranges))] == [one.hex() for one in digests]
    tensors = b"".join(digests)
    assert (found.tensors, found.whole) == (tensors, blake3(frame + tensors).hexdigest())
    assert sum(seen) == end + len(inside)
    whole = [(at, at + nbytes) for at, nbytes in ranges if nbytes]
    assert sorted(announced) == sorted([(0, end)] * 2 + whole)
