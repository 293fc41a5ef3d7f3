"""The nouns of a ZeRO checkpoint: its tensors, its files, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.location import Location
from zexport.checkpoint.rank_files import RankFileKind
from zexport.checkpoint.ranks import RankStates
from zexport.errors import ZexportError, raise_all
from zexport.findings import Finding, FindingKind
from zexport.formats.inert import Global, TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.printable import brief
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource
from zexport.ranges.replicas import CastReplica, Replica


class Role(Enum):
    """What a tensor is to the training."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint, whole.

    Attributes:
        name: its name in ``param_shapes`` or in the module.
        shape: its full shape.
        dtype: the element type that is stored (masters are fp32, frozen weights the module's type).
        role: trainable, frozen or buffer.
        source: its elements in row-major order; ``None`` where rank files are missing.
        fp32_under: the types of an export under which it stays in float32.
        module_dtype: the type it has in the module, where that is recorded for it alone: under
            ZeRO-3 an adapter may stay in fp32 beside a model in 16 bits.
    """

    name: str
    shape: Shape
    dtype: DType
    role: Role
    source: ByteSource | None
    fp32_under: frozenset[DType] = frozenset()
    module_dtype: DType | None = None

    __repr__ = brief

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)

    def output_dtype(self, target: DType) -> DType:
        """What it becomes in an export to ``target``.

        Integer and bool tensors never change, nor do floating buffers unless the target has 16
        bits.
        """
        if target in self.fp32_under and self.dtype.is_floating:
            return DType.F32
        if not self.dtype.is_floating or (self.role is Role.BUFFER and target is DType.F32):
            return self.dtype
        return target


def source_of(tensor: StoredTensor) -> ByteSource:
    """Where the elements of a tensor lie that is of a checkpoint without problems."""
    source = tensor.source
    if source is None or source.nbytes != tensor.numel * tensor.dtype.itemsize:
        # Opening has checked both; to come here is a bug, never the input's fault.
        raise AssertionError(f"{tensor.name} was laid out wrongly")
    return source


def whole_tensor(file: TorchFile, name: str, tensor: TensorRef, role: Role) -> StoredTensor:
    """A tensor that a file holds whole."""
    return StoredTensor(name, tensor.shape, tensor.dtype, role, file.source(tensor))


class FlatData(Struct, frozen=True):
    """The partitions of one flat group, of all ranks that share it, laid end to end.

    Attributes:
        source: their bytes, as they are saved.
        dtype: their element type.
        padding: how many of the elements belong to no parameter, by the layout's arithmetic.
    """

    source: ByteSource
    dtype: DType
    padding: int

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.source.nbytes // self.dtype.itemsize


class Inventory(Struct, frozen=True):
    """Every tensor of a checkpoint, and the names that are not tensors of their own.

    Attributes:
        tensors: each tensor once.
        aliases: tied name to the name of the tensor that it is.
        left_out: names of the module whose values are in no file.
        replicas: second copies that must equal what is exported.
        flats: the flat data that the trained ones lie in, each once.
        warnings: what the user should know of how values were chosen.
        notes: what the user may want to know of it.
        problems: contradictions that a user may allow.
        files: files that hold some of the tensors and are no rank's states.
        module_dtype: the element type the module trained in.
    """

    tensors: tuple[StoredTensor, ...]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    replicas: tuple[Replica | CastReplica, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flats: tuple[FlatData, ...] = ()
    problems: tuple[ZexportError, ...] = ()
    files: tuple[TorchFile, ...] = ()
    module_dtype: DType | None = None

    @classmethod
    def joined(cls, parts: Sequence[Inventory]) -> Inventory:
        """All parts as one; what several say is said once, and a later tie goes before."""
        known = {alias for part in parts for alias in part.aliases}
        left_out = dict.fromkeys(name for part in parts for name in part.left_out)
        return cls(
            tensors=tuple(tensor for part in parts for tensor in part.tensors),
            aliases={alias: name for part in parts for alias, name in part.aliases.items()},
            left_out=tuple(name for name in left_out if name not in known),
            replicas=tuple(replica for part in parts for replica in part.replicas),
            warnings=tuple(dict.fromkeys(one for part in parts for one in part.warnings)),
            notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            flats=tuple(flat for part in parts for flat in part.flats),
            problems=tuple(problem for part in parts for problem in part.problems),
            files=tuple(file for part in parts for file in part.files),
        )


class CheckpointFile(Struct, frozen=True):
    """A rank file and whether an export reads it.

    Attributes:
        path: the file.
        kind: what it holds.
        rank: data-parallel rank; 0 where there is none.
        nbytes: its size.
        needed: whether an export reads it.
        unknown_globals: names in its pickle that are outside the closed list.
    """

    path: Path
    kind: RankFileKind
    rank: int
    nbytes: int
    needed: bool
    unknown_globals: tuple[Global, ...]

    @property
    def name(self) -> str:
        """Its name below the tag folder."""
        depth = 3 if self.kind is RankFileKind.PARAMETER else 1  # zero/<parameter>/fp32.pt
        return "/".join(self.path.parts[-depth:])


class Structure(Enum):
    """How the model was split, beside the data parallelism that there always is."""

    DATA = "data parallelism alone"
    TENSOR = "tensor parallelism"
    PIPELINE = "pipeline parallelism"
    EXPERTS = "expert parallelism"
    UNIVERSAL = "none: converted to a universal checkpoint"


class Parallelism(Struct, frozen=True):
    """The degrees of parallelism beside that of data.

    Attributes:
        stages: pipeline stages.
        tensor_ranks: ranks that every tensor is split over.
        expert_ranks: over how many ranks experts are dealt out; several numbers where layers
            differ, none where there are no experts or nothing says it.
        experts: the number of experts of every layer that has some, in the module's order.
    """

    stages: int = 1
    tensor_ranks: int = 1
    expert_ranks: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    def words(self) -> Iterator[str]:
        """Every degree above one, in words."""
        if self.stages > 1:
            yield f"{self.stages:,} pipeline stages"
        if self.tensor_ranks > 1:
            yield f"{self.tensor_ranks:,} tensor ranks"
        if self.expert_ranks:
            degrees = " or ".join(f"{degree:,}" for degree in self.expert_ranks)
            yield f"{degrees} expert {'rank' if degrees == '1' else 'ranks'}"
        for count in sorted(set(self.experts)):
            layers = self.experts.count(count)
            yield f"{count:,} experts in " + (
                "1 layer" if layers == 1 else f"each of {layers:,} layers"
            )


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """Everything the metadata of a checkpoint says.

    Attributes:
        location: the tag folder and what lies around it.
        layout: in words, such as ``ZeRO-3`` or ``ZeRO-1 (BF16_Optimizer)``.
        parallelism: in how many ways the model was split.
        stage: ZeRO stage; ``None`` where it could not be read.
        world_size: number of data-parallel ranks that wrote it.
        ds_version: version of DeepSpeed that wrote it.
        global_steps: steps of the training.
        skipped_steps: how many of them the optimizer did not take, for an overflow.
        optimizer: the optimizer's name in the DeepSpeed configuration.
        lr_step: step of the learning-rate scheduler.
        module_dtype: the element type the module trained in.
        cast_dtype: the element type that DeepSpeed's configuration has the module cast to;
            ``None`` where it leaves the module alone.
        master_dtype: the element type of the master weights.
        tensors: every tensor once, trainable first, each kind in the checkpoint's order.
        aliases: tied names: alias to the name of the tensor that it is.
        left_out: names of the module whose values are in no file.
        frozen_left_out: whether the record of frozen weights was switched off at save time, so that
            some may have been left out without a trace.
        missing_ranks: ranks whose optimizer file is not there.
        missing_model_ranks: ranks whose model file is not there although it should be.
        missing_files: names of the rank files that an export needs and that are not there.
        files: the rank files.
        torch_files: those that an export may read, as the inert reader sees them.
        replicas: second copies that must agree with what is exported.
        problems: what stands in the way of an export, all of it.
        warnings: what does not, but should be known before the weights are used.
        notes: what may be of interest.
        newer: tells of a newer checkpoint of the run; not of what this one is.
        flats: the flat data that masters lie in, each once.
        findings: those warnings that have a kind.
        cells: what the files of each model-parallel index say.
        structure: how the model was split.
        parts: further folders in which nodes kept parts of it.
    """

    location: Location
    layout: str
    parallelism: Parallelism
    stage: int | None
    world_size: int | None
    ds_version: str | None
    global_steps: int | None
    optimizer: str | None
    lr_step: int | None
    module_dtype: DType | None
    cast_dtype: DType | None
    master_dtype: DType | None
    tensors: tuple[StoredTensor, ...]
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]
    frozen_left_out: bool
    missing_ranks: tuple[int, ...]
    missing_model_ranks: tuple[int, ...]
    missing_files: tuple[str, ...]
    files: tuple[CheckpointFile, ...]
    torch_files: tuple[TorchFile, ...]
    replicas: tuple[Replica | CastReplica, ...]
    problems: tuple[ZexportError, ...]
    warnings: tuple[str, ...]
    newer: tuple[str, ...]
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    flats: tuple[FlatData, ...] = ()
    skipped_steps: int = 0
    cells: Mapping[int, RankStates] = field(default_factory=dict)
    structure: Structure = Structure.DATA
    parts: tuple[Location, ...] = ()

    __repr__ = brief

    @property
    def ranks(self) -> int | None:
        """Number of all ranks that wrote it."""
        if self.world_size is None:
            return None
        return self.world_size * self.parallelism.stages * self.parallelism.tensor_ranks

    @property
    def pruned_files(self) -> frozenset[Path]:
        """The files that were written again without the optimizer's states."""
        states = (one for cell in self.cells.values() for one in cell.optimizer.values())
        return frozenset(one.file.path for one in states if one.is_pruned)

    @property
    def may_lack_weights(self) -> bool:
        """Whether the save may have left weights out.

        ZeRO-1 keeps no record of frozen weights (``frozen_param_shapes`` is always ``None``), so
        there a save without them leaves no trace.
        """
        return self.frozen_left_out or bool(self.left_out) or self.stage == 1

    def of_role(self, role: Role) -> tuple[StoredTensor, ...]:
        """The tensors of one role."""
        return tuple(tensor for tensor in self.tensors if tensor.role is role)


def raise_problems(
    checkpoint: ZeroCheckpoint, allow: Set[FindingKind] = frozenset()
) -> tuple[Finding, ...]:
    """Raise what stands in the way of an export, if anything: all of it, as the gravest kind.

    What is only told, or was allowed by name, is given back.
    """
    raise_all(
        [problem for problem in checkpoint.problems if problem.finding not in allow],
        checkpoint.location.tag_dir,
    )
    found = [finding for problem in checkpoint.problems if (finding := finding_of(problem))]
    return tuple(replace(one, accepted=one.kind in allow) for one in (*checkpoint.findings, *found))


def finding_of(problem: ZexportError) -> Finding | None:
    """A problem as what it is where it was allowed."""
    if problem.finding is None:
        return None
    return Finding(problem.finding, "", 0, problem.statement())
