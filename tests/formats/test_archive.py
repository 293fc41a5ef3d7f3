"""Damaged, hostile and odd files of ``torch.save``: refused in plain words, or read exactly."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zexport import DamagedCheckpointError, UnsupportedError, ZexportError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.source import Member
from zexport.storage.contents import LFS_POINTER

VALUE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5, dtype=torch.int16), "n": 7}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small file in the zip container."""
    path = tmp_path / "rank_0.pt"
    torch.save(VALUE, path)
    return path


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    """The same in the old container."""
    path = tmp_path / "rank_0.pt"
    torch.save(VALUE, path, _use_new_zipfile_serialization=False)
    return path


def tensor_of(file: TorchFile, name: str) -> TensorRef:
    assert isinstance(file.value, dict)
    tensor = file.value[name]
    assert isinstance(tensor, TensorRef)
    return tensor


def rewrite(
    path: Path,
    change: Callable[[str, bytes], tuple[str, bytes] | None] = lambda name, data: (name, data),
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Write the zip anew, each record changed or left out."""
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for record in records:
            if (changed := change(*record)) is not None:
                new.writestr(*changed)


def test_members_are_the_tensor_records_with_their_place_and_crc(saved: Path) -> None:
    members = read_torch_file(saved).members
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        naive = [
            Member(info.filename, data.index(archive.read(info)), info.file_size, info.CRC)
            for info in archive.infolist()
            if "/data/" in info.filename
        ]
    assert list(members) == sorted(naive, key=lambda member: member.offset)
    assert len(members) == 2


def test_members_leave_out_empty_and_compressed_records(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.zeros(0), torch.zeros(3)], path)
    assert [member.nbytes for member in read_torch_file(path).members] == [12]
    rewrite(path, compression=zipfile.ZIP_DEFLATED)
    assert read_torch_file(path).members == ()


@pytest.mark.parametrize("zipped", [True, False])
def test_reading_touches_no_tensor_data(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "big.pt"
    torch.save(torch.zeros(30_000_000), path, _use_new_zipfile_serialization=zipped)
    before = _bytes_read()
    file = read_torch_file(path)
    assert isinstance(file.value, TensorRef)
    assert file.source(file.value).nbytes == 120_000_000
    assert _bytes_read() - before < 1 << 21


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((13,), (1,), 0), ((3, 4), (4, 1), 1), ((2,), (12,), 0), ((1,), (1,), 12), ((), (), 2**62)],
)
def test_a_tensor_beyond_its_storage_is_damage(
    tmp_path: Path, zipped: bool, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(12), path, _use_new_zipfile_serialization=zipped)
    file = read_torch_file(path)
    assert isinstance(file.value, TensorRef)
    wild = TensorRef(file.value.dtype, shape, stride, offset, file.value.storage)
    with pytest.raises(DamagedCheckpointError, match=r"beyond its storage.*found 48 bytes"):
        file.source(wild)
    inside = TensorRef(file.value.dtype, (2, 2), (9, 2), 0, file.value.storage)
    assert file.source(inside).nbytes == 16


def test_a_storage_that_does_not_fit_its_record_is_damage(saved: Path) -> None:
    rewrite(saved, lambda name, data: (name, data + b"!" if name.endswith("data/0") else data))
    file = read_torch_file(saved)
    with pytest.raises(DamagedCheckpointError, match=r"found 49 bytes, expected 48 bytes"):
        file.source(tensor_of(file, "w"))
    assert file.source(tensor_of(file, "b")).nbytes == 10


def test_compressed_tensor_data_is_refused_only_where_it_is_asked_for(saved: Path) -> None:
    rewrite(saved, compression=zipfile.ZIP_DEFLATED)
    file = read_torch_file(saved)
    assert isinstance(file.value, dict)
    assert file.value["n"] == 7
    with pytest.raises(UnsupportedError, match=r"data/0 is compressed.*zip -0 -r NEW rank_0"):
        file.source(tensor_of(file, "w"))


def test_zip64_sizes_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    rewrite(saved)
    file = read_torch_file(saved)
    (extent,) = file.source(tensor_of(file, "w")).extents(0, 48)
    data = saved.read_bytes()[extent.offset : extent.offset + extent.nbytes]
    assert data == torch.arange(12.0).numpy().tobytes()


def test_big_endian_data_is_refused(saved: Path) -> None:
    rewrite(saved, lambda name, data: (name, b"big" if name.endswith("byteorder") else data))
    with pytest.raises(UnsupportedError, match="little-endian"):
        read_torch_file(saved)


def test_a_file_without_a_byteorder_record_is_little_endian(saved: Path) -> None:
    rewrite(saved, lambda name, data: None if name.endswith("byteorder") else (name, data))
    assert read_torch_file(saved).root == "rank_0"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_damage(saved: Path) -> None:
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("rank_0/data/0", b"")
    with pytest.raises(DamagedCheckpointError, match="two records of one name"):
        read_torch_file(saved)


def test_a_zip_that_torch_did_not_write_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/readme", b"hello")
    with pytest.raises(DamagedCheckpointError, match=r"torch\.save did not write it"):
        read_torch_file(path)
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(DamagedCheckpointError):
        read_torch_file(path)


def directory_at(data: bytes, name: bytes) -> int:
    """Where the central directory's entry of a record begins."""
    return data.rindex(name) - 46


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (8, struct.pack("<H", 1), "encrypted"),
        (20, struct.pack("<II", 2**30, 2**30), "reaches into the next one"),
        (24, struct.pack("<I", 40), "reaches into the next one"),
        (42, struct.pack("<I", 7), None),
    ],
    ids=["encrypted", "beyond the file", "two sizes", "moved"],
)
def test_a_directory_entry_that_lies_is_refused(
    saved: Path, field: int, value: bytes, message: str | None
) -> None:
    data = bytearray(saved.read_bytes())
    at = directory_at(bytes(data), b"rank_0/data/0") + field
    data[at : at + len(value)] = value
    saved.write_bytes(data)
    with pytest.raises(ZexportError, match=message):
        read_torch_file(saved)


