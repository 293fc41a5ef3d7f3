"""The plan of an export: the source of every output byte, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from zexport.checkpoint.resolve import original_name
from zexport.checkpoint.state import StoredTensor, TrainingState, source_of
from zexport.errors import MemoryLimitError
from zexport.export.weights import Tensors
from zexport.findings import Finding, FindingKind
from zexport.formats.safetensors import HeaderEntry, SafetensorsFrame, build_header
from zexport.formats.torch_writer import TorchFrame, TorchRecords, lay_out
from zexport.model.hub_cache import GivenBase
from zexport.options import CheckMode, ExportDType, ExportOptions, ReshardOptions
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.computed import updates_in
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource, Record
from zexport.storage.json import JsonTable, Natural
from zexport.storage.storage import Version
from zexport.text import brief

if TYPE_CHECKING:
    from zexport.ranges.reader import ReadableFile

_PROCESS_NBYTES = 96 << 20
"""Memory of the process before the first chunk: interpreter, numpy and the plan."""

_CHUNK_NBYTES_MAX = 2 << 20
_CHUNK_NBYTES_MIN = 64 << 10
_BUFFERS_PER_JOB = 3
"""Source bytes, cast bytes, and a temporary."""
_BYTES_PER_SECOND = 1_000_000_000
_MB = 1_000_000


DTYPES: dict[ExportDType | None, DType] = {
    ExportDType.FP32: DType.F32,
    ExportDType.BF16: DType.BF16,
    ExportDType.FP16: DType.F16,
}
"""The values of ``--dtype`` that name a dtype."""


def target_dtype(checkpoint: TrainingState, dtype: ExportDType | None) -> DType | None:
    """Return the dtype of an export's floating-point tensors; ``None`` for each weight's own."""
    own = checkpoint.module_dtype or DType.F32 if checkpoint.location.is_zero else None
    return DTYPES.get(dtype, own)


WEIGHTS_ONLY = "weights only: from_pretrained will not load this"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def qualified(filename: str, name: str) -> str:
    """Return a tensor's name in the whole output: after its file's folder, if any.

    In a torch file, it comes after the file's name.
    """
    folder, slash, _ = filename.rpartition("/")
    return f"{folder}/{name}" if slash else name


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

    @property
    def nbytes(self) -> int:
        return len(self.content or b"") if self.version is None else self.version.nbytes


class SourceFile(Struct, frozen=True):
    """A file that the plan reads, and its records by offset.

    A record is a zip record, a storage of a legacy torch file, or a tensor of safetensors.
    """

    path: Path
    version: Version
    records: tuple[Record, ...]

    @classmethod
    def of(cls, file: ReadableFile) -> SourceFile:
        return cls(file.path, file.version, file.records)


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
        reference: tensors of the checkpoint for ``--engine deepspeed``, else ``None``.
    """

    out_dir: Path
    origin: Origin
    form: Form
    shards: Sequence[FilePlan]
    side_files: tuple[SideFile, ...]
    sources: tuple[SourceFile, ...]
    provenance: JsonTable
    warnings: tuple[str, ...]
    overwrite: bool
    jobs: int
    chunk_nbytes: int
    reference: Iterable[StoredTensor] | None = None
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
        if len({original_name(one.name) for one in folders}) == 1:  # one tag, maybe on many nodes
            return {path: path.name for path in paths}
        above = next(((one, *one.parents) for one in folders), ())
        root = next((top for top in above if all(f.is_relative_to(top) for f in folders)), None)
        return {
            path: path.relative_to(root).as_posix()
            if root is not None and path.is_relative_to(root)
            else path.name
            for path in paths
        }


def plan_file(filename: str, tensors: Tensors, dtypes: Mapping[str, DType]) -> FilePlan:
    """Return the plan of a safetensors file: widest dtype first, then by name.

    Source: safetensors 0.6, ``tensor.rs`` (``prepare``).
    """
    order = sorted(tensors.items(), key=lambda item: (-dtypes[item[0]].itemsize, item[0]))
    header, offsets = build_header([HeaderEntry(n, dtypes[n], one.shape) for n, one in order])
    planned = tuple(
        TensorPlan(
            name=qualified(filename, name),
            shape=one.shape,
            dtype=dtypes[name],
            stored_name=one.name,
            stored_dtype=one.dtype,
            source=source_of(one),
            offset=len(header) + offset,
        )
        for (name, one), offset in zip(order, offsets, strict=True)
    )
    return FilePlan(filename, SafetensorsFrame(header), planned)


def plan_torch_file(filename: str, value: object) -> FilePlan:
    """Return the plan of a torch file that ``torch.load`` reads as ``value``.

    ``value`` consists of plain Python values, ``TensorLeaf`` and the classes of
    ``zexport.formats.pickle_values``; its tensors are named by their key path.
    """
    frame, placed = lay_out(value, PurePosixPath(filename).stem)
    tensors = []
    for one in placed:
        name, leaf = f"{filename}/{one.name}", one.leaf
        stored = (name, leaf.stored_dtype, leaf.source)
        tensors.append(TensorPlan(name, leaf.shape, leaf.dtype, *stored, one.offset))
    return FilePlan(filename, frame, tuple(tensors))


