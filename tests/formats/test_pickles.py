"""The closed pickle machine: exact on plain data, inert on everything else, never out of bounds."""

from __future__ import annotations

import argparse
import pickle
import pickletools
import struct
import time
import tracemalloc
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zexport import DamagedCheckpointError, UnsafeError, UnsupportedError
from zexport.formats import pickle_reader
from zexport.formats.pickle_reader import Pickle, load
from zexport.formats.pickle_values import (
    Global,
    Opaque,
    OpaqueKey,
)
from zexport.formats.torch_file import read_torch_file

PATH = Path("rank.pt")
CALL_SYSTEM = b"cposix\nsystem\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
FRAGMENT = b"cdeepspeed.utils.tensor_fragment\nfragment_address\n"


def read(data: bytes) -> Pickle:
    return load(data, path=PATH)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(
    kind: bytes = b"ctorch\nFloatStorage\n", numel: bytes = b"K\x06", more: bytes = b""
) -> bytes:
    return b"(" + text("storage") + kind + text("0") + text("cpu") + numel + more + b"tQ"


def tensor(
    *,
    of: bytes | None = None,
    offset: bytes = b"K\x00",
    shape: bytes = b"K\x02K\x03\x86",
    stride: bytes = b"K\x03K\x01\x86",
) -> bytes:
    return REBUILD + b"(" + (of or storage()) + offset + shape + stride + b"\x89})tR"


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.tuples(st.integers(), st.booleans()), inner, max_size=4
        )
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.tuples(st.integers(), st.text(max_size=3)), max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_values_of_every_protocol_are_read_as_python_reads_them(
    value: object, protocol: int
) -> None:
    result = read(pickle.dumps(value, protocol))
    assert result.value == value
    assert result.unknown_globals == ()


def test_the_stage_enum_is_a_number_however_python_wrote_it() -> None:
    names = ("disabled", "optimizer_states", "gradients", "weights", "max_stage")
    for name, stage in zip(names, (0, 1, 2, 3, 3), strict=True):
        by_name = read(b"c__builtin__\ngetattr\n" + STAGE + text(name) + b"\x86R.")
        by_value = read(STAGE + b"K" + bytes([stage]) + b"\x85R.")
        assert by_name.value == by_value.value == stage
        assert by_name.unknown_globals == by_value.unknown_globals == ()


@given(st.binary(max_size=300), st.integers(3, 5))
def test_bytes_are_read_as_python_reads_them(value: bytes, protocol: int) -> None:
    both = [value, bytearray(value)] if protocol == 5 else [value]
    assert read(pickle.dumps(both, protocol)).value == both


@pytest.mark.parametrize(
    "args",
    [
        CALL_SYSTEM + text("__globals__"),
        STAGE + text("__class__"),
        b"ctorch\nSize\n" + text("gradients"),
        text("a") + text("gradients"),
    ],
)
def test_getattr_of_anything_but_a_stage_is_unknown(args: bytes) -> None:
    result = read(b"cbuiltins\ngetattr\n" + args + b"\x86R.")
    assert isinstance(result.value, Opaque)
    assert Global("builtins", "getattr") in result.unknown_globals


@pytest.mark.parametrize(
    "rest",
    [
        b".",
        b"}b.",
        b"}(" + text("numel") + b"K\x07" + text("start") + b"\x88ub.",
        b"}(" + text("numel") + b"J\xff\xff\xff\xff" + text("start") + b"K\x01ub.",
    ],
    ids=["never filled", "empty", "bool", "negative"],
)
def test_a_fragment_address_that_is_not_two_numbers_is_damage(rest: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="fragment_address"):
        read(FRAGMENT + b")\x81" + rest)


@pytest.mark.parametrize(
    "data",
    [
        tensor(offset=b"J\xff\xff\xff\xff"),
        tensor(offset=b"\x88"),
        tensor(offset=b"G" + bytes(8)),
        tensor(offset=b"N"),
        tensor(shape=b"K\x02\x85"),
        tensor(shape=b"]"),
        tensor(shape=b"K\x02J\xff\xff\xff\xff\x86"),
        tensor(shape=b"K\x02\x88\x86"),
        tensor(shape=b"K\x02\x8a\x09" + b"\x00" * 8 + b"\x01\x86"),
        tensor(shape=b"(" + b"K\x01" * 65 + b"t", stride=b"(" + b"K\x01" * 65 + b"t"),
        tensor(stride=b"K\x03J\xff\xff\xff\xff\x86"),
        tensor(of=b"K\x01"),
        REBUILD + b")R",
        REBUILD + b"K\x01R",
        storage(numel=b"J\xff\xff\xff\xff"),
        storage(numel=b"\x88"),
        storage(kind=CALL_SYSTEM),
        storage(kind=b"K\x01"),
        storage(more=b"K\x00"),
        storage(more=b"NN"),
        text("storage") + b"Q",
        b"K\x05Q",
        b"(" + text("module") + CALL_SYSTEM + b"NNtQ",
        b"P0\n",
        storage() + storage(numel=b"K\x07") + b"\x86",
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + storage() + b"K\x00))\x89}CX\ntR",
    ],
)
def test_a_tensor_that_is_not_described_in_whole_numbers_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"rank\.pt: .* at byte \d+"):
        read(data + b".")


