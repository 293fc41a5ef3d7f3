"""Files next to the checkpoint that contain weights again, or weights that the checkpoint lacks.

ZeRO-3's gathered weights and peft's adapter file are replicas of master weights, and are compared.
peft's file may also contain embeddings: if they were resized or are targets, peft saves them with
the adapter (0.21, ``utils/save_and_load.py``), but the Trainer leaves frozen weights out of the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from zexport.checkpoint.resolve import list_tags
from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.checkpoint.zero.records import ZERO3
from zexport.errors import FrozenLeftOutError, ZexportError
from zexport.export.adapters import Adapter
from zexport.export.base_model import frozen_in, read_base, replica_of
from zexport.export.peft import PeftName, names_of_adapter, parse_name
from zexport.export.weights import PEFT_PREFIX, Weights
from zexport.filenames import ADAPTER_FILE
from zexport.formats.safetensors import SafetensorsHeader, read_header
from zexport.options import CheckMode
from zexport.ranges.compare import CastReplica, compare_casts
from zexport.ranges.dtypes import Shape
from zexport.ranges.reader import SourceReader
from zexport.storage.files import is_file, is_link
from zexport.storage.symlink_policy import Boundary
from zexport.text import some

Copies = tuple[CastReplica, ...]

RESIZED_HINT = (
    "Pass the base model with resized embeddings as --base, train with the embeddings in "
    "modules_to_save, or leave out frozen weights with --exclude-frozen"
)


def gathered_copies(checkpoint: TrainingState) -> tuple[tuple[SafetensorsHeader, ...], Copies]:
    """Return files of weights that ZeRO-3 gathered, and their replicas of master weights.

    The Trainer writes them next to the tag folder. They don't record their step, so with several
    tags none is returned. Unreadable files, links, and files that lack a weight or
    have an unknown one are ignored.
    """
    location = checkpoint.location
    if checkpoint.stage != ZERO3 or len(list_tags(location.root)) != 1:
        return (), ()
    try:
        headers = read_base(location.root, follow_symlinks=location.boundary.follow)
    except ZexportError:
        return (), ()
    if any(is_link(header.path) for header in headers):
        return (), ()
    known = Weights.of(checkpoint).every_tensor
    replicas: dict[str, CastReplica] = {}
    for header in headers:
        for name, copy in header.tensors.items():
            tensor = known.get(name)
            if tensor is None or tensor.shape != copy.shape:
                return headers, ()
            replica = _replica(tensor, header, name)
            if tensor.role is Role.TRAINABLE and replica is not None:
                replicas[tensor.name] = replica
    trained = {t.name for t in checkpoint.tensors if t.role is Role.TRAINABLE and t.numel}
    return headers, tuple(replicas.values()) if trained <= replicas.keys() else ()


def _replica(tensor: StoredTensor, header: SafetensorsHeader, name: str) -> CastReplica | None:
    """Return a file's tensor as a replica; ``None`` if its shape or dtype rules that out."""
    copy = frozen_in(header, name)
    is_narrower = copy.dtype.is_floating and copy.dtype.itemsize < tensor.dtype.itemsize
    is_cast = copy.dtype is tensor.dtype or is_narrower
    return replica_of(tensor.name, header.path, tensor, copy) if is_cast else None


class AdapterFile(Struct, frozen=True):
    """peft's file of an adapter, next to the checkpoint.

    Attributes:
        replicas: of the adapter's master weights; empty unless the file has all of them.
        held: base weights that the checkpoint has too, by their names in the file.
        lacking: base weights that the checkpoint lacks, by their names in the file.
        is_of_step: whether the checkpoint has equal values of all other tensors of the file.
        nbytes_read: bytes read to compare them.
    """

    header: SafetensorsHeader
    replicas: Copies
    held: Mapping[str, StoredTensor]
    lacking: Mapping[str, StoredTensor]
    is_of_step: bool
    nbytes_read: int

    @property
    def of_base(self) -> dict[str, StoredTensor]:
        """What the checkpoint lacks, by its names in the base model."""
        return {parse_name(name).of_base: tensor for name, tensor in self.lacking.items()}

    @property
    def description(self) -> str:
        """Whether the file supplies what the checkpoint lacks."""
        names = some([*self.of_base], 4)
        if self.is_of_step:
            return f"{names}: not in the checkpoint; taken from {self.header.path}"
        return (
            f"{self.header.path}: contains the adapter of another step or run; {names} not taken. "
            "Copy the file that peft wrote with this checkpoint"
        )


