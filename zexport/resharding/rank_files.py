"""Model states and optimizer states files for another world size or stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    FileKind,
    Group,
    Parameter,
    Recorded,
    Role,
    TrainingState,
)
from zexport.checkpoint.zero.expert_layers import AUTOEP_WEIGHTS, autoep_layers, cut_experts
from zexport.checkpoint.zero.experts import sharing_ranks
from zexport.checkpoint.zero.file_names import rank_file_name
from zexport.checkpoint.zero.flat_groups import (
    flat_partition_numel,
    is_per_parameter,
    partition_numel,
    round_robin_order,
)
from zexport.checkpoint.zero.records import ZERO3, ModelStates
from zexport.errors import (
    DamagedCheckpointError,
    FrozenLeftOutError,
    UnsupportedError,
    UsageError,
)
from zexport.export.plan import FilePlan, plan_torch_file
from zexport.formats.pickle_values import Ordered, Size, TensorLeaf, TensorRef
from zexport.formats.pickle_view import PickleView
from zexport.ranges.computed import Partition, Partitions, Zeros
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.source import ByteSource, Chain, Window
from zexport.resharding.reshardable import OF_LAYOUT
from zexport.resharding.target import Settings, TargetSettings
from zexport.resharding.values import (
    ModuleEntry,
    copied_files,
    loss_scaler,
    module_entries,
    records_of,
    slots_of,
    source_of,
    static_loss_scaler,
    with_leaves,
    written,
)

_INNER = "optimizer_state_dict"
_INFO = "universal_checkpoint_info"
_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")
"""Keys of AutoEP's layers; the second is an older name."""


_size: Callable[[Shape], Size] = cache(Size)
"""Returns one object per shape, which is written once."""


class Place(Struct, frozen=True):
    """A rank of the target; ``sharing`` are the ranks with the same experts, in order."""

    rank: int
    sharing: Sequence[int]
    world_size: int

    def of(self, group: Group) -> tuple[int, int]:
        """Return the number of the rank's partition of a group, and how many there are."""
        if group.of_experts:
            return self.sharing.index(self.rank), len(self.sharing)
        return self.rank, self.world_size


def plan_rank_files(
    state: TrainingState, settings: TargetSettings, tag: str, dropped: Collection[str] = ()
) -> Iterator[FilePlan]:
    """Yield every rank file of the tag folder, without client state that is ``dropped``."""
    _check_target(state, settings)
    is_zero3 = settings.stage == ZERO3
    kind = FileKind.MODEL_PER_RANK if is_zero3 else FileKind.MODEL
    prefix = "bf16_" if settings.is_bf16 else ""
    experts = () if is_zero3 else (FileKind.EXPERT,)  # ZeRO-3 has experts in the rank files
    yield from copied_files(state, tag, FileKind.PIPELINE_LAYER, *experts)
    has_expert_files = any(one.kind is FileKind.EXPERT for one in state.files)
    for cell in state.cells:
        if not (is_zero3 or has_expert_files):
            yield from _expert_files(cell, state.zero[cell.index].first, tag)
        groups = _flat_groups(cell, settings)
        models = ModelFiles(cell, [flat.parameters for flat in groups], settings, dropped)
        # Source: DeepSpeed 0.19.8, utils/groups.py (_create_expert_and_data_parallel).
        is_blocks = settings.is_data_before_experts
        sets = sharing_ranks(cell.expert_ranks, settings.world_size, is_blocks=is_blocks)
        sharing = sets[cell.expert_rank]
        places = [Place(rank, sharing, settings.world_size) for rank in sharing]
        for place in places if is_zero3 else (one for one in places if one.rank == 0):
            name = rank_file_name(kind, place.rank, cell.index)
            yield plan_torch_file(f"{tag}/{name}", models.value(place))
        for place in places:
            name = rank_file_name(FileKind.OPTIMIZER, place.rank, cell.index, prefix=prefix)
            value = _optimizer_value(cell, groups, settings, place, dropped)
            yield plan_torch_file(f"{tag}/{name}", value)


