"""The fp32 masters inside a ZeRO-0 model file, each brought to the name of its weight."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zexport.checkpoint.assembly.cast_check import fingerprint
from zexport.checkpoint.states import ModelStates
from zexport.checkpoint.untrusted import Value
from zexport.dtypes import DType
from zexport.extents import ByteSource, Window
from zexport.layouts import LayoutError
from zexport.layouts.zero0 import Span, is_tiled, match_in_order
from zexport.streams.reader import SourceReader
from zexport.torchfile.pickles import FragmentAddress, StorageRef, TensorRef

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Master:
    """The fp32 values of one weight."""

    source: ByteSource
    dtype: DType


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one unnamed master stands for: a weight, or all that are views of one flat tensor.

    Attributes:
        kind: what is known of it from metadata.
        source: its values in the module.
        dtype: their element type.
        parts: the weights in it, with the element at which each begins.
    """

    kind: Hashable
    source: ByteSource
    dtype: DType
    parts: tuple[tuple[str, int], ...]


def find_masters(model: ModelStates, weights: Mapping[str, TensorRef]) -> dict[str, Master]:
    """The masters by name, in the module's order; none where the optimizer holds none.

    Args:
        model: the model file's states.
        weights: the module's weights, each once.

    Raises:
        LayoutError: masters cannot be told apart, or not all of them are there.
        DamagedCheckpointError: the optimizer is not what DeepSpeed writes.
    """
    optimizer = Value(model.file.path, "model states", model.file.value).get("optimizer")
    floating = {n: t for n, t in weights.items() if t.dtype.is_floating and t.numel}
    found: dict[str, Master] = {}
    if optimizer.has("fp32_groups"):
        units = [_weight_unit(model, name, tensor) for name, tensor in floating.items()]
        groups = [
            [item.tensor() for item in group.items()]
            for group in optimizer.need("fp32_groups").items()
        ]
        found = _match(model, units, groups)
    elif optimizer.has("fp32_groups_flat"):
        flats = optimizer.need("fp32_groups_flat").items()
        found = _match(model, _storage_units(model, floating), [[f.tensor()] for f in flats])
    elif optimizer.has("single_partition_of_fp32_groups"):
        found = dict(_named_masters(model, optimizer, floating))
    return {name: found[name] for name in weights if name in found}


def _weight_unit(model: ModelStates, name: str, tensor: TensorRef) -> _Unit:
    return _Unit(tensor.shape, model.file.source(tensor), tensor.dtype, ((name, 0),))


def _storage_units(model: ModelStates, weights: Mapping[str, TensorRef]) -> list[_Unit]:
    """The storages that weights share without a gap, as the fused optimizer's flat groups are."""
    by_storage: dict[StorageRef, list[str]] = {}
    for name, tensor in weights.items():
        by_storage.setdefault(tensor.storage, []).append(name)
    units = []
    for storage, names in by_storage.items():
        views = [(weights[name].offset, weights[name].numel) for name in names]
        if is_tiled(views, storage.numel):
            whole = TensorRef(storage.dtype, (storage.numel,), (1,), 0, storage)
            parts = tuple((name, weights[name].offset) for name in names)
            units.append(_Unit(whole.shape, model.file.source(whole), storage.dtype, parts))
    return units


def _match(
    model: ModelStates, units: Sequence[_Unit], groups: Sequence[Sequence[TensorRef]]
) -> dict[str, Master]:
    """The master of each weight, by shape and order, and by samples where these leave a doubt.

    Masters without elements are left out, as DeepSpeed 0.19 does itself
    (``runtime/utils.py``, ``is_optimized_parameter``).
    """
    groups = [[master for master in group if master.numel] for group in groups]
    spans = match_in_order([u.kind for u in units], [[m.shape for m in g] for g in groups])
    if not all(span.is_certain for group in spans for span in group):
        spans = _match_by_samples(model, units, groups)
    found: dict[str, Master] = {}
    for span, master in zip(_flat(spans), _flat(groups), strict=True):
        unit = units[span.first]
        if not span.is_certain:
            raise LayoutError(
                "several weights look like one fp32 master",
                f"{unit.parts[0][0]!r} and {units[span.last].parts[0][0]!r} alike",
                "weights that differ",
            )
        source = model.file.source(master)
        for name, offset in unit.parts:
            itemsize = master.dtype.itemsize
            numel = model.module[name].numel
            window = Window(source, offset * itemsize, numel * itemsize)
            found[name] = Master(source if len(unit.parts) == 1 else window, master.dtype)
    return found


def _match_by_samples(
    model: ModelStates, units: Sequence[_Unit], groups: Sequence[Sequence[TensorRef]]
) -> list[list[Span]]:
    """Matched anew with samples of the values beside the shapes: a few kilobytes of each."""
    dtypes = {unit.dtype for unit in units}
    if len(dtypes) > 1:
        raise LayoutError(
            "the module's weights are of several types",
            ", ".join(sorted(dtype.torch_name for dtype in dtypes)),
            "one",
        )
    seen_as = next(iter(dtypes), DType.F32)
    with SourceReader([model.file]) as reader:
        parameters = [(u.kind, fingerprint(reader, u.source, u.dtype, seen_as)) for u in units]
        masters = [
            [(m.shape, fingerprint(reader, model.file.source(m), m.dtype, seen_as)) for m in group]
            for group in groups
        ]
    return match_in_order(parameters, masters)


def _named_masters(
    model: ModelStates, optimizer: Value, weights: Mapping[str, TensorRef]
) -> Iterator[tuple[str, Master]]:
    """The masters of BF16_Optimizer, whose dictionary names them.

    Source: DeepSpeed 0.19, ``runtime/bf16_optimizer.py`` (``state_dict``): the partition of the
    rank that saved, which is all of a group only where there is one rank.
    """
    flats = optimizer.need("single_partition_of_fp32_groups").items()
    mappings = optimizer.need("param_slice_mappings").items()
    for flat, mapping in zip(flats, mappings, strict=False):
        tensor = flat.tensor()
        source, itemsize = model.file.source(tensor), tensor.dtype.itemsize
        for name, entry in mapping.entries().items():
            place = entry.value
            if not isinstance(place, FragmentAddress):
                entry.fail("is not a fragment_address")
            expected = weights[name].numel if name in weights else None
            if place.numel != expected or place.start + place.numel > tensor.numel:
                raise LayoutError(
                    f"the fp32 master of {name!r} is not all there",
                    f"elements {place.start} to {place.start + place.numel} of {tensor.numel}",
                    f"{expected} elements" if expected else "a weight of that name",
                )
            window = Window(source, place.start * itemsize, place.numel * itemsize)
            yield name, Master(window, tensor.dtype)


def _flat(groups: Iterable[Sequence[_Item]]) -> list[_Item]:
    return [item for group in groups for item in group]