def adapter_files(
    checkpoint: TrainingState, stored: Weights, adapters: Iterable[Adapter], check: CheckMode
) -> dict[str, AdapterFile]:
    """Return peft's files next to the checkpoint, by adapter name.

    A file supplies weights only if whatever the checkpoint has too is equal: all elements, or
    samples.
    """
    every = stored.every_tensor
    parts = {name: parse_name(name) for name in every}
    copied = {one.of_base for one in parts.values() if one.is_copy}
    base = {one.of_base: every[name] for name, one in parts.items() if _is_of_base(one)}
    location = checkpoint.location
    within = Boundary.of(location.root, follow=location.boundary.follow)
    found: dict[str, AdapterFile] = {}
    for adapter in adapters:
        path = location.root / adapter.folder / ADAPTER_FILE
        try:
            if not (is_file(path) and within.holds(path)):
                continue
            header = read_header(path)
        except ZexportError:
            continue
        own = names_of_adapter(stored.tensors, adapter.name)
        trained = {
            one.on_disk: stored.tensors[name]
            for name, one in own.items()
            if stored.tensors[name].role is not Role.BUFFER
        }
        saved = {n: parse_name(n) for n in header.tensors if n.startswith(PEFT_PREFIX)}
        of_base = {
            name: one.of_base
            for name, one in saved.items()
            if _is_of_base(one) and one.rest in ("weight", "bias") and one.of_base not in copied
        }
        held = {name: base[inner] for name, inner in of_base.items() if inner in base}
        lacking = {name: frozen_in(header, name) for name in of_base if name not in held}
        compared = _replicas(header, {**trained, **held}) if of_base else None
        is_of_step, nbytes = False, 0
        if compared is not None:
            with SourceReader([*checkpoint.torch_files, header]) as reader:
                is_of_step = not compare_casts(
                    compared,
                    reader.read_into,
                    full=check is CheckMode.FULL,
                    expect=reader.expect,
                )
                nbytes = reader.nbytes_read
        replicas = _replicas(header, trained) or ()
        found[adapter.name] = AdapterFile(header, replicas, held, lacking, is_of_step, nbytes)
    return found


def with_saved(
    stored: Weights, saved: AdapterFile | None, given: Mapping[str, Shape], *, needed: bool
) -> Weights:
    """Return the weights with those of peft's file that the checkpoint lacks.

    If that is of another step, resized weights are nowhere; refused if they are ``needed``.
    """
    if saved is None or not saved.lacking:
        return stored
    if saved.is_of_step:
        return Weights({**stored.tensors, **saved.lacking}, stored.aliases, stored.left_out)
    resized = [n for n, t in saved.of_base.items() if given.get(n, t.shape) != t.shape]
    if resized and needed:
        raise FrozenLeftOutError(
            "resized weights are not in the checkpoint, and this file is of another step or run",
            path=saved.header.path,
            found=some(resized),
            expected="the file that peft wrote with the checkpoint",
            hint=RESIZED_HINT,
        )
    return stored


def _replicas(header: SafetensorsHeader, own: Mapping[str, StoredTensor]) -> Copies | None:
    """Return a file's replicas of these tensors; ``None`` unless it has all, none of them empty."""
    found = [_replica(t, header, name) for name, t in own.items() if name in header.tensors]
    whole = tuple(one for one in found if one is not None)
    return whole if len(whole) == len(own) else None


def _is_of_base(parts: PeftName) -> bool:
    return not parts.adapter and not parts.is_replaced
