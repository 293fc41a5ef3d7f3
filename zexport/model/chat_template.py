"""The chat templates of a model folder, compared with those of other folders."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from zexport.errors import ZexportError
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import TOKENIZER_CONFIG
from zexport.model.sidecars import CHAT_TEMPLATES, MORE_TEMPLATES, Files, Sidecars
from zexport.model.tokenizer import table_of
from zexport.store.contents import read_json_object, read_regular
from zexport.store.json import Json, tables_in

TEMPLATE_FILES = (*CHAT_TEMPLATES, TOKENIZER_CONFIG)
"""Files that hold one, that first which goes before the others.

Source: transformers 5.23, ``tokenization_utils_base.py`` and ``processing_utils.py``.
"""

_NBYTES_MAX = 4 << 20


def template_statements(sidecars: Sidecars) -> Iterator[Statement]:
    """The chat template of what is copied, and those of the other folders; the named ones too."""
    written = dict(_templates(sidecars.copied))
    name, own = next(iter(written.items()), ("", "none"))
    yield Statement(Fact.TEMPLATE, own, f"the export's {name}" if name else "the export")
    for folder, files in sidecars.folders.items():
        for name, template in _templates(files):
            yield Statement(Fact.TEMPLATE, template, f"{folder}'s {name}")
    for by, files in {"the export": sidecars.copied, **sidecars.folders}.items():
        for name, text in _more(files).items():
            yield Statement(Fact.TEMPLATE, _in_brief(text), f"{by}'s", f"the template {name!r}:")


def _more(files: Files) -> dict[str, str]:
    """The templates that have names, for tools or documents, say; files go before a table."""
    named = {
        str(one.get("name")): str(one.get("template")).strip()
        for one in tables_in(table_of(files, TOKENIZER_CONFIG).get("chat_template"))
        if one.get("name") != "default"
    }
    paths = {Path(name).stem: path for name, path in files.items() if fnmatch(name, MORE_TEMPLATES)}
    return named | {name: _read(path).strip() for name, path in paths.items()}


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
