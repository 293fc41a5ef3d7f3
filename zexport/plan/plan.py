"""The plan: where every output byte comes from, decided before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import Struct

from zexport.checkpoint.state import StoredTensor, TrainingState, source_of
from zexport.findings import Finding, FindingKind
from zexport.formats.safetensors_file import HeaderEntry, SafetensorsFrame, build_header
from zexport.formats.torch_writer import TorchFrame, lay_out
from zexport.model.hub_cache import GivenBase
from zexport.options import CheckMode, ExportDType
from zexport.printable import brief
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Member
from zexport.ranges.replicas import CastReplica, Replica
from zexport.store.json import Json, Natural
from zexport.store.versions import Version

if TYPE_CHECKING:
    from zexport.ranges.reader import ReadableFile


def qualified(filename: str, name: str) -> str:
    """The name of a tensor within the whole output: after its file's folder, if it has one."""
    folder, slash, _ = filename.rpartition("/")
    return f"{folder}/{name}" if slash else name


def qualified_by_file(filename: str, name: str) -> str:
    """The same for a file whose tensors have names of their own: after the file."""
    return f"{filename}/{name}"


Frame: TypeAlias = SafetensorsFrame | TorchFrame
"""Everything of a file but its tensors' bytes, whatever the file's form.

Its ``pieces`` are runs of bytes with their places, ascending: one before the first tensor, and at
most one behind each. They take the CRC-32 of the tensors' bytes, in order, each asked for after the
run before the tensor; no matter what where ``has_crc32`` is false.
"""


class TensorPlan(Struct, frozen=True, gc=False):
    """One tensor of the output and where its elements come from.

    ``source``, row-major, cast where the two types differ. ``name`` is its own in the whole output,
    ``offset`` its first byte in the file.
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
        """Number of elements (1 for a scalar)."""
        return self.source.nbytes // self.stored_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.numel * self.dtype.itemsize


class FilePlan(Struct, frozen=True):
    """One file of tensors: these in file order, and all that stands before, between and behind."""

    filename: str
    frame: Frame
    tensors: tuple[TensorPlan, ...]

    @property
    def data_nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return self.frame.nbytes + self.data_nbytes


class SideFile(Struct, frozen=True):
    """A small file beside the shards: ``content`` to write, or ``origin``, a file to copy.

    It is copied as it was when it had this ``version``, or not at all; ``None`` for as it is.
    """

    filename: str
    content: bytes | None = None
    origin: Path | None = None
    version: Version | None = None


class SourceFile(Struct, frozen=True):
    """One checkpoint file that the plan reads, and the records that hold tensor bytes, by offset.

    A record of torch's old container is a storage; of safetensors, a tensor.
    """

    path: Path
    version: Version
    members: tuple[Member, ...]

    @classmethod
    def of(cls, file: ReadableFile) -> SourceFile:
        """What a plan keeps of a file whose directory or header was read."""
        return cls(file.path, file.version, file.members)


class Origin(Struct, frozen=True):
    """Which checkpoint it is.

    Attributes:
        folder: the tag's folder in full, or the last names of the checkpoint's where only the
            manifest tells of it.
        step: optimizer steps.
        layout: in words, such as ``ZeRO-3``.
        ranks: ranks that wrote it.
    """

    folder: str
    step: Natural | None
    layout: str
    ranks: Natural | None

    @classmethod
    def of(cls, checkpoint: TrainingState) -> Origin:
        """A checkpoint that is there."""
        location = checkpoint.location
        folder = str(location.real_root / location.tag)
        return cls(folder, checkpoint.global_steps, checkpoint.layout, checkpoint.ranks)

    @classmethod
    def recorded(cls, record: object) -> Origin | None:
        """What a manifest says of a checkpoint; ``None`` where that says too little."""
        told = record if isinstance(record, Mapping) else {}
        try:
            return msgspec.convert({**told, "step": told.get("global_steps")}, cls)
        except msgspec.ValidationError:
            return None

    def __str__(self) -> str:
        """In words: folder, step, layout and ranks."""
        told = (
            None if self.step is None else f"step {self.step:,}",
            self.layout,
            None if self.ranks is None else f"{self.ranks:,} rank{'s' * (self.ranks != 1)}",
        )
        words = ", ".join(filter(None, told))
        return f"{self.folder} ({words})" if words else self.folder


class Form(Struct, frozen=True):
    """What a folder is made as.

    Attributes:
        dtypes: element types of its floating-point tensors, as torch names them, the commonest
            first.
        names: whose names the tensors have: ``hub``, ``memory`` or ``peft``; of resharded files,
            ``checkpoint``.
        weights_only: whether there is no config, without which ``from_pretrained`` loads nothing.
    """

    dtypes: tuple[str, ...]
    names: str
    weights_only: bool

    @property
    def is_checkpoint(self) -> bool:
        """Whether training goes on from it."""
        return self.names == "checkpoint"


class Reference(Struct, frozen=True):
    """A checkpoint that DeepSpeed's converter is to rebuild, and what the plan needs of it."""

    root: Path
    tag: str
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Everything an export will do; nothing has been written yet and no decision is left.

    Attributes:
        out_dir: the folder that will appear.
        origin: the checkpoint that it is made from.
        form: what it is made as.
        shards: the files of tensors, in order.
        side_files: everything else but the manifest.
        sources: the checkpoint files that are read, each once.
        replicas: second copies that must agree with what is exported; compared before any tensor
            is written.
        gathered: copies beside the checkpoint; where they differ, that is told.
        check: how much of them is compared.
        allow: kinds of findings that do not end the export.
        findings: what was found while planning.
        provenance: what the manifest says of the checkpoint and the options, as JSON values.
        warnings: what the user should know before using the result, in sentences.
        base: the model that was given for what the checkpoint lacks, if one was.
        notes: what the user may want to know.
        left_out: entries of the module's state dict that are no tensors, or have no values.
        overwrite: whether an existing ``out_dir`` is replaced (after the new one is complete).
        jobs: worker threads.
        chunk_nbytes: bytes of one tensor that a worker holds at a time.
        nbytes_compared: bytes of tensors that planning itself has read, since the plan depends on
            whether they are equal.
        pruned: sources that were written again without the optimizer's states: their weights lie
            elsewhere in them than before, and are the same.
        reference: the checkpoint, where DeepSpeed's own converter is to rebuild it; ``None`` where
            the bytes come from ``sources``.
    """

    out_dir: Path
    origin: Origin
    form: Form
    shards: tuple[FilePlan, ...]
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
        """The sources by their paths below the checkpoint's folder, which is left out.

        So they are the same wherever it lies, or the parts of it that nodes kept. Those of files
        elsewhere are their last part.
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
"""The element types that can be asked for by name."""

WEIGHTS_ONLY = "weights only: from_pretrained will not load this"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def plan_file(
    filename: str, tensors: Mapping[str, StoredTensor], dtypes: Mapping[str, DType]
) -> FilePlan:
    """One file of safetensors: widest elements first, then by name, as its own library has it."""
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
    """One file that ``torch.load`` gives ``value`` of, with a tensor for each ``TensorLeaf`` in it.

    ``value`` is of plain Python values and the classes of ``zexport.formats.inert``. Its tensors
    are named by the file and by where they stand in ``value``, and lie in that order.
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
