"""Small files beside the weights, compared with those of other folders."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain

from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG
from zexport.model.custom_code import modules_named
from zexport.model.sidecars import (
    ABOVE,
    PROCESSOR,
    SENTENCE_CONFIGS,
    THE_CHECKPOINT,
    Files,
    Sidecars,
    states_model,
)
from zexport.model.tokenizer import content_of, table_of
from zexport.printable import some
from zexport.store.contents import repeated_keys
from zexport.store.folders import children
from zexport.store.json import Json

_TOKENIZER_KEYS = re.compile(
    r"add_\w+|do_\w+|\w+_side|(?:bos|eos|unk|sep|pad|cls|mask)_token|model_max_length|legacy"
    r"|tokenizer_class|split_special_tokens|clean_up_tokenization_spaces|fix_mistral_regex"
)
_ANY_KEY = re.compile(
    r"(?!transformers_version|auto_map|chat_template|name_or_path|_|\w+_file$)\w+"
)
_COMPARED = {
    TOKENIZER_CONFIG: _TOKENIZER_KEYS,
    **dict.fromkeys((GENERATION_CONFIG, *PROCESSOR, *SENTENCE_CONFIGS), _ANY_KEY),
}
"""The files whose values are compared with those of other folders, and the keys that count."""

_ANY_CLASS = re.compile(r"(PreTrainedTokenizer|TokenizersBackend|PythonBackend)(Fast)?")
"""Classes of tokenizers that say nothing of which one it is."""

_BY_HAND = re.compile(r"(?:.*/)?[\w-]*config\w*\.json|special_tokens_map\.json")
_OF_RUN = re.compile(r"trainer_state\.json|training_args\.bin|(?:checkpoint|step|epoch)[-_]?\d+")
_LONG, _TOLD_MAX = 60, 8


def beside_statements(sidecars: Sidecars) -> Iterator[Statement]:
    """What small files say: in each node's folder, in the folder above, twice, or of code."""
    yield from _of_nodes(sidecars)
    yield from _of_above(sidecars)
    yield from repeated_statements(sidecars.files)
    yield from _of_code(sidecars)


def choice_notes(copied: Files, folders: Mapping[str, Files]) -> Iterator[str]:
    """Yield one note: from which folder files are copied, if other folders have different ones."""
    told = []
    for name, path in copied.items():
        having = {by: files for by, files in folders.items() if name in files}
        own = content_of(copied, name) if states_model(name) and len(having) > 1 else None
        others = [by for by, files in having.items() if own not in (None, content_of(files, name))]
        if others:
            used = next((by for by, files in having.items() if files[name] == path), "elsewhere")
            told.append(f"{name} of {used} (not of {some(others)})")
    if told:
        yield f"files differ between folders, and the export has {some(told, _TOLD_MAX)}"


def file_statements(sidecars: Sidecars) -> Iterator[Statement]:
    """What files say that are copied, and those of the same names in other folders."""
    for name, keys in _COMPARED.items():
        if (path := sidecars.copied.get(name)) is None:
            continue
        own = _settings(sidecars.copied, name, keys)
        for where, files in sidecars.folders.items():
            other = _settings(files, name, keys) if files.get(name, path) != path else {}
            for key in sorted(own.keys() & other.keys()):
                yield Statement(Fact.BASE_FILE, own[key], "the export's", f"{name}, {key}:")
                yield Statement(Fact.BASE_FILE, other[key], f"{where}'s", f"{name}, {key}:")


def _of_nodes(sidecars: Sidecars) -> Iterator[Statement]:
    """What all folders hold in which nodes kept parts of the checkpoint, file by file."""
    nodes = {by: sidecars.folders[by] for by in (THE_CHECKPOINT, *sidecars.nodes)}
    for name in sorted({*chain.from_iterable(nodes.values())}) if sidecars.nodes else ():
        having = {by: files for by, files in nodes.items() if name in files and states_model(name)}
        said = {by: _settings(files, name, _ANY_KEY) for by, files in having.items()}
        for key in sorted({*chain.from_iterable(said.values())}):
            for by, settings in said.items():
                told = settings.get(key, "nothing")
                yield Statement(Fact.NODE_FILE, told, by, f"{name}, {key}:")
        for by, files in having.items() if not any(said.values()) else ():
            content = content_of(files, name) or b""
            told = f"{len(content)} bytes ({zlib.crc32(content):08x})"
            yield Statement(Fact.NODE_FILE, told, by, f"{name}:")


def _of_above(sidecars: Sidecars) -> Iterator[Statement]:
    """What the export has of the folder above the checkpoint, where nothing shows a run there."""
    taken, folder = sidecars.files_above, sidecars.above
    if folder is None or not taken or ABOVE in sidecars.run_configs:
        return
    names = [path.name for path in children(folder)]
    if not any(_OF_RUN.fullmatch(name) for name in names):
        yield Statement(Fact.RUN_FOLDER, some(taken), "the export")
        yield Statement(Fact.RUN_FOLDER, "nothing of a training", "the folder above")


def repeated_statements(files: Files) -> Iterator[Statement]:
    """The values of keys that one file has twice."""
    for name, path in files.items():
        for key, values in repeated_keys(path).items() if _BY_HAND.fullmatch(name) else ():
            for number, value in enumerate(values, start=1):
                yield Statement(Fact.REPEATED_KEY, _plain(value), f"{name}, {number}.", key)


def _of_code(sidecars: Sidecars) -> Iterator[Statement]:
    """The modules of its own folder that a config or tokenizer names, and what there is of them."""
    stated = {name: table_of(sidecars.copied, name) for name in (TOKENIZER_CONFIG, *PROCESSOR)}
    if sidecars.config is not None:
        stated[CONFIG] = dict(sidecars.config.content)
        for by, content in stated.items():
            for module in sorted(modules_named(content)):
                if f"{module}.py" not in sidecars.copied:
                    yield Statement(Fact.CODE, "code of its own", by, f"{module}.py")
                    yield Statement(Fact.CODE, "no such file", "the export", f"{module}.py")


def _settings(files: Files, name: str, keys: re.Pattern[str]) -> dict[str, object]:
    """What a file says under some keys, in values of one line; what says nothing is left out."""
    plain = {k: _plain(value) for k, value in table_of(files, name).items() if keys.fullmatch(k)}
    return {key: value for key, value in plain.items() if value is not None}


def _plain(value: Json) -> object:
    """A value that fits into a line; of a token that is written as a table, its text."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        value = value["content"]
    if isinstance(value, str):
        value = None if _ANY_CLASS.fullmatch(value) else value.removesuffix("Fast")
    if not isinstance(value, str | list | dict):
        return value
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]}... ({zlib.crc32(text.encode(errors='replace')):08x})"
