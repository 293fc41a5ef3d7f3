from __future__ import annotations

import os
import pickle
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import Run, model_file, optimizer_file, save, small_model
from tests.support.real_cases import Facts, deepspeed_state, facts, on_every_real_checkpoint
from zexport import consolidate, plan_export
from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.resolve import locate
from zexport.errors import (
    DamagedCheckpointError,
    MissingExtraError,
    UnsafeError,
    UnsupportedError,
    ZexportError,
)
from zexport.export.plan import TensorPlan
from zexport.options import Engine, ExportOptions, NameLayout
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.run import reference_engine as reference
from zexport.run.pieces import TensorReader
from zexport.run.reference_engine import open_reference

Converter = Callable[..., dict[str, torch.Tensor]]


def _opened(root: Path) -> AbstractContextManager[TensorReader]:
    location = locate(root)
    return open_reference(location.root, location.tag)


def exported(root: Path, out: Path, engine: Engine, *, exclude_frozen: bool = False) -> Facts:
    options = ExportOptions(
        engine=engine, layout=NameLayout.MEMORY, exclude_frozen=exclude_frozen, jobs=2
    )
    consolidate(root, out, options)
    return facts({k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()})


def outcome(root: Path, out: Path, engine: Engine, *, exclude_frozen: bool) -> Facts | type:
    try:
        return exported(root, out, engine, exclude_frozen=exclude_frozen)
    except ZexportError as error:
        assert not out.exists()
        return type(error)


def names_deepspeed_gives(root: Path) -> set[str]:
    try:
        return set(deepspeed_state(root))
    except (ValueError, RuntimeError):
        return set()


@pytest.mark.deepspeed
@pytest.mark.parametrize("exclude_frozen", [False, True])
@on_every_real_checkpoint
def test_both_engines_export_the_same_wherever_deepspeed_rebuilds_every_tensor(
    root: Path, tmp_path: Path, exclude_frozen: bool
) -> None:
    native = outcome(root, tmp_path / "native", Engine.NATIVE, exclude_frozen=exclude_frozen)
    if isinstance(native, dict) and not native.keys() <= names_deepspeed_gives(root):
        expected: Facts | type = UnsupportedError
    else:
        expected = native

    ours = outcome(root, tmp_path / "reference", Engine.DEEPSPEED, exclude_frozen=exclude_frozen)

    assert ours == expected


