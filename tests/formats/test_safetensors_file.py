"""The safetensors header, written and read, down to each rule of the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from zexport import DamagedCheckpointError, UnsupportedError
from zexport.formats.safetensors import HeaderEntry, build_header, read_header
from zexport.ranges.dtypes import DType

ENTRIES = [
    HeaderEntry("b", DType.F32, (2, 3)),
    HeaderEntry("a", DType.BF16, ()),
    HeaderEntry("none", DType.I64, (0, 4)),
    HeaderEntry("flags", DType.BOOL, (3,)),
]


def _write(path: Path, table: object, data: bytes = b"") -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _tensor(begin: int, end: int, dtype: str = "F32", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize("name", ["__metadata__", "twice"])
def test_a_name_that_is_taken_cannot_be_written(name: str) -> None:
    entries = [HeaderEntry("twice", DType.U8, (1,)), HeaderEntry(name, DType.U8, (1,))]
    with pytest.raises(UnsupportedError, match=f"cannot hold a tensor named '{name}'"):
        build_header(entries)


def test_a_name_that_is_not_unicode_cannot_be_written() -> None:
    with pytest.raises(UnsupportedError, match="not valid Unicode"):
        build_header([HeaderEntry("\ud800", DType.U8, (1,))])


def test_a_header_beyond_the_limit_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zexport.formats.safetensors.HEADER_NBYTES_LIMIT", 64)
    with pytest.raises(UnsupportedError, match="header of a shard is too long"):
        build_header(ENTRIES)


@pytest.mark.parametrize(
    ("table", "nbytes", "message"),
    [
        ({"a": _tensor(4, 8)}, 8, "does not begin where the one before it ends"),
        ({"a": _tensor(0, 8), "b": _tensor(4, 8)}, 8, "does not begin where"),
        ({"a": _tensor(0, 4), "b": _tensor(8, 12)}, 12, "does not begin where"),
        ({"a": _tensor(0, 8, shape=[3])}, 8, "length that does not fit its shape"),
        ({"a": _tensor(0, 8, shape=[2**62, 8])}, 8, "a shape beyond every memory"),
        ({"a": _tensor(0, 8, shape=[10**4000, 10**4000])}, 8, "a shape beyond every memory"),
        ({"a": _tensor(0, 8, shape=[2] + [1] * 64)}, 8, "a shape beyond every memory"),
        ({"a": _tensor(4, 0, shape=[1])}, 4, "does not begin where"),
        ({"a": _tensor(0, 4)}, 5, "another size than its header says"),
        ({"a": _tensor(0, 4)}, 3, "another size than its header says"),
        ({"a": _tensor(0, 4, shape=[-1])}, 4, "not natural numbers"),
        ({"a": _tensor(0, 4, shape=[True])}, 4, "not natural numbers"),
        ({"a": _tensor(0, 4, shape=[1.0])}, 4, "not natural numbers"),
        ({"a": _tensor(0, 4, shape="1")}, 4, "not natural numbers"),
        ({"a": {**_tensor(0, 4), "data_offsets": [0]}}, 4, "not natural numbers"),
        ({"a": {**_tensor(0, 4), "more": 1}}, 4, "not described by dtype, shape"),
        ({"a": 7}, 0, "not described by dtype, shape"),
        ({"__metadata__": {"a": 1}}, 0, "not a table of strings"),
        ({"__metadata__": 3}, 0, "not a table of strings"),
        ([], 0, "not a JSON object"),
        (b"{", 0, "not JSON"),
        (b"\xff\xfe{}", 0, "not JSON"),
        (b"[" * 100_000, 0, "not JSON"),
        (b'{"a":1,"a":2}', 0, "names something twice"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(
    tmp_path: Path, table: object, nbytes: int, message: str
) -> None:
    path = _write(tmp_path / "model.safetensors", table, bytes(nbytes))
    with pytest.raises(DamagedCheckpointError, match=message) as caught:
        read_header(path)
    assert caught.value.path == path


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_length_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="too short"):
        read_header(path)


@pytest.mark.parametrize("claim", [3, 100_000_001, 2**64 - 1])
def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path, claim: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", claim) + b"{}")
    with pytest.raises(DamagedCheckpointError, match="claims a header longer"):
        read_header(path)


def test_a_type_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "model.safetensors", {"a": _tensor(0, 4, "F8_E8M0", [4])}, bytes(4))
    with pytest.raises(
        UnsupportedError, match=r"element type that zexport does not know \(found F8_E8M0"
    ):
        read_header(path)
