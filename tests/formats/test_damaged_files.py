"""Damaged and malformed rank files: every one is refused with its path, or exported exactly."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Run, model_file, save, small_model
from tests.support.malice import text
from zexport import DamagedCheckpointError, UnsafeError, UnsupportedError, ZexportError
from zexport.formats.pickle_reader import load

_SYSTEM = b"cposix\nsystem\n"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_REBUILD_V3 = b"ctorch._utils\n_rebuild_tensor_v3\n"


class Victim:
    """A small checkpoint, and the model states file that tests change."""

    def __init__(self, folder: Path, *, legacy: bool = False) -> None:
        run = Run(stage=2, legacy=legacy)
        self.root = save(small_model(), run, folder / "run")
        self.file = model_file(self.root / "global_step2", run, 0)
        self.content = self.file.read_bytes()
        self.out = folder / "out"

    def refused(
        self, content: bytes, kind: type[ZexportError] = DamagedCheckpointError, word: str = "."
    ) -> ZexportError:
        """Return the error of an export with this content of the file."""
        self.file.write_bytes(content)
        with pytest.raises(kind, match=word) as caught:
            zexport.consolidate(self.root, self.out, layout="memory")
        assert caught.value.path == self.file
        assert caught.value.hint or isinstance(caught.value, UnsupportedError)
        assert not self.out.exists()
        return caught.value

    def exported(self, content: bytes) -> dict[str, torch.Tensor]:
        self.file.write_bytes(content)
        zexport.consolidate(self.root, self.out, layout="memory", overwrite=True)
        return load_file(self.out / "model.safetensors")

    def with_pickle(self, data: bytes) -> bytes:
        return self.zipped(lambda name, old: (name, data if name.endswith("data.pkl") else old))

    def zipped(
        self,
        change: Callable[[str, bytes], tuple[str, bytes] | None] = lambda name, data: (name, data),
        compression: int = zipfile.ZIP_STORED,
    ) -> bytes:
        """Return the zip file with each record changed or left out."""
        stream = io.BytesIO()
        with zipfile.ZipFile(self.file) as old, zipfile.ZipFile(stream, "w", compression) as new:
            for name in old.namelist():
                if (record := change(name, old.read(name))) is not None:
                    new.writestr(*record)
        return stream.getvalue()


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    """For tests that never export."""
    return Victim(tmp_path_factory.mktemp("shared"))


def _last_tensor(victim: Victim) -> str:
    """Name of the largest record; consolidate reads it for its checksum."""
    with zipfile.ZipFile(io.BytesIO(victim.content)) as archive:
        records = [one for one in archive.infolist() if "/data/" in one.filename]
        return max(records, key=lambda one: one.file_size).filename


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, I am text\n", r"not written by torch\.save"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (bytes(4096), r"not written by torch\.save"),
        (b"PK\x03\x04 and no more", "incomplete or damaged"),
        (pickle.dumps({"a": 1}), r"torch\.save did not write"),
    ],
)
def test_file_of_another_kind_is_refused(shared: Victim, content: bytes, message: str) -> None:
    shared.refused(content, word=message)


@pytest.mark.parametrize("legacy", [False, True])
def test_truncated_file_is_refused(tmp_path: Path, legacy: bool) -> None:
    victim = Victim(tmp_path, legacy=legacy)
    size = len(victim.content)
    for end in {*range(0, size, size // 12), *range(size - 4, size)}:
        victim.refused(victim.content[:end])


# --- zip ---


def test_zip64_and_compressed_pickles_are_exported(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = victim.exported(victim.content)
    assert expected

    def is_same(content: bytes) -> bool:
        found = victim.exported(content)
        return all(torch.equal(found[name], value) for name, value in expected.items())

    assert is_same(victim.zipped(lambda n, d: None if n.endswith("byteorder") else (n, d)))
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    assert is_same(victim.zipped())


def test_bytes_before_the_zip_file_are_ignored_as_torch_does(victim: Victim) -> None:
    torch.save({"module": {}}, other := io.BytesIO())
    expected = victim.exported(victim.content)
    found = victim.exported(other.getvalue() + victim.content)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_compressed_tensors_are_refused_with_a_command(victim: Victim) -> None:
    content = victim.zipped(compression=zipfile.ZIP_DEFLATED)
    error = victim.refused(content, UnsupportedError, "is compressed")
    assert "zip -0 -r NEW" in error.hint


def test_big_endian_numbers_are_refused(shared: Victim) -> None:
    shared.file.write_bytes(shared.content)
    content = shared.zipped(lambda n, d: (n, b"big" if n.endswith("byteorder") else d))
    shared.refused(content, UnsupportedError, "little-endian")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", "..", "C:\\x"])
def test_duplicate_record_or_record_outside_the_folder_is_refused(
    shared: Victim, name: str
) -> None:
    shared.file.write_bytes(shared.content)
    with zipfile.ZipFile(shared.file, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name or archive.namelist()[0]), b"x")
    shared.refused(shared.file.read_bytes(), word="same name|one top folder")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (8, struct.pack("<H", 1), "encrypted"),
        (20, struct.pack("<II", 2**30, 2**30), "overlap"),
        (24, struct.pack("<I", 3), "overlap"),
        (42, struct.pack("<I", 7), "does not match|overlap"),
    ],
    ids=["encrypted", "too long", "two sizes", "moved"],
)
def test_false_directory_entry_is_refused(
    shared: Victim, field: int, value: bytes, message: str
) -> None:
    data = bytearray(shared.content)
    at = bytes(data).rindex(_last_tensor(shared).encode()) - 46 + field
    data[at : at + len(value)] = value
    shared.refused(bytes(data), ZexportError, message)


@pytest.mark.parametrize("field", [0, 26, 28, 30])
def test_record_header_unlike_the_directory_is_refused(shared: Victim, field: int) -> None:
    data = bytearray(shared.content)
    at = data.index(_last_tensor(shared).encode()) - 30 + field
    data[at : at + 2] = b"\xff\xff"
    shared.refused(bytes(data), word="does not match the zip directory")


def test_changed_bytes_in_pickle_or_tensor_are_refused(shared: Victim) -> None:
    for name in (b"/data.pkl", _last_tensor(shared).encode()):
        data = bytearray(shared.content)
        at = data.index(name) + len(name)
        data[at - 30 + data[at - 30 :].index(name) + 200] ^= 1
        shared.refused(bytes(data))


def test_storage_of_another_size_is_refused(shared: Victim) -> None:
    shared.file.write_bytes(shared.content)
    name = _last_tensor(shared)
    content = shared.zipped(lambda n, d: (n, d + b"!" if n == name else d))
    shared.refused(content, word="size of storage")


# --- legacy ---


def _five(*values: object) -> bytes:
    return b"".join(pickle.dumps(value, 2) for value in values)


@pytest.mark.parametrize(
    ("version", "system", "keys", "message"),
    [
        (1002, {"little_endian": True}, [], "protocol version"),
        (1001, {"little_endian": False}, [], "little-endian"),
        (1001, {"little_endian": True}, ["0"], "list of storages"),
        (1001, {"little_endian": True}, [[]], "list of storages"),
    ],
)
def test_malformed_legacy_file_is_refused(
    shared: Victim, version: object, system: object, keys: object, message: str
) -> None:
    content = _five(0x1950A86A20F9469CFC6C, version, system, {}, keys)
    shared.refused(content, ZexportError, message)


@pytest.mark.parametrize("at", [-3, None], ids=["inside the last storage", "at the end"])
def test_legacy_file_with_extra_bytes_is_refused(tmp_path: Path, at: int | None) -> None:
    victim = Victim(tmp_path, legacy=True)
    place = len(victim.content) if at is None else at
    content = victim.content[:place] + b"\x7f" * 4 + victim.content[place:]
    victim.refused(content, word="bytes after the last storage")


# --- pickles ---


def _storage(
    kind: bytes = b"ctorch\nFloatStorage\n", numel: bytes = b"K\x06", more: bytes = b""
) -> bytes:
    return b"(" + text("storage") + kind + text("0") + text("cpu") + numel + more + b"tQ"


def _tensor(
    of: bytes | None = None,
    *,
    offset: bytes = b"K\x00",
    shape: bytes = b"K\x02K\x03\x86",
    stride: bytes = b"K\x03K\x01\x86",
) -> bytes:
    return _REBUILD + b"(" + (of or _storage()) + offset + shape + stride + b"\x89})tR"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"K\x01", "ends early"),
        (b".", "missing value"),
        (b"h\x05.", "missing value"),
        (b"X\x02\x00\x00\x00\xc3\x28.", "invalid text"),
        (b"Nq\x01.", "consecutively"),
        (b"}K\x01a.", "not a list"),
        (b"]K\x01K\x02s.", "not a dict"),
        (b"]}b.", "attributes"),
        (b"K\x01K\x02\x93.", "not text"),
        (_SYSTEM + b"K\x01R.", "not a tuple"),
        (b"\x8b\x01\x04\x00\x00" + bytes(1025) + b".", "more than 1024 bytes"),
        (b"P0\n.", "is not an opcode"),
        *(
            (tensor + b".", "whole numbers")
            for tensor in (
                _tensor(offset=b"J\xff\xff\xff\xff"),
                _tensor(shape=b"K\x02\x85"),
                _tensor(shape=b"K\x02\x8a\x09" + b"\x00" * 8 + b"\x01\x86"),
                _tensor(shape=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t"),
                _tensor(stride=b"K\x03J\xff\xff\xff\xff\x86"),
                _tensor(b"K\x01"),
                _REBUILD + b")R",
            )
        ),
        *(
            (storage + b".", "describe a storage|in two ways|view of another")
            for storage in (
                _storage(numel=b"J\xff\xff\xff\xff"),
                _storage(kind=_SYSTEM),
                _storage(more=b"K\x00"),
                b"K\x05Q",
                _storage() + _storage(numel=b"K\x07") + b"\x86",
            )
        ),
        (_REBUILD_V3 + b"(" + _storage() + b"K\x00))\x89}K\x01tR.", "no dtype"),
    ],
)
def test_malformed_pickle_is_refused(shared: Victim, data: bytes, reason: str) -> None:
    shared.file.write_bytes(shared.content)
    shared.refused(shared.with_pickle(data), word=rf"pickle at byte \d+: .*({reason})")


@pytest.mark.parametrize(
    "hidden",
    [
        _tensor(offset=_SYSTEM + b")R"),
        _tensor(shape=_SYSTEM + b")RK\x01\x86"),
        _tensor(_SYSTEM + b")R"),
        _REBUILD_V3 + b"(" + _storage() + b"K\x00))\x89}" + _SYSTEM + b")RtR",
    ],
)
def test_tensor_whose_place_requires_code_is_unsafe(shared: Victim, hidden: bytes) -> None:
    shared.file.write_bytes(shared.content)
    error = shared.refused(shared.with_pickle(hidden + b"."), UnsafeError, "running code")
    assert error.exit_code == 5


def test_opcodes_that_no_pickler_writes_are_refused() -> None:
    late = {op.code for op in pickletools.opcodes if op.proto >= 2}
    never = {"\x82", "\x83", "\x84", "\x97", "\x98", "\x8d", "\x8e"}
    written = {ord(code) for code in (late | set("NJMKGX].}eau(tshqjrbRcQ01)")) - never}
    for code in set(range(256)) - written:
        with pytest.raises(
            DamagedCheckpointError, match=f"at byte 1: {code:#04x} is not an opcode"
        ):
            load(bytes([code]) + b"1\n.", path=Path("x"))
