"""The chat template: which one an export has, and what other files of the run say it is."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from zexport.errors import ZexportError
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import TOKENIZER_CONFIG
from zexport.model.sidecars import BASE, CHAT_TEMPLATES, MORE_TEMPLATES, Files, Sidecars
from zexport.model.tokenizer import table_of
from zexport.store.contents import read_json_object, read_regular
from zexport.store.json import Json, tables_in

TEMPLATE_FILES = (*CHAT_TEMPLATES, TOKENIZER_CONFIG)
"""Files that hold one, that first which goes before the others.

Source: transformers 5.23, ``tokenization_utils_base.py`` and ``processing_utils.py``.
"""

_NBYTES_MAX = 4 << 20
_MARK = re.compile(r"<\|[\w-]{1,64}\|>|<(?:start|end)_of_\w{1,64}>|<\uff5c[^\uff5c<>]{1,64}\uff5c>")
"""What looks like a special token: as most have it, as Gemma's, and as DeepSeek's."""

_MARKS_MAX = 64

_ASIDE = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}", re.DOTALL
)
"""What is no template within one."""

_TAG = re.compile(r"\{%[-+]?\s*((?:end)?(?:if|for|macro))\b")
_TAGS = ("if", "for", "macro")


def template_statements(sidecars: Sidecars) -> Iterator[Statement]:
    """The template of what is copied, and those of all folders that were looked at.

    A training may give a model a template of its own, so that the base's is another; where the
    export has none, the base's is one that it lacks.
    """
    written = dict(_templates(sidecars.copied))
    name, own = next(iter(written.items()), ("", "none"))
    by = f"the export's {name}" if name else "the export"
    for fact in (Fact.CHAT_TEMPLATE, Fact.BASE_TEMPLATE):
        yield Statement(fact, own, by)
    yield from _whole(sidecars.copied)
    for folder, files in sidecars.folders.items():
        fact = Fact.BASE_TEMPLATE if folder == BASE and written else Fact.CHAT_TEMPLATE
        for name, template in _templates(files):
            yield Statement(fact, template, f"{folder}'s {name}")
    more = _more(sidecars.copied)
    for name, own in more.items():
        for fact in (Fact.CHAT_TEMPLATE, Fact.BASE_TEMPLATE):
            yield Statement(fact, _in_brief(own), "the export's", f"the template {name!r}:")
    for folder, files in sidecars.folders.items():
        fact = Fact.BASE_TEMPLATE if folder == BASE else Fact.CHAT_TEMPLATE
        for name, text in _more(files).items() if more else ():
            if name in more:
                yield Statement(fact, _in_brief(text), f"{folder}'s", f"the template {name!r}:")


def _more(files: Files) -> dict[str, str]:
    """The templates that have names, for tools or documents, say; files go before a table."""
    named = {
        str(one.get("name")): str(one.get("template")).strip()
        for one in tables_in(table_of(files, TOKENIZER_CONFIG).get("chat_template"))
        if one.get("name") != "default"
    }
    paths = {Path(name).stem: path for name, path in files.items() if fnmatch(name, MORE_TEMPLATES)}
    return named | {name: _read(path).strip() for name, path in paths.items()}


def marks(files: Files) -> tuple[str, list[str]]:
    """The file of the template that counts, and what in it looks like special tokens."""
    name, text = _that_counts(files)
    return name, sorted({*_MARK.findall(text)})[:_MARKS_MAX]


def _that_counts(files: Files) -> tuple[str, str]:
    """The file of the template that goes before others, and its text."""
    texts = ((name, _read(files[name])) for name in TEMPLATE_FILES if name in files)
    return next(((name, text) for name, text in texts if text.strip()), ("", ""))


def _whole(files: Files) -> Iterator[Statement]:
    """How often the template that counts begins something, and ends it; and of what it tells.

    Source: jinja 3.1, ``parser.py``; transformers 5.23, ``utils/chat_template_utils.py``.
    """
    name, text = _that_counts(files)
    if not name:
        return
    tags = Counter(_TAG.findall(_ASIDE.sub("", text)))
    for tag in _TAGS:
        yield Statement(Fact.TEMPLATE_WHOLE, tags[tag], "what begins", f"{name}, {tag}:")
        yield Statement(Fact.TEMPLATE_WHOLE, tags[f"end{tag}"], "what ends", f"{name}, {tag}:")
    if "messages" not in text:
        yield Statement(Fact.TEMPLATE_WHOLE, "no messages", name)
        yield Statement(Fact.TEMPLATE_WHOLE, "messages", "what it is given")


def _templates(files: Files) -> Iterator[tuple[str, str]]:
    """Each file that holds a template, with the template in a few words."""
    for name in TEMPLATE_FILES:
        text = _read(files[name]).strip() if name in files else ""
        if text or (name in files and name.endswith(".jinja")):  # which is taken, if empty
            yield name, _in_brief(text)


def _in_brief(text: str) -> str:
    return f"{len(text):,} characters ({zlib.crc32(text.encode(errors='replace')):08x})"


def _read(path: Path) -> str:
    """The template in a file; empty where there is none, or none that can be read."""
    try:
        if path.suffix == ".jinja":
            return (read_regular(path, _NBYTES_MAX) or b"").decode(errors="replace")
        found = read_json_object(path).get("chat_template")
    except (OSError, ZexportError):
        return ""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in tables_in(found)}
        found = named.get("default", _text(found))
    return found if isinstance(found, str) else _text(found)


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True) if value else ""
