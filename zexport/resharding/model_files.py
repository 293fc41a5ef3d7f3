"""Model states files of a target: the module, its tables of shapes, and what is carried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from math import prod

from msgspec import Struct

from zexport.checkpoint.state import MODULE, Cell, Parameter, Role
from zexport.checkpoint.zero.flat_groups import partition_numel
from zexport.checkpoint.zero.module_names import is_placeholder
from zexport.checkpoint.zero.records import ZERO3
from zexport.errors import FrozenLeftOutError
from zexport.formats.pickle_values import Ordered, Size, TensorLeaf, TensorRef
from zexport.ranges.computed import Stripe, Stripes, Zeros
from zexport.ranges.dtypes import DType, Shape
from zexport.resharding.optimizer_files import Place, flat_leaf
from zexport.resharding.resumable import OF_LAYOUT
from zexport.resharding.settings import Settings, TargetSettings
from zexport.resharding.values import records_of, with_leaves, written


class ModuleEntry(Struct, frozen=True):
    """An entry of the module's state dict; ``ref`` is empty if ``is_placeholder``.

    ``owner`` names its parameter (tied names have the same); ZeRO-3 partitions it if
    ``is_parameter``.
    """

    owner: str
    ref: TensorRef
    is_placeholder: bool
    is_parameter: bool


def module_entries(cell: Cell) -> dict[str, ModuleEntry]:
    """Return the entries of the module's state dict by the name in the file.

    ZeRO-2 and 3 list frozen parameters. With ZeRO-0 and 1, an unlisted tensor is a parameter if it
    has a usual name, or the dtype that DeepSpeed casts parameters to; others are what modules add
    to the state dict.
    """
    if (model := cell.states) is None:
        return {}
    stage = model.zero_config.get("stage")
    is_listed, cast = stage in (2, ZERO3), model.cast_dtype
    listed = {*model.trained, *(name for group in cell.groups for name in group.names)}
    listed |= {*((model.frozen_shapes or ()) if is_listed else ())}

    def is_parameter(name: str) -> bool:
        one = cell.parameters.get(name)
        if one is None or one.role is Role.BUFFER:
            return False
        is_usual = name.rpartition(".")[2] in ("weight", "bias") or one.dtype is cast
        return not prod(one.shape) or name in listed or (is_usual and not is_listed)

    stored = model.root.get("module").table()
    names = [name for name, ref in stored.items() if isinstance(ref, TensorRef)]
    entries = {}
    for name, (own, ref) in zip(names, model.module.items(), strict=True):
        owner, is_elsewhere = cell.aliases.get(own, own), stage == ZERO3 and is_placeholder(ref)
        is_own = is_elsewhere if stage == ZERO3 else is_parameter(owner)
        entries[name] = ModuleEntry(owner, ref, is_elsewhere, is_own)
    return entries


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
        self._said, _ = records_of(cell)
        self._shapes = [
            Ordered((one.name, _size(one.shape)) for one in group) for group in flat_groups
        ]
        values, file = self._said.values, self._said.file
        self._carried = written(self._said, {*OF_LAYOUT, *dropped})
        self._config = settings.put_into(with_leaves(values.get("ds_config"), file))
        self._leaves: dict[tuple[str, DType], TensorLeaf] = {}
        self._module = self._made_module()  # the same in the files of all ranks
        ties = values.get("shared_params")  # recorded; aliases are what the module shows
        self._ties = Ordered({**(ties if isinstance(ties, dict) else {}), **cell.aliases})
        self._has_table = cell.frozen is not None and settings.stage != 1
        self._frozen: dict[str, TensorLeaf] = {}
        self._striped: dict[str, Stripes] = {}
        for name in (cell.frozen or ()) if self._has_table else ():
            one = cell.parameters[name]
            leaf = _whole(one, MODULE if one.has(MODULE) else one.value_slot)
            self._frozen[name] = leaf
            if settings.stage == ZERO3:
                numel = partition_numel(prod(one.shape), settings.world_size)
                self._striped[name] = Stripes((leaf.source,), (numel * leaf.dtype.itemsize,))
            else:  # the module's own
                self._frozen[name] = self._leaves.get((name, leaf.dtype), leaf)

    def value(self, place: Place) -> dict[object, object]:
        """Return all of one rank's model states file."""
        rank = place.rank
        carried, module = self._of_rank(rank)
        shapes = Ordered((name, _size(one.shape)) for name, one in self._frozen.items())
        made: dict[object, object] = {
            **dict(_autoep_layers(carried, self._cell, place, self._settings.stage)),
            "module": module,
            "optimizer": None,
            "param_shapes": self._shapes,
            "frozen_param_shapes": shapes if self._has_table else None,
            "frozen_param_fragments": self._fragments(rank) if self._has_table else None,
            "shared_params": self._ties if rank == 0 else Ordered(),
            "dp_world_size": self._settings.world_size,
            "ds_config": self._config,
        }
        order = dict.fromkeys((*self._said.values, *carried, *made))
        known = {**carried, **made}
        return {key: known[key] for key in order if key in known}

    def _of_rank(self, rank: int) -> tuple[Mapping[object, object], object]:
        """Return what is carried, and the module: a rank's own if as many ranks had them before."""
        if not self._cell.own or not isinstance(self._module, Ordered):
            return self._carried, self._module
        own = self._cell.own[rank if keeps_own(self._cell, self._settings) else 0]
        differing = differing_keys(self._cell)
        module = Ordered(_replaced(self._module, written(own.buffers), differing))
        module.attributes = self._module.attributes
        client = written(own.client, self._dropped)
        return _replaced(self._carried, client, differing), module

    def _made_module(self) -> object:
        """Return the module's state dict; tied names are one tensor in it."""
        file, module = self._said.file, self._said.values.get("module")
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
                f"no values of {name!r}, which the module names",
                path=self._said.file.path,
                hint="Save again with all weights, and reshard that checkpoint",
            )
        if self._settings.stage == ZERO3 and entry.is_parameter:
            return TensorLeaf((0,), ref.dtype, Zeros(0), ref.dtype)
        if key not in self._leaves and own is not None and entry.is_placeholder:
            self._leaves[key] = _whole(own, own.value_slot, ref.dtype)
        elif key not in self._leaves:
            source = self._said.file.source(ref)
            self._leaves[key] = TensorLeaf(ref.shape, ref.dtype, source, ref.dtype)
        return self._leaves[key]

    def _fragments(self, rank: int) -> Ordered:
        """Return the frozen weights: this rank's partitions, or whole."""
        if self._settings.stage != ZERO3:
            return Ordered(self._frozen)
        return Ordered(
            (name, flat_leaf(Stripe(self._striped[name], rank), one.dtype))
            for name, one in self._frozen.items()
        )