@pytest.mark.parametrize("field", [0, 26, 28, 30])
def test_a_record_header_that_contradicts_the_directory_is_damage(saved: Path, field: int) -> None:
    data = bytearray(saved.read_bytes())
    at = bytes(data).index(b"rank_0/data/0") - 30 + field
    data[at : at + 2] = b"\xff\xff"
    saved.write_bytes(data)
    file = read_torch_file(saved)
    with pytest.raises(DamagedCheckpointError, match="is not where"):
        file.source(tensor_of(file, "w"))
    with pytest.raises(DamagedCheckpointError, match="is not where"):
        file.members  # noqa: B018


def test_a_flipped_bit_in_the_pickle_is_damage(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[bytes(data).index(b"K\x07u")] ^= 1
    saved.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="CRC"):
        read_torch_file(saved)


def test_a_compressed_pickle_is_read_but_not_beyond_its_limit(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(saved, compression=zipfile.ZIP_DEFLATED)
    assert read_torch_file(saved).unknown_globals == ()
    monkeypatch.setattr("zexport.formats.torch_file.MAX_PICKLE_NBYTES", 100)
    with pytest.raises(DamagedCheckpointError, match="expected at most 100"):
        read_torch_file(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, I am text\n", r"is not a file that torch\.save wrote"),
        (LFS_POINTER + b"v1\noid sha256:0\n", "is a git-lfs pointer"),
        (bytes(4096), r"is not a file that torch\.save wrote"),
        (b"PK\x03\x04 and no more", "it ends early"),
        (pickle.dumps({"a": 1}), r"not one that torch\.save wrote"),
    ],
)
def test_a_file_that_torch_did_not_write_is_named_as_such_with_a_next_step(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        read_torch_file(path)
    assert caught.value.path == path
    assert caught.value.hint


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_cut_off_anywhere_is_damage(tmp_path: Path, zipped: bool) -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(3)}, stream, _use_new_zipfile_serialization=zipped)
    path = tmp_path / "x.pt"
    for end in range(len(stream.getvalue())):
        path.write_bytes(stream.getvalue()[:end])
        with pytest.raises(DamagedCheckpointError):
            read_torch_file(path)


@pytest.mark.parametrize("zipped", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_a_changed_file_is_read_within_its_bounds_or_refused(
    tmp_path: Path, zipped: bool, changes: list[tuple[int, int]]
) -> None:
    stream = io.BytesIO()
    torch.save(VALUE, stream, _use_new_zipfile_serialization=zipped)
    data = bytearray(stream.getvalue())
    for place, byte in changes:
        data[-1 - place % len(data)] = byte
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    try:
        file = read_torch_file(path)
        places = [(member.offset, member.nbytes) for member in file.members]
        for tensor in file.value.values() if isinstance(file.value, dict) else ():
            if isinstance(tensor, TensorRef):
                source = file.source(tensor)
                places += [(part.offset, part.nbytes) for part in source.extents(0, source.nbytes)]
    except ZexportError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert all(offset + nbytes <= len(data) for offset, nbytes in places)


def five_pickles(*values: object) -> bytes:
    return b"".join(pickle.dumps(value, 2) for value in values)


@pytest.mark.parametrize(
    ("version", "system", "keys", "message"),
    [
        (1002, {"little_endian": True}, [], "found 1002, expected 1001"),
        ([], {"little_endian": True}, [], "found no number, expected 1001"),
        (1001, {"little_endian": False}, [], "little-endian"),
        (1001, None, [], "little-endian"),
        (1001, {"little_endian": True}, ["0"], "list of storages"),
        (1001, {"little_endian": True}, "0", "list of storages"),
        (1001, {"little_endian": True}, [[]], "list of storages"),
    ],
)
def test_an_old_container_that_contradicts_the_format_is_refused(
    tmp_path: Path, version: object, system: object, keys: object, message: str
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(five_pickles(0x1950A86A20F9469CFC6C, version, system, {}, keys))
    with pytest.raises(ZexportError, match=message):
        read_torch_file(path)


def test_an_old_container_that_counts_its_elements_in_another_way_is_damage(legacy: Path) -> None:
    data = bytearray(legacy.read_bytes())
    at = bytes(data).rindex(struct.pack("<q", 12))
    data[at] = 11
    legacy.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"11 elements .* expected 12 elements"):
        read_torch_file(legacy)


@pytest.mark.parametrize("surplus", [1, 4, 64])
@pytest.mark.parametrize("at", [-3, None], ids=["put into the last storage", "appended"])
def test_an_old_container_with_bytes_too_many_is_damage(
    surplus: int, at: int | None, legacy: Path
) -> None:
    data = legacy.read_bytes()
    place = len(data) if at is None else at
    legacy.write_bytes(data[:place] + b"\x7f" * surplus + data[place:])
    with pytest.raises(DamagedCheckpointError, match="goes on after its last storage") as caught:
        read_torch_file(legacy)
    assert caught.value.expected == f"{len(data)}"
