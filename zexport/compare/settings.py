"""What two sides say beside their tensors, and differently, so that equal tensors do not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from zexport.adapters.stated import SCALING
from zexport.checkpoint.untrusted import Value
from zexport.facts.statements import disagreements
from zexport.filenames import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG
from zexport.formats.inert import Opaque
from zexport.model.config import ConfigFile
from zexport.model.config_facts import run_statements
from zexport.model.hub_cache import plain_name
from zexport.resume.state import CellState
from zexport.store.contents import read_json_object
from zexport.store.folders import exists, is_file
from zexport.store.json import JsonObject

_OF_BASE = ("base_model_name_or_path", "revision", "task_type")
"""What an adapter is loaded onto; paths count by their last name, wherever a base lies."""

_OF_RUN = ("global_steps", "skipped_steps", "lr_scheduler", "loss_scaler")
_APART = frozenset({"params", "step"})


class Setting(Struct, frozen=True):
    """A setting that both sides state, or one alone.

    Attributes:
        about: which it is.
        a: its value on the first side, as text.
        b: that on the second.
    """

    about: str
    a: str
    b: str


def of_models(a: Path, b: Path, *, are_adapters: bool) -> Iterator[Setting]:
    """What the configs in two folders say otherwise of what is computed with their weights."""
    for name in (ADAPTER_CONFIG,) if are_adapters else (CONFIG,):
        if is_file(a / name) and is_file(b / name):
            one, other = read_json_object(a / name), read_json_object(b / name)
            if are_adapters:
                yield from _of_adapters(one, other)
            else:
                sides = ConfigFile(a / name, one), ConfigFile(b / name, other)
                for found in disagreements(run_statements(*sides, "B")):
                    for about, (left, right, *_) in found.statements.items():
                        yield Setting(f"{CONFIG}: {about}", str(left.value), str(right.value))
    beside = [str(exists(side / ADAPTER_FILE)) for side in (a, b)]
    if not are_adapters and len({*beside}) > 1:
        yield Setting(f"{ADAPTER_FILE} beside the model", *beside)


def _of_adapters(a: JsonObject, b: JsonObject) -> Iterator[Setting]:
    for key in SCALING:
        if a.get(key) != b.get(key):
            yield Setting(f"{ADAPTER_CONFIG}: {key}", str(a.get(key)), str(b.get(key)))
    for key in _OF_BASE:
        one, other = str(a.get(key) or ""), str(b.get(key) or "")
        if one and other and plain_name(Path(one).name) != plain_name(Path(other).name):
            yield Setting(f"{ADAPTER_CONFIG}: {key}", one, other)


def of_trainings(a: CellState, b: CellState) -> Iterator[Setting]:
    """What two trainings have otherwise of groups, steps, schedule and loss scaler.

    What one side alone records is no difference: layouts record more or less.
    """
    one, other = _stated(a), _stated(b)
    for about in sorted(one.keys() & other.keys()):
        if one[about] != other[about] and str(one[about]) != str(other[about]):
            yield Setting(about, str(one[about]), str(other[about]))


def _stated(cell: CellState) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for number, group in enumerate(cell.groups):
        if group.settings is not None:
            values = group.settings.values.items()
            told = {key: value for key, value in values if key not in _APART}
            plain = Value(group.settings.file.path, "", told).plain_values()
            found |= {f"{key} of group {number}": value for key, value in plain.items()}
    for said in (cell.model, cell.optimizer):
        for key in _OF_RUN:
            value = said.values.get(key)
            value = value.state if isinstance(value, Opaque) else value
            plain = Value(said.file.path, "", value).plain_values()
            found |= {f"{key}.{inner}".rstrip("."): one for inner, one in plain.items()}
    return found