def _check_target(state: TrainingState, settings: TargetSettings) -> None:
    """Raise if DeepSpeed cannot resume this state with these settings.

    Each expert-parallel rank keeps its experts, so the expert-parallel size cannot change. Under
    ZeRO-3, torch's Adagrad is created again from the flat groups, which are added a second time on
    loading. Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``initialize_optimizer_states``,
    ``_rigid_load_state_dict``).
    """
    path = records_of(state.cells[0])[0].file.path
    if settings.world_size % (size := state.cells[0].expert_ranks):
        raise UsageError(
            "--world-size does not fit the expert-parallel size, which cannot change",
            path=path,
            found=settings.world_size,
            expected=f"a multiple of {size}",
        )
    problem = ""
    for cell in state.cells if settings.stage == ZERO3 else ():
        roles = {one.role for one in cell.parameters.values()}
        if cell.frozen is None and Role.FROZEN in roles:
            problem = "frozen weights next to experts would be lost under ZeRO-3"
        recorded = [one.settings.values for one in cell.groups if one.settings is not None]
        if any("initial_accumulator_value" in one for one in recorded):
            problem = "DeepSpeed loads no state of torch's Adagrad under ZeRO-3"
    if problem:
        raise UsageError(problem, path=path, hint="Pass --stage 2, or --stage 1")


def _expert_files(cell: Cell, model: ModelStates, tag: str) -> Iterator[FilePlan]:
    """Yield the files that ZeRO-1/2 loads AutoEP's experts from, and ZeRO-3 does not write."""
    dtype = model.cast_dtype or DType.F32
    for layer in autoep_layers(model):
        weights = [cell.parameters[f"{layer.experts}.{weight}"] for weight in AUTOEP_WEIGHTS]
        for place, expert in enumerate(layer.held[cell.expert_rank]):
            content: dict[object, object] = {}
            for one in weights:
                part = cut_experts(one, [place]).source()
                content[f"{one.name}.{expert}"] = TensorLeaf(one.shape[1:], dtype, part, one.dtype)
            name = rank_file_name(FileKind.EXPERT, 0, cell.index, layer=layer.number, expert=expert)
            yield plan_torch_file(f"{tag}/{name}", content)


# Flat groups


class FlatTarget(Struct, frozen=True):
    """A flat group of the target: a parameter group, or under ZeRO-3 a sub-group of one.

    ``whole`` has all parameters of each slot: one after the other (ZeRO-1/2), or partitioned.
    """

    group: Group
    parameters: tuple[Parameter, ...]
    numel: int
    whole: Mapping[str, Partitions | Chain]
    dtypes: Mapping[str, DType]

    def _span(self, place: Place) -> tuple[int, int]:
        """Return the first element of a partition of ZeRO-1/2, and their number."""
        number, count = place.of(self.group)
        full = flat_partition_numel(self.numel, count)
        return number * full, full

    def padding(self, place: Place) -> int:
        """Return the padding elements in a partition of ZeRO-1/2; a small group has many."""
        begin, full = self._span(place)
        return min(full, max(0, begin + full - self.numel))

    def leaf(self, slot: str, place: Place, padding: int = 0) -> TensorLeaf:
        """Return the partition of one slot, without its last ``padding`` elements."""
        dtype, whole = self.dtypes[slot], self.whole[slot]
        if isinstance(whole, Partitions):
            return _flat_leaf(Partition(whole, place.of(self.group)[0]), dtype)
        (begin, full), size = self._span(place), dtype.itemsize
        return _flat_leaf(Window(whole, begin * size, (full - padding) * size), dtype)

    def whole_leaf(self, slot: str, place: Place) -> TensorLeaf:
        """Return one slot of every parameter that is partly in the partition, whole."""
        begin, full = self._span(place)
        found, offset = [], 0
        for one in self.parameters:
            end = offset + prod(one.shape)
            if max(offset, begin) < min(end, begin + full):
                found.append(source_of(one, slot))
            offset = end
        return _flat_leaf(Chain(tuple(found)), self.dtypes[slot])


