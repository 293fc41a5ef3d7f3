"""Reading by range from real files, and the CRC-32 of whatever was read in whatever order."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.support.plans import save, source_file
from zexport.errors import CheckpointError, DamagedCheckpointError
from zexport.export.plan import SourceFile
from zexport.ranges.extents import Chain, Extent
from zexport.ranges.reader import SourceReader


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceFile, list[Extent], list[bytes]]:
    """A file of three tensors, where each lies, and its bytes."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(count, generator=generator) for count in (1000, 7, 300)]
    file, extents = save(tmp_path_factory.mktemp("three") / "rank.pt", tensors)
    return file, extents, [tensor.numpy().tobytes() for tensor in tensors]


def _read(reader: SourceReader, extent: Extent | Chain, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    reader.read_into(extent, start, memoryview(buffer))
    return bytes(buffer)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _flip(path: Path, offset: int) -> SourceFile:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    return source_file(path)


def test_bytes_of_several_ranges_are_laid_end_to_end(
    three: tuple[SourceFile, list[Extent], list[bytes]],
) -> None:
    file, extents, data = three
    chain = Chain((extents[2], extents[0]))
    with SourceReader([file]) as reader:
        assert _read(reader, chain, 1190, 30) == (data[2] + data[0])[1190:1220]
        assert _read(reader, chain, 0, 0) == b""
        assert reader.nbytes_read == 30


def test_finish_reads_only_what_is_missing_of_the_records_it_touched(
    three: tuple[SourceFile, list[Extent], list[bytes]],
) -> None:
    file, extents, _ = three
    with SourceReader([file]) as reader:
        _read(reader, extents[0], 100, 50)
        _read(reader, extents[0], 3000, 1000)
        reader.finish()
        assert reader.nbytes_read == 4000
        reader.finish()
        assert reader.nbytes_read == 4000


_READS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4000), st.integers(0, 4000)), max_size=12
)


@given(reads=_READS)
@settings(max_examples=150, deadline=None)
def test_any_reads_in_any_order_pass_on_a_sound_file(
    three: tuple[SourceFile, list[Extent], list[bytes]], reads: list[tuple[int, int, int]]
) -> None:
    file, extents, data = three
    with SourceReader([file]) as reader:
        for index, start, nbytes in reads:
            first = min(start, extents[index].nbytes)
            count = min(nbytes, extents[index].nbytes - first)
            assert _read(reader, extents[index], first, count) == data[index][first:][:count]
        reader.finish()


@given(reads=_READS, where=st.integers(0, 3999))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_read_of_a_record_finds_a_flipped_bit_anywhere_in_it(
    tmp_path: Path, reads: list[tuple[int, int, int]], where: int
) -> None:
    file, (extent,) = save(tmp_path / "rank.pt", [torch.arange(1000.0)])
    _flip(file.path, extent.offset + where)
    now = source_file(file.path, file.members)
    with SourceReader([now]) as reader:
        for _, start, nbytes in [*reads, (0, 0, 1)]:
            first = min(start, 3999)
            _read(reader, extent, first, max(min(nbytes, 4000 - first), 1))
        with pytest.raises(DamagedCheckpointError, match="does not hold the bytes that were saved"):
            reader.finish()


def test_the_damaged_record_is_named_with_both_sums(tmp_path: Path) -> None:
    file, extents = save(tmp_path / "rank.pt", [torch.ones(10), torch.ones(20)])
    _flip(file.path, extents[1].offset)
    with SourceReader([source_file(file.path, file.members)]) as reader:
        _read(reader, extents[1], 0, 80)
        with pytest.raises(DamagedCheckpointError) as caught:
            reader.finish()
    assert caught.value.path == file.path
    assert "record 'rank/data/1'" in caught.value.problem
    assert caught.value.expected == f"{file.members[1].crc32:08x}"
    assert caught.value.found != f"CRC-32 {caught.value.expected}"


def test_damage_in_a_record_that_is_not_needed_does_no_harm(tmp_path: Path) -> None:
    file, extents = save(tmp_path / "rank.pt", [torch.ones(10), torch.ones(20)])
    _flip(file.path, extents[1].offset)
    with SourceReader([source_file(file.path, file.members)]) as reader:
        _read(reader, extents[0], 0, 40)
        reader.finish()


def test_padding_that_no_tensor_needs_is_proved_too(tmp_path: Path) -> None:
    file, (extent,) = save(tmp_path / "rank.pt", [torch.ones(1000)])
    _flip(file.path, extent.offset + 3999)
    with SourceReader([source_file(file.path, file.members)]) as reader:
        _read(reader, extent, 0, 3000)
        with pytest.raises(DamagedCheckpointError):
            reader.finish()


def test_a_range_across_two_records_counts_for_both(tmp_path: Path) -> None:
    file, extents = save(tmp_path / "rank.pt", [torch.ones(10), torch.ones(20)])
    both = Extent(file.path, extents[0].offset, extents[1].offset + 80 - extents[0].offset)
    with SourceReader([file]) as reader:
        _read(reader, both, 0, both.nbytes)
        read = reader.nbytes_read
        reader.finish()
        assert reader.nbytes_read == read


