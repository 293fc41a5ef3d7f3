"""Universal checkpoints: a folder per trained parameter, with a file per slot; model states files.

The converter writes frozen weights and buffers as fp32 and tied weights from 16-bit values. These
are read from the copied model states files; a pipeline's are in layer files, which
``zexport reshard`` keeps and DeepSpeed's converter does not.

Source: DeepSpeed 0.10 to 0.19, ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

from msgspec.structs import replace

from zexport.checkpoint.boxes import Bound, InFile, in_file
from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    FileKind,
    Group,
    Parameter,
    Recorded,
    Role,
    Stored,
    by_role,
    joined,
)
from zexport.checkpoint.zero.expert_layers import AutoEpLayer, autoep_weights, cut_experts
from zexport.checkpoint.zero.flat_groups import check_one_dtype, partition_numel, with_untrained
from zexport.checkpoint.zero.pipeline import TIED, layer_prefix, read_layers
from zexport.checkpoint.zero.ranks import FROM_NODES, TagFolder, no_model
from zexport.checkpoint.zero.records import ModelStates, kept_of, scalar
from zexport.checkpoint.zero.tensor_parallel import join_tensor_ranks, tensor_ranks
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.formats.pickle_values import TensorRef
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.torch_file import TorchFile, read_torch_file
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import Window
from zexport.storage.files import child_folders, children
from zexport.text import some

FOLDER, OPTIMIZER_STATE, STEP = "zero", "optimizer_state", "step"
_SOURCE = "Reshard the checkpoint that it was converted from"
_CONVERTED = "Export the checkpoint that it was converted from"


def read_universal(tag: TagFolder) -> tuple[Cell, Callable[[], tuple[Cell, ...]]]:
    """Return all tensors, and a function that returns what each rank had before conversion."""
    if any(0 not in one.model for one in tag.ranks.values()):
        raise no_model(tag.path)
    source = _Universal(tag)
    return source.whole, lambda: tuple(source.split())


class _Universal:
    """A universal checkpoint: parameter folders, and the model states of all converted ranks."""

    def __init__(self, tag: TagFolder) -> None:
        self.tag = tag
        self.folder = tag.path / FOLDER
        self.layer_files = tag.of_kind(FileKind.PIPELINE_LAYER)
        self.opened: list[TorchFile] = []
        self.models = [*tag.models.values()]
        self.parts = [self._part(index, model) for index, model in tag.models.items()]

    @cached_property
    def optimizer(self) -> TorchFile:
        return read_torch_file(self.folder / f"{OPTIMIZER_STATE}.pt")

    @property
    def root(self) -> PickleView:
        return view(self.optimizer, "optimizer state")

    def _part(self, index: int, model: ModelStates) -> Cell:
        """Return what the model states of one index have; trained parameters have no values."""
        stage = model.zero_config.get("stage")
        if model.is_round_robin and stage in (1, 2) and model.dp_world_size != 1:
            # BF16_Optimizer does not shuffle, but nothing records it. Only zexport writes names
            # into parameter groups.
            groups = self.root.get("param_groups").items()
            params = [one.value for group in groups for one in group.need("params").items()]
            if not params or not all(isinstance(one, str) for one in params):
                raise UnsupportedError(
                    "values are in the wrong order, because DeepSpeed's converter does not support "
                    "round_robin_gradients",
                    path=model.file.path,
                    hint=_CONVERTED,
                )
        ranks = self.tag.ranks[index]
        world_size = model.dp_world_size or len(ranks.model)
        if ranks.is_zero3 and len(ranks.model) < world_size and model.frozen_shapes:
            raise IncompleteCheckpointError(
                "model states files are missing, which have partitions of frozen weights",
                path=self.tag.path,
                found=f"{len(ranks.model)} of {world_size}",
                hint=FROM_NODES,
            )
        stored = {MASTER: Bound(DType.F32, Zeros(0))}
        trained = [Parameter(*one, Role.TRAINABLE, stored) for one in model.trained.items()]
        cell = with_untrained(replace(ranks, world_size=world_size), model, trained)
        if not model.has_experts:
            return cell
        # AutoEP keeps a replaced module under its old name and never updates its weights.
        listed, known = model.frozen_shapes or {}, cell.parameters
        stale = [n for n, one in known.items() if one.role is Role.FROZEN and n not in listed]
        return replace(
            cell,
            parameters={name: one for name, one in known.items() if name not in stale},
            frozen=None if cell.frozen is None else tuple(listed),
            left_out=(*cell.left_out, *stale),
        )

    @cached_property
    def whole(self) -> Cell:
        slots, names = self.slots, dict.fromkeys(n for model in self.models for n in model.trained)
        weights = {name: self._weight(name, slots.get(name, ())) for name in names}
        stepped = [one for name, one in weights.items() if "exp_avg" in slots[name]]
        check_one_dtype(one.dtype for one in stepped if prod(one.shape))
        rest = self._joined(self.parts, weights)
        layers = self._joined([*self._layers()], weights)
        lost = [name for name in rest.left_out if name not in layers.parameters]
        warnings = [f"the converter dropped {some(lost)}; the export lacks them"] if lost else []
        if not (self.layer_files or any(model.module for model in self.models)):
            warnings.append(
                "frozen weights may be missing: a pipeline stores them in layer files, which "
                "DeepSpeed's converter does not copy"
            )
        found = [*weights.values(), *rest.parameters.values(), *layers.parameters.values()]
        return replace(
            rest,
            parameters=by_role(found),
            aliases={alias: name for alias, name in rest.aliases.items() if alias not in weights},
            left_out=(),
            frozen=tuple(n for n, one in rest.parameters.items() if one.role is Role.FROZEN),
            copies=(*rest.copies, *layers.copies),
            files=tuple(self.opened),
            warnings=(*rest.warnings, *warnings),
        )

    def _joined(self, cells: Sequence[Cell], weights: Collection[str]) -> Cell:
        """Return what tensor ranks have except trained weights; other ranks have nothing else."""
        rest = [
            replace(
                cell,
                parameters={n: one for n, one in cell.parameters.items() if n not in weights},
                copies=(),
            )
            for cell in cells
        ]
        if len(rest) > 1 and any(cell.parameters for cell in rest):
            return join_tensor_ranks(self.models[: len(rest)], rest)
        return rest[0] if len(rest) == 1 else joined(rest or [Cell({})])

    @cached_property
    def slots(self) -> dict[str, list[str]]:
        """The slots in each parameter folder.

        Raises:
            LayoutError: folders and model states are of different conversions. The converter
                writes ``exp_avg`` only for names in ``param_shapes``.
        """
        found, known, trained = dict[str, list[str]](), set[str](), set[str]()
        for folder, _ in child_folders(self.folder):
            found[folder.name] = [one.stem for one in children(folder) if one.suffix == ".pt"]
        for model, part in zip(self.models, self.parts, strict=True):
            module = model.root.get("module").table()  # may be from --inject_missing_state
            known |= {*part.parameters, *part.aliases, *part.left_out, *module}
            trained |= model.trained.keys()
        due = {name: trained if "exp_avg" in slots else known for name, slots in found.items()}
        if extra := sorted(name for name, names in due.items() if name not in names):
            raise LayoutError("folders are of another conversion", some(extra), "parameters")
        return found

    def _weight(self, name: str, slots: Collection[str]) -> Parameter:
        """Return a trained parameter with its master weights and, if a file has them, module's."""
        if MASTER not in slots:
            raise LayoutError(f"folder {FOLDER} lacks weights", "none", f"{name}/{MASTER}.pt")
        file = read_torch_file(self.folder / name / f"{MASTER}.pt")
        shards = [model.trained[name] for model in self.models if name in model.trained]
        models = [(m.file, m.module[name]) for m in self.models if name in m.module]
        root, shape, differing = view(file, "the file"), shards[0], 0
        if not isinstance(file.value, TensorRef):
            shape = root.need("param").tensor().shape
            # Experts, tensor ranks and vocabulary padding change one dimension.
            differing = int(
                len(shards) > 1 or root.has("ep_num_experts") or root.has("vocab_tensor")
            )
            is_16_bit = any(ref.numel and ref.dtype in (DType.BF16, DType.F16) for _, ref in models)
            if is_16_bit and "exp_avg" not in slots and root.mapping().keys() == {"param"}:
                raise UnsupportedError(
                    f"no master weights of {name!r}: the converter used 16-bit values",
                    path=root.path,
                    hint=_CONVERTED,
                )
        for shard in shards:
            pairs = zip(shard, shape, strict=False)
            if len(shard) != len(shape) or sum(a != b for a, b in pairs) > differing:
                root.fail("has another shape than in the model states files", f"{list(shape)}")
        stored: dict[str, Stored] = {MASTER: self._slot(file, shape)}
        for file, ref in [one for one in models if one[1].shape == shape][:1]:
            stored[MODULE] = InFile(file, ref)
        return Parameter(name, shape, Role.TRAINABLE, stored)

    def _slot(self, file: TorchFile, shape: Shape) -> Bound:
        """Return the tensor of a file: in its shape, or flat and maybe padded.

        DeepSpeed 0.15 to 0.19.2 strip too little padding (``extract_zero_shards_stage3``).
        """
        root, whole = view(file, "the file"), prod(shape)
        is_flat, world_size = isinstance(file.value, TensorRef), self.models[0].dp_world_size or 1
        ref = root.tensor() if is_flat else root.need("param").tensor()
        padded = (world_size - 1) * partition_numel(whole, world_size)
        if ref.numel not in (whole, max(whole, padded)) if is_flat else ref.shape != shape:
            root.fail(f"has another shape than {list(shape)}", f"{list(ref.shape)}")
        self.opened.append(file)
        return Bound(ref.dtype, Window(file.source(ref), 0, whole * ref.dtype.itemsize))

    def _layers(self) -> Iterator[Cell]:
        """Yield the tensors in layer files of each tensor rank, except tied layers."""
        by_rank = read_layers(self.tag)
        buffers = {name for model in self.models for name in model.buffers}
        for rank, layers in sorted(by_rank.items()):
            own = self.models[rank :: len(by_rank)]
            sizes = {name: prod(shape) for model in own for name, shape in model.trained.items()}
            found = dict[str, Parameter]()
            for layer in layers.values():
                self.opened.append(layer.file)
                prefix = layer_prefix(layer, sizes, buffers)
                for name, ref in layer.named(prefix).items() if not prefix.startswith(TIED) else ():
                    role = Role.BUFFER if name in buffers else Role.FROZEN
                    found[name] = in_file(layer.file, name, ref, role)
            yield Cell(found)

    def split(self) -> Iterator[Cell]:
        """Yield the cells of the model-parallel and expert-parallel ranks that were converted.

        Raises:
            ZexportError: optimizer states do not fit, or it is unknown how the ranks split them.
        """
        count, grid = len(self.models), self.models[0].grid
        if count > 1 and (grid is None or grid.stages * grid.tensor_ranks != count):
            raise UnsupportedError(
                "joined from several model-parallel ranks, whose layout is not recorded",
                path=self.tag.path,
                hint=_SOURCE,
            )
        tensor = 1 if grid is None or count == 1 else grid.tensor_ranks
        if tensor < count and not self.layer_files:
            raise IncompleteCheckpointError(
                "layer files of the pipeline are missing, which the converter does not copy",
                path=self.tag.path,
                hint=_SOURCE,
            )
        states = {name: self._with_states(one) for name, one in self.whole.parameters.items()}
        values: dict[str, object] = {"optimizer_state_dict": dict(self.root.mapping())}
        for at, (model, part) in enumerate(zip(self.models, self.parts, strict=True)):
            first, layers = at - at % tensor, autoep_weights(model)
            ranks = self.models[first : first + tensor]
            shapes = [{n: r.shape for n, r in m.module.items()} | m.trained for m in ranks]
            shards = {name: [own.get(name, ()) for own in shapes] for name in states}
            splits = tensor_ranks(ranks, shards) if tensor > 1 else None
            expert_ranks, *others = {len(layer.held) for layer in layers.values()} or {1}
            if others:
                raise LayoutError("several expert-parallel sizes", [expert_ranks, *others], "one")
            groups = self._groups(model, layers)
            values |= {"ds_config": model.config, "ds_version": model.version}
            for rank in range(expert_ranks):
                own = dict[str, Parameter]()
                for name, shape in model.trained.items():
                    whole, layer = states[name], layers.get(name)
                    own[name] = whole
                    if splits is not None:
                        own[name] = splits.split(whole, at - first)
                    elif layer is not None:
                        own[name] = cut_experts(whole, layer.held[rank])
                    has_experts = layer is None or whole.shape[:1] == (layer.num_experts,)
                    if own[name].shape != shape or not has_experts:
                        raise LayoutError(f"{name!r} has two shapes", shape, whole.shape)
                rest = [one for name, one in part.parameters.items() if name not in own]
                yield replace(
                    part,
                    parameters=by_role([*own.values(), *rest]),
                    groups=groups,
                    copies=(),
                    files=(*self.opened, self.optimizer),
                    optimizer=Recorded(self.optimizer, dict(values)),
                    expert_rank=rank,
                    expert_ranks=expert_ranks,
                )

    def _with_states(self, one: Parameter) -> Parameter:
        """Return a trained parameter with its optimizer states instead of module weights."""
        folder, slots = self.folder / one.name, sorted(self.slots.get(one.name, ()))
        states = {
            slot: self._slot(read_torch_file(folder / f"{slot}.pt"), one.shape)
            for slot in slots
            if slot not in (MASTER, STEP)
        }
        return replace(one, stored={one.value_slot: one.stored[one.value_slot], **states})

    def _groups(self, model: ModelStates, layers: Mapping[str, AutoEpLayer]) -> tuple[Group, ...]:
        """Return the parameter groups, which have names, or numbers of dictionaries.

        ZeRO-1/2 have a file with the step per parameter, ZeRO-3 the step of the first flat group.
        """
        found, shapes = list[Group](), dict(enumerate(model.param_shapes))
        shared = kept_of(self.root.get("optimizer_state_dict"), 0).scalars
        for group in self.root.need("param_groups").items():
            own = set[str]()
            for one in group.need("params").items():
                is_name = isinstance(one.value, str)
                own |= {one.value} if is_name else shapes.get(one.number(), {}).keys()
            names = [name for name in model.trained if name in own]
            settings = {key: value for key, value in group.table().items() if key != "params"}
            experts = [layers[name] for name in names if name in layers]
            if experts:  # a run keeps its own size unless it is given one
                settings["name"] = f"ep_size_{len(experts[0].held)}"
            stepped = [name for name in names if STEP in self.slots[name]]
            files = [read_torch_file(self.folder / name / f"{STEP}.pt") for name in stepped]
            self.opened += files
            if len(steps := {scalar(file, file.value) for file in files}) > 1:
                raise LayoutError("step differs within its group", sorted(map(str, steps)), "one")
            scalars = Recorded(self.optimizer, {k: v for k, v in shared.items() if k == STEP})
            if files:
                scalars = Recorded(files[0], {STEP: files[0].value})
            recorded = Recorded(self.optimizer, settings)
            found.append(Group(tuple(names), recorded, scalars, bool(experts)))
        if sorted(name for one in found for name in one.names) != sorted(model.trained):
            numbers = sum(len(one.names) for one in found), len(model.trained)
            raise LayoutError(f"groups in {OPTIMIZER_STATE}.pt differ from param_shapes", *numbers)
        return tuple(found)
