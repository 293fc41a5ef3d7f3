"""A universal checkpoint as a state: every parameter's states whole, in files of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor, ZeroCheckpoint
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.layouts.expert_layers import read_autoep_layers
from zexport.checkpoint.layouts.universal_weights import (
    FOLDER,
    OPTIMIZER_STATE,
    STEP,
    names_its_groups,
    shape_of_flat,
)
from zexport.checkpoint.layouts.zero import with_untrained
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.module_names import with_parameter_names
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.checkpoint.ranks import models_of, no_first_model
from zexport.checkpoint.untrusted import Value
from zexport.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    LayoutError,
    UnsupportedError,
)
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import Window
from zexport.ranges.replicas import Replica
from zexport.resharding.expert_shares import Share
from zexport.resharding.read_cells import frozen_table, module_entries, said_by
from zexport.resharding.read_experts import expert_files
from zexport.resharding.state import CellState, Group, Parameter, Recorded, TrainingState, is_of
from zexport.resharding.whole import Parts
from zexport.store.folders import children, is_file


def read_universal(checkpoint: ZeroCheckpoint) -> TrainingState:
    """The state of a conversion, cut again as its model-parallel ranks had it.

    Source: DeepSpeed 0.15 to 0.19, ``checkpoint/ds_to_universal.py``.
    """
    tag_dir = checkpoint.location.tag_dir
    models = models_of(checkpoint.cells)
    for index in checkpoint.cells.keys() - models.keys():
        raise no_first_model(tag_dir, index)
    tensor = _tensor_ranks(tag_dir, [*models.values()])
    known = {one.name: one for one in checkpoint.tensors}
    names = {name for model in models.values() for shapes in model.param_shapes for name in shapes}
    cells, files, replicas = [], [], []
    for index, model in sorted(models.items()):
        first = index - index % tensor
        own = [models[rank] for rank in range(first, first + tensor)]
        whole = None if tensor == 1 else Parts.of(own, index - first)
        parts: Sequence[Parts | Share | None] = Share.all_of(model) or [whole]
        for part in parts:
            reader = _Reader(tag_dir / FOLDER, with_parameter_names(model), known, names, part)
            cells.append(_cell(checkpoint, index, model, reader))
            files += reader.files
            replicas += reader.replicas
    layers = [file for file in checkpoint.torch_files if is_of(file, RankFileKind.PIPELINE_LAYER)]
    if tensor < len(models) and not layers:
        raise IncompleteCheckpointError(
            "lacks the files of its pipeline's layers, which the converter leaves behind",
            path=tag_dir,
            expected=rank_file_name(RankFileKind.PIPELINE_LAYER),
            hint="Reshard the checkpoint that it was converted from",
        )
    by_path = {file.path: file for file in files}
    return TrainingState(tuple(cells), tuple(layers), tuple(replicas), tuple(by_path.values()))


def _tensor_ranks(tag_dir: Path, models: Sequence[ModelStates]) -> int:
    """How many ranks share each parameter, of those that a conversion was made of."""
    grid = models[0].grid
    if len(models) > 1 and (grid is None or grid.stages * grid.tensor != len(models)):
        raise UnsupportedError(
            "joins what several model-parallel ranks had, and does not say how they shared it",
            path=tag_dir,
            found=f"{len(models)} model-parallel ranks",
            expected="as many as checkpoint_parallel_dimensions",
            hint="Reshard the checkpoint that it was converted from",
        )
    return 1 if grid is None or len(models) == 1 else grid.tensor


def _cell(checkpoint: ZeroCheckpoint, index: int, model: ModelStates, reader: _Reader) -> CellState:
    named, ranks = with_parameter_names(model), checkpoint.cells[index]
    inventory = Inventory(checkpoint.tensors, checkpoint.aliases, ())
    if len(checkpoint.cells) > 1:  # the module is in its own pieces
        inventory = with_untrained((), ranks, named, model.dp_world_size or 1)
    cell = CellState(
        index=index,
        groups=tuple(reader.groups()),
        frozen=frozen_table(ranks, named, inventory, model.dp_world_size or 1),
        module=tuple(module_entries(model, named, inventory, is_zero3=ranks.is_zero3)),
        aliases=checkpoint.aliases,
        model=said_by(model),
        optimizer=reader.optimizer_file(),
    )
    if not isinstance(reader.parts, Share):
        return cell
    cell = replace(cell, expert_rank=reader.parts.rank, expert_ranks=reader.parts.count)
    dtype = checkpoint.module_dtype or DType.F32
    return replace(cell, expert_files=tuple(expert_files(cell, read_autoep_layers(model), dtype)))


@dataclass
class _Reader:
    """The files below ``zero``; all that were opened, and steps that must be equal.

    ``known`` are all tensors, whole; ``names`` what is trained on any rank, and ``parts`` how to
    cut out this rank's.
    """

    folder: Path
    model: ModelStates
    known: Mapping[str, StoredTensor]
    names: Collection[str]
    parts: Parts | Share | None
    files: list[TorchFile] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._global = read_torch_file(self.folder / f"{OPTIMIZER_STATE}.pt")
        self._said = Value(self._global.path, "optimizer state", self._global.value)
        self.files.append(self._global)

    def optimizer_file(self) -> Recorded:
        """What an optimizer file would say beside groups and masters."""
        inner = dict(self._said.mapping())
        config, version = self.model.ds_config, self.model.ds_version
        states = {"optimizer_state_dict": inner, "ds_config": config, "ds_version": version}
        return Recorded(self._global, states)

    def groups(self) -> Iterator[Group]:
        """Every parameter group; it names its parameters, or numbers those of ``param_shapes``."""
        for said, own in zip(self._said.need("param_groups").items(), self._members(), strict=True):
            values = {k: one for k, one in said.mapping_or_empty().items() if k != "params"}
            settings, is_experts = Recorded(self._global, values), False
            if isinstance(self.parts, Share) and (is_experts := self.parts.has_all(own)):
                settings = self.parts.settings(settings)
            yield Group(
                parameters=tuple(self._parameter(name, shape) for name, shape in own.items()),
                settings=settings,
                scalars=self._scalars([*own]),
                of_experts=is_experts,
            )

    def _members(self) -> list[dict[str, Shape]]:
        """The parameters of every group, each of all that are trained in one of them."""
        shapes = self.model.param_shapes
        groups = [one.need("params").items() for one in self._said.need("param_groups").items()]
        if names_its_groups(self._said):
            known = {name: shape for own in shapes for name, shape in own.items()}
            found = [[item.text() for item in own] for own in groups]
            if sorted(name for own in found for name in own) == sorted(self.names):
                return [{n: known[n] for n in own if n in known} for own in found]
            raise self._other_groups(f"{sum(map(len, found))} names", f"the {len(known)}")
        numbers = [[item.number() for item in own] for own in groups]
        if [one for own in numbers for one in own] == [*range(len(shapes))]:
            return [dict(chain.from_iterable(shapes[n].items() for n in own)) for own in numbers]
        dictionaries = f"the {len(shapes)} dictionaries"
        raise self._other_groups(f"params {numbers}", f"{dictionaries} of param_shapes, in order")

    def _other_groups(self, found: str, expected: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            "has other parameter groups than the model files",
            path=self._global.path,
            found=found,
            expected=expected,
            hint="Convert the checkpoint again, or reshard its source",
        )

    def _parameter(self, name: str, shape: Shape) -> Parameter:
        """A parameter with all states that lie in its folder."""
        whole = self.known[name]
        tensors = {MASTERS: whole}
        for path in sorted(children(self.folder / name)):
            if path.suffix == ".pt" and path.stem not in (MASTERS, STEP):
                tensors[path.stem] = self._state(path, name, whole.shape)
        if self.parts is not None:
            tensors = {state: self.parts.cut(one) for state, one in tensors.items()}
            if tensors[MASTERS].shape != shape:
                cut = list(tensors[MASTERS].shape)
                raise LayoutError(f"the model files give {name!r} another shape", list(shape), cut)
        return Parameter(name, shape, tensors)

    def _state(self, path: Path, name: str, shape: Shape) -> StoredTensor:
        file = read_torch_file(path)
        self.files.append(file)
        content = Value(path, "the file", file.value)
        is_flat = isinstance(file.value, TensorRef)
        tensor = content.tensor() if is_flat else content.need("param").tensor()
        if is_flat:
            shape_of_flat(name, tensor.numel, [shape], self.model.dp_world_size)
        elif tensor.shape != shape:
            raise LayoutError(
                f"the state {path.stem!r} of {name!r} has another shape than it",
                list(tensor.shape),
                list(shape),
            )
        source = Window(file.source(tensor), 0, prod(shape) * tensor.dtype.itemsize)
        return StoredTensor(name, shape, tensor.dtype, Role.TRAINABLE, source)

    def _scalars(self, names: list[str]) -> Recorded:
        """The step, of each parameter (ZeRO-1/2) or of the first flat group (ZeRO-3)."""
        first: Recorded | None = None
        for name in names:
            path = self.folder / name / f"{STEP}.pt"
            if not is_file(path):
                continue
            file = read_torch_file(path)
            self.files.append(file)
            if first is None:
                first = Recorded(file, {STEP: file.value})
            elif isinstance(file.value, TensorRef):
                kept = first.values[STEP]
                one = first.file.source(Value(first.file.path, STEP, kept).tensor())
                self.replicas.append(Replica(f"the step of {name}", one, file.source(file.value)))
            elif file.value != first.values[STEP]:
                raise LayoutError(
                    f"the step of {name!r} is another than of the group's first parameter",
                    file.value,
                    first.values[STEP],
                )
        return first or self._step_of_all()

    def _step_of_all(self) -> Recorded:
        states = self._said.get("optimizer_state_dict").mapping_or_empty().get("state")
        state = states.get(0) if isinstance(states, dict) else None
        found = state.get(STEP) if isinstance(state, dict) else None
        return Recorded(self._global, {} if found is None else {STEP: found})