@pytest.mark.deepspeed
@pytest.mark.parametrize("checkpoint", ["zero2", "zero3"])
def test_it_exports_masters_frozen_weights_and_buffers_as_they_are_stored(
    checkpoint: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = request.getfixturevalue(checkpoint)
    found = exported(root, tmp_path / "out", Engine.DEEPSPEED)
    wanted = {
        name: value.float() if name in small_model().frozen else value
        for name, value in small_model().tensors.items()
    }
    assert found == facts(wanted)


@pytest.mark.deepspeed
def test_nothing_of_what_deepspeed_says_reaches_stdout(
    zero3: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exported(zero3, tmp_path / "out", Engine.DEEPSPEED)
    assert capfd.readouterr().out == ""


@pytest.mark.deepspeed
def test_a_flipped_bit_is_found_although_deepspeed_does_not_look(
    zero3: Path, tmp_path: Path
) -> None:
    path = optimizer_file(zero3 / "global_step2", small_model(), 1)
    some = small_model().masters["emb.weight"].reshape(-1)[31:40].numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(some, bytes([some[0] ^ 1]) + some[1:]))
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        exported(zero3, tmp_path / "out", Engine.DEEPSPEED)


class _Slow:
    """A value that takes long enough to make for other threads to come in between.

    ``made`` is taken while any such value is made.
    """

    def __init__(self, value: torch.Tensor, made: Lock) -> None:
        self.value = value
        self.made = made

    def contiguous(self) -> torch.Tensor:
        assert self.made.acquire(blocking=False), "two tensors are made at once"
        time.sleep(0.001)
        self.made.release()
        return self.value


def test_threads_that_ask_at_the_same_time_get_their_tensors_made_one_at_a_time(
    zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Lock()
    state = {name: _Slow(value, made) for name, value in small_model().tensors.items()}
    monkeypatch.setattr(reference, "_import_converter", lambda: lambda *_, **__: state)
    plan = plan_export(open_checkpoint(zero3), tmp_path / "out")
    asked = [tensor for shard in plan.shards for tensor in shard.tensors] * 10
    with _opened(zero3) as reader, ThreadPoolExecutor(4) as threads:

        def read(tensor: TensorPlan) -> bytes:
            buffer = bytearray(tensor.numel * tensor.stored_dtype.itemsize)
            reader.read_into(tensor, 0, memoryview(buffer), reader.new_ledger())
            return bytes(buffer)

        found = list(threads.map(read, asked))
    stored = facts(small_model().tensors)
    assert found == [stored[tensor.stored_name][2] for tensor in asked]


# --- what must not run ---


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def never(*_: object, **__: object) -> NoReturn:
    pytest.fail("DeepSpeed was run")


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's converter must not be run."""
    monkeypatch.setattr(reference, "_import_converter", never)


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize(
    "name", ["stray_optim_states.pt", "layer_copy_model_states.pt", "old copy_optim_states.pt"]
)
def test_a_stray_file_that_deepspeed_would_load_is_refused_for_the_code_it_names(
    zero3: Path, tmp_path: Path, name: str
) -> None:
    torch.save({"module": _Bomb(tmp_path / "ran")}, zero3 / "global_step2" / name)
    with pytest.raises(UnsafeError, match=r"mkdir") as caught:
        exported(zero3, tmp_path / "out", Engine.DEEPSPEED)
    assert caught.value.path == zero3 / "global_step2" / name
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("unused")
def test_a_file_in_which_torch_finds_another_pickle_is_refused(zero3: Path, tmp_path: Path) -> None:
    path = model_file(zero3 / "global_step2", Run(), 0)
    torch.save({"module": _Bomb(tmp_path / "ran")}, tmp_path / path.name)
    _hide_in(path, (tmp_path / path.name).read_bytes())
    with pytest.raises(UnsafeError, match="mkdir"), _opened(zero3):
        pass


def _hide_in(path: Path, hidden: bytes) -> None:
    """Put a second archive into a zip file that only readers who trust the zip64 locator find."""
    shown = path.read_bytes()
    shown_directory, hidden_directory = _directory(shown), _directory(hidden)
    body, entries = shown[: shown_directory[0]], shown[slice(*shown_directory)]
    moved = len(hidden) + 56
    entries = _moved(entries, moved)
    end = struct.Struct("<4sQHHIIQQQQ")
    counts = (entries.count(b"PK\x01\x02"), hidden[slice(*hidden_directory)].count(b"PK\x01\x02"))
    ends = [
        end.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, stop - start, offset)
        for count, (start, stop), offset in (
            (counts[0], shown_directory, moved + shown_directory[0]),
            (counts[1], hidden_directory, hidden_directory[0]),
        )
    ]
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(hidden), 1)
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    path.write_bytes(hidden + ends[1] + body + entries + ends[0] + locator + last)


def _directory(archive: bytes) -> tuple[int, int]:
    """Where the central directory begins and ends."""
    last = archive.rindex(b"PK\x05\x06")
    nbytes, offset = struct.unpack_from("<II", archive, last + 12)
    return offset, offset + nbytes


def _moved(entries: bytes, by: int) -> bytes:
    """A central directory whose records lie ``by`` bytes further on."""
    moved, place = bytearray(entries), 0
    while place < len(moved):
        (offset,) = struct.unpack_from("<I", moved, place + 42)
        struct.pack_into("<I", moved, place + 42, offset + by)
        place += 46 + sum(struct.unpack_from("<HHH", moved, place + 28))
    return bytes(moved)


@pytest.mark.usefixtures("unused")
def test_a_file_that_torch_would_load_as_torchscript_is_refused(zero3: Path) -> None:
    path = model_file(zero3 / "global_step2", Run(), 0)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/constants.pkl", pickle.dumps(()))
    with pytest.raises(UnsafeError, match="jit"), _opened(zero3):
        pass


# --- what is not exact ---


@pytest.mark.usefixtures("unused")
def test_files_in_the_old_format_are_not_supported(tmp_path: Path) -> None:
    root = save(small_model(), Run(legacy=True), tmp_path / "old")
    with pytest.raises(UnsupportedError, match="old format"), _opened(root):
        pass


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("folder", ["run[1]", "run*", "run?"])
def test_a_folder_whose_name_deepspeed_takes_for_a_pattern_is_not_supported(
    tmp_path: Path, folder: str
) -> None:
    root = save(small_model(), Run(), tmp_path / folder)
    with pytest.raises(UnsupportedError, match="pattern"), _opened(root):
        pass


