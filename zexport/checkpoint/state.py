"""The state of a run as parameters with slots, joined from all ranks: the same for every source.

A source yields cells: what the ranks of one model-parallel index store. Joining cells gives a cell
again; the last one is ``TrainingState.whole``. No tensor is read here: a parameter contains where
each slot is (``Stored``) and binds it to byte ranges on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import IncompleteCheckpointError, ZexportError, raise_all
from zexport.findings import Finding, FindingKind
from zexport.formats.pickle_values import Global
from zexport.formats.torch_file import TorchFile
from zexport.ranges.compare import CastReplica, Replica
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource, Unread
from zexport.text import brief

if TYPE_CHECKING:
    from zexport.checkpoint.resolve import Location
    from zexport.checkpoint.zero.ranks import Ranks
    from zexport.checkpoint.zero.records import ModelStates

MASTER = "fp32"
"""Slot of the fp32 master weights (rarely 16-bit), under the name of universal checkpoints."""

MODULE = "module"
"""Slot of the module weights: rounded master weights, or frozen weights and buffers themselves."""


class Role(Enum):
    """How a training step uses a tensor."""

    TRAINABLE = "trainable"
    FROZEN = "frozen"
    BUFFER = "buffer"


class Stored(Protocol):
    """Where one slot of a parameter is: in a file, a flat group, partitions or boxes."""

    @property
    def dtype(self) -> DType: ...

    def bind(self) -> ByteSource:
        """Return the elements in row-major order.

        Raises:
            LayoutError: the stored lengths do not fit the shapes.
            IncompleteCheckpointError: rank files are missing.
        """
        ...


class Parameter(Struct, frozen=True):
    """A tensor of the module with its slots; ``module_dtype`` if that is recorded separately."""

    name: str
    shape: Shape
    role: Role
    stored: Mapping[str, Stored]
    module_dtype: DType | None = None

    @property
    def slots(self) -> dict[str, DType]:
        return {slot: one.dtype for slot, one in self.stored.items()}

    @property
    def value_slot(self) -> str:
        """``MASTER`` if there are master weights, else ``MODULE``."""
        return MASTER if self.has(MASTER) else MODULE

    @property
    def dtype(self) -> DType:
        return self.dtype_of(self.value_slot)

    def has(self, slot: str) -> bool:
        return slot in self.stored

    def dtype_of(self, slot: str) -> DType:
        return self.stored[slot].dtype

    def source(self, slot: str | None = None) -> ByteSource:
        """Return the elements of a slot (default: the value slot)."""
        return self.stored[slot or self.value_slot].bind()


class Recorded(Struct, frozen=True):
    """Values recorded in a file's dictionary; tensors among them are stored in that file."""

    file: TorchFile
    values: Mapping[Any, object]


class Group(Struct, frozen=True):
    """A parameter group of the optimizer; ``names`` in the order given to it.

    ``settings`` are the learning rate etc., ``scalars`` optimizer states such as ``step``. If
    ``of_experts``, only expert-data-parallel ranks partition it.
    """

    names: tuple[str, ...]
    settings: Recorded | None
    scalars: Recorded
    of_experts: bool = False


class Copy(Struct, frozen=True):
    """Two stored copies of a parameter: each slot that both have must be equal."""

    kept: Parameter
    other: Parameter


class RankValues(Struct, frozen=True):
    """Client state and buffers that one rank of a ZeRO-3 run saved differently from others."""

    client: Recorded
    buffers: Recorded


class FlatData(Struct, frozen=True):
    """All partitions of a flat group end to end, with the number of padding elements."""

    source: ByteSource
    dtype: DType
    padding: int

    @property
    def numel(self) -> int:
        return self.source.nbytes // self.dtype.itemsize


