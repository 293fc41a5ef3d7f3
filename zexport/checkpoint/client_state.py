"""What the training's own code saved within a checkpoint: further weights, and each rank's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat

from zexport.checkpoint.contents import Role, ZeroCheckpoint
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.ranks import RankStates, models_of
from zexport.checkpoint.untrusted import Value
from zexport.facts.statements import Statement
from zexport.facts.training import TrainingFact
from zexport.formats.inert import ForeignStorage, Opaque, StorageRef, TensorRef
from zexport.formats.torch_file import TorchFile

_OF_DEEPSPEED = ("module", "frozen_param_fragments", "optimizer", "ds_config", "lr_scheduler")
"""Tables of a model file that are DeepSpeed's own; any other is of the training's code.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``)."""

OF_LAYOUT = frozenset(
    {
        *("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "dp_world_size", "ds_config"),
    }
)
"""Keys of a model file that depend on how parameters are partitioned, or on the configuration."""

_OF_EXPERTS = ("ds_autoep_layers", "autoep_layers", "universal_checkpoint_info")
_DEPTH_MAX = 100

_DEPTH = 3
"""Tables within tables that are looked through: an average lies in one, or in a callback's."""


def client_statements(checkpoint: ZeroCheckpoint) -> Iterator[Statement]:
    """The weights, and most of them once more by their names and shapes, in a table of its own."""
    model = next(iter(models_of(checkpoint.cells).values()), None)
    if model is None:
        return
    known = {one.name: one.shape for one in checkpoint.tensors if one.role is not Role.BUFFER}
    root = Value(model.file.path, "model states", model.file.value).mapping_or_empty()
    others = {key: value for key, value in root.items() if key not in _OF_DEEPSPEED}
    for path, table in _tables(others, _DEPTH, set()):
        held = {n.removeprefix("module."): v for n, v in table.items() if isinstance(v, TensorRef)}
        count = sum(held[name].shape == known[name] for name in held.keys() & known.keys())
        if count * 2 > len(known):
            yield Statement(TrainingFact.MORE_WEIGHTS, "the weights of the module", "the export")
            yield Statement(TrainingFact.MORE_WEIGHTS, f"{count:,} tensors of their names", path)


def _tables(
    table: Mapping[str, object], depth: int, seen: set[int]
) -> Iterator[tuple[str, dict[str, object]]]:
    """The tables in a table, each once, with the keys that lead to it."""
    for key, value in table.items() if depth else ():
        if isinstance(value, dict) and id(value) not in seen:
            seen.add(id(value))
            inner = {name: one for name, one in value.items() if isinstance(name, str)}
            yield key, inner
            yield from ((f"{key}.{path}", one) for path, one in _tables(inner, depth - 1, seen))


def differing(ranks: RankStates) -> tuple[list[str], list[str]]:
    """Return the keys of client state, and the buffers, whose values differ between ranks.

    Under ZeRO-3 each rank saves its own. Tensors are compared by the CRC-32 of their records.

    Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``).
    """
    models = [ranks.model[rank] for rank in sorted(ranks.model)] if ranks.is_zero3 else []
    return _differing(models, _client_state), _differing(models, _buffers)


def _client_state(file: TorchFile) -> dict[str, object]:
    said = Value(file.path, "model states", file.value).mapping_or_empty()
    return {key: one for key, one in said.items() if key not in {*OF_LAYOUT, *_OF_EXPERTS}}


def _buffers(file: TorchFile) -> dict[str, object]:
    """Return what the module holds besides the placeholders of parameters."""
    module = Value(file.path, "model states", file.value).get("module").mapping_or_empty()
    return {
        name: one
        for name, one in module.items()
        if not (isinstance(one, TensorRef) and one.shape == (0,))
    }


def _differing(
    models: Sequence[ModelStates], table_of: Callable[[TorchFile], dict[str, object]]
) -> list[str]:
    files = [one.file for one in models]
    first = table_of(files[0]) if files else {}
    found: set[str] = set()
    for file in files[1:]:
        own = first if file.value is files[0].value else table_of(file)
        found |= {
            key
            for key in {**first, **own}.keys() - found
            if not (key in first and key in own)
            or not _Comparison(files[0], file).is_same(first[key], own[key])
        }
    return sorted(found, key=str)


class _Comparison:
    """A comparison of two files' values, of which parts may occur often or contain themselves."""

    def __init__(self, first: TorchFile, other: TorchFile) -> None:
        self._first, self._other = first, other
        self._seen: set[tuple[int, int]] = set()

    def is_same(self, one: object, other: object, depth: int = 0) -> bool:
        """Return whether ``one`` of the first file equals ``other`` of the other file."""
        if isinstance(one, _STORAGES) and isinstance(other, _STORAGES):
            same = self._first.checksum(one) == self._other.checksum(other)
            return same and one.nbytes == other.nbytes
        parts, others = _parts(one), _parts(other)
        if parts is None or others is None:
            return one == other
        pair = id(one), id(other)
        if pair in self._seen:
            return True
        self._seen.add(pair)
        is_alike = type(one) is type(other) and len(parts) == len(others) and depth < _DEPTH_MAX
        return is_alike and all(map(self.is_same, parts, others, repeat(depth + 1)))


_STORAGES = StorageRef, ForeignStorage


def _parts(value: object) -> Sequence[object] | None:
    """Return what a value consists of; ``None`` for a plain one."""
    if isinstance(value, TensorRef):
        return value.dtype, value.shape, value.stride, value.offset, value.storage
    if isinstance(value, Opaque):
        return value.callee, value.args, value.state, value.items, *chain(*value.pairs)
    if isinstance(value, dict):
        return *value, *value.values()
    return value if isinstance(value, list | tuple) else None
