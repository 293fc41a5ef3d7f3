"""What two sides say beside their tensors, and differently, so that equal tensors do not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.state import Cell
from zexport.export.peft_config import DECIDING
from zexport.filenames import ADAPTER_CONFIG, CONFIG
from zexport.formats.pickle_values import Opaque
from zexport.formats.pickle_view import PickleView
from zexport.model.config import differences
from zexport.model.hub_cache import plain_name
from zexport.resharding.values import records_of
from zexport.storage.contents import read_json_object
from zexport.storage.files import is_file
from zexport.storage.json import Json, JsonObject

_OF_BASE = ("base_model_name_or_path", "revision", "task_type")
"""What an adapter is loaded onto; paths count by their last name, wherever a base lies."""

_NO_DIFFERENCE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}

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
    """Yield keys that the configs in two folders both have, with other values."""
    name = ADAPTER_CONFIG if are_adapters else CONFIG
    if not (is_file(a / name) and is_file(b / name)):
        return
    one, other = read_json_object(a / name), read_json_object(b / name)
    if are_adapters:
        yield from _of_adapters(one, other)
        return
    found = {each.key: (each.ours, each.theirs) for each in differences(one, other)}
    ours, theirs = dict(_leaves(one)), dict(_leaves(other))
    for key in ours.keys() & theirs.keys():
        is_rope = any(part.startswith("rope_") for part in key.split("."))
        if ours[key] != theirs[key] and not is_rope:
            found.setdefault(key, (ours[key], theirs[key]))
    for key, values in sorted(found.items()):
        yield Setting(f"{CONFIG}: {key}", *map(str, values))


def _leaves(table: JsonObject, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield all keys that matter to a model, with their values; inner keys after a dot."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key not in _NO_DIFFERENCE:
            yield prefix + key, value


def _of_adapters(a: JsonObject, b: JsonObject) -> Iterator[Setting]:
    for key in DECIDING:
        if a.get(key) != b.get(key):
            yield Setting(f"{ADAPTER_CONFIG}: {key}", str(a.get(key)), str(b.get(key)))
    for key in _OF_BASE:
        one, other = str(a.get(key) or ""), str(b.get(key) or "")
        if one and other and plain_name(Path(one).name) != plain_name(Path(other).name):
            yield Setting(f"{ADAPTER_CONFIG}: {key}", one, other)


def of_trainings(a: Cell, b: Cell) -> Iterator[Setting]:
    """What two trainings have otherwise of groups, steps, schedule and loss scaler.

    What one side alone records is no difference: layouts record more or less.
    """
    one, other = _stated(a), _stated(b)
    for about in sorted(one.keys() & other.keys()):
        if one[about] != other[about] and str(one[about]) != str(other[about]):
            yield Setting(about, str(one[about]), str(other[about]))


def _stated(cell: Cell) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for number, group in enumerate(cell.groups):
        if group.settings is not None:
            values = group.settings.values.items()
            told = {key: value for key, value in values if key not in _APART}
            plain = PickleView(group.settings.file.path, "", told).plain_values()
            found |= {f"{key} of group {number}": value for key, value in plain.items()}
    for said in records_of(cell):
        for key in _OF_RUN:
            value = said.values.get(key)
            value = value.state if isinstance(value, Opaque) else value
            plain = PickleView(said.file.path, "", value).plain_values()
            found |= {f"{key}.{inner}".rstrip("."): one for inner, one in plain.items()}
    return found
