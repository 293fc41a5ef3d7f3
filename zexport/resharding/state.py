"""The state of a training by name, whole: what a checkpoint is, however its ranks had cut it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from zexport.checkpoint.contents import StoredTensor
from zexport.checkpoint.rank_files import RankFileKind, parse_rank_file
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.replicas import Replica


def is_of(file: TorchFile, kind: RankFileKind) -> bool:
    """Whether a file is of a kind, by its name."""
    name = parse_rank_file(file.path)
    return name is not None and name.kind is kind


class Recorded(Struct, frozen=True):
    """What a file's dictionary records; tensors in it are the file's."""

    file: TorchFile
    values: Mapping[Any, object]


class Parameter(Struct, frozen=True):
    """One trained parameter, and what the optimizer keeps of each of its elements.

    ``tensors`` are the masters (``bind.MASTERS``) and every state by its name, each whole and in
    the parameter's shape.
    """

    name: str
    shape: Shape
    tensors: Mapping[str, StoredTensor]


class Group(Struct, frozen=True):
    """One parameter group, in the order in which the optimizer was given its parameters.

    Attributes:
        parameters: the order is the same at every world size; round robin is undone.
        settings: learning rate and the like; ``None`` where they are not recorded.
        scalars: what the optimizer keeps of the group as a whole, such as its step.
        of_experts: whether its parameters are experts', which only the ranks share that have the
            same ones.
    """

    parameters: tuple[Parameter, ...]
    settings: Recorded | None
    scalars: Recorded
    of_experts: bool = False


class ModuleEntry(Struct, frozen=True):
    """One name of the module's state dict.

    ``owner`` is the tensor that it is: tied names have the same. ``dtype`` is the element type that
    the module has it in, ``value`` its elements, maybe of another type, and ``None`` where they are
    in no file. What ``is_parameter`` is striped by ZeRO-3, with a placeholder here.
    """

    name: str
    owner: str
    dtype: DType
    value: StoredTensor | None
    is_parameter: bool


class RankOwn(Struct, frozen=True):
    """What one rank of ZeRO-3 saved differently from others: client state, buffers."""

    client: Recorded
    buffers: Recorded


class CellState(Struct, frozen=True):
    """All of one model-parallel index; under data parallelism alone there is one.

    With experts there is one for each expert-parallel rank. They differ in the groups of experts.

    Attributes:
        index: the model-parallel index that its files carry.
        groups: what is trained.
        frozen: what the table of frozen weights has, in its order; ``None`` where there is none to
            be written, as some may have been left out of the save.
        module: the module's state dict, in its order.
        aliases: tied name to the name of the tensor that it is.
        model: the model file of rank 0, its client state among it.
        optimizer: what the optimizer files say beside groups and masters, by rank 0's.
        own: by rank, what differs between ranks; empty if nothing does.
        expert_rank: whose experts its groups have.
        expert_ranks: how many expert-parallel ranks there are.
        expert_files: the files of its experts, by name, where the source has none and a target may
            need some.
    """

    index: int
    groups: tuple[Group, ...]
    frozen: Mapping[str, StoredTensor] | None
    module: tuple[ModuleEntry, ...]
    aliases: Mapping[str, str]
    model: Recorded
    optimizer: Recorded
    own: tuple[RankOwn, ...] = ()
    expert_rank: int = 0
    expert_ranks: int = 1
    expert_files: tuple[tuple[str, Mapping[object, object]], ...] = ()

    @property
    def differing(self) -> list[str]:
        """The keys of client state, and the buffers, that ranks have differently."""
        tables = [said.values for own in self.own for said in (own.client, own.buffers)]
        return [*dict.fromkeys(key for values in tables for key in values)]

    @property
    def label(self) -> str:
        """Which it is, of all of a training."""
        if self.expert_ranks == 1:
            return f"{self.index}"
        stage = f"{self.index}, " if self.index else ""
        return f"{stage}expert rank {self.expert_rank}"

    def parameters(self) -> Iterator[Parameter]:
        """Everything that is trained."""
        for group in self.groups:
            yield from group.parameters


class TrainingState(Struct, frozen=True):
    """The state of a training.

    ``cells`` are by model-parallel index, and expert-parallel rank; the degree of data parallelism
    alone can change. ``carried`` are files of no rank that go along unchanged, such as a pipeline's
    layers, ``replicas`` second copies of states, which must be equal, and ``files`` those that
    states lie in and that are no rank's.
    """

    cells: tuple[CellState, ...]
    carried: tuple[TorchFile, ...] = ()
    replicas: tuple[Replica, ...] = ()
    files: tuple[TorchFile, ...] = ()