def _flat_groups(cell: Cell, settings: TargetSettings) -> list[FlatTarget]:
    found, path = list[FlatTarget](), records_of(cell)[1].file.path
    for group in cell.groups:
        parameters = tuple(cell.parameters[name] for name in group.names)
        ranks = settings.world_size // (cell.expert_ranks if group.of_experts else 1)
        if settings.is_dealt_out:
            order = round_robin_order(len(parameters), ranks)
            parameters = tuple(parameters[index] for index in order)
        runs = [parameters]
        if settings.stage == ZERO3:
            runs = _sub_groups(parameters, ranks, settings.sub_group_size)
        for own in runs:
            numels, dtypes = [prod(one.shape) for one in own], _dtypes(own, path)
            padding = flat_partition_numel(sum(numels), ranks) * ranks - sum(numels)
            whole: dict[str, Partitions | Chain] = {}
            for slot, dtype in dtypes.items():
                size, sources = dtype.itemsize, tuple(source_of(one, slot) for one in own)
                if settings.stage == ZERO3:
                    partitions = tuple(partition_numel(numel, ranks) * size for numel in numels)
                    whole[slot] = Partitions(sources, partitions)
                else:
                    whole[slot] = Chain((*sources, Zeros(padding * size)))
            found.append(FlatTarget(group, own, sum(numels), whole, dtypes))
    return found


def _sub_groups(
    parameters: tuple[Parameter, ...], ranks: int, size: int
) -> list[tuple[Parameter, ...]]:
    """Return the parameters of each sub-group of ZeRO-3.

    A sub-group is full once a rank's partitions reach ``size`` elements. Source: DeepSpeed 0.10 to
    0.19, ``runtime/zero/stage3.py`` (``_create_fp16_sub_groups``).
    """
    partitions = [partition_numel(prod(one.shape), ranks) for one in parameters]
    if size >= sum(partitions):
        return [parameters] if parameters else []
    found, begin, held = [], 0, 0
    for end, numel in enumerate(partitions, start=1):
        held += numel
        if held >= size or end == len(partitions):
            found.append(parameters[begin:end])
            begin, held = end, 0
    return found


def _dtypes(parameters: Sequence[Parameter], path: Path) -> dict[str, DType]:
    """Return the dtype of every slot; all parameters of a flat group have the same."""
    found = slots_of(parameters[0]) if parameters else {MASTER: DType.F32}
    for one in parameters:
        if (own := slots_of(one)) != found:
            raise UnsupportedError(
                f"optimizer states of {one.name!r} differ from those of its group",
                path=path,
                found=_listed(own),
                expected=_listed(found),
                hint="Reshard to the stage and settings that the checkpoint was saved with",
            )
    return found


def _listed(slots: Mapping[str, DType]) -> str:
    return ", ".join(f"{slot} {dtype.torch_name}" for slot, dtype in slots.items())


