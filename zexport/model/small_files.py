"""Small files beside the weights, held against the model and their like in other folders."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain

from zexport.errors import ZexportError
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import (
    CONFIG,
    GENERATION_CONFIG,
    PROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from zexport.model.config import settings_of
from zexport.model.custom_code import modules_named
from zexport.model.sidecars import (
    ABOVE,
    BASE,
    MODULES,
    PROCESSOR,
    SENTENCE_CONFIGS,
    THE_CHECKPOINT,
    Files,
    Sidecars,
    states_model,
)
from zexport.model.tokenizer import content_of, read_tokenizer, table_of
from zexport.printable import some
from zexport.store.contents import read_json_list, repeated_keys
from zexport.store.folders import children
from zexport.store.json import Json, as_table, tables_in

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

_VISION = ("vision_config", "vision_tower_config", "vision_encoder")
_PATCHES = {
    "patch_size": ("patch_size",),
    "merge_size": ("spatial_merge_size",),
    "temporal_patch_size": ("temporal_patch_size",),
    "feature_size": ("num_mel_bins",),
    "image_seq_length": ("image_seq_length", "mm_tokens_per_image"),
}
"""How a processor calls what the model's config calls otherwise."""

_FAMILY = re.compile("(clip|siglip)(?!seg)", re.IGNORECASE)
"""Parts that see whose processors are mostly their own; those of others serve several."""

_CHOICES = ("vision_feature_select_strategy",)
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_DIMENSIONS = ("embedding_dimension", "word_embedding_dimension")
_ANY_CLASS = re.compile(r"(PreTrainedTokenizer|TokenizersBackend|PythonBackend)(Fast)?")
"""Classes of tokenizers that say nothing of which one it is."""

_NORMALIZING = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_BY_HAND = re.compile(r"(?:.*/)?[\w-]*config\w*\.json|special_tokens_map\.json")
_OF_RUN = re.compile(r"trainer_state\.json|training_args\.bin|(?:checkpoint|step|epoch)[-_]?\d+")
_LONG, _NO_LENGTH = 60, 10**9


def beside_statements(sidecars: Sidecars) -> Iterator[Statement]:
    """What small files say of the model, of each other, and as their like in other folders do."""
    yield from file_statements(sidecars)
    for told in (_of_nodes, _of_above, _of_lengths, _of_rules):
        yield from told(sidecars)
    yield from repeated_statements(sidecars.files)
    for told in (_of_code, _of_processor, _of_sentences):
        yield from told(sidecars)


def file_statements(sidecars: Sidecars) -> Iterator[Statement]:
    """What files say that are copied, and those of the same names in other folders."""
    for name, keys in _COMPARED.items():
        if (path := sidecars.copied.get(name)) is None:
            continue
        own = _settings(sidecars.copied, name, keys)
        for where, files in sidecars.folders.items():
            other = _settings(files, name, keys) if files.get(name, path) != path else {}
            fact = Fact.BASE_FILE if where == BASE else Fact.RUN_FILE
            for key in sorted(own.keys() & other.keys()):
                yield Statement(fact, own[key], "the export's", f"{name}, {key}:")
                yield Statement(fact, other[key], f"{where}'s", f"{name}, {key}:")
    for name in sidecars.copied if sidecars.config is not None else ():
        yield from _code_of_all(sidecars, name) if name.endswith(".py") else ()


def _code_of_all(sidecars: Sidecars, name: str) -> Iterator[Statement]:
    """What a module holds that is copied, and those of its name in other folders."""
    for where, files in {"": sidecars.copied, **sidecars.folders}.items():
        content = content_of(files, name)
        told = None if content is None else f"code ({zlib.crc32(content):08x})"
        facts = (Fact.BASE_FILE,) if where == BASE else (Fact.RUN_FILE,)
        for fact in facts if where else (Fact.RUN_FILE, Fact.BASE_FILE):
            yield Statement(fact, told, f"{where}'s" if where else "the export's", f"{name}:")


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


