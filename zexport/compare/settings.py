"""What two sides say beside their tensors, and differently, so that equal tensors do not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from msgspec import Struct

from zexport.adapters.stated import SCALING
from zexport.checkpoint.state import Cell
from zexport.facts.model import Fact
from zexport.facts.rows import AnyFact
from zexport.facts.statements import disagreements
from zexport.filenames import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG
from zexport.formats.inert import Opaque
from zexport.formats.pickle_view import PickleView
from zexport.model.chat_template import template_statements
from zexport.model.config import ConfigFile
from zexport.model.config_facts import parts_of, run_statements, unstated_statements
from zexport.model.fit import ModelNames
from zexport.model.hub_cache import plain_name
from zexport.model.names import Learner
from zexport.model.names_client import NamesClient
from zexport.model.sidecars import BASE, Sidecars, stating_files
from zexport.model.small_files import file_statements
from zexport.model.vocabulary import vocabulary_statements
from zexport.resharding.values import records_of
from zexport.store.contents import read_json_object
from zexport.store.files import reading
from zexport.store.folders import exists, is_file, is_folder
from zexport.store.json import Json, JsonObject

_OF_BASE = ("base_model_name_or_path", "revision", "task_type")
"""What an adapter is loaded onto; paths count by their last name, wherever a base lies."""

_OF_LOADING = ("architectures", "tie_word_embeddings", "vocab_size")
_OF_FORM = ("quantization_config", "compression_config", "auto_map")
"""Keys of a config that decide what is made of the weights, though they are not built otherwise: if
both sides have them, and the latter if one alone has."""

_NAMES: Mapping[AnyFact, str] = {Fact.BASE_FILE: "", Fact.VOCABULARY: "tokenizer"}
"""What a setting is called in front, where that is not the chat template."""

_STATED = (CONFIG, "B")
"""Who states what the other side leaves to the model's class."""

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
    """What the files in two folders say otherwise of what is computed with their weights."""
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
                yield from _of_loading(one, other)
                yield from _of_one_alone(*sides)
    if is_folder(a) and is_folder(b):
        yield from _of_files(a, b)
    beside = [str(exists(side / ADAPTER_FILE)) for side in (a, b)]
    if not are_adapters and len({*beside}) > 1:
        yield Setting(f"{ADAPTER_FILE} beside the model", *beside)


def _of_loading(a: JsonObject, b: JsonObject, part: str = "") -> Iterator[Setting]:
    """Which class loads the weights, in which form, and how many rows and classes there are."""
    for key in (*_OF_LOADING, *_OF_FORM):
        is_of_both = None not in (a.get(key), b.get(key))
        one, other = _in_brief(a.get(key)), _in_brief(b.get(key))
        if is_of_both != (key in _OF_FORM) and one != other:
            yield Setting(f"{CONFIG}: {part}{key}", one, other)
    labels = [table for side in (a, b) if isinstance(table := side.get("id2label"), dict)]
    if len({frozenset(table) for table in labels}) > 1:
        yield Setting(f"{CONFIG}: {part}id2label", *(f"{len(one):,} classes" for one in labels))
    for key in parts_of(a):
        inner, its = a[key], b.get(key)
        if key not in _OF_FORM and isinstance(inner, dict) and isinstance(its, dict):
            yield from _of_loading(inner, its, f"{part}{key}.")


def _of_one_alone(a: ConfigFile, b: ConfigFile) -> Iterator[Setting]:
    """What one config says of how the model is built, and the other leaves to its class.

    What the class takes is asked of transformers where it may matter, and remembered from then on.
    """
    if not any(unstated_statements(a, b, "B", {})):
        return
    with NamesClient(are_needed=False) as transformers:
        names = Learner(None, transformers).names(a, {})
    defaults = names.defaults if isinstance(names, ModelNames) else {}
    for found in disagreements(unstated_statements(a, b, "B", defaults)):
        for about, said in found.statements.items():
            one, other = (f"{s.value}{' (unstated)' * (s.by not in _STATED)}" for s in said)
            yield Setting(f"{CONFIG}: {about}", one, other)


def _in_brief(value: Json) -> str:
    """A value in a word: of a table its method."""
    if isinstance(value, dict):
        return str(value.get("quant_method") or "there")
    return "none" if value is None else str(value)


def _of_files(a: Path, b: Path) -> Iterator[Setting]:
    """What templates, tokenizers and small configs say otherwise; B's may be of an older version.

    So B stands where a base does, whose rules of a tokenizer may be written in other words.
    """
    with reading(a):
        files = stating_files(a), stating_files(b)
    sides = Sidecars(None, None, files[0], (), base=None, folders={BASE: files[1]})
    stated = chain(
        template_statements(sides),
        vocabulary_statements(sides.copied, sides.folders),
        file_statements(sides),
    )
    for found in disagreements(stated):
        for about, (left, *others) in found.statements.items():
            said = f"{left.value}"
            right = [s for s in others if str(s.by).startswith(BASE) and str(s.value) != said]
            if right:
                named = filter(None, (_NAMES.get(found.fact, "chat template"), about.rstrip(",:")))
                yield Setting(": ".join(named), said, str(right[0].value))


def _of_adapters(a: JsonObject, b: JsonObject) -> Iterator[Setting]:
    for key in SCALING:
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
