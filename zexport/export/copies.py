"""Files next to the checkpoint that contain weights again, or weights that the checkpoint lacks.

ZeRO-3's gathered weights and peft's adapter file are replicas of master weights, and are compared.
peft's file may also contain embeddings: if they were resized or are targets, peft saves them with
the adapter (0.21, ``utils/save_and_load.py``), but the Trainer leaves frozen weights out of the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.resolve import list_tags
from zexport.checkpoint.state import Role, StoredTensor, TrainingState
from zexport.checkpoint.zero.records import ZERO3
from zexport.errors import FrozenLeftOutError, ZexportError
from zexport.export.adapters import Adapter
from zexport.export.base_model import read_base, replicas_of, weights_in
from zexport.export.peft import PeftName, names_of_adapter, parse_name
from zexport.export.weights import PEFT_PREFIX, Tensors, Weights
from zexport.filenames import ADAPTER_FILE
from zexport.formats.safetensors import SafetensorsHeader, read_header
from zexport.model.hub_names import Shapes
from zexport.ranges.compare import CastReplica, compare_casts
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
    trained = {name: one for name, one in known.items() if one.role is Role.TRAINABLE}
    replicas: dict[str, CastReplica] = {}
    for header in headers:
        copies = weights_in(header)
        if any(name not in known or known[name].shape != t.shape for name, t in copies.items()):
            return headers, ()
        replicas |= {one.name: one for one in replicas_of(trained, copies, header.path)}
    is_whole = {one.name for one in trained.values() if one.numel} <= replicas.keys()
    return headers, tuple(replicas.values()) if is_whole else ()


class AdapterFile(Struct, frozen=True):
    """peft's file of an adapter, next to the checkpoint.

    Attributes:
        replicas: of the adapter's master weights; empty unless the file has all of them.
        held: base weights that the checkpoint has too, by their names in the file.
        lacking: base weights that the checkpoint lacks, by their names in the file.
        is_of_step: whether the checkpoint has equal values of all other tensors of the file.
    """

    header: SafetensorsHeader
    replicas: Copies
    held: Tensors
    lacking: Tensors
    is_of_step: bool

    @property
    def of_base(self) -> Tensors:
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
    checkpoint: TrainingState,
    stored: Weights,
    adapters: Iterable[Adapter],
    reader: SourceReader,
    *,
    is_full: bool,
) -> dict[str, AdapterFile]:
    """Return peft's files next to the checkpoint, by adapter name.

    A file supplies weights only if whatever the checkpoint has too is equal: all elements
    (``is_full``), or samples.
    """
    every = stored.every_tensor
    parts = {name: parse_name(name) for name in every}
    copied = {one.of_base for one in parts.values() if one.is_copy}
    base = {one.of_base: every[name] for name, one in parts.items() if _is_of_base(one)}
    location = checkpoint.location
    within = Boundary.of(location.model_dir, follow=location.boundary.follow)
    found: dict[str, AdapterFile] = {}
    for adapter in adapters:
        path = location.model_dir / adapter.folder / ADAPTER_FILE
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
        held, lacking = dict[str, StoredTensor](), dict[str, StoredTensor]()
        for name, tensor in weights_in(header).items():
            one = parse_name(name)
            is_weight = name.startswith(PEFT_PREFIX) and one.rest in ("weight", "bias")
            if not is_weight or not _is_of_base(one) or one.of_base in copied:
                continue
            if one.of_base in base:
                held[name] = base[one.of_base]
            else:
                lacking[name] = tensor
        reader.add(header)
        compared = _replicas(header, {**trained, **held}) if held or lacking else None
        is_of_step = compared is not None and not compare_casts(
            compared, reader.read_into, full=is_full, expect=reader.expect
        )
        replicas = _replicas(header, trained) or ()
        found[adapter.name] = AdapterFile(header, replicas, held, lacking, is_of_step)
    return found


def with_saved(
    stored: Weights, saved: AdapterFile | None, given: Shapes, *, needed: bool
) -> Weights:
    """Return the weights with those of peft's file that the checkpoint lacks.

    If that is of another step, resized weights are nowhere; refused if they are ``needed``.
    """
    if saved is None or not saved.lacking:
        return stored
    if saved.is_of_step:
        return replace(stored, tensors={**stored.tensors, **saved.lacking})
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


def _replicas(header: SafetensorsHeader, own: Tensors) -> Copies | None:
    """Return a file's replicas of these tensors; ``None`` unless it has all, none of them empty."""
    found = tuple(replicas_of(own, weights_in(header), header.path))
    return found if len(found) == len(own) else None


def _is_of_base(parts: PeftName) -> bool:
    return not parts.adapter and not parts.is_replaced