def _flat_leaf(source: ByteSource, dtype: DType) -> TensorLeaf:
    return TensorLeaf((source.nbytes // dtype.itemsize,), dtype, source, dtype)


# Optimizer states files


def _optimizer_value(
    cell: Cell,
    flats: Sequence[FlatTarget],
    settings: TargetSettings,
    place: Place,
    dropped: Collection[str],
) -> dict[object, object]:
    """Return one rank's optimizer states file: what the loaders read, and no more.

    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``_rigid_load_state_dict``),
    ``runtime/zero/stage_1_and_2.py`` and ``runtime/bf16_optimizer.py``
    (``_load_legacy_checkpoint``).
    """
    recorded = records_of(cell)[1]
    inner = inner_of(recorded)
    rest = written(recorded, (_INNER, *dropped))
    if "ds_config" in rest:
        rest["ds_config"] = settings.put_into(rest["ds_config"])
    optimizer = _wrapped_optimizer(cell, flats, settings, place)
    if settings.stage == ZERO3:
        has_experts = any(flat.group.of_experts for flat in flats)
        zero: dict[object, object] = {
            "zero_stage": ZERO3,
            "loss_scaler": loss_scaler(inner) or static_loss_scaler(),
            "dynamic_loss_scale": inner.values.get("dynamic_loss_scale", False),
            "overflow": inner.values.get("overflow", False),
            "partition_count": settings.world_size,
            **(
                {"ds_zero_partition_groups": _partition_groups(flats, place)} if has_experts else {}
            ),
            "optimizer_state_dict": optimizer,
            "fp32_flat_groups": [flat.leaf(MASTER, place) for flat in flats],
        }
        return {_INNER: zero, **rest}
    # BF16_Optimizer has neither stage nor loss scaler, and loads padded master weights.
    is_plain = not settings.is_bf16_optimizer
    paddings = [flat.padding(place) for flat in flats]
    zero = {"zero_stage": settings.stage} if is_plain else {}
    zero |= scaling_of(inner, is_scaled=is_plain)
    if info := inner.values.get(_INFO):
        zero[_INFO] = with_leaves(info, inner.file)
    zero |= {
        "base_optimizer_state": optimizer,
        "single_partition_of_fp32_groups": [
            flat.leaf(MASTER, place, padding if is_plain else 0)
            for flat, padding in zip(flats, paddings, strict=True)
        ],
        "group_paddings": paddings,
        "partition_count": [place.of(flat.group)[1] for flat in flats],
        "ds_version": version_in(inner),
    }
    return {_INNER: zero, **rest}


def inner_of(recorded: Recorded) -> Recorded:
    """Return the record of ZeRO's own optimizer in an optimizer states file, with its version."""
    file, values = recorded.file, recorded.values
    inner = PickleView(file.path, "optimizer states", values).need(_INNER).mapping()
    return Recorded(file, {"ds_version": values.get("ds_version"), **inner})


def scaling_of(inner: Recorded, *, is_scaled: bool = True) -> dict[object, object]:
    """Return loss scaler and clipping; without recorded clipping, the run's own applies."""
    kept: dict[object, object] = {}
    scaler = loss_scaler(inner) if is_scaled else None
    if scaler is not None:
        kept["loss_scaler"] = scaler
        kept |= {key: inner.values.get(key, False) for key in ("dynamic_loss_scale", "overflow")}
    return kept | {key: one for key, one in inner.values.items() if key == "clip_grad"}


def version_in(inner: Recorded) -> str:
    """Return the DeepSpeed version of the source, without which ZeRO-1/2 loads nothing."""
    return PickleView(inner.file.path, "optimizer states", inner.values).get("ds_version").text()


def _wrapped_optimizer(
    cell: Cell, flats: Sequence[FlatTarget], settings: TargetSettings, place: Place
) -> dict[object, object]:
    """Return the state dict of the wrapped optimizer, which numbers flat groups."""
    states = {}
    for number, flat in enumerate(flats):
        own = {} if flat.group.settings is None else flat.group.settings.values
        state = written(flat.group.scalars)
        for slot in (one for one in flat.whole if one != MASTER):
            is_whole = settings.stage != ZERO3 and is_per_parameter(own, slot)
            state[slot] = (flat.whole_leaf if is_whole else flat.leaf)(slot, place)
        if state:
            states[number] = state
    groups = []
    for group in cell.groups:
        if group.settings is None:
            raise DamagedCheckpointError(
                "settings of the parameter groups are not recorded",
                path=records_of(cell)[1].file.path,
                expected="param_groups",
                hint="Save again without elastic_checkpoint, or start from an export's weights",
            )
        params = [number for number, flat in enumerate(flats) if flat.group is group]
        groups.append({**written(group.settings), "params": params})
    return {"state": states, "param_groups": groups}


def _partition_groups(flats: Iterable[FlatTarget], place: Place) -> list[dict[object, object]]:
    """Return the ranks that partition each sub-group, which AutoEP compares with the run.

    Source: DeepSpeed 0.19.8, ``runtime/zero/stage3.py`` (``_zero3_partition_group_metadata``) and
    ``module_inject/auto_ep_layer.py`` (``ds_zero_placement_family``).
    """
    found = list[dict[object, object]]()
    for number, group in enumerate(flat.group for flat in flats):
        part, count = place.of(group)
        ranks = place.sharing if group.of_experts else range(place.world_size)
        size = place.world_size // count
        found.append(
            {
                "sub_group": number,
                "partition_count": count,
                "partition_rank": part,
                "partition_ranks": [*ranks],
                "families": ["autoep_expert" if group.of_experts else "replicated"],
                "group_names": [f"ep_size_{size}" if group.of_experts else "replicated"],
            }
        )
    return found


# Model states files


class ModelFiles:
    """The model states files of one cell: one per rank under ZeRO-3, else one.

    ``flat_groups`` are the parameters of each flat group of the target; keys of the client state
    that are ``dropped`` are left out.
    """

    def __init__(
        self,
        cell: Cell,
        flat_groups: Iterable[Iterable[Parameter]],
        settings: TargetSettings,
        dropped: Collection[str] = (),
    ) -> None:
        self._cell, self._settings, self._dropped = cell, settings, dropped
        self._recorded, _ = records_of(cell)
        self._shapes = [
            Ordered((one.name, _size(one.shape)) for one in group) for group in flat_groups
        ]
        values, file = self._recorded.values, self._recorded.file
        self._carried = written(self._recorded, {*OF_LAYOUT, *dropped})
        self._config = settings.put_into(with_leaves(values.get("ds_config"), file))
        self._leaves: dict[tuple[str, DType], TensorLeaf] = {}
        self._module = self._shared_module()
        ties = values.get("shared_params")  # recorded; aliases are what the module shows
        self._ties = Ordered({**(ties if isinstance(ties, dict) else {}), **cell.aliases})
        self._has_table = cell.frozen is not None and settings.stage != 1
        self._frozen: dict[str, TensorLeaf] = {}
        for name in (cell.frozen or ()) if self._has_table else ():
            one = cell.parameters[name]
            leaf = _whole(one, MODULE if one.has(MODULE) else one.value_slot)
            # Except under ZeRO-3, the module has the same tensor.
            self._frozen[name] = self._leaves.get((name, leaf.dtype), leaf)

    def value(self, place: Place) -> dict[object, object]:
        """Return one rank's model states file."""
        carried, module = self._of_rank(place.rank)
        shapes = Ordered((name, _size(one.shape)) for name, one in self._frozen.items())
        made: dict[object, object] = {
            **_autoep_records(carried, self._cell, place, self._settings.stage),
            "module": module,
            "optimizer": None,
            "param_shapes": self._shapes,
            "frozen_param_shapes": shapes if self._has_table else None,
            "frozen_param_fragments": self._fragments(place.rank) if self._has_table else None,
            "shared_params": self._ties if place.rank == 0 else Ordered(),
            "dp_world_size": self._settings.world_size,
            "ds_config": self._config,
        }
        known = {**carried, **made}
        order = dict.fromkeys((*self._recorded.values, *known))
        return {key: known[key] for key in order if key in known}

    def _of_rank(self, rank: int) -> tuple[Mapping[object, object], object]:
        """Return client state and module: the rank's own if the source had as many ranks."""
        if not self._cell.own or not isinstance(self._module, Ordered):
            return self._carried, self._module
        own = self._cell.own[rank if keeps_own(self._cell, self._settings) else 0]
        differing = differing_keys(self._cell)
        module = Ordered(_replaced(self._module, written(own.buffers), differing))
        module.attributes = self._module.attributes
        client = written(own.client, self._dropped)
        return _replaced(self._carried, client, differing), module

    def _shared_module(self) -> object:
        """Return the module's state dict of all ranks; tied names are one tensor in it."""
        file, module = self._recorded.file, self._recorded.values.get("module")
        if not isinstance(module, dict):
            return module
        entries = module_entries(self._cell)
        made = Ordered(
            (name, self._entry(name, entries[name]))
            if isinstance(one, TensorRef)
            else (name, with_leaves(one, file))
            for name, one in module.items()
        )
        if isinstance(module, Ordered) and module.attributes is not None:
            made.attributes = with_leaves(module.attributes, file)
        return made

    def _entry(self, name: str, entry: ModuleEntry) -> TensorLeaf:
        own, ref = self._cell.parameters.get(entry.owner), entry.ref
        key = (entry.owner, ref.dtype)
        if entry.is_placeholder and own is None:
            raise FrozenLeftOutError(
                f"no values of {name!r}, which the module contains",
                path=self._recorded.file.path,
                hint="Save again with all weights, and reshard that checkpoint",
            )
        if self._settings.stage == ZERO3 and entry.is_parameter:
            return TensorLeaf((0,), ref.dtype, Zeros(0), ref.dtype)
        if key not in self._leaves and own is not None and entry.is_placeholder:
            self._leaves[key] = _whole(own, own.value_slot, ref.dtype)
        elif key not in self._leaves:
            source = self._recorded.file.source(ref)
            self._leaves[key] = TensorLeaf(ref.shape, ref.dtype, source, ref.dtype)
        return self._leaves[key]

    def _fragments(self, rank: int) -> Ordered:
        """Return the frozen weights: this rank's partitions, or whole."""
        if self._settings.stage != ZERO3:
            return Ordered(self._frozen)
        partitions = Ordered()
        for name, one in self._frozen.items():
            numel = partition_numel(prod(one.shape), self._settings.world_size)
            whole = Partitions((one.source,), (numel * one.dtype.itemsize,))
            partitions[name] = _flat_leaf(Partition(whole, rank), one.dtype)
        return partitions


def _whole(one: Parameter, slot: str, dtype: DType | None = None) -> TensorLeaf:
    own = one.dtype_of(slot)
    return TensorLeaf(one.shape, dtype or own, one.source(slot), own)


def keeps_own(cell: Cell, settings: Settings) -> bool:
    """Whether each rank keeps its own client state and buffers."""
    if not isinstance(settings, TargetSettings) or settings.stage != ZERO3:
        return False
    return settings.world_size == len(cell.own)


def differing_keys(cell: Cell) -> list[object]:
    """Return keys of client state, and buffers, that differ between ranks."""
    return [
        *dict.fromkeys(k for own in cell.own for k in (*own.client.values, *own.buffers.values))
    ]


def _replaced(
    values: Mapping[object, object], own: Mapping[object, object], differing: Collection[object]
) -> dict[object, object]:
    kept = {key: one for key, one in values.items() if key in own or key not in differing}
    return {**kept, **own}


def _autoep_records(
    recorded: Mapping[object, object], cell: Cell, place: Place, stage: int
) -> dict[object, object]:
    """Return the keys in which AutoEP records its layers, for a rank of the target.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``).
    """

    def of_rank(layer: object) -> object:
        if not isinstance(layer, dict):
            return layer
        count = layer.get("num_local_experts")
        count = count if isinstance(count, int) else 0
        now = {
            "checkpoint_format": "zero3_partitioned" if stage == ZERO3 else "per_expert_files",
            "checkpoint_format_version": 1 if stage == ZERO3 else None,
            "ep_rank": cell.expert_rank,
            "expert_data_parallel_rank": place.sharing.index(place.rank),
            "expert_data_parallel_world_size": len(place.sharing),
            "global_expert_start": cell.expert_rank * count,
            "global_expert_end": (cell.expert_rank + 1) * count,
        }
        return {**layer, **{key: one for key, one in now.items() if key in layer}}

    def layers_in(table: Mapping[object, object]) -> dict[object, object]:
        found = ((key, table.get(key)) for key in _AUTOEP_KEYS)
        return {key: [*map(of_rank, one)] for key, one in found if isinstance(one, list)}

    found = layers_in(recorded)
    if isinstance(info := recorded.get(_INFO), dict):
        found[_INFO] = {**info, **layers_in(info)}
    return found
