"""``--engine deepspeed``: tensors as DeepSpeed's own converter rebuilds them.

It unpickles freely and checks no checksums. So every file that it would load is first read inertly
and must name no unknown global, and the same bytes are read again for their CRC-32.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import MissingExtraError, UnsafeError, UnsupportedError
from zexport.export.checked_reader import WeightReader
from zexport.export.plan import ExportPlan, TensorPlan
from zexport.formats.pickle_reader import load
from zexport.formats.torch_file import read_torch_file
from zexport.optional_deps import to_install
from zexport.ranges.coverage import Coverage
from zexport.ranges.source import ByteSource, Extent, Mosaic, Window
from zexport.storage.files import matching

if TYPE_CHECKING:
    import torch

_PATTERNS = ("*_model_states.pt", "*_optim_states.pt")
"""Files of a tag folder that are unpickled.

Source: DeepSpeed 0.19.8, ``utils/zero_to_fp32.py`` (``get_model_state_files``,
``get_optim_files``).
"""

_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError),
)
"""What the converter raises, on purpose or not, if it cannot rebuild a checkpoint."""

_USE_NATIVE = "Export with --engine native, which does not need DeepSpeed"
_EXACT_FLOATS = 2**24
"""Integers below this magnitude are exact in fp32."""


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise UnsupportedError(
            "cannot be rebuilt by DeepSpeed's converter",
            path=path,
            found=f"{type(error).__name__}: {error}",
            hint=_USE_NATIVE,
        ) from error


class DeepSpeedReader(WeightReader):
    """Reads tensors as ``zero_to_fp32`` rebuilds them, one in memory at a time."""

    _tag_dir: Path
    _known: dict[ByteSource | None, StoredTensor]

    @classmethod
    def of_plan(cls, plan: ExportPlan) -> Self:
        reader = super().of_plan(plan)
        reader._tag_dir = Path(plan.origin.folder)
        reader._known = {tensor.source: tensor for tensor in plan.reference or ()}
        return reader

    def prepare(self) -> None:
        """Run the converter.

        Raises:
            MissingExtraError: DeepSpeed is not installed.
            UnsafeError: the converter would run unknown code.
            UnsupportedError: it cannot rebuild this checkpoint.
        """
        if find_spec("torch") is None or find_spec("deepspeed") is None:
            hint = f"{to_install('deepspeed')}, or use --engine native"
            raise MissingExtraError("the engine `deepspeed` needs the package deepspeed", hint=hint)
        _check_harmless(self._tag_dir)
        self._state = _run_converter(self._tag_dir)
        self._held: dict[str, memoryview] = {}
        self._turn_to_rebuild = Lock()

    def read_tensor(
        self, tensor: TensorPlan, start: int, buffer: memoryview, coverage: Coverage
    ) -> None:
        super().read_tensor(tensor, start, buffer, coverage)  # for the CRC-32; then overwritten
        named: dict[Path, StoredTensor] = {}
        places = _by_name(tensor.source, self._known, named)
        if places is None:  # not part of another tensor: DeepSpeed has it under its own name
            name, source = Path(tensor.stored_name), tensor.source
            places = Extent(name, 0, source.nbytes)
            named[name] = StoredTensor(
                tensor.stored_name, tensor.shape, tensor.stored_dtype, Role.TRAINABLE, source
            )
        filled = 0
        with self._turn_to_rebuild:
            for extent in places.extents(start, start + buffer.nbytes):
                stored = named[extent.path]
                if stored.name not in self._held:
                    self._held.clear()  # never hold two large tensors
                    value = _rebuilt(self._state, stored, self._tag_dir)
                    self._held[stored.name] = value.numpy().data
                part = self._held[stored.name][extent.offset : extent.offset + extent.nbytes]
                buffer[filled : filled + extent.nbytes] = part
                filled += extent.nbytes


def _by_name(
    source: ByteSource,
    wanted: dict[ByteSource | None, StoredTensor],
    named: dict[Path, StoredTensor],
) -> ByteSource | None:
    """Return a source as ranges of DeepSpeed's tensors, with names as paths; else ``None``."""
    if (found := wanted.get(source)) is not None:
        named[Path(found.name)] = found
        return Extent(Path(found.name), 0, source.nbytes)
    if isinstance(source, Window):
        inner = _by_name(source.source, wanted, named)
        return None if inner is None else Window(inner, source.start, source.nbytes)
    if isinstance(source, Mosaic):
        moved = [_by_name(tile.source, wanted, named) for tile in source.tiles]
        pairs = zip(source.tiles, moved, strict=True)
        tiles = [structs.replace(tile, source=inner) for tile, inner in pairs if inner is not None]
        return replace(source, tiles=tuple(tiles)) if len(tiles) == len(moved) else None
    return None


