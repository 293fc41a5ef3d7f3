"""Embeddings in the file that peft wrote beside a checkpoint, which the checkpoint itself lacks.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict``): embeddings that were
resized or targeted are saved with the adapter. They are frozen, and the Hugging Face Trainer leaves
frozen weights out of the checkpoint, so that this file may hold the only copy of the new rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from msgspec import Struct

from zexport.adapters.find import Adapter
from zexport.adapters.peft_names import of_adapter, read_name
from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.errors import ZexportError
from zexport.filenames import ADAPTER_FILE
from zexport.formats.safetensors_file import SafetensorsHeader, read_header
from zexport.options import CheckMode
from zexport.ranges.reader import SourceReader
from zexport.ranges.replicas import CastReplica, compare_casts
from zexport.store.boundary import Boundary
from zexport.store.folders import is_file
from zexport.weights.base_model import copy_of, frozen_in
from zexport.weights.named import PEFT_PREFIX, Weights

_PARAMETERS = ("weight", "bias")


class SavedBeside(Struct, frozen=True):
    """What peft's file of one adapter has of the base model.

    ``held`` are the checkpoint's own tensors, ``lacking`` the file's where it has none, both by the
    names in the file. ``is_of_step`` tells whether the adapter in it is the checkpoint's, as the
    module held it; if not, its weights may be those of another model.
    """

    header: SafetensorsHeader
    held: Mapping[str, StoredTensor]
    lacking: Mapping[str, StoredTensor]
    is_of_step: bool
    nbytes_read: int = 0

    @property
    def of_base(self) -> dict[str, StoredTensor]:
        """What the checkpoint lacks, by the names in the base model."""
        return {read_name(name).of_base: tensor for name, tensor in self.lacking.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was taken of it, where the checkpoint lacks it."""
        if not self.lacking or not self.is_of_step:
            return ()
        of_base = ", ".join(self.of_base)
        return (f"{of_base}: not in the checkpoint, taken from peft's {ADAPTER_FILE} beside it",)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was not taken of it, although the checkpoint lacks it."""
        if not self.lacking or self.is_of_step:
            return ()
        return (
            f"{', '.join(self.of_base)}: not in the checkpoint, nor taken from {ADAPTER_FILE} "
            "beside it, whose adapter has other values: it is of another step or run",
        )


def saved_beside(
    checkpoint: TrainingState,
    stored: Weights,
    adapters: Iterable[Adapter],
    check: CheckMode,
) -> dict[str, SavedBeside]:
    """What peft's files beside the checkpoint have of the base model, by the adapter's name.

    What such a file and the checkpoint both have is compared: all elements, or samples.
    """
    every = stored.every_tensor
    parts = {name: read_name(name) for name in every}
    copied = {part.of_base for part in parts.values() if part.is_copy}
    base = {
        part.of_base: every[name]
        for name, part in parts.items()
        if not part.adapter and not part.is_replaced
    }
    found: dict[str, SavedBeside] = {}
    for adapter in adapters:
        header = _read_file(checkpoint, adapter)
        whole = {} if header is None else _of_base(header, copied)
        if header is None or not whole:
            continue
        held = {name: base[inner] for name, inner in whole.items() if inner in base}
        lacking = {name: frozen_in(header, name) for name in whole if name not in held}
        own = _tensors_of(adapter, stored)
        is_of_step, nbytes = _holds(header, {**own, **held}, checkpoint, check)
        found[adapter.name] = SavedBeside(header, held, lacking, is_of_step, nbytes)
    return found


def adapter_copies(
    checkpoint: TrainingState, stored: Weights, adapters: Iterable[Adapter]
) -> list[tuple[SafetensorsHeader, tuple[CastReplica, ...]]]:
    """Copies of the adapters' masters in peft's files beside the checkpoint, by file.

    None of a file that lacks some, as one that ZeRO-3 left empty, or has them in other shapes.
    """
    found: list[tuple[SafetensorsHeader, tuple[CastReplica, ...]]] = []
    for adapter in adapters:
        header = _read_file(checkpoint, adapter)
        if header is not None:
            copies = _copies(header, _tensors_of(adapter, stored))
            found += [] if copies is None else [(header, copies)]
    return found


def _copies(
    header: SafetensorsHeader, own: Mapping[str, StoredTensor]
) -> tuple[CastReplica, ...] | None:
    """A file's tensors as copies of these; ``None`` where it has not all, or in another shape."""
    found = [copy_of(t, header, name) for name, t in own.items() if name in header.tensors]
    whole = tuple(copy for copy in found if copy is not None)
    return whole if len(whole) == len(own) else None


def _tensors_of(adapter: Adapter, stored: Weights) -> dict[str, StoredTensor]:
    """The checkpoint's tensors of an adapter, by their names in peft's file."""
    parts, tensors = of_adapter(stored.tensors, adapter.name), stored.tensors
    return {p.on_disk: tensors[n] for n, p in parts.items() if tensors[n].role is not Role.BUFFER}


def _read_file(checkpoint: TrainingState, adapter: Adapter) -> SafetensorsHeader | None:
    """The header of an adapter's file; ``None`` for none that can be read, or a link outside."""
    root = checkpoint.location.root
    path = root / adapter.folder / ADAPTER_FILE
    within = Boundary.of(root, follow=checkpoint.location.boundary.follow)
    if not is_file(path) or not within.holds(path):
        return None
    try:
        return read_header(path)
    except ZexportError:
        return None  # ZeRO-3 may have left an empty one; the adapter is in the rank files


def _of_base(header: SafetensorsHeader, copied: Set[str]) -> dict[str, str]:
    """The file's names of tensors of the base model, trained copies aside, to the names there."""
    parts = {name: read_name(name) for name in header.tensors if name.startswith(PEFT_PREFIX)}
    return {
        name: part.of_base
        for name, part in parts.items()
        if part.rest in _PARAMETERS
        and not part.adapter
        and not part.is_replaced
        and part.of_base not in copied
    }


def _holds(
    header: SafetensorsHeader,
    own: Mapping[str, StoredTensor],
    checkpoint: TrainingState,
    check: CheckMode,
) -> tuple[bool, int]:
    """Whether the file has all of these, as rounding the checkpoint's masters gives it.

    And how much was read to tell. That proves no record: where damage lets it differ, nothing of
    the file is taken.
    """
    whole = _copies(header, own)
    if whole is None:
        return False, 0
    with SourceReader([*checkpoint.torch_files, header]) as reader:
        full = check is CheckMode.FULL
        differing = compare_casts(whole, reader.read_into, full=full, expect=reader.expect)
        return not differing, reader.nbytes_read
