"""Settings that differ: keys of config files, and training settings of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.state import Cell
from zexport.export.peft import DECIDING
from zexport.filenames import ADAPTER_CONFIG, CONFIG
from zexport.formats.pickle_values import Opaque
from zexport.formats.pickle_view import PickleView
from zexport.model.config import differences
from zexport.model.hub_cache import plain_name
from zexport.resharding.values import records_of
from zexport.storage.files import is_file
from zexport.storage.json import Json, JsonObject, as_table, read_json_object

_BASE_KEY = "base_model_name_or_path"
_WITHOUT_EFFECT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
"""Keys that do not change what the model computes; dtypes are compared per tensor."""

_RUN_KEYS = ("global_steps", "skipped_steps", "lr_scheduler", "loss_scaler")
_GROUP_KEYS_COMPARED_ELSEWHERE = frozenset({"params", "step"})


class Setting(Struct, frozen=True):
    """A setting with different values.

    Attributes:
        about: the setting.
        a: its value in A, as text.
        b: its value in B.
    """

    about: str
    a: str
    b: str


def compare_configs(a: Path, b: Path) -> list[Setting]:
    """Return the keys of config.json and adapter_config.json that differ in two folders.

    Keys of config.json that only one folder has are not reported: versions of transformers write
    different keys.
    """
    found = []
    if is_file(a / CONFIG) and is_file(b / CONFIG):
        one, other = read_json_object(a / CONFIG), read_json_object(b / CONFIG)
        values = {key: (ours, theirs) for key, ours, theirs in differences(one, other)}
        leaves, others = dict(_leaves(one)), dict(_leaves(other))
        for key in leaves.keys() & others.keys():
            if leaves[key] != others[key]:
                values.setdefault(key, (leaves[key], others[key]))
        found += [
            Setting(f"{CONFIG}: {key}", *map(str, pair)) for key, pair in sorted(values.items())
        ]
    if is_file(a / ADAPTER_CONFIG) and is_file(b / ADAPTER_CONFIG):
        ours, theirs = (_adapter_settings(folder / ADAPTER_CONFIG) for folder in (a, b))
        found += [
            Setting(f"{ADAPTER_CONFIG}: {key}", value, theirs[key])
            for key, value in ours.items()
            if value != theirs[key]
        ]
    return found


def _adapter_settings(path: Path) -> dict[str, str]:
    """Return settings as text; the base model's folder may have moved: only its name counts."""
    content = read_json_object(path)
    base = plain_name(Path(str(content.get(_BASE_KEY))).name)
    return {key: str(content.get(key)) for key in DECIDING} | {_BASE_KEY: base}


def _leaves(table: JsonObject, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield keys with their values; inner keys after a dot."""
    for key, value in _with_plain_rope(table).items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key not in _WITHOUT_EFFECT:
            yield prefix + key, value


def _with_plain_rope(table: JsonObject) -> JsonObject:
    """Return RoPE settings as keys of the config: transformers 5 moved and renamed some."""
    rope = {**as_table(table.get("rope_scaling") or table.get("rope_parameters"))}
    if any(isinstance(inner, dict) for inner in rope.values()):  # one for each kind of layer
        return table
    kind = rope.pop("type", "default")
    rest = {k: v for k, v in table.items() if k not in ("rope_scaling", "rope_parameters")}
    return {**rest, "rope_type": kind, **rope}


def compare_training_settings(a: Cell, b: Cell) -> Iterator[Setting]:
    """Yield settings of parameter groups, steps, LR scheduler and loss scaler that differ.

    Settings that only one side records are not reported: ZeRO stages record different ones.
    """
    ours, theirs = _training_settings(a), _training_settings(b)
    for about in sorted(ours.keys() & theirs.keys()):
        if ours[about] != theirs[about] and str(ours[about]) != str(theirs[about]):
            yield Setting(about, str(ours[about]), str(theirs[about]))


def _training_settings(cell: Cell) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for number, group in enumerate(cell.groups):
        if group.settings is not None:
            values = {
                key: value
                for key, value in group.settings.values.items()
                if key not in _GROUP_KEYS_COMPARED_ELSEWHERE
            }
            plain = PickleView(group.settings.file.path, "", values).plain_values()
            found |= {f"{key} of group {number}": value for key, value in plain.items()}
    for record in records_of(cell):
        for key in _RUN_KEYS:
            value = record.values.get(key)
            value = value.state if isinstance(value, Opaque) else value
            plain = PickleView(record.file.path, "", value).plain_values()
            found |= {f"{key}.{inner}".rstrip("."): one for inner, one in plain.items()}
    return found