def test_a_file_without_sums_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"0123456789")
    with SourceReader([source_file(path)]) as reader:
        assert _read(reader, Extent(path, 2, 5), 1, 3) == b"345"
        reader.finish()


def test_a_range_beyond_the_end_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    path.write_bytes(b"0123456789")
    with (
        SourceReader([source_file(path)]) as reader,
        pytest.raises(DamagedCheckpointError, match="ends too early") as caught,
    ):
        _read(reader, Extent(path, 5, 10), 0, 10)
    assert (caught.value.found, caught.value.expected) == ("10 bytes", "at least 15")


def test_a_missing_file_is_the_checkpoints_fault(tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    path.write_bytes(b"0123456789")
    file = source_file(path)
    path.unlink()
    with (
        SourceReader([file]) as reader,
        pytest.raises(CheckpointError, match="cannot be read: No such file"),
    ):
        _read(reader, Extent(path, 0, 1), 0, 1)


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    path.write_bytes(b"0123456789")
    file = source_file(path)
    os.utime(path, ns=(0, file.version.mtime_ns + 1))
    with (
        SourceReader([file]) as reader,
        pytest.raises(DamagedCheckpointError, match="was changed while it was read"),
    ):
        _read(reader, Extent(path, 0, 1), 0, 1)


@pytest.mark.parametrize("change", ["touched", "longer", "gone"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rank.pt"
    path.write_bytes(b"0123456789")
    with SourceReader([source_file(path)]) as reader:
        _read(reader, Extent(path, 0, 1), 0, 1)
        if change == "touched":
            os.utime(path, ns=(0, 0))
        elif change == "longer":
            path.write_bytes(b"0123456789a")
        else:
            path.unlink()
        with pytest.raises(CheckpointError, match=r"was changed|No such file"):
            reader.finish()


def test_more_files_than_the_process_may_open_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zexport.ranges.reader.getrlimit", lambda _: (384, 384))
    paths = [tmp_path / f"{index}.pt" for index in range(300)]
    for index, path in enumerate(paths):
        path.write_bytes(bytes([index % 256]))
    before = _descriptors()
    with SourceReader([source_file(path) for path in paths]) as reader:
        for index, path in enumerate(paths + paths):
            assert _read(reader, Extent(path, 0, 1), 0, 1) == bytes([index % 300 % 256])
            assert _descriptors() - before <= 128  # the rest is left to others
    assert _descriptors() == before


def test_threads_may_read_at_once(
    three: tuple[SourceFile, list[Extent], list[bytes]],
) -> None:
    file, extents, data = three
    with SourceReader([file]) as reader, ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda at: _read(reader, extents[0], at, 4), range(0, 4000, 4)))
        assert b"".join(parts) == data[0]
        reader.finish()
        assert reader.nbytes_read == 4000


# --- what was read ---


def _lines(file: SourceFile, *indices: int) -> str:
    """The digest that a manifest should have, as its documentation says."""
    members = [file.members[index] for index in indices]
    data = file.path.read_bytes()
    crcs = [zlib.crc32(data[m.offset : m.offset + m.nbytes]) for m in members]
    lines = (
        f"{m.name} {m.offset} {m.nbytes} {c:08x}\n" for m, c in zip(members, crcs, strict=True)
    )
    return blake3("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("with_crc", [True, False])
@pytest.mark.parametrize("pieces", [1, 7, 4096])
def test_the_digest_of_what_was_read_is_that_of_whole_records_in_any_order(
    three: tuple[SourceFile, list[Extent], list[bytes]], with_crc: bool, pieces: int
) -> None:
    file, extents, _ = three
    if not with_crc:
        members = tuple(structs.replace(member, crc32=None) for member in file.members)
        file = structs.replace(file, members=members)
    first, last = min(extents, key=_offset), max(extents, key=_offset)
    with SourceReader([file]) as reader:
        ledgers = [reader.new_ledger() for _ in range(2)]
        for number, start in enumerate(range(0, last.nbytes - 8, pieces)):
            buffer = memoryview(bytearray(min(pieces, last.nbytes - 8 - start)))
            reader.read_into(last, start, buffer, ledgers[number % 2])
        reader.read_into(first, 4, memoryview(bytearray(4)), ledgers[0])
        for ledger in reversed(ledgers):
            reader.take(ledger.ranges())
        assert reader.finish() == {file.path: _lines(file, 0, len(file.members) - 1)}


def test_what_was_only_compared_is_in_no_digest(
    three: tuple[SourceFile, list[Extent], list[bytes]],
) -> None:
    file, extents, _ = three
    with SourceReader([file]) as reader:
        _read(reader, extents[0], 0, 8)
        assert reader.finish() == {}


def _offset(extent: Extent) -> int:
    return extent.offset