@cache
def _size(shape: Shape) -> Size:
    """Return one object per shape, which is written once."""
    return Size(shape)


_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")
"""Keys of AutoEP's layers; the second is an older name."""

_INFO = "universal_checkpoint_info"
_FORMAT = "checkpoint_format"


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


def _whole(one: Parameter, slot: str, dtype: DType | None = None) -> TensorLeaf:
    own = one.dtype_of(slot)
    return TensorLeaf(one.shape, dtype or own, one.source(slot), own)


def _autoep_layers(
    said: Mapping[object, object], cell: Cell, place: Place, stage: int
) -> Iterator[tuple[object, object]]:
    """Yield what AutoEP records of its layers, for a rank of the target.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``).
    """

    def placed(layers: list[object]) -> list[object]:
        return [_placed(one, cell, place, stage) for one in layers]

    for key in _AUTOEP_KEYS:
        if isinstance(layers := said.get(key), list):
            yield key, placed(layers)
    info = said.get(_INFO)
    if isinstance(info, dict) and isinstance(layers := info.get(_AUTOEP_KEYS[0]), list):
        yield _INFO, {**info, _AUTOEP_KEYS[0]: placed(layers)}


def _placed(layer: object, cell: Cell, place: Place, stage: int) -> object:
    if not isinstance(layer, dict):
        return layer
    count = layer.get("num_local_experts")
    first = cell.expert_rank * count if isinstance(count, int) else 0
    now = {
        _FORMAT: "zero3_partitioned" if stage == ZERO3 else "per_expert_files",
        f"{_FORMAT}_version": 1 if stage == ZERO3 else None,
        "ep_rank": cell.expert_rank,
        "expert_data_parallel_rank": place.sharing.index(place.rank),
        "expert_data_parallel_world_size": len(place.sharing),
        "global_expert_start": first,
        "global_expert_end": first + count if isinstance(count, int) else 0,
    }
    return {**layer, **{key: one for key, one in now.items() if key in layer}}