def _rebuilt(state: dict[str, Any], stored: StoredTensor, tag_dir: Path) -> torch.Tensor:
    """Return the bytes of a tensor, in its stored shape and dtype."""
    import torch  # noqa: PLC0415 - takes seconds

    def differs(what: str, found: object = None, expected: object = None) -> UnsupportedError:
        problem = f"DeepSpeed's converter {what}"
        return UnsupportedError(
            problem, path=tag_dir, found=found, expected=expected, hint=_USE_NATIVE
        )

    name, dtype = stored.name, getattr(torch, stored.dtype.torch_name)
    if name not in state:
        raise differs(f"leaves out {name!r}")
    with _failures(tag_dir):
        value: torch.Tensor = state[name].contiguous()
    if tuple(value.shape) != stored.shape:
        raise differs(f"gives {name!r} another shape", tuple(value.shape), stored.shape)
    if value.dtype is dtype:
        return _flat_bytes(value)
    # It casts buffers to fp32, and nothing else (0.19: floating ones; before: all of them).
    same = value.to(dtype)
    is_exact = value.dtype is torch.float32 and torch.equal(
        _flat_bytes(same.to(value.dtype)), _flat_bytes(value)
    )
    if dtype.is_floating_point:
        is_exact &= dtype.itemsize <= 4
    else:
        is_exact &= not dtype.is_complex and bool((value.abs() < _EXACT_FLOATS).all())
    if not is_exact:
        raise differs(f"casts {name!r}, which may round it", value.dtype, dtype)
    return _flat_bytes(same)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; unlike values, NaNs compare equal."""
    import torch  # noqa: PLC0415 - takes seconds

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _check_harmless(tag_dir: Path) -> None:
    """Raise if a file names an unknown global, as our reader or torch's finds it.

    Two readers can be made to disagree about where a zip directory is, and torch's is the one that
    unpickles.
    """
    import torch  # noqa: PLC0415 - takes seconds

    if any(character in str(tag_dir) for character in "*?["):
        problem = "has a character in its path that DeepSpeed's converter reads as a pattern"
        raise UnsupportedError(problem, path=tag_dir, hint=f"Rename the folder. {_USE_NATIVE}")
    for path in (path for pattern in _PATTERNS for path in matching(tag_dir, pattern)):
        if path.name.startswith("."):
            continue
        file = read_torch_file(path)
        if file.is_legacy:  # torch.load would also try a tar archive
            problem = "is a legacy torch file, which DeepSpeed's converter does not read"
            raise UnsupportedError(problem, path=path, hint=_USE_NATIVE)
        with _failures(path):
            archive = torch.PyTorchFileReader(str(path))
            is_script = "constants.pkl" in archive.get_all_records()  # goes to torch.jit.load
            data = archive.get_record("data.pkl")
        unknown = {*file.unknown_globals, *load(data, path=path).unknown_globals}
        if unknown or is_script:
            raise UnsafeError(
                "names code that DeepSpeed's converter would run",
                path=path,
                found=", ".join(map(str, sorted(unknown))) or "torch.jit.load",
                expected="globals of torch and DeepSpeed that only hold data",
                hint="Export with --engine native, which runs none of it",
            )


def _run_converter(tag_dir: Path) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - takes seconds

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for compilers and devices
    with redirect_stdout(sys.stderr):  # DeepSpeed's logger keeps the stream of this moment
        from deepspeed.utils import zero_to_fp32  # noqa: PLC0415 - optional

    convert = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    printed = io.StringIO()
    with _failures(tag_dir), redirect_stdout(printed), redirect_stderr(printed):
        found: dict[str, Any] = convert(str(tag_dir.parent), tag=tag_dir.name, lazy_mode=True)
        return found