def read(
    root: Path, monkeypatch: pytest.MonkeyPatch, converter: Converter, dtype: DType, numel: int
) -> bytes:
    """The tensor ``x`` as the reference gives it when DeepSpeed's converter is ``converter``."""
    monkeypatch.setattr(reference, "_import_converter", lambda: converter)
    path = model_file(root / "global_step2", Run(), 0)
    buffer = bytearray(numel * dtype.itemsize)
    with _opened(root) as reader:
        source = Extent(path, 0, len(buffer))
        tensor = TensorPlan("y", (numel,), dtype, "x", dtype, source, 0)
        reader.read_into(tensor, 0, memoryview(buffer), reader.new_ledger())
    return bytes(buffer)


@pytest.mark.parametrize(
    "stored",
    [
        torch.tensor([2**24 - 1, 1 - 2**24, 0]),
        torch.tensor([True, False]),
        torch.tensor([-128, 127], dtype=torch.int8),
        torch.tensor([0.1, -0.0, float("inf"), 6e-8], dtype=torch.float16),
        torch.tensor([0.1, -0.0, 1e38, 1e-40], dtype=torch.bfloat16),
        torch.tensor([0.1, float("nan")]),
        torch.tensor([0.1], dtype=torch.float64),
    ],
    ids=lambda value: str(value.dtype),
)
def test_a_value_of_the_stored_type_or_of_float32_becomes_the_stored_one_again(
    zero3: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.Tensor
) -> None:
    dtype = next(dtype for dtype in DType if f"torch.{dtype.torch_name}" == str(stored.dtype))
    for given in (stored, stored.float()) if dtype is not DType.F64 else (stored,):
        found = read(zero3, monkeypatch, lambda *_, g=given, **__: {"x": g}, dtype, stored.numel())
        assert found == facts({"x": stored})["x"][2]


@pytest.mark.parametrize(
    ("given", "dtype", "reason"),
    [
        (torch.tensor([2.0**24]), DType.I64, "rounded"),
        (torch.tensor([-(2.0**24)]), DType.I32, "rounded"),
        (torch.tensor([float("nan")]), DType.I64, "rounded"),
        (torch.tensor([0.1]), DType.F64, "rounded"),
        (torch.tensor([1], dtype=torch.int32), DType.I64, "rounded"),
        (torch.tensor([0.5]), DType.I64, "cannot hold"),
        (torch.tensor([300.0]), DType.U8, "cannot hold"),
        (torch.tensor([0.1]), DType.BF16, "cannot hold"),
        (torch.tensor([1e6]), DType.F16, "cannot hold"),
        (torch.tensor([[1.0]]), DType.F32, "another shape"),
    ],
)
def test_a_value_that_may_not_be_the_stored_one_is_refused(
    zero3: Path, monkeypatch: pytest.MonkeyPatch, given: torch.Tensor, dtype: DType, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        read(zero3, monkeypatch, lambda *_, **__: {"x": given}, dtype, 1)


def test_a_tensor_that_deepspeed_leaves_out_is_named(
    zero3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="leaves out 'x'"):
        read(zero3, monkeypatch, lambda *_, **__: {"y": torch.zeros(1)}, DType.F32, 1)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("no"),
        AttributeError("no"),
        EOFError("no"),
        FileNotFoundError("no"),
        IndexError("no"),
        KeyError("no"),
        ModuleNotFoundError("no"),
        NotImplementedError("no"),
        RuntimeError("no"),
        TypeError("no"),
        ValueError("no"),
        ZeroDivisionError("no"),
        pickle.UnpicklingError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_deepspeed_raises_is_told_with_its_type_and_text(
    zero3: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise error

    with pytest.raises(UnsupportedError, match=rf"found {type(error).__name__}: '?no") as caught:
        read(zero3, monkeypatch, refuse, DType.F32, 1)
    assert caught.value.__cause__ is error


def test_without_deepspeed_it_says_what_to_install(
    zero3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.utils", None)
    with (
        pytest.raises(MissingExtraError, match=r"pip install '\.\[deepspeed\]'"),
        _opened(zero3),
    ):
        pass