@pytest.mark.parametrize(
    "hidden",
    [
        tensor(offset=CALL_SYSTEM + b")R"),
        tensor(shape=CALL_SYSTEM + b")R"),
        tensor(shape=CALL_SYSTEM + b")RK\x01\x86"),
        tensor(of=CALL_SYSTEM + b")R"),
        b"ctorch._utils\n_rebuild_tensor_v3\n("
        + storage()
        + b"K\x00))\x89}"
        + CALL_SYSTEM
        + b")RtR",
    ],
)
def test_a_tensor_whose_place_needs_code_is_unsafe(hidden: bytes) -> None:
    with pytest.raises(UnsafeError, match="code that would have to run"):
        read(hidden + b".")


def _written() -> set[int]:
    """The opcodes of all that Python's picklers write since protocol 2, in memory's reach."""
    late = {op.code for op in pickletools.opcodes if op.proto >= 2}
    early = "NJMKGX].}eau(tdshqjrbRcQ01)".replace("d", "")
    never = {"\x82", "\x83", "\x84", "\x97", "\x98", "\x8d", "\x8e"}
    return {ord(code) for code in (late | set(early)) - never}


def test_what_no_pickler_of_protocol_2_or_later_writes_is_refused_by_number() -> None:
    for code in set(range(256)) - _written():
        with pytest.raises(
            DamagedCheckpointError, match=f"at byte 1: {code:#04x} is not an opcode"
        ):
            read(bytes([code]) + b"1\n.")
    with pytest.raises(DamagedCheckpointError, match="is not an opcode"):
        read(pickle.dumps([1.5, "text"], protocol=0))


