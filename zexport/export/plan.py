"""The plan of an export: the source of every output byte, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import Struct

from zexport.checkpoint.state import StoredTensor, TrainingState, source_of
from zexport.findings import Finding, FindingKind
from zexport.formats.safetensors import HeaderEntry, SafetensorsFrame, build_header
from zexport.formats.torch_writer import TorchFrame, TorchRecords, lay_out
from zexport.model.hub_cache import GivenBase
from zexport.options import CheckMode, ExportDType
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Member
from zexport.storage.json import Json, Natural
from zexport.storage.storage import Version
from zexport.text import brief

if TYPE_CHECKING:
    from zexport.ranges.reader import ReadableFile


def qualified(filename: str, name: str) -> str:
    """Return a tensor's name in the whole output: the folder of its file, if any, comes first."""
    folder, slash, _ = filename.rpartition("/")
    return f"{folder}/{name}" if slash else name


def qualified_by_file(filename: str, name: str) -> str:
    """Return the name of a tensor in a torch file: its file comes first."""
    return f"{filename}/{name}"


Frame: TypeAlias = SafetensorsFrame | TorchFrame | TorchRecords
"""All bytes of a file except those of its tensors."""


class TensorPlan(Struct, frozen=True, gc=False):
    """An output tensor: its elements are ``source``, row-major, cast if the dtypes differ.

    ``name`` is unique in the whole output, ``offset`` its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    stored_name: str
    stored_dtype: DType
    source: ByteSource
    offset: int

    @property
    def numel(self) -> int:
        return self.source.nbytes // self.stored_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class FilePlan(Struct, frozen=True):
    """An output file of tensors, in file order."""

    filename: str
    frame: Frame
    tensors: tuple[TensorPlan, ...]

    @property
    def data_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return self.frame.nbytes + self.data_nbytes


class SideFile(Struct, frozen=True):
    """A small output file: ``content``, or a copy of ``origin``, at ``version`` if given."""

    filename: str
    content: bytes | None = None
    origin: Path | None = None
    version: Version | None = None


class SourceFile(Struct, frozen=True):
    """A file that the plan reads, and its records by offset.

    A record is a zip member, a storage of a legacy torch file, or a tensor of safetensors.
    """

    path: Path
    version: Version
    members: tuple[Member, ...]

    @classmethod
    def of(cls, file: ReadableFile) -> SourceFile:
        return cls(file.path, file.version, file.members)


class Origin(Struct, frozen=True):
    """The checkpoint that was exported.

    Attributes:
        folder: path of the tag folder; from a manifest, its last names.
        step: optimizer step.
        layout: such as ``ZeRO-3``.
        ranks: number of ranks that wrote it.
    """

    folder: str
    step: Natural | None
    layout: str
    ranks: Natural | None

    @classmethod
    def of(cls, checkpoint: TrainingState) -> Origin:
        location = checkpoint.location
        folder = str(location.real_root / location.tag)
        return cls(folder, checkpoint.global_steps, checkpoint.layout, checkpoint.ranks)

    @classmethod
    def recorded(cls, record: object) -> Origin | None:
        """Return what a manifest records of its checkpoint, if that is complete."""
        known = record if isinstance(record, Mapping) else {}
        try:
            return msgspec.convert({**known, "step": known.get("global_steps")}, cls)
        except msgspec.ValidationError:
            return None

    def __str__(self) -> str:
        details = (
            None if self.step is None else f"step {self.step:,}",
            self.layout,
            None if self.ranks is None else f"{self.ranks:,} rank{'s' * (self.ranks != 1)}",
        )
        words = ", ".join(filter(None, details))
        return f"{self.folder} ({words})" if words else self.folder


class Form(Struct, frozen=True):
    """The form of an output folder.

    Attributes:
        dtypes: dtypes of the floating-point tensors, as torch names them, most common first.
        names: kind of tensor names: ``hub``, ``memory`` or ``peft``; ``checkpoint`` if resharded.
        weights_only: there is no config.json, so that ``from_pretrained`` cannot load it.
    """

    dtypes: tuple[str, ...]
    names: str
    weights_only: bool

    @property
    def is_checkpoint(self) -> bool:
        return self.names == "checkpoint"


class Reference(Struct, frozen=True):
    """The checkpoint for ``--engine deepspeed``, and its tensors."""

    root: Path
    tag: str
    tensors: tuple[StoredTensor, ...]


class ExportPlan(Struct, frozen=True):
    """All that an export will do; running it takes no more decisions.

    Attributes:
        out_dir: the output folder.
        origin: the checkpoint.
        form: dtypes and names of the output.
        shards: the files of tensors, in order.
        side_files: all other files, except the manifest.
        sources: the files to read, each once.
        replicas: copies that must equal what is exported; compared before writing.
        gathered: copies next to the checkpoint; a difference is a finding.
        check: how much of the copies is compared.
        allow: kinds of findings that the user accepts.
        findings: findings of planning.
        provenance: what the manifest records of checkpoint and options, as JSON values.
        warnings: what the user should act on.
        base: the base model, if given.
        notes: what the user may want to know.
        left_out: entries of the module's state dict without tensors or values.
        overwrite: replace an existing ``out_dir`` once the new one is complete.
        jobs: worker threads.
        chunk_nbytes: bytes of a tensor that a worker holds at a time.
        nbytes_compared: bytes of tensors that planning read.
        pruned: sources without optimizer states, whose weights moved within the file.
        reference: the checkpoint for ``--engine deepspeed``, else ``None``.
    """

    out_dir: Path
    origin: Origin
    form: Form
    shards: Sequence[FilePlan]
    side_files: tuple[SideFile, ...]
    sources: tuple[SourceFile, ...]
    provenance: Mapping[str, Json]
    warnings: tuple[str, ...]
    overwrite: bool
    jobs: int
    chunk_nbytes: int
    reference: Reference | None = None
    replicas: tuple[Replica | CastReplica, ...] = ()
    gathered: tuple[CastReplica, ...] = ()
    check: CheckMode = CheckMode.SAMPLED
    allow: frozenset[FindingKind] = frozenset()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    nbytes_compared: int = 0
    pruned: frozenset[Path] = frozenset()
    base: GivenBase | None = None

    __repr__ = brief

    @property
    def source_names(self) -> dict[Path, str]:
        """Return source names that stay the same if the checkpoint moves: paths below its folder.

        Of other files, the last part.
        """
        paths = [source.path for source in self.sources]
        folders = {path.parent for path in paths if path.suffix == ".pt"}
        if len({folder.name for folder in folders}) == 1:  # one tag, in a folder or one a node
            return {path: path.name for path in paths}
        above = next(((one, *one.parents) for one in folders), ())
        root = next((top for top in above if all(f.is_relative_to(top) for f in folders)), None)
        return {
            path: path.relative_to(root).as_posix()
            if root is not None and path.is_relative_to(root)
            else path.name
            for path in paths
        }


DTYPES = {
    ExportDType.FP32: DType.F32,
    ExportDType.BF16: DType.BF16,
    ExportDType.FP16: DType.F16,
}
"""The values of ``--dtype`` that name a dtype."""

WEIGHTS_ONLY = "weights only: from_pretrained will not load this"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def plan_file(
    filename: str, tensors: Mapping[str, StoredTensor], dtypes: Mapping[str, DType]
) -> FilePlan:
    """Return the plan of a safetensors file: widest dtype first, then by name.

    Source: safetensors 0.6, ``tensor.rs`` (``prepare``).
    """
    order = sorted(tensors, key=lambda name: (-dtypes[name].itemsize, name))
    header, offsets = build_header(
        [HeaderEntry(name, dtypes[name], tensors[name].shape) for name in order]
    )
    planned = tuple(
        TensorPlan(
            name=qualified(filename, name),
            shape=tensors[name].shape,
            dtype=dtypes[name],
            stored_name=tensors[name].name,
            stored_dtype=tensors[name].dtype,
            source=source_of(tensors[name]),
            offset=len(header) + offset,
        )
        for name, offset in zip(order, offsets, strict=True)
    )
    return FilePlan(filename, SafetensorsFrame(header), planned)


def plan_torch_file(filename: str, value: object) -> FilePlan:
    """Return the plan of a torch file that ``torch.load`` reads as ``value``.

    ``value`` consists of plain Python values, ``TensorLeaf`` and the classes of
    ``zexport.formats.pickle_values``; its tensors are named by their key path.
    """
    frame, placed = lay_out(value, PurePosixPath(filename).stem)
    tensors = tuple(
        TensorPlan(
            name=name,
            shape=one.leaf.shape,
            dtype=one.leaf.dtype,
            stored_name=name,
            stored_dtype=one.leaf.stored_dtype,
            source=one.leaf.source,
            offset=one.offset,
        )
        for one in placed
        for name in (qualified_by_file(filename, one.name),)
    )
    return FilePlan(filename, frame, tensors)
