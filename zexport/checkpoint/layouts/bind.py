"""Slots bound to bytes: which tensors lie in a flat run, where, and which run of the optimizer's.

What tensors there are is said by names and shapes (slots); where each lies is arithmetic
(``zero12`` and ``zero3``); the runs are the masters, or any state that the optimizer keeps of every
element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

from msgspec import Struct

from zexport.checkpoint.contents import FlatData, Role, StoredTensor
from zexport.checkpoint.layouts import zero3, zero12
from zexport.checkpoint.optimizer_states import OptimizerStates
from zexport.errors import LayoutError
from zexport.formats.inert import TensorRef
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import ByteSource, Chain, Striped, Window

MASTERS = "fp32"
"""The run of the masters, by the name that universal checkpoints give it."""


class FlatRun(Struct, frozen=True):
    """The slots of one flat run: trained tensors that lie end to end, in this order.

    It is made of ``groups``, with name and shape for each; ``paddings`` are the elements of padding
    after each tensor (ZeRO-1/2), empty where there is none.
    """

    groups: tuple[int, ...]
    shapes: tuple[Mapping[str, Shape], ...]
    paddings: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, Shape]]:
        """Every name with its shape."""
        for shapes in self.shapes:
            yield from shapes.items()

    def places(self) -> list[zero12.FlatParameter]:
        """Where each lies in the partitions of ZeRO-1/2."""
        return [*zero12.place_parameters(self.shapes[0], self.paddings)]


class Bound(Struct, frozen=True):
    """The tensors of a flat run, each with its bytes, and all these: where no file is missing."""

    tensors: tuple[StoredTensor, ...]
    flat: FlatData | None


def bind(
    run: FlatRun,
    owners: Sequence[OptimizerStates | None],
    *,
    is_zero3: bool,
    state: str = MASTERS,
    module: Mapping[str, TensorRef] | None = None,
) -> Bound:
    """The tensors of ``run``, out of what its owners hold of it.

    The owners are in the order of their parts, ``None`` for one that is missing. ``state`` is
    ``MASTERS`` or the name of a state tensor (``GroupState.tensors``), such as ``exp_avg``.
    """
    there = [states for states in owners if states is not None]
    parts = [[*_parts(states, run, state)] for states in there]
    flat: FlatData | None = None
    sources: Iterator[ByteSource | None] = repeat(None, sum(map(len, run.shapes)))
    dtype = next((part.dtype for own in parts for part in own), DType.F32)
    if there and len(there) == len(owners):
        check_one_type(part.dtype for own in parts for part in own)
        flats = tuple(
            end_to_end([states.file.source(part) for part in own])
            for states, own in zip(there, parts, strict=True)
        )
        lay = _stripes if is_zero3 else _windows
        flat, sources = lay(run, parts, flats, dtype)
    types = module or {}
    tensors = tuple(
        StoredTensor(
            name,
            shape,
            dtype,
            Role.TRAINABLE,
            source,
            module_dtype=types[name].dtype if name in types else None,
        )
        for (name, shape), source in zip(run, sources, strict=True)
    )
    return Bound(tensors, flat)


def _parts(states: OptimizerStates, run: FlatRun, state: str) -> Iterator[TensorRef]:
    """What one rank holds of a run."""
    for group in run.groups:
        if group >= len(states.flat_groups):
            continue
        if state == MASTERS:
            yield states.flat_groups[group]
        elif (part := states.group_states[group].tensors.get(state)) is not None and part.is_dense:
            yield part
        else:
            raise LayoutError(
                f"the optimizer keeps no {state!r} of flat group {group}",
                ", ".join(states.group_states[group].tensors) or "no state",
                "a run of elements on every rank",
            )


def check_one_type(dtypes: Iterable[DType]) -> None:
    """Hold what lies in flat groups to one floating-point type."""
    found = set(dtypes)
    if len(found) > 1 or not all(dtype.is_floating for dtype in found):
        raise LayoutError(
            "the flat groups are not of one floating-point type",
            ", ".join(sorted(dtype.torch_name for dtype in found)),
            "float32 throughout",
        )


def end_to_end(sources: Sequence[ByteSource]) -> ByteSource:
    """Several sources as one."""
    return sources[0] if len(sources) == 1 else Chain(tuple(sources))


_Parts = Sequence[Sequence[TensorRef]]
_Laid = tuple[FlatData, Iterator[ByteSource]]


def _stripes(run: FlatRun, parts: _Parts, flats: tuple[ByteSource, ...], dtype: DType) -> _Laid:
    """ZeRO-3: stripe ``d`` of every tensor from owner ``d``."""
    zero3.check_flat_numels(run.shapes, [sum(part.numel for part in own) for own in parts])
    if all(len(own) == len(run.shapes) for own in parts):
        for shapes, row in zip(run.shapes, zip(*parts, strict=True), strict=True):
            zero3.check_flat_numels([shapes], [part.numel for part in row])
    places = [*zero3.stripe_parameters(run.shapes, len(flats))]
    padding = zero3.padding_numel(places, len(flats))
    size = dtype.itemsize
    sources = (
        Striped(flats, one.offset * size, one.stripe_numel * size, one.numel * size)
        for one in places
    )
    return FlatData(end_to_end(flats), dtype, padding), sources


def _windows(run: FlatRun, parts: _Parts, flats: tuple[ByteSource, ...], dtype: DType) -> _Laid:
    """ZeRO-1/2: a window of the partitions laid end to end."""
    numels = [sum(part.numel for part in own) for own in parts]
    zero12.check_partitions(run.shapes[0], numels, paddings=run.paddings)
    places, size, whole = run.places(), dtype.itemsize, end_to_end(flats)
    padding = zero12.padding_numel(places, whole.nbytes // size)
    sources = (Window(whole, one.offset * size, one.numel * size) for one in places)
    return FlatData(whole, dtype, padding), sources