class Cell(Struct, frozen=True):
    """What the ranks of one model-parallel index (and one expert-parallel rank) store, or a join.

    Attributes:
        parameters: by name; trainable first, then frozen, then buffers.
        groups: the optimizer's parameter groups.
        aliases: tied name to parameter name.
        left_out: names of the module whose values are in no file.
        frozen: names in the table of frozen weights; ``None`` if none may be written.
        copies: second copies that must be equal.
        matched: parameters whose master weights were matched by order and values, not by name.
        files: files with tensors; universal checkpoints add files as slots are bound.
        states: rank 0's model states; ``optimizer``: all values of its optimizer states file.
        own: by rank, values that differ between ranks; empty if none do.
        problems: contradictions that a user may accept with ``--allow``.
    """

    parameters: Mapping[str, Parameter]
    groups: tuple[Group, ...] = ()
    aliases: Mapping[str, str] = {}
    left_out: tuple[str, ...] = ()
    frozen: tuple[str, ...] | None = ()
    copies: tuple[Copy, ...] = ()
    matched: frozenset[str] = frozenset()
    flats: tuple[FlatData, ...] = ()
    files: Sequence[TorchFile] = ()
    states: ModelStates | None = None
    optimizer: Recorded | None = None
    index: int = 0
    expert_rank: int = 0
    expert_ranks: int = 1
    own: tuple[RankValues, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[ZexportError, ...] = ()

    @property
    def label(self) -> str:
        """Position in the grid of ranks, such as ``1, expert rank 2``."""
        stage = [str(self.index)] if self.index or self.expert_ranks == 1 else []
        expert = [f"expert rank {self.expert_rank}"] if self.expert_ranks > 1 else []
        return ", ".join(stage + expert)

    def trained(self) -> list[Parameter]:
        """Return the parameters of all groups, in the optimizer's order."""
        return [self.parameters[name] for group in self.groups for name in group.names]


def joined(cells: Sequence[Cell]) -> Cell:
    """Return what several cells list, concatenated, without parameters and groups."""
    aliases = {alias: name for cell in cells for alias, name in cell.aliases.items()}
    left_out = dict.fromkeys(name for cell in cells for name in cell.left_out)
    return replace(
        cells[0],
        parameters={},
        groups=(),
        aliases=aliases,
        left_out=tuple(name for name in left_out if name not in aliases),
        copies=tuple(copy for cell in cells for copy in cell.copies),
        matched=frozenset().union(*(cell.matched for cell in cells)),
        flats=tuple(flat for cell in cells for flat in cell.flats),
        files=tuple(file for cell in cells for file in cell.files),
        warnings=tuple(dict.fromkeys(one for cell in cells for one in cell.warnings)),
        notes=tuple(dict.fromkeys(note for cell in cells for note in cell.notes)),
        problems=tuple(problem for cell in cells for problem in cell.problems),
    )


class StoredTensor(Struct, frozen=True):
    """A whole tensor of the checkpoint, bound to bytes.

    Attributes:
        dtype: stored dtype (master weights: fp32; frozen weights: the module's).
        source: elements in row-major order; ``None`` if rank files are missing.
        fp32_under: output dtypes of an export that keep this tensor in float32.
        module_dtype: its dtype in the module, if recorded separately.
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
        return prod(self.shape)

    def output_dtype(self, target: DType | None) -> DType:
        """Return its dtype in an export to ``target`` (``None``: it stays).

        Integer and bool tensors never change; floating buffers only if the target has 16 bits.
        """
        if target is None:
            return self.dtype
        if target in self.fp32_under and self.dtype.is_floating:
            return DType.F32
        if not self.dtype.is_floating or (self.role is Role.BUFFER and target is DType.F32):
            return self.dtype
        return target


def source_of(tensor: StoredTensor) -> ByteSource:
    """Return the source of a tensor of a checkpoint without problems."""
    source = tensor.source
    if source is None or source.nbytes != tensor.numel * tensor.dtype.itemsize:
        # Opening has checked both: a bug, never the input's fault.
        raise AssertionError(f"{tensor.name} was bound to the wrong bytes")
    return source.source if isinstance(source, Unread) else source


class FileKind(Enum):
    """What a file of a checkpoint contains."""

    OPTIMIZER = "optimizer partition"
    MODEL_PER_RANK = "model states of one rank (ZeRO-3)"
    MODEL = "model states"
    EXPERT = "expert"
    EXPERT_OPTIMIZER = "expert optimizer"
    PIPELINE_LAYER = "pipeline layer"
    SHARD = "shards of one rank"
    """Of an FSDP checkpoint: a DCP file, a rank file, or sharded safetensors."""
    ADAPTER = "adapter"
    PARAMETER = "parameter of all ranks"
    """Of a universal checkpoint; its folder has the parameter's name."""


class CheckpointFile(Struct, frozen=True):
    """A file of the checkpoint; ``needed`` if an export reads it.

    ``unknown_globals`` are names in its pickle outside the closed list.
    """

    path: Path
    kind: FileKind
    rank: int
    nbytes: int
    needed: bool
    unknown_globals: tuple[Global, ...]

    @property
    def name(self) -> str:
        depth = 3 if self.kind is FileKind.PARAMETER else 1  # zero/<parameter>/fp32.pt
        return "/".join(self.path.parts[-depth:])


class Structure(Enum):
    """How the model was split, in addition to data parallelism."""

    DATA = "only data parallelism"
    TENSOR = "tensor parallelism"
    PIPELINE = "pipeline parallelism"
    EXPERTS = "expert parallelism"
    UNIVERSAL = "none: converted to a universal checkpoint"
    FSDP = "parameters by FSDP"


class Parallelism(Struct, frozen=True):
    """Degrees of model parallelism.

    Attributes:
        stages: pipeline stages.
        expert_ranks: expert-parallel sizes (several if layers differ; none without experts).
        experts: number of experts of every layer that has some, in the module's order.
    """

    stages: int = 1
    tensor_ranks: int = 1
    expert_ranks: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    def words(self) -> Iterator[str]:
        """Yield every degree above one in words."""
        if self.stages > 1:
            yield f"{self.stages:,} pipeline stages"
        if self.tensor_ranks > 1:
            yield f"{self.tensor_ranks:,} tensor ranks"
        if self.expert_ranks:
            yield f"expert-parallel size {' or '.join(map(str, self.expert_ranks))}"
        if self.experts:
            yield f"{' or '.join(map(str, sorted(set(self.experts))))} experts"


class TrainingState(Struct, frozen=True, dict=True):
    """The metadata of a checkpoint.

    Attributes:
        layout: in words, such as ``ZeRO-3`` or ``ZeRO-1 (BF16_Optimizer)``.
        whole: all parameters, joined from all ranks.
        tensors: the value slot of each parameter, bound; trainable first.
        replicas: second copies that must agree with the tensors.
        problems: everything that prevents an export.
        split: returns the cells as the ranks saved them (see ``cells``).
        zero: DeepSpeed's own records, by model-parallel index.
        world_size: number of data-parallel ranks.
        global_steps: optimizer steps of the run, skipped ones included.
        skipped_steps: steps that the optimizer skipped because of an overflow.
        optimizer: its name in the DeepSpeed config.
        module_dtype: the commonest floating dtype of the module.
        cast_dtype: dtype that the DeepSpeed config casts the module to; ``None`` for no cast.
        frozen_left_out: whether frozen weights may have been excluded without a trace.
        missing_ranks: data-parallel ranks whose optimizer states file is missing.
        missing_model_ranks: ranks whose model states file is missing.
        missing_files: names of missing rank files that an export needs.
        torch_files: opened files that an export may read.
        newer: notes about newer checkpoints of the run.
        findings: warnings that have a finding kind.
        parts: further folders with parts of a node-local checkpoint.
    """

    location: Location
    layout: str
    whole: Cell
    tensors: tuple[StoredTensor, ...] = ()
    replicas: tuple[Replica | CastReplica, ...] = ()
    problems: tuple[ZexportError, ...] = ()
    split: Callable[[], tuple[Cell, ...]] = tuple
    zero: Mapping[int, Ranks] = {}
    structure: Structure = Structure.DATA
    parallelism: Parallelism = Parallelism()
    stage: int | None = None
    world_size: int | None = None
    ds_version: str | None = None
    global_steps: int | None = None
    skipped_steps: int = 0
    optimizer: str | None = None
    lr_step: int | None = None
    module_dtype: DType | None = None
    cast_dtype: DType | None = None
    frozen_left_out: bool = False
    missing_ranks: tuple[int, ...] = ()
    missing_model_ranks: tuple[int, ...] = ()
    missing_files: tuple[str, ...] = ()
    files: tuple[CheckpointFile, ...] = ()
    torch_files: tuple[TorchFile, ...] = ()
    pruned_files: frozenset[Path] = frozenset()
    warnings: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    parts: tuple[Location, ...] = ()

    __repr__ = brief

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return self.whole.parameters

    @property
    def aliases(self) -> Mapping[str, str]:
        return self.whole.aliases

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.whole.left_out

    @property
    def flats(self) -> tuple[FlatData, ...]:
        return self.whole.flats

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Cells as the ranks saved them, by model-parallel index and expert-parallel rank.

        Raises:
            ZexportError: the checkpoint cannot be split again.
        """
        return self.split()

    @property
    def master_dtype(self) -> DType | None:
        return next((one.dtype for one in self.tensors if one.role is Role.TRAINABLE), None)

    @property
    def ranks(self) -> int | None:
        """Number of all ranks that wrote it."""
        if self.world_size is None:
            return None
        return self.world_size * self.parallelism.stages * self.parallelism.tensor_ranks

    @property
    def may_lack_weights(self) -> bool:
        """Whether weights may have been excluded when saving.

        ZeRO-1 has no record of frozen weights (``frozen_param_shapes`` is always ``None``).
        """
        return self.frozen_left_out or bool(self.left_out) or self.stage == 1


def by_role(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    roles = list(Role)
    return {one.name: one for one in sorted(parameters, key=lambda one: roles.index(one.role))}


def bound(one: Parameter, slot: str) -> ByteSource | None:
    try:
        return one.source(slot) if one.has(slot) else None
    except IncompleteCheckpointError:  # rank files are missing
        return None


def stored_tensors(cell: Cell) -> tuple[StoredTensor, ...]:
    """Return the value slot of each parameter, bound; unbound if rank files are missing."""
    return tuple(
        StoredTensor(
            name=one.name,
            shape=one.shape,
            dtype=one.dtype,
            role=one.role,
            source=bound(one, one.value_slot),
            module_dtype=one.module_dtype,
        )
        for one in cell.parameters.values()
    )


def raise_problems(
    state: TrainingState, allow: Set[FindingKind] = frozenset()
) -> tuple[Finding, ...]:
    """Raise problems that are not accepted, as one error; return the others as findings."""
    raise_all(
        [problem for problem in state.problems if problem.finding not in allow],
        state.location.tag_dir,
    )
    found = [finding for problem in state.problems if (finding := finding_of(problem))]
    return tuple(replace(one, accepted=one.kind in allow) for one in (*state.findings, *found))


def finding_of(problem: ZexportError) -> Finding | None:
    if problem.finding is None:
        return None
    return Finding(problem.finding, "", 0, problem.statement())