def _calculation_nbytes(shards: Iterable[FilePlan], jobs: int) -> int:
    """Return the memory for the largest computed tensor (a merged weight), without buffers."""
    from zexport.ranges.calculator import held_nbytes  # noqa: PLC0415 - imports numpy

    updates = updates_in(tensor.source for shard in shards for tensor in shard.tensors)
    largest = max(updates, key=lambda update: held_nbytes(update, jobs), default=None)
    return 0 if largest is None else held_nbytes(largest, jobs)


def share_memory(
    options: ExportOptions | ReshardOptions, shards: Iterable[FilePlan] = ()
) -> tuple[int, int]:
    """Return worker threads and bytes of a chunk that stay within ``--max-memory``.

    Raises:
        MemoryLimitError: ``--max-memory`` is too small for one thread.
    """
    jobs = max(1, options.jobs)
    if options.max_memory_nbytes is None:
        return jobs, _CHUNK_NBYTES_MAX
    needed = _PROCESS_NBYTES + _calculation_nbytes(shards, 1)
    extra = _calculation_nbytes(shards, 2) - _calculation_nbytes(shards, 1)
    spare = options.max_memory_nbytes - needed
    jobs = min(jobs, max(1, spare // (extra + _BUFFERS_PER_JOB * _CHUNK_NBYTES_MIN)))
    chunk = min(_CHUNK_NBYTES_MAX, (spare - (jobs - 1) * extra) // (_BUFFERS_PER_JOB * jobs))
    if chunk < _CHUNK_NBYTES_MIN:
        raise MemoryLimitError(
            "--max-memory is too small",
            found=f"{options.max_memory_nbytes // _MB:,} MB",
            expected=f"{-(-(needed + _BUFFERS_PER_JOB * _CHUNK_NBYTES_MIN) // _MB):,} MB or more",
            hint="Raise --max-memory",
        )
    return jobs, chunk - chunk % 4096


class PlannedFile(Struct, frozen=True):
    """A safetensors file.

    Attributes:
        name: name in the output folder.
        nbytes: size, with its header.
        tensors: number of tensors.
    """

    name: str
    nbytes: Natural
    tensors: Natural


class PlannedSource(Struct, frozen=True):
    """A file that would be read, at least in part.

    Attributes:
        path: its path.
        nbytes: its size.
    """

    path: Path
    nbytes: Natural


class PlanSummary(Struct, frozen=True, kw_only=True):
    """What an export would do.

    Attributes:
        out_dir: the output folder.
        origin: the checkpoint.
        base: the base model; null without one.
        form: dtypes and names of the output.
        files: the safetensors files.
        side_files: the other files, except the manifest.
        sources: the files that would be read.
        tensors: number of tensors.
        nbytes_to_read: bytes of tensors to read.
        nbytes_to_write: bytes of the safetensors files.
        nbytes_compared: bytes of tensors that planning read to compare weights, if any.
        memory_nbytes: upper estimate of the memory of the process.
        seconds_at_1_gb_per_s: reading, then writing, at 10^9 bytes per second; an export overlaps
            them.
        jobs: worker threads.
        overwrite: an existing folder would be replaced.
        findings: findings of planning.
        warnings: what the user should act on.
        notes: what the user may want to know.
    """

    out_dir: Path
    origin: Origin
    base: GivenBase | None
    form: Form
    files: tuple[PlannedFile, ...]
    side_files: tuple[str, ...]
    sources: tuple[PlannedSource, ...]
    tensors: Natural
    nbytes_to_read: Natural
    nbytes_to_write: Natural
    nbytes_compared: Natural | UnsetType = UNSET
    memory_nbytes: Natural
    seconds_at_1_gb_per_s: float
    jobs: Natural
    overwrite: bool
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def summarize(plan: ExportPlan) -> PlanSummary:
    to_read = sum(tensor.source.nbytes for file in plan.shards for tensor in file.tensors)
    to_write = sum(file.nbytes for file in plan.shards)
    buffers_nbytes = plan.jobs * _BUFFERS_PER_JOB * plan.chunk_nbytes
    calculation_nbytes = _calculation_nbytes(plan.shards, plan.jobs)
    return PlanSummary(
        out_dir=plan.out_dir,
        origin=plan.origin,
        base=plan.base,
        form=plan.form,
        files=tuple(PlannedFile(f.filename, f.nbytes, len(f.tensors)) for f in plan.shards),
        side_files=tuple(file.filename for file in plan.side_files),
        sources=tuple(PlannedSource(file.path, file.version.nbytes) for file in plan.sources),
        tensors=sum(len(file.tensors) for file in plan.shards),
        nbytes_to_read=to_read,
        nbytes_to_write=to_write,
        nbytes_compared=plan.nbytes_compared or UNSET,
        memory_nbytes=_PROCESS_NBYTES + buffers_nbytes + calculation_nbytes,
        seconds_at_1_gb_per_s=(to_read + to_write) / _BYTES_PER_SECOND,
        jobs=plan.jobs,
        overwrite=plan.overwrite,
        findings=plan.findings,
        warnings=plan.warnings,
        notes=plan.notes,
    )
