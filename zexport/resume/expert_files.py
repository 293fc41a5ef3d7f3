"""Experts beside the parameter groups: frozen ones, their files, AutoEP's record of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from zexport.checkpoint.contents import source_of
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.layouts.expert_layers import (
    AUTOEP_WEIGHTS,
    AutoEpLayer,
    ExpertLayers,
    parse_native,
)
from zexport.checkpoint.model_states import ZERO3, ModelStates
from zexport.checkpoint.rank_files import RankFileKind, rank_file_name
from zexport.formats.leaves import TensorLeaf
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Window
from zexport.resume.cuts import Place
from zexport.resume.state import CellState

_LAYERS = ("ds_autoep_layers", "autoep_layers")
"""Under which AutoEP records its layers; the second is an older name."""

_INFO = "universal_checkpoint_info"
_FORMAT = "checkpoint_format"


def has_frozen_experts(model: ModelStates, layers: ExpertLayers, trained: Iterable[str]) -> bool:
    """Whether experts have weights that are not trained, which the files of experts hold.

    The table of frozen weights that ZeRO-2 writes has those of the first rank. Every rank would
    load them over its own (DeepSpeed 0.19.8, ``runtime/engine.py``, ``load_module_state_dict``), so
    such a training gets no table: the module and these files have every weight.
    """
    held = {name for files in layers.files.values() for one in files for name in one.tensors}
    native = {_of_first(name) for name in held if parse_native(name) is not None}
    known = {*map(_of_first, trained), *map(_of_first, model.buffer_names)}
    return bool((native | layers.autoep.keys()) - known)


def _of_first(name: str) -> str:
    """The same weight of the first expert."""
    native = parse_native(name)
    return name if native is None else native.renumbered(0)


def expert_files(
    cell: CellState, layers: Iterable[AutoEpLayer], dtype: DType
) -> Iterator[tuple[str, dict[object, object]]]:
    """The files that ZeRO-1 and 2 load AutoEP's experts from, which ZeRO-3 does without.

    A file for each expert of this rank, by its name: its weights as the module has them, in
    ``dtype``.
    """
    masters = {one.name: one.tensors[MASTERS] for one in cell.parameters()}
    for layer in layers:
        for place, expert in enumerate(layer.held[cell.expert_rank]):
            content: dict[object, object] = {}
            for weight in AUTOEP_WEIGHTS:
                whole = masters[f"{layer.experts}.{weight}"]
                shape, size = whole.shape[1:], whole.dtype.itemsize
                nbytes = prod(shape) * size
                part = Window(source_of(whole), place * nbytes, nbytes)
                leaf = TensorLeaf(shape, dtype, part, whole.dtype)
                content[f"{layer.experts}.{weight}.{expert}"] = leaf
            kind = RankFileKind.EXPERT
            yield rank_file_name(kind, 0, cell.index, layer=layer.number, expert=expert), content


def autoep_layers(
    said: Mapping[object, object], cell: CellState, place: Place, stage: int
) -> Iterator[tuple[object, object]]:
    """What AutoEP records of its layers, for a rank of the target.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_moe_checkpoint``).
    """

    def placed(layers: list[object]) -> list[object]:
        return [_placed(one, cell, place, stage) for one in layers]

    for key in _LAYERS:
        if isinstance(layers := said.get(key), list):
            yield key, placed(layers)
    info = said.get(_INFO)
    if isinstance(info, dict) and isinstance(layers := info.get(_LAYERS[0]), list):
        yield _INFO, {**info, _LAYERS[0]: placed(layers)}


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