class _Made:
    """What Python pickles with keyword arguments, with a state, and by class."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return (1,), {"a": 2}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("is_zip", [True, False])
def test_whatever_torch_save_writes_is_read(protocol: int, is_zip: bool, tmp_path: Path) -> None:
    """The numbers of what is stored, too: picklers count them up, and no others are read."""
    inner: list[object] = []
    inner.append((1, 2, 3, inner))
    state = {
        "plain": [None, True, 1, -1, 300, 70_000, 2**70, 2**3000, 1.5, "ü", "u" * 300, 1 + 2j],
        "bytes": [b"x", b"y" * 300, bytearray(b"z")],
        "many": [list(range(2001)), {str(i): i for i in range(2001)}, set(range(2001))],
        "objects": [argparse.Namespace(a=1), _Made(a=1), Path("x"), slice(1), deque([1]), inner],
        "mine": [OrderedDict(a=OrderedDict()), frozenset({1}), torch.Size([1]), torch.float32],
        "tensors": [torch.zeros(3, 2).t(), nn.Parameter(torch.ones(2)), torch.zeros(1).bfloat16()],
        "optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict(),
    }
    torch.save(
        state,
        path := tmp_path / "x.pt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=is_zip,
    )
    value = read_torch_file(path).value
    assert isinstance(value, dict)
    for key in ("plain", "many", "optimizer"):
        assert value[key] == state[key]
    assert [type(one).__name__ for one in value["tensors"]] == ["TensorRef"] * 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends early"),
        (b".", "takes more values"),
        (b"K\x01", "ends early"),
        (b"h\x05.", "never stored"),
        (b"j\x05\x00\x00\x00.", "never stored"),
        (b"t.", "takes more values"),
        (b"K\x01(\x86.", "takes more values"),
        (b"q\x00.", "takes more values"),
        (b"X\xff\xff\xff\xff.", "ends early"),
        (b"\x96" + b"\xff" * 8 + b".", "ends early"),
        (b"X\x02\x00\x00\x00\xc3\x28.", "cannot be decoded"),
        (b"c\xff\nx\n.", "cannot be decoded"),
        (b"cposix", "does not end"),
        (b"Nq\x01.", "in turn"),
        (b"Nq\x00q\x00.", "in turn"),
        (b"}K\x01a.", "not a list"),
        (b"]K\x01K\x02s.", "not a dict"),
        (b"](K\x01\x90.", "not a set"),
        (b"}(K\x01u.", "no value"),
        (b"]}b.", "attributes"),
        (b"K\x01K\x02\x93.", "not text"),
        (CALL_SYSTEM + b"K\x01R.", "not a tuple"),
        (b"\x8b\x01\x04\x00\x00" + bytes(1025) + b".", "more than 1024 bytes"),
        (b"\x8b\xff\xff\xff\x7f.", "ends early"),
    ],
)
def test_a_malformed_pickle_is_damage_and_the_message_says_what_is_wrong(
    data: bytes, reason: str
) -> None:
    with pytest.raises(DamagedCheckpointError, match=rf"^rank\.pt: .* at byte \d+: .*{reason}"):
        read(data)


def test_keys_that_take_exponential_time_to_hash_are_wrapped() -> None:
    doubled = b"K\x01" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(200))
    start = time.monotonic()
    result = read(b"}" + doubled + b"K\x01s.").value
    members = read(b"\x8f(" + doubled + b"\x90.").value
    assert time.monotonic() - start < 1
    assert isinstance(result, dict)
    assert isinstance(members, set)
    assert all(isinstance(key, OpaqueKey) for key in (*result, *members))


def test_a_huge_memo_index_allocates_nothing() -> None:
    tracemalloc.start()
    for data in (b"Nr\xff\xff\xff\xff.", b"Nj\xff\xff\xff\xff."):
        with pytest.raises(DamagedCheckpointError):
            read(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_lists_within_lists_to_any_depth_are_read_without_recursion() -> None:
    depth = 200_000
    value = read(b"]" * depth + b"a" * (depth - 1) + b".").value
    for _ in range(depth - 1):
        assert isinstance(value, list)
        (value,) = value
    assert value == []


def test_marks_and_calls_to_any_depth_are_read_without_recursion() -> None:
    depth = 100_000
    assert isinstance(read(b"(" * depth + b"t" * depth + b".").value, tuple)
    assert isinstance(read(CALL_SYSTEM + b")R" * depth + b".").value, Opaque)
    nested = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00"
    inner = b"(h\x00ctorch\nTensor\n" * depth + b")" + b"}t" * depth
    assert isinstance(read(nested + inner + b"R.").value, Opaque)


def test_work_and_size_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_reader, "MAX_OPCODES", 10)
    assert read(b"N0" * 4 + b"N.").value is None
    with pytest.raises(DamagedCheckpointError, match="goes on after 10 opcodes"):
        read(b"N0" * 5 + b"N.")
    monkeypatch.setattr(pickle_reader, "MAX_PICKLE_NBYTES", 8)
    with pytest.raises(DamagedCheckpointError, match="longer than it may be"):
        read(text("longer than that") + b".")


_FLOODS = {
    "lists": b"]" * 150_000,
    "sets": b"\x8f" * 50_000,
    "dicts": b"}NNs" * 40_000,
    "marks": b"(" * 150_000,
    "frozen sets": b"(\x91" * 50_000,
    "nothing": b"N" * 1_500_000,
    "memo": b"N" + b"\x94" * 1_500_000,
    "texts": b"\x8c\x02ab" * 150_000,
    "wide texts": b"(" + (text("\U0001f600" + "a" * 200) + b"0") * 15_000 + b"1N",
    "opaque": CALL_SYSTEM + b"q\x00" + b"h\x00)R" * 60_000,
    "globals": b"".join(b"ca\n%d\n" % i for i in range(25_000)),
    "storages": b"".join(
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(f"{i}") + text("cpu") + b"K\x06tQ"
        for i in range(15_000)
    ),
    "copies of a list": b"](" + b"K\x07" * 1_000 + b"eq\x00"
    + b"cbuiltins\nset\nq\x01" + b"h\x01h\x00\x85R" * 100,
    "copies of a tuple": b"](" + b"K\x07" * 1_000 + b"eq\x00"
    + b"ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 1000,
    "one long text": b"X" + struct.pack("<I", 20 << 20),
}  # fmt: skip


@pytest.mark.parametrize("flood", _FLOODS.values(), ids=_FLOODS.keys())
def test_no_pickle_takes_more_memory_than_it_may(
    flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound of a few megabytes: all costs are proportional, and tracing is slow."""
    bound = 10 << 20
    monkeypatch.setattr(pickle_reader, "MAX_NBYTES", bound)
    tracemalloc.start()
    with pytest.raises((UnsupportedError, DamagedCheckpointError)) as caught:
        read(flood + b".")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "MiB of memory" in str(caught.value) or "ends early" in str(caught.value)
    assert peak < bound