def _of_processor(sidecars: Sidecars) -> Iterator[Statement]:
    """The processor that files name, and the sizes that it and the model's config give images."""
    config = settings_of(sidecars.config)
    inner = (config.get(key) for key in _VISION)
    vision = next((table for table in inner if isinstance(table, dict)), config)
    yield from _image_processors(sidecars)
    yield from _image_families(sidecars, vision)
    for name in (*PROCESSOR, TOKENIZER_CONFIG):
        content = table_of(sidecars.copied, name)
        yield Statement(Fact.PROCESSOR, content.get("processor_class"), name)
        for key, keys in _PATCHES.items() if name != TOKENIZER_CONFIG else ():
            for other in keys:
                due = vision.get(other, config.get(other))
                if content.get(key) is not None and due is not None:
                    yield Statement(Fact.PATCHES, _side(due), CONFIG, key)
                    yield Statement(Fact.PATCHES, _side(content[key]), name, key)
        for key in _CHOICES:
            yield Statement(Fact.PATCHES, config.get(key), CONFIG, key)
            yield Statement(Fact.PATCHES, content.get(key), name, key)
        brought_to = content.get("crop_size" if content.get("do_center_crop") else "size")
        made, due = _side(brought_to), _side(vision.get("image_size"))
        if made is not None and due is not None:
            yield Statement(Fact.IMAGE_SIZE, due, CONFIG)
            yield Statement(Fact.IMAGE_SIZE, made, name)


def _image_families(sidecars: Sidecars, vision: Mapping[str, Json]) -> Iterator[Statement]:
    """The models that an image processor and the part that sees are of, where both are known."""
    sees = _FAMILY.match(str(vision.get("model_type")))
    for name in PROCESSOR[:2]:
        made = _FAMILY.match(str(table_of(sidecars.copied, name).get("image_processor_type")))
        if sees and made:
            yield Statement(Fact.IMAGE_FAMILY, sees[0].lower(), CONFIG)
            yield Statement(Fact.IMAGE_FAMILY, made[0].lower(), name)


def _image_processors(sidecars: Sidecars) -> Iterator[Statement]:
    """What the two files say that a processor for images may have its settings in."""
    processor, alone = (table_of(sidecars.copied, name) for name in PROCESSOR[:2])
    inner = processor.get("image_processor")
    for by, table in ((PROCESSOR_CONFIG, inner), ("preprocessor_config.json", alone)):
        for key, value in as_table(table).items() if inner else ():
            if _ANY_KEY.fullmatch(key):
                yield Statement(Fact.PROCESSOR, _plain(value), by, key)


def _of_sentences(sidecars: Sidecars) -> Iterator[Statement]:
    """The size of what each step of a sentence-transformers model is given, and what it has."""
    copied = sidecars.copied
    steps = _steps(copied)
    for where, files in sidecars.folders.items() if steps else ():
        fact = Fact.BASE_FILE if where == BASE else Fact.RUN_FILE
        for by, others in (("the export's", steps), (f"{where}'s", _steps(files))):
            kinds = [str(one.get("type")) for one in tables_in(others)]
            yield Statement(fact, ", ".join(kinds) or None, by, "modules.json, type:")
    given, by = _hidden_size(settings_of(sidecars.config)), CONFIG
    for step in steps:
        name = f"{step.get('path')}/config.json" if isinstance(step, dict) else ""
        content = table_of(copied, name)
        takes = next(
            (content[key] for key in (*_DIMENSIONS, "in_features") if key in content), None
        )
        if given is not None and takes is not None:
            yield Statement(Fact.SENTENCE_SIZE, given, by, name)
            yield Statement(Fact.SENTENCE_SIZE, takes, name, name)
        if (gives := content.get("out_features")) is not None:
            given, by = gives, name
        path = as_table(step).get("path")
        if path and name not in copied:
            yield Statement(Fact.SENTENCE_STEP, "a step", "modules.json", str(path))
            yield Statement(Fact.SENTENCE_STEP, "no files", "the export", str(path))
        elif gives is not None:
            yield Statement(Fact.SENTENCE_STEP, "weights of its own", "its config", str(path))
            yield Statement(Fact.SENTENCE_STEP, "none", "the export", str(path))
    yield from _lengths(sidecars)


def _steps(files: Files) -> list[Json]:
    """The steps of a sentence-transformers model."""
    with suppress(ZexportError, OSError):
        return read_json_list(files[MODULES]) if MODULES in files else []
    return []


