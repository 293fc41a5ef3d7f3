"""Reads of real files by range, in any order, and their CRC-32."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zexport import CheckpointError, DamagedCheckpointError
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource, Extent

Saved = tuple[TorchFile, list[ByteSource], list[bytes]]


def _save(path: Path, tensors: Sequence[torch.Tensor]) -> Saved:
    """Return a file of tensors, their places and their bytes."""
    torch.save(list(tensors), path)
    file = read_torch_file(path)
    assert isinstance(file.value, list)
    places = [file.source(value) for value in file.value]
    return file, places, [tensor.numpy().tobytes() for tensor in tensors]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(count, generator=generator) for count in (1000, 7, 300)]
    return _save(tmp_path_factory.mktemp("three") / "rank.pt", tensors)


def _read(reader: SourceReader, source: ByteSource, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    reader.read_into(source, start, memoryview(buffer))
    return bytes(buffer)


def _flipped(path: Path, source: ByteSource, at: int) -> TorchFile:
    """Return the file with one bit of a tensor flipped."""
    (extent,) = source.extents(at, at + 1)
    data = bytearray(path.read_bytes())
    data[extent.offset] ^= 1
    path.write_bytes(data)
    return read_torch_file(path)


_READS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4000), st.integers(0, 4000)), max_size=12
)


@given(reads=_READS)
@settings(max_examples=60, deadline=None)
def test_reads_in_any_order_pass(three: Saved, reads: list[tuple[int, int, int]]) -> None:
    file, places, data = three
    with SourceReader([file]) as reader:
        for index, start, nbytes in reads:
            first = min(start, places[index].nbytes)
            count = min(nbytes, places[index].nbytes - first)
            assert _read(reader, places[index], first, count) == data[index][first:][:count]
        reader.finish()


@given(reads=_READS, where=st.integers(0, 3999))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_flipped_bit_anywhere_in_a_read_record_is_refused(
    tmp_path: Path, reads: list[tuple[int, int, int]], where: int
) -> None:
    file, (place,), _ = _save(tmp_path / "rank.pt", [torch.arange(1000.0)])
    with SourceReader([_flipped(file.path, place, where)]) as reader:
        for _, start, nbytes in [*reads, (0, 0, 1)]:
            first = min(start, 3999)
            _read(reader, place, first, max(min(nbytes, 4000 - first), 1))
        with pytest.raises(DamagedCheckpointError, match="CRC-32 of record"):
            reader.finish()


def test_damaged_record_that_is_not_read_is_ignored(tmp_path: Path) -> None:
    file, places, _ = _save(tmp_path / "rank.pt", [torch.ones(10), torch.ones(20)])
    with SourceReader([_flipped(file.path, places[1], 0)]) as reader:
        _read(reader, places[0], 0, 40)
        reader.finish()


def test_read_beyond_the_end_is_refused(tmp_path: Path) -> None:
    file, _, _ = _save(tmp_path / "rank.pt", [torch.ones(1)])
    end = file.path.stat().st_size
    with (
        SourceReader([file]) as reader,
        pytest.raises(DamagedCheckpointError, match="file is too short"),
    ):
        _read(reader, Extent(file.path, end - 5, 10), 0, 10)


@pytest.mark.parametrize("change", ["touched", "longer", "gone"])
def test_file_that_changes_meanwhile_is_refused(tmp_path: Path, change: str) -> None:
    file, (place,), _ = _save(tmp_path / "rank.pt", [torch.ones(1)])
    with SourceReader([file]) as reader:
        _read(reader, place, 0, 1)
        if change == "touched":
            os.utime(file.path, ns=(0, 0))
        elif change == "longer":
            file.path.write_bytes(file.path.read_bytes() + b"a")
        else:
            file.path.unlink()
        with pytest.raises(CheckpointError, match=r"file changed|No such file"):
            reader.finish()


def test_more_files_than_descriptors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zexport.ranges.reader.getrlimit", lambda _: (384, 384))
    saved = [_save(tmp_path / f"{n}.pt", [torch.tensor([float(n)])]) for n in range(300)]
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with SourceReader([file for file, _, _ in saved]) as reader:
        for _, (place,), (data,) in saved + saved:
            assert _read(reader, place, 0, 4) == data
            assert len(list(descriptors.iterdir())) - before <= 128  # the rest is left to others
    assert len(list(descriptors.iterdir())) == before
