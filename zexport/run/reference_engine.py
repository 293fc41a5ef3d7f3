"""DeepSpeed's own converter as a source of tensors: when it may run, what of it can be believed."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import MissingExtraError, UnsafeError, UnsupportedError
from zexport.export.plan import TensorPlan
from zexport.extras import to_install
from zexport.formats.inert import Global
from zexport.formats.pickles import load
from zexport.formats.torch_file import Container, TorchFile, read_torch_file
from zexport.ranges.extents import ByteSource, Extent, Window
from zexport.ranges.ledger import Ledger
from zexport.ranges.mosaic import Mosaic
from zexport.ranges.reader import SourceReader
from zexport.run.pieces import Piece, TensorReader
from zexport.store.folders import matching

if TYPE_CHECKING:
    import torch

_PATTERNS = ("*_model_states.pt", "*_optim_states.pt")
"""Every file of a tag folder that the converter unpickles, strays among them.

Source: DeepSpeed 0.19.8, ``utils/zero_to_fp32.py`` (``get_model_state_files`` and
``get_optim_files``).
"""

_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,  # NotImplementedError is one
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What the converter raises, on purpose or not, where it cannot rebuild a checkpoint."""

_INTEGERS_OF_FLOAT32 = 2**24
"""Below this magnitude every whole number is a float32, so none was rounded to get there."""

_USE_NATIVE = "Export with --engine native, which does not need DeepSpeed"


class _Lazy(Protocol):
    """A value of the converter's state dict: a tensor, or its recipe."""

    def contiguous(self) -> torch.Tensor: ...


_State = Mapping[str, _Lazy]


@contextmanager
def open_reference(
    root: Path, tag: str, stored: Iterable[StoredTensor] = ()
) -> Iterator[TensorReader]:
    """The tensors of a checkpoint as DeepSpeed's ``zero_to_fp32`` rebuilds them.

    A plan's are laid out of the ``stored`` ones as ever. It unpickles freely and checks no CRC: so
    every file is read inertly before, and must name nothing unknown; and the same bytes are read
    again for the CRC.
    """
    tag_dir = root / tag
    if find_spec("torch") is None:
        raise _missing("no torch")
    files = _vetted_files(tag_dir)
    with SourceReader(files) as sources:
        yield _Reference(tag_dir, _run_converter(root, tag), sources, stored)


class _Reference:
    """The converter's state dict as a ``TensorReader``; holds one tensor at a time."""

    def __init__(
        self,
        tag_dir: Path,
        state: _State,
        sources: SourceReader,
        stored: Iterable[StoredTensor],
    ) -> None:
        self._wanted = {id(tensor.source): tensor for tensor in stored}
        self._tag_dir = tag_dir
        self._state = state
        self._sources = sources
        self.new_ledger = sources.new_ledger
        self.take = sources.take
        self.finish = sources.finish
        self._lock = Lock()
        self._held: tuple[str, memoryview] | None = None

    @property
    def nbytes_read(self) -> int:
        """Bytes read for the CRC; what DeepSpeed itself reads is not known."""
        return self._sources.nbytes_read

    def expect(self, pieces: Iterable[Piece]) -> None:
        """DeepSpeed reads files of this machine alone."""

    def read_into(self, tensor: TensorPlan, start: int, buffer: memoryview, ledger: Ledger) -> None:
        """Fill ``buffer`` with the stored bytes of ``tensor`` from ``start`` on."""
        # For the CRC alone: what it reads is written over at once.
        self._sources.read_into(tensor.source, start, buffer, ledger)
        named, places = self._in_names(tensor)
        filled = 0
        with self._lock:
            for extent in places.extents(start, start + buffer.nbytes):
                held = self._hold(named[extent.path])
                part = held[extent.offset : extent.offset + extent.nbytes]
                buffer[filled : filled + extent.nbytes] = part
                filled += extent.nbytes

    def _in_names(self, tensor: TensorPlan) -> tuple[dict[Path, StoredTensor], ByteSource]:
        """The tensor as ranges of tensors of DeepSpeed's, whose names stand for files."""
        named: dict[Path, StoredTensor] = {}

        def in_names(source: ByteSource) -> ByteSource | None:
            if id(source) in self._wanted:
                wanted = self._wanted[id(source)]
                named[Path(wanted.name)] = wanted
                return Extent(Path(wanted.name), 0, source.nbytes)
            if isinstance(source, Window):
                inner = in_names(source.source)
                return None if inner is None else Window(inner, source.start, source.nbytes)
            if isinstance(source, Mosaic):
                tiles = [(tile, in_names(tile.source)) for tile in source.tiles]
                moved = [
                    structs.replace(tile, source=inner)
                    for tile, inner in tiles
                    if inner is not None
                ]
                return replace(source, tiles=tuple(moved)) if len(moved) == len(tiles) else None
            return None

        if (places := in_names(tensor.source)) is not None:
            return named, places
        wanted = StoredTensor(
            tensor.stored_name, tensor.shape, tensor.stored_dtype, Role.TRAINABLE, tensor.source
        )
        return {Path(wanted.name): wanted}, Extent(Path(wanted.name), 0, tensor.source.nbytes)

    def _hold(self, wanted: StoredTensor) -> memoryview:
        """All bytes of a tensor of DeepSpeed's; it stays until another is asked for."""
        if self._held is None or self._held[0] != wanted.name:
            self._held = None  # so that two large tensors are never held at once
            self._held = wanted.name, _flat_bytes(self._stored(wanted)).numpy().data
        return self._held[1]

    def _stored(self, tensor: StoredTensor) -> torch.Tensor:
        """The whole tensor, in the shape and the element type that are stored."""
        import torch  # noqa: PLC0415 - takes seconds

        name, wanted = tensor.name, getattr(torch, tensor.dtype.torch_name)
        if name not in self._state:
            raise self._differs(f"leaves out {name!r}")
        with _refusals(self._tag_dir):
            value = self._state[name].contiguous()
        if tuple(value.shape) != tensor.shape:
            raise self._differs(
                f"gives {name!r} another shape", found=tuple(value.shape), expected=tensor.shape
            )
        if value.dtype is wanted:
            return value
        if _may_be_rounded(value, wanted):
            raise self._differs(
                f"turns {name!r} into another type, which may have rounded it (whole numbers of "
                "2**24 and more need not have an exact float32)",
                found=value.dtype,
                expected=wanted,
            )
        restored = value.to(wanted)
        if not torch.equal(_flat_bytes(restored.to(value.dtype)), _flat_bytes(value)):
            raise self._differs(
                f"has values for {name!r} that its type cannot hold",
                found=value.dtype,
                expected=wanted,
            )
        return restored

    def _differs(
        self, what: str, *, found: object = None, expected: object = None
    ) -> UnsupportedError:
        return UnsupportedError(
            f"DeepSpeed's converter {what}",
            path=self._tag_dir,
            found=found,
            expected=expected,
            hint=_USE_NATIVE,
        )