def _lengths(sidecars: Sidecars) -> Iterator[Statement]:
    """The positions that a model has, and the longest text that a file lets in."""
    positions = _positions(sidecars)
    for name, most in _sentence_lengths(sidecars.copied).items():
        if isinstance(positions, int) and most is not None:
            yield Statement(Fact.SENTENCE_LENGTH, positions + 1, "one more than all positions")
            yield Statement(Fact.SENTENCE_LENGTH, most, name)


def _of_lengths(sidecars: Sidecars) -> Iterator[Statement]:
    """The length that ``tokenizer.json`` cuts texts to, or fills them up to, and what others name.

    Source: transformers 5.23, ``tokenization_utils_base.py``: what names no length has 10**30.
    """
    copied, positions = sidecars.copied, _positions(sidecars)
    longest = {
        TOKENIZER_CONFIG: table_of(copied, TOKENIZER_CONFIG).get("model_max_length"),
        GENERATION_CONFIG: table_of(copied, GENERATION_CONFIG).get("max_length"),
    }
    for by, most in longest.items():
        if isinstance(positions, int) and isinstance(most, int) and most < _NO_LENGTH:
            yield Statement(Fact.TEXT_POSITIONS, positions + 1, "one more than all positions", by)
            yield Statement(Fact.TEXT_POSITIONS, most, by, by)
    cut = longest[TOKENIZER_CONFIG]
    if isinstance(positions, int) and isinstance(cut, int) and 2 * cut <= positions:
        yield Statement(Fact.TEXT_CUT, cut, f"{TOKENIZER_CONFIG}, model_max_length")
        yield Statement(Fact.TEXT_CUT, positions, f"{CONFIG}, max_position_embeddings")
    named = [positions, cut, *_sentence_lengths(copied).values()]
    known = sorted({n for n in named if isinstance(n, int) and n < _NO_LENGTH})
    for done, length in read_tokenizer(copied).lengths.items():
        yield Statement(Fact.TEXT_LENGTH, known or "no length", "the other files", done)
        yield Statement(Fact.TEXT_LENGTH, length, TOKENIZER, done)


def _of_rules(sidecars: Sidecars) -> Iterator[Statement]:
    """What ``tokenizer_config.json`` says of rules that ``tokenizer.json`` has as well.

    Source: transformers 5.23, ``models/bert/tokenization_bert.py``, which makes them anew of the
    former, and ``tokenization_utils_tokenizers.py``.
    """
    files = sidecars.copied
    settings, tokenizer = table_of(files, TOKENIZER_CONFIG), read_tokenizer(files)
    rules = tokenizer.normalizing
    left = {
        f"split_special_tokens in {TOKENIZER_CONFIG}": settings.get("split_special_tokens") is True,
        f"dropout in {TOKENIZER}": bool(tokenizer.model.dropout),
    }
    for by, is_left in left.items():
        yield Statement(Fact.TOKENIZER_LEFT, "set" if is_left else None, by)
        yield Statement(Fact.TOKENIZER_LEFT, "unset" if is_left else None, "what was trained with")
    for key, rule in _NORMALIZING.items() if rules.get("type") == "BertNormalizer" else ():
        yield Statement(Fact.TOKENIZER_RULE, rules.get(rule), TOKENIZER, key)
        yield Statement(Fact.TOKENIZER_RULE, settings.get(key), TOKENIZER_CONFIG, key)


def _positions(sidecars: Sidecars) -> Json:
    return settings_of(sidecars.config).get("max_position_embeddings")


def _sentence_lengths(files: Files) -> dict[str, Json]:
    names = [name for name in files if name.startswith("sentence_")]
    return {name: table_of(files, name).get("max_seq_length") for name in names}


def _hidden_size(content: Mapping[str, Json]) -> Json:
    tables = (content, as_table(content.get("text_config")))
    return next((table[key] for table in tables for key in _HIDDEN if key in table), None)


def _side(size: Json) -> int | None:
    """The length of a square's side, however it is written; none for what is no square."""
    sides = {size} if isinstance(size, int) else set[Json]()
    if isinstance(size, dict):
        sides = {size.get("height"), size.get("width")}
    if isinstance(size, list):
        sides = {side for side in size if isinstance(side, int)}
    side = sides.pop() if len(sides) == 1 else None
    return side if isinstance(side, int) else None


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
