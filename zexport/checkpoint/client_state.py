"""What the training's own code saved within a checkpoint: weights of the names of the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zexport.checkpoint.contents import Role, ZeroCheckpoint
from zexport.checkpoint.ranks import models_of
from zexport.checkpoint.untrusted import Value
from zexport.facts.statements import Statement
from zexport.facts.training import TrainingFact
from zexport.formats.inert import TensorRef

_OF_DEEPSPEED = ("module", "frozen_param_fragments", "optimizer", "ds_config", "lr_scheduler")
"""Tables of a model file that are DeepSpeed's own; any other is of the training's code.

Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_save_checkpoint``)."""

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
