"""What the model files of a target hold: the module, its tables of shapes, and what is carried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache

from zexport.checkpoint.client_state import OF_LAYOUT
from zexport.checkpoint.contents import StoredTensor, source_of
from zexport.checkpoint.layouts import zero3
from zexport.checkpoint.model_states import ZERO3
from zexport.errors import FrozenLeftOutError
from zexport.formats.inert import Ordered, Size, TensorLeaf, TensorRef
from zexport.ranges.computed import Stripe, Stripes, Zeros
from zexport.ranges.dtypes import DType, Shape
from zexport.resharding.optimizer_files import Place, flat_leaf
from zexport.resharding.settings import Settings, TargetSettings
from zexport.resharding.state import CellState, ModuleEntry, Parameter
from zexport.resharding.values import with_leaves, written


class ModelFiles:
    """The model files of one model-parallel index: one a rank under ZeRO-3, else one in all.

    ``flat_groups`` are the parameters of each flat group of the target; keys of the client's state
    that are ``dropped`` are left out.
    """

    def __init__(
        self,
        cell: CellState,
        flat_groups: Iterable[Iterable[Parameter]],
        settings: TargetSettings,
        dropped: Collection[str] = (),
    ) -> None:
        self._cell = cell
        self._settings = settings
        self._shapes = [
            Ordered((one.name, _size(one.shape)) for one in group) for group in flat_groups
        ]
        said = cell.model
        self._carried = written(said, {*OF_LAYOUT, *dropped})
        self._dropped = dropped
        self._config = settings.put_into(with_leaves(said.values.get("ds_config"), said.file))
        self._stripes = {
            name: _stripes(tensor, settings.world_size)
            for name, tensor in (cell.frozen or {}).items()
        }
        self._leaves: dict[tuple[str, DType], TensorLeaf] = {}
        self._module = self._made_module()  # the same in the files of all ranks

    def value(self, place: Place) -> dict[object, object]:
        """All of one rank's model file."""
        rank = place.rank
        carried, module = self._of_rank(rank)
        made: dict[object, object] = {
            **dict(_autoep_layers(carried, self._cell, place, self._settings.stage)),
            "module": module,
            "optimizer": None,
            "param_shapes": self._shapes,
            "frozen_param_shapes": self._frozen_shapes(),
            "frozen_param_fragments": self._fragments(rank),
            "shared_params": self._ties() if rank == 0 else Ordered(),
            "dp_world_size": self._settings.world_size,
            "ds_config": self._config,
        }
        order = dict.fromkeys((*self._cell.model.values, *carried, *made))
        known = {**carried, **made}
        return {key: known[key] for key in order if key in known}

    def _of_rank(self, rank: int) -> tuple[Mapping[object, object], object]:
        """Return what is carried, and the module: a rank's own if as many ranks had them before."""
        if not self._cell.own or not isinstance(self._module, Ordered):
            return self._carried, self._module
        own = self._cell.own[rank if keeps_own(self._cell, self._settings) else 0]
        differing = self._cell.differing
        module = Ordered(_replaced(self._module, written(own.buffers), differing))
        module.attributes = self._module.attributes
        client = written(own.client, self._dropped)
        return _replaced(self._carried, client, differing), module

    def _made_module(self) -> object:
        """The module's state dict; what is one tensor under several names is one here."""
        said = self._cell.model
        module = said.values.get("module")
        if not isinstance(module, dict):
            return module
        entries = {entry.name: entry for entry in self._cell.module}
        made = Ordered(
            (name, self._entry(entries[name]))
            if isinstance(one, TensorRef)
            else (name, with_leaves(one, said.file))
            for name, one in module.items()
        )
        if isinstance(module, Ordered) and module.attributes is not None:
            made.attributes = with_leaves(module.attributes, said.file)
        return made

    def _entry(self, entry: ModuleEntry) -> TensorLeaf:
        if entry.value is None:
            raise FrozenLeftOutError(
                f"has no value of {entry.name!r}, which the module names",
                path=self._cell.model.file.path,
                hint="Save again with all weights, and reshard that",
            )
        if self._settings.stage == ZERO3 and entry.is_parameter:
            return TensorLeaf((0,), entry.dtype, _NOTHING, entry.dtype)
        key = entry.owner, entry.dtype
        return self._leaves.setdefault(key, _whole(entry.value, entry.dtype))

    def _frozen_shapes(self) -> object:
        if self._cell.frozen is None or self._settings.stage == 1:
            return None
        return Ordered((name, _size(one.shape)) for name, one in self._cell.frozen.items())

    def _fragments(self, rank: int) -> object:
        """The frozen weights: this rank's stripes, or whole, and then the module's own."""
        if self._cell.frozen is None or self._settings.stage == 1:
            return None
        if self._settings.stage == ZERO3:
            return Ordered(
                (name, flat_leaf(Stripe(self._stripes[name], rank), one.dtype))
                for name, one in self._cell.frozen.items()
            )
        return Ordered(
            (name, self._leaves.get((name, one.dtype)) or _whole(one, one.dtype))
            for name, one in self._cell.frozen.items()
        )

    def _ties(self) -> Ordered:
        """The recorded ties, and those that the source's module shows otherwise."""
        recorded = self._cell.model.values.get("shared_params")
        return Ordered({**(recorded if isinstance(recorded, dict) else {}), **self._cell.aliases})


@cache
def _size(shape: Shape) -> Size:
    """One object for each shape: it is written once, however many weights have it."""
    return Size(shape)


_NOTHING = Zeros(0)

_AUTOEP_KEYS = ("ds_autoep_layers", "autoep_layers")
"""Under which AutoEP records its layers; the second is an older name."""

_INFO = "universal_checkpoint_info"
_FORMAT = "checkpoint_format"


def keeps_own(cell: CellState, settings: Settings) -> bool:
    """Return whether each rank keeps its own client state and buffers."""
    if not isinstance(settings, TargetSettings) or settings.stage != ZERO3:
        return False
    return settings.world_size == len(cell.own)


def _replaced(
    values: Mapping[object, object], own: Mapping[object, object], differing: Collection[object]
) -> dict[object, object]:
    kept = {key: one for key, one in values.items() if key in own or key not in differing}
    return {**kept, **own}


def _stripes(tensor: StoredTensor, world_size: int) -> Stripes:
    stripe = zero3.stripe_numel(tensor.numel, world_size) * tensor.dtype.itemsize
    return Stripes((source_of(tensor),), (stripe,))


def _whole(tensor: StoredTensor, dtype: DType) -> TensorLeaf:
    return TensorLeaf(tensor.shape, dtype, source_of(tensor), tensor.dtype)


def _autoep_layers(
    said: Mapping[object, object], cell: CellState, place: Place, stage: int
) -> Iterator[tuple[object, object]]:
    """What AutoEP records of its layers, for a rank of the target.

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


def _placed(layer: object, cell: CellState, place: Place, stage: int) -> object:
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
