"""A storage that falters for a moment, and one that does not come back."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.plans import source_file
from zexport.errors import CheckpointError, OutputError
from zexport.ranges.digests import digest_file
from zexport.ranges.extents import Extent
from zexport.ranges.reader import SourceReader
from zexport.store import retries
from zexport.store.files import open_input, open_output
from zexport.store.retries import PAUSES_SECONDS, steadily, synced

TRIES = len(PAUSES_SECONDS) + 1
PASSING = (errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSES_SECONDS", (0.0,) * len(PAUSES_SECONDS))


class Failing:
    """A call that fails so many times before it is let through."""

    def __init__(self, whole: Callable[..., Any], number: int, times: int) -> None:
        self.calls = 0
        self._whole = whole
        self._number = number
        self._times = times

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise OSError(self._number, os.strerror(self._number))
        return self._whole(*args, **named)


@pytest.mark.parametrize("number", PASSING)
def test_what_fails_for_a_moment_is_tried_again(number: int) -> None:
    act = Failing(lambda: "done", number, TRIES - 1)
    recovered: list[int] = []
    assert steadily(act, recover=lambda: recovered.append(1)) == "done"
    assert len(recovered) == TRIES - 1


def test_what_goes_on_failing_is_raised_after_a_few_tries() -> None:
    act = Failing(lambda: "done", errno.EIO, TRIES)
    with pytest.raises(OSError, match="Input/output error"):
        steadily(act)
    assert act.calls == TRIES


def test_a_full_disk_is_not_tried_again() -> None:
    act = Failing(lambda: "done", errno.ENOSPC, 1)
    with pytest.raises(OSError, match="No space left"):
        steadily(act)
    assert act.calls == 1


def test_a_failed_fsync_is_never_taken_for_a_success_by_a_second_one(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        synced(file.fileno(), Failing(os.fsync, errno.EINTR, TRIES - 1))
        sync = Failing(os.fsync, errno.EIO, 1)
        with pytest.raises(OSError, match="Input/output error"):
            synced(file.fileno(), sync)
    assert sync.calls == 1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def _read(path: Path) -> bytes:
    buffer = bytearray(path.stat().st_size)
    with SourceReader([source_file(path)]) as reader:
        reader.read_into(Extent(path, 0, len(buffer)), 0, memoryview(buffer))
        reader.finish()
    return bytes(buffer)


@pytest.mark.parametrize("call", ["preadv", "open"])
@pytest.mark.parametrize("number", PASSING)
def test_a_source_that_falters_is_read_all_the_same(
    source: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, Failing(getattr(os, call), number, 3))
    assert _read(source) == source.read_bytes()


def test_a_source_that_cannot_be_read_is_named_with_the_byte(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", Failing(os.preadv, errno.EIO, 99))
    with pytest.raises(CheckpointError, match="cannot be read at byte 0: Input/output error"):
        _read(source)


def test_short_reads_and_writes_are_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:7]], at))
        patch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
        data = _read(source)
        with open_output(tmp_path / "copy", is_new=True) as file:
            file.write(data, 0)
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_stale_handle_is_opened_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has moved the file: the old handle is stale until the path is opened anew."""
    preadv, content = os.preadv, source.read_bytes()
    stale = source.stat().st_ino
    with SourceReader([source_file(source)]) as reader:
        buffer = bytearray(len(content))
        reader.read_into(Extent(source, 0, 1), 0, memoryview(buffer)[:1])
        status = source.stat()
        source.rename(tmp_path / "moved")
        source.write_bytes(content)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))

        def read(descriptor: int, parts: list[memoryview], offset: int) -> int:
            if os.fstat(descriptor).st_ino == stale:
                raise OSError(errno.ESTALE, "Stale file handle")
            return preadv(descriptor, parts, offset)

        monkeypatch.setattr(os, "preadv", read)
        reader.read_into(Extent(source, 0, len(content)), 0, memoryview(buffer))
        reader.finish()
    assert bytes(buffer) == content


@pytest.mark.parametrize("call", ["pwrite", "open", "ftruncate"])
def test_an_output_that_falters_is_written_all_the_same(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, Failing(getattr(os, call), errno.EIO, 3))
        with open_output(tmp_path / "file", is_new=True) as file:
            file.reserve(6)
            file.write(b"onetwo", 0)
    assert (tmp_path / "file").read_bytes() == b"onetwo"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_that_goes_on_failing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", Failing(os.pwrite, errno.EIO, 99))
    with (
        open_output(tmp_path / "file", is_new=True) as file,
        pytest.raises(OutputError, match="cannot be written: Input/output error"),
    ):
        file.write(b"one", 0)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_takes_no_room_beforehand_is_written_to_all_the_same(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr("zexport.store.files._fallocate", lambda: fallocate)
    with open_output(tmp_path / "file", is_new=True) as file:
        file.reserve(5)
    assert (tmp_path / "file").stat().st_size == 5


# --- reading again from the disk ---


def _pages_in_memory(path: Path) -> int:
    """How many pages of a file the system holds, by mincore(2)."""
    nbytes = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapped:
        pages = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        call = ctypes.CDLL(None, use_errno=True).mincore
        assert call(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
        return sum(page & 1 for page in pages)


def _is_in_memory_alone(folder: Path) -> bool:
    """Whether the file system has no disk to read from again."""
    mounts = (line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    held = [(Path(place), kind) for place, kind in mounts if folder.is_relative_to(place)]
    return max(held, key=lambda one: len(one[0].parts))[1] in ("tmpfs", "ramfs")


def test_what_is_read_again_from_the_disk_is_not_in_memory_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert _pages_in_memory(path) == (1 << 20) // mmap.PAGESIZE
    with open_input(path) as file:
        file.forget()
    assert _pages_in_memory(path) == 0 or _is_in_memory_alone(tmp_path)
    digest_file(path)
    assert _pages_in_memory(path) == (1 << 20) // mmap.PAGESIZE