def _may_be_rounded(value: torch.Tensor, wanted: torch.dtype) -> bool:
    """Whether a tensor of type ``wanted`` can have lost digits in becoming ``value``.

    The converter raises buffers to float32 and nothing else: floating ones in 0.19, all of them
    before (``utils/zero_to_fp32.py``, ``parse_model_states``).
    """
    import torch  # noqa: PLC0415 - takes seconds

    if value.dtype is not torch.float32 or wanted.is_complex:
        return True
    if wanted.is_floating_point:
        return bool(wanted.itemsize > value.dtype.itemsize)
    return not bool((value.abs() < _INTEGERS_OF_FLOAT32).all())  # NaN is below nothing


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes; they compare equal where NaN would not."""
    import torch  # noqa: PLC0415 - takes seconds

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _vetted_files(tag_dir: Path) -> tuple[TorchFile, ...]:
    """Every file that the converter would load; none of them names anything unknown."""
    if any(character in str(tag_dir) for character in "*?["):
        raise UnsupportedError(
            "has a character in its path that DeepSpeed's converter takes for a pattern",
            path=tag_dir,
            hint=f"Rename the folder. {_USE_NATIVE}",
        )
    paths = [path for pattern in _PATTERNS for path in matching(tag_dir, pattern)]
    return tuple(_vetted(path) for path in paths if not path.name.startswith("."))


def _vetted(path: Path) -> TorchFile:
    file = read_torch_file(path)
    if file.container is not Container.ZIP:
        # torch.load would also try it as a tar archive, which the inert reader does not.
        raise UnsupportedError(
            "is in torch's old format, which DeepSpeed's converter does not read",
            path=path,
            hint=_USE_NATIVE,
        )
    unknown = {*file.unknown_globals, *_globals_torch_would_find(path)}
    if unknown:
        raise UnsafeError(
            "names code that DeepSpeed's converter would run",
            path=path,
            found=", ".join(map(str, sorted(unknown))),
            expected="globals of torch and DeepSpeed that only hold data",
            hint="Export with --engine native, which runs none of it",
        )
    return file


def _globals_torch_would_find(path: Path) -> tuple[Global, ...]:
    """The unknown globals of the pickle that torch's own zip reader finds in the file.

    Two readers can be made to disagree about where a zip file's directory is; what will be run is
    what torch finds.
    """
    import torch  # noqa: PLC0415 - takes seconds

    with _refusals(path):
        archive = torch.PyTorchFileReader(str(path))
        if "constants.pkl" in archive.get_all_records():
            return (Global("torch.jit", "load"),)  # what torch.load hands such a file to
        data = archive.get_record("data.pkl")
    return load(data, path=path).unknown_globals


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Whatever the converter raises, as what it means here."""
    try:
        yield
    except _REFUSALS as error:
        raise UnsupportedError(
            "cannot be rebuilt by DeepSpeed's converter",
            path=path,
            found=f"{type(error).__name__}: {error}",
            hint=_USE_NATIVE,
        ) from error


def _run_converter(root: Path, tag: str) -> _State:
    converter = _import_converter()
    said = io.StringIO()  # its account of its progress, which is not ours to print
    with _refusals(root / tag), redirect_stdout(said), redirect_stderr(said):
        return converter(str(root), tag=tag, lazy_mode=True)


def _import_converter() -> Callable[..., _State]:
    """DeepSpeed's function. Its logger is made on import, for the stream that it finds then."""
    import torch  # noqa: PLC0415 - takes seconds

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it looks for compilers and devices
    try:
        with redirect_stdout(sys.stderr):
            from deepspeed.utils import zero_to_fp32  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise _missing(error) from error
    converter: Callable[..., _State] = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    return converter


def _missing(found: object) -> MissingExtraError:
    return MissingExtraError(
        "the engine `deepspeed` needs the package deepspeed",
        found=found,
        hint=f"{to_install('deepspeed')}, or use --engine native",
    )
