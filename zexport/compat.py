"""DeepSpeed's ``zero_to_fp32`` functions under the same names: swap the import line.

Unlike DeepSpeed's, they include frozen weights of ZeRO-1, write tied weights as safetensors, refuse
damaged or mixed files, and run no code in a checkpoint. Errors have the builtin types that
DeepSpeed raises, with a ``ZexportError`` as cause.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import (
    FileKind,
    Role,
    StoredTensor,
    TrainingState,
    raise_problems,
    source_of,
)
from zexport.errors import CheckpointError, DamagedCheckpointError, FrozenLeftOutError, ZexportError
from zexport.export.checked_reader import ProvenWeights, WeightReader
from zexport.filenames import WEIGHTS_IN_ORDER
from zexport.optional_deps import to_install
from zexport.ranges.dtypes import DType
from zexport.storage.files import is_file, make_folder, write_durably
from zexport.storage.local import copy_mode, rename
from zexport.storage.location import local_path, place
from zexport.text import some

if TYPE_CHECKING:
    import torch

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

for _package in ("torch", "huggingface_hub"):
    if find_spec(_package) is None:
        raise ImportError(f"zexport.compat needs {_package}. {to_install('hub')}.")


class LazyTensor:
    """A tensor that ``contiguous()`` reads, each time from disk.

    The first read compares replicas. A CRC-32 covers a record of many tensors, and is checked once
    nearly all its bytes have been read.
    """

    def __init__(self, stored: StoredTensor, dtype: DType, weights: ProvenWeights) -> None:
        import torch  # noqa: PLC0415 - takes seconds

        self.shape = torch.Size(stored.shape)
        self.dtype: torch.dtype = getattr(torch, dtype.torch_name)
        self._stored = stored
        self._weights = weights

    def contiguous(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ValueError: replicas or a CRC-32 differ, or a file has changed.
            OSError: a file cannot be read.
        """
        with _as_builtin(OSError), self._weights.reading(is_whole=False) as reader:
            return self.read(reader)

    def read(self, reader: WeightReader) -> torch.Tensor:
        import torch  # noqa: PLC0415 - takes seconds

        value = torch.empty(self.shape, dtype=getattr(torch, self._stored.dtype.torch_name))
        room = value.reshape(-1).view(torch.uint8).numpy().data
        reader.read_into(source_of(self._stored), 0, room)
        return value.to(self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Mapping[str, torch.Tensor | LazyTensor]:
    """Return master weights, frozen weights and buffers by in-memory name, in DeepSpeed's order.

    Master and frozen weights keep their stored dtype (fp32 and the module's). Floating buffers of
    less than 32 bits become float32, as from DeepSpeed; others keep their dtype, because float32
    would change values. Tied names share one tensor object.

    Args:
        checkpoint_dir: the folder with ``latest``, or any other level that zexport accepts.
        tag: name of the tag folder; ``None`` for the one in ``latest``.
        exclude_frozen_parameters: leave out frozen weights.
        lazy_mode: return ``LazyTensor`` objects instead of tensors.

    Raises:
        FileNotFoundError: the tag folder, or every file of one kind, is missing.
        ValueError: the checkpoint is missing, ambiguous, incomplete, damaged, unsafe or not
            supported, replicas differ, or frozen weights were left out when it was saved.
    """
    checkpoint = _open(checkpoint_dir, tag, may_lack_frozen=exclude_frozen_parameters)
    tensors, weights = _state(checkpoint, _in_memory, exclude_frozen=exclude_frozen_parameters)
    return tensors if lazy_mode else _read_all(tensors, weights)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Load the checkpoint's weights into the model, moved to the CPU, and return it.

    Warnings name missing weights, which keep the model's values as with DeepSpeed, unexpected
    weights, and tied weights with different values. A 16-bit model rounds the weights.

    Raises:
        FileNotFoundError: as ``get_fp32_state_dict_from_zero_checkpoint``.
        ValueError: likewise, except for frozen weights that were left out.
        RuntimeError: a tensor has another shape than the model's.
    """
    checkpoint = _open(checkpoint_dir, tag, may_lack_frozen=True)
    values = _read_all(*_state(checkpoint, _in_memory, exclude_frozen=False))
    model = model.cpu()
    result = model.load_state_dict(values, strict=False)
    for what, names in (
        ("no value for", result.missing_keys),
        ("values unknown to the model:", result.unexpected_keys),
    ):
        if names:
            warnings.warn(f"{checkpoint_dir} has {what} {some(names)}", stacklevel=2)
    for tied in _tied_apart(model, values):
        problem = f"{checkpoint_dir}: values of tied weights differ ({', '.join(tied)})"
        warnings.warn(f"{problem}; the model has those of {tied[-1]}", stacklevel=2)
    return model


def _tied_apart(
    model: torch.nn.Module, values: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, ...]]:
    """Yield the names of a tied weight with different values, in the order of loading."""
    import torch  # noqa: PLC0415 - takes seconds

    by_weight: dict[int, list[str]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if name in values:
            by_weight.setdefault(id(weight), []).append(name)
    for first, *others in by_weight.values():
        if not all(torch.equal(values[first], values[name]) for name in others):
            yield first, *others


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write ``pytorch_model.bin`` or ``model.safetensors``, or shards and their index.

    Floating tensors of less than 32 bits become float32, frozen weights included. Files are renamed
    into place once all are written and every CRC-32 is right. Tied weights are stored once in
    ``.bin`` files, and under each name in safetensors. Uses the memory of one shard. A warning
    names other weights in the folder that from_pretrained would load instead.

    Arguments and errors that are not listed are those of
    ``get_fp32_state_dict_from_zero_checkpoint``.

    Args:
        output_dir: the output folder, created if missing.
        max_shard_size: bytes, or a string such as ``5GB``; ``None`` for one file.
        safe_serialization: write safetensors.

    Raises:
        OSError: the output cannot be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # noqa: PLC0415 - 30 ms

    with _as_builtin(ValueError):
        output_dir = local_path(output_dir)
    checkpoint = _open(checkpoint_dir, tag, may_lack_frozen=exclude_frozen_parameters)
    tensors, weights = _state(checkpoint, _widened, exclude_frozen=exclude_frozen_parameters)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda lazy: lazy.shape.numel() * lazy.dtype.itemsize,
        get_storage_id=lambda lazy: None if safe_serialization else lazy,  # tied names share it
        filename_pattern=f"{stem}{{suffix}}.{suffix}",
        max_shard_size=sys.maxsize if max_shard_size is None else max_shard_size,
    )
    make_folder(output_dir)
    with TemporaryDirectory(dir=output_dir, prefix=".zexport-") as name:
        folder = Path(name)
        with _as_builtin(OSError), weights.reading() as reader:
            for filename, names in split.filename_to_tensors.items():
                _save(_read({name: tensors[name] for name in names}, reader), folder / filename)
        filenames = list(split.filename_to_tensors)
        if split.is_sharded:
            filenames.append(f"{stem}.{suffix}.index.json")
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_durably(folder / filenames[-1], text.encode())
        for filename in filenames:  # the index last
            rename(folder / filename, output_dir / filename)
    sooner = WEIGHTS_IN_ORDER[: WEIGHTS_IN_ORDER.index(filenames[-1])]
    if older := next((name for name in sooner if is_file(output_dir / name)), None):
        problem = f"{output_dir}: from_pretrained loads {older} instead of {filenames[-1]}"
        warnings.warn(f"{problem}. Remove {older}", stacklevel=2)


@contextmanager
def _as_builtin(kind: type[OSError] | type[ValueError]) -> Iterator[None]:
    """Raise a ``ZexportError`` as ``kind`` if files are missing, else as ``ValueError``."""
    try:
        yield
    except ZexportError as error:
        is_damage = isinstance(error, DamagedCheckpointError)
        is_missing = isinstance(error, CheckpointError) and not is_damage
        raise (kind if is_missing else ValueError)(str(error)) from error


def _open(
    checkpoint_dir: str | os.PathLike[str], tag: str | None, *, may_lack_frozen: bool
) -> TrainingState:
    """Return a checkpoint without problems, or raise the type that DeepSpeed raises.

    Source: DeepSpeed 0.19.8, ``utils/zero_to_fp32.py``: ValueError if tag and ``latest`` or files
    of some ranks are missing; FileNotFoundError if the tag folder or all files of one kind are.
    """
    is_named = tag is not None or is_file(place(checkpoint_dir) / "latest")
    with _as_builtin(FileNotFoundError if is_named else ValueError):
        checkpoint = open_checkpoint(place(checkpoint_dir), tag=tag)
    kinds = {file.kind is FileKind.OPTIMIZER for file in checkpoint.files}
    with _as_builtin(ValueError if len(kinds) > 1 else FileNotFoundError):
        findings = raise_problems(checkpoint)
    found = (f"{one.kind}: {one.detail or one.tensor}" for one in findings)
    for text in (*checkpoint.newer, *checkpoint.warnings, *found):
        warnings.warn(text, stacklevel=3)
    if may_lack_frozen or not (checkpoint.left_out or checkpoint.frozen_left_out):
        return checkpoint
    with _as_builtin(ValueError):
        raise FrozenLeftOutError(
            "frozen weights may have been left out when the checkpoint was saved",
            path=checkpoint.location.tag_dir,
            found=f"no values for {some(checkpoint.left_out)}" if checkpoint.left_out else None,
            expected="every weight of the model",
            hint="Pass exclude_frozen_parameters=True to leave them out",
        )


def _state(
    checkpoint: TrainingState,
    dtype_of: Callable[[StoredTensor], DType],
    *,
    exclude_frozen: bool,
) -> tuple[OrderedDict[str, LazyTensor], ProvenWeights]:
    """Return every tensor in the order of DeepSpeed's state dict, and their reader."""
    roles = [Role.BUFFER, *([] if exclude_frozen else [Role.FROZEN]), Role.TRAINABLE]
    stored = [tensor for role in roles for tensor in checkpoint.tensors if tensor.role is role]
    with _as_builtin(ValueError):
        weights = ProvenWeights(checkpoint, stored)
    tensors = OrderedDict((one.name, LazyTensor(one, dtype_of(one), weights)) for one in stored)
    for alias, name in checkpoint.aliases.items():
        if name in tensors:
            tensors[alias] = tensors[name]
    return tensors, weights


def _widened(stored: StoredTensor) -> DType:
    is_narrow = stored.dtype.is_floating and stored.dtype.itemsize < DType.F32.itemsize
    return DType.F32 if is_narrow else stored.dtype


def _in_memory(stored: StoredTensor) -> DType:
    return _widened(stored) if stored.role is Role.BUFFER else stored.dtype


def _read_all(tensors: Mapping[str, LazyTensor], weights: ProvenWeights) -> dict[str, torch.Tensor]:
    with _as_builtin(OSError), weights.reading() as reader:
        return _read(tensors, reader)


def _read(tensors: Mapping[str, LazyTensor], reader: WeightReader) -> dict[str, torch.Tensor]:
    """Read each tensor once; tied names share it."""
    read = {lazy: lazy.read(reader) for lazy in dict.fromkeys(tensors.values())}
    return {name: read[lazy] for name, lazy in tensors.items()}


def _save(shard: dict[str, torch.Tensor], path: Path) -> None:
    import torch  # noqa: PLC0415 - takes seconds
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    if path.suffix == ".bin":
        torch.save(shard, path)
        return
    first = {id(shard[name]): name for name in reversed(shard)}
    own = {n: t if first[id(t)] == n else t.clone() for n, t in shard.items()}
    write_durably(empty := path.with_suffix(".mode"), b"")
    save_file(own, path, metadata={"format": "pt"})
    copy_mode(path, empty)
