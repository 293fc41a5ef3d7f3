"""Write the generated parts of the docs: schemas, tables, commands and the README's picture.

``--check`` lists stale files and exits with 1. ``--demo`` also runs ``examples/demo.sh`` (a minute)
and puts its output into ``docs/index.md``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import zexport
from docs.forms import FORMS, descriptions, schemas
from docs.picture import PICTURE, picture, words
from docs.support import SUPPORT
from zexport.cli.main import cli

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FAMILIES = ROOT / "benchmarks" / "families.json"
_KEY_TABLES = (*list(FORMS)[:6], "inspect", *list(FORMS)[6:])
_KEYS_MAX = 14
_VALUES_MAX = 11
"""Enumerations with more values, such as the kinds of findings, are listed elsewhere."""


def generated() -> dict[Path, str]:
    """Return every file with generated content, as it should be."""
    made = schemas()
    inspect_schema = DOCS / "schemas" / "inspect.json"
    known = made | {"inspect": json.loads(inspect_schema.read_text(encoding="utf-8"))}
    parts = {
        "architecture.md": {"packages": packages()},
        "cli.md": {"commands": commands()},
        "families.md": {"families": families()},
        "interfaces.md": key_tables({name: known[name] for name in _KEY_TABLES}),
        "python.md": {"functions": functions(), "types": types(), "errors": errors()},
        "support.md": {"support": support()},
    }
    pages = {DOCS / name: _with_parts(DOCS / name, texts) for name, texts in parts.items()}
    files = {
        DOCS / "schemas" / f"{name}.json": json.dumps(schema, indent=2) + "\n"
        for name, schema in made.items()
    }
    if find_spec("transformers"):  # without it, inspect prints how to install it
        files[PICTURE] = picture()
    return pages | files


def _with_parts(page: Path, parts: dict[str, str]) -> str:
    """Return a page with the text between ``<!-- name -->`` and ``<!-- /name -->`` replaced."""
    text = page.read_text(encoding="utf-8")
    for name, content in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            sys.exit(f"{page.name}: no part <!-- {name} -->")
        text = f"{before}{begin}{content}{end}{after}"
    return text


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _first(value: Any) -> str:
    """Return the first paragraph of a docstring on one line, as Markdown."""
    text = inspect.getdoc(value) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


# --- tables of pages about the project ---


def support() -> str:
    """Return the table of supported and refused layouts."""
    rows = [
        (row.layout, row.stages, f"refused: {row.refused}" if row.refused else row.note or "yes")
        for row in SUPPORT
    ]
    return _table(("layout", "ZeRO stage", "exported"), rows)


def packages() -> str:
    """Return a line for each package, importers first, from its docstring."""
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8")
    order = re.findall(r"\b(\w+)\b", contract.partition("layers")[2])
    names = [path.parent.name for path in ROOT.glob("zexport/*/__init__.py")]
    rows = []
    for name in sorted(names, key=lambda name: (name not in order, (*order, name).index(name))):
        code = (ROOT / "zexport" / name / "__init__.py").read_text(encoding="utf-8")
        text = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")[0]
        rows.append((f"`{name}`", " ".join(text.split())))
    return _table(("package", "contents"), rows)


def families() -> str:
    """Return the model families, grouped by how their files differ from memory."""
    data = json.loads(FAMILIES.read_text(encoding="utf-8"))
    groups = defaultdict[str, list[str]](list)
    for name, outcome in data["changed"].items():
        kinds = re.findall(r"[a-z]+", outcome["kind"])
        group = "several layouts" if kinds == ["same"] else ", ".join(kinds)
        groups[group].append(name)
    verdicts = Counter(outcome["verdict"] for outcome in data["changed"].values())
    verdicts["equal"] += len(data["same"])
    others = ", ".join(f"{n} are {what}" for what, n in sorted(verdicts.items()) if what != "equal")
    head = (
        f"transformers {data['transformers']}: {data['model_types']} model types, of which "
        f"{sum(verdicts.values())} can be built from their default config. {verdicts['equal']} are "
        f"equal to transformers' own conversion{f'; {others}' if others else ''}. "
        f"{len(data['same'])} are stored as they are in memory. The others:\n\n"
    )
    rows = [(group, _code(names)) for group, names in sorted(groups.items())]
    return head + _table(("tensors", "model types"), rows)


# --- commands ---


def commands() -> str:
    """Return every command with its options; options of several commands once, at the end."""
    root = cli.make_context("zexport", [], resilient_parsing=True)
    found = {name: cli.get_command(root, name) for name in cli.list_commands(root)}
    contexts = {
        name: command.make_context(name, [], parent=root, resilient_parsing=True)
        for name, command in found.items()
        if command
    }
    options = {name: _options(context) for name, context in contexts.items()}
    users = Counter((name, record) for one in options.values() for name, record in one.items())
    shared = dict[str, tuple[str, str]]()
    for (name, record), count in users.most_common():
        if count > 1:
            shared.setdefault(name, record)
    parts = []
    for command_name, context in contexts.items():
        own = {n: record for n, record in options[command_name].items() if shared.get(n) != record}
        also = [name for name in options[command_name] if name not in own]
        pieces = " ".join(context.command.collect_usage_pieces(context))
        parts.append(
            f"## zexport {command_name}\n\n```text\nzexport {command_name} {pieces}\n```\n"
        )
        parts.append(_help(context.command))
        if own:
            parts.append(_table(("option", "meaning"), own.values()))
        parts.append(f"[Also](#options-of-several-commands): {_code(also)}.\n")
    parts.append("## Options of several commands\n")
    parts.append(_table(("option", "meaning"), [shared[name] for name in sorted(shared)]))
    return "\n".join(parts)


def _options(context: click.Context) -> dict[str, tuple[str, str]]:
    """Return names to the cells of a table; hidden options and ``--help`` are left out."""
    options = [one for one in context.command.get_params(context) if isinstance(one, click.Option)]
    records = [one.get_help_record(context) for one in options]
    cells = [(f"`{one[0]}`", " ".join(one[1].split())) for one in records if one]
    named = {re.findall(r"--[\w-]+", option)[0]: (option, text) for option, text in cells}
    return {name: cell for name, cell in named.items() if name != "--help"}


def _help(command: click.Command) -> str:
    paragraphs = inspect.cleandoc((command.help or "").replace("\b", "")).split("\n\n")
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return re.sub(r"^Example: (.*)$", r"Example: `\1`", "\n\n".join(lines), flags=re.M) + "\n"


# --- Python ---


def _public() -> dict[str, Any]:
    return {name: getattr(zexport, name) for name in zexport.__all__ if name[0] != "_"}


def functions() -> str:
    """Return the public functions with their signatures."""
    names = dict[Any, str]()
    texts = []
    for name, one in _public().items():
        if inspect.isfunction(one):
            texts.append(f"### {name}\n\n{_function(name, one, names.get(one))}\n\n")
            names.setdefault(one, name)
    return "".join(texts)


def _function(name: str, function: Any, alias_of: str | None) -> str:
    if alias_of:
        return f"The same as `{alias_of}`."
    signature, lines = inspect.signature(function), list[str]()
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        text = f"{'**' if one.kind is one.VAR_KEYWORD else ''}{one.name}: {_plain(one.annotation)}"
        if one.default is not one.empty:
            text += f" = {'...' if callable(one.default) else _value(one.default)}"
        lines.append(text)
    inner = "".join(f"    {line},\n" for line in lines)
    call = f"{name}(\n{inner}) -> {signature.return_annotation}"
    return f"{_first(function)}\n\n```text\n{call}\n```"


def types() -> str:
    """Return the public types: values of enumerations, fields of records."""
    found = [one for one in _public().values() if isinstance(one, type)]
    plain = [one for one in found if not issubclass(one, (Enum, Exception))]
    enums = [one for one in found if issubclass(one, Enum)]
    rows = [(f"`{one.__name__}`", _code(member.value for member in one)) for one in enums]
    return "".join(map(_type, plain)) + "### Enumerations\n\n" + _table(("type", "values"), rows)


def _type(kind: type) -> str:
    fields = _fields(kind)
    head = f"### {kind.__name__}\n\n{_first(kind)}\n\n"
    if kind.__name__.endswith("Options"):
        usual = kind()
        rows = [(f"`{n}`", f"`{t}`", _default(n, getattr(usual, n))) for n, t in fields.items()]
        return head + _table(("field", "type", "default"), rows) + "\n"
    reports = {one for form in FORMS.values() for one in form[2]}
    parts = " ".join(text for one in reports for text in _fields(one).values())
    if kind in reports or re.search(rf"\b{kind.__name__}\b", parts):
        return f"{head}Fields: {_code(f'{n}: {t}' for n, t in fields.items())}.\n\n"
    texts = {n: text for one in kind.__mro__ for n, text in descriptions(one.__doc__ or "")}
    texts = {n: re.sub(r"\bnull\b", "`None`", text) for n, text in texts.items()}
    public = {n: t for n, t in fields.items() if set(re.findall(r"\w+", t)) <= _known_types()}
    rows = [(f"`{n}`", f"`{t}`", texts.get(n, "")) for n, t in public.items()]
    return head + (_table(("field", "type", "meaning"), rows) + "\n" if rows else "")


def _fields(kind: type) -> dict[str, str]:
    """Return the public fields of a class and its bases, with their types."""
    bases = [one for one in reversed(kind.__mro__) if one.__module__.startswith("zexport.")]
    found = {n: _plain(t) for one in bases for n, t in inspect.get_annotations(one).items()}
    return {n: t for n, t in found.items() if n[0] != "_" and not t.startswith("ClassVar")}


def _known_types() -> set[str]:
    """Return the words in types that a caller can use; fields of other types are internal."""
    plain = {
        "None",
        "bool",
        "float",
        "int",
        "str",
        "Path",
        "frozenset",
        "tuple",
        "Mapping",
        "Sequence",
    }
    return {*plain, "DType", "Shape", *zexport.__all__}


def _plain(annotation: object) -> str:
    return str(annotation).replace("Natural", "int")


def _value(value: object) -> str:
    return repr(value.value if isinstance(value, Enum) else value)


def _default(name: str, value: object) -> str:
    return "one per core, at most 4" if name == "jobs" else f"`{_value(value)}`"


def errors() -> str:
    """Return the public exceptions with kind and exit code."""
    found = [one for one in _public().values() if isinstance(one, type)]
    kinds = [one for one in found if issubclass(one, zexport.ZexportError)]
    kinds.sort(key=lambda one: (one.exit_code, one.__name__))
    rows = [
        (f"`{one.__name__}`", f"`{one.__base__.__name__}`", f"`{one.kind}`", str(one.exit_code))
        for one in kinds
        if one.__base__
    ]
    return _table(("error", "base", "kind", "exit code"), rows)


# --- JSON ---


def key_tables(found: dict[str, Any]) -> dict[str, str]:
    """Return a table of keys for each schema; rows of earlier tables are only named."""
    above: set[tuple[str, ...]] = set()
    tables = {}
    for name, schema in found.items():
        properties = _inlined(schema["properties"], schema.get("$defs", {}))
        nodes = {key: node for key, node in properties.items() if key != "schema"}
        rows = [row for key, node in nodes.items() for row in _rows(key, node)]
        new = [row for row in rows if row not in above]
        text = _table(("key", "type", "meaning"), new) + "\n" if new else ""
        if old := [row[0] for row in rows if row in above]:
            text += f"As above: {', '.join(old)}.\n\n"
        tables[name] = text + f"[Schema](schemas/{name}.json)\n"
        above.update(rows)
    return tables


def _rows(key: str, node: Any) -> list[tuple[str, str, str]]:
    """Return the row of a key, or of each key in an object with many."""
    inner = node.get("properties", {})
    if len(inner) <= _KEYS_MAX:
        return [(f"`{key}`", _kind(node), _meaning(node))]
    rows = [(f"`{key}`", _kind(node), node["description"])]
    return rows + [row for name in inner for row in _rows(f"{key}.{name}", inner[name])]


def _inlined(node: Any, definitions: Any) -> Any:
    """Return a node with its references replaced by what they refer to."""
    if isinstance(node, dict) and "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    if isinstance(node, dict):
        return {key: _inlined(value, definitions) for key, value in node.items()}
    return node


def _kind(node: Any) -> str:
    if "const" in node:
        return json.dumps(node["const"])
    kind = node["type"]
    return kind if isinstance(kind, str) else " or ".join(kind)


def _meaning(node: Any) -> str:
    text = node["description"]
    if values := _values(node):
        text += f" One of {values}."
    if keys := _keys(node):
        text += f" {keys}"
    return text


def _values(node: Any) -> str:
    values = [value for value in node.get("enum", ()) if value is not None]
    return _code(values) if 0 < len(values) <= _VALUES_MAX else ""


def _keys(node: Any) -> str:
    """Return the keys of an object, or of the objects in an array, on one line."""
    inner = next((node[key] for key in ("items", "additionalProperties") if node.get(key)), node)
    inner = inner if isinstance(inner, dict) else node
    texts = []
    for key, value in inner.get("properties", {}).items():
        more = _values(value) or _keys(value)
        texts.append(f"`{key}`" + (f" ({more})" if more else ""))
    return ", ".join(texts)


# --- demo ---


def demo() -> str:
    """Run ``examples/demo.sh`` and return its output, shortened to what any machine prints."""
    script = ["bash", str(ROOT / "examples" / "demo.sh")]
    done = subprocess.run(
        script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout)
    lines = list[str]()
    for line in done.stdout.replace(str(ROOT), "/data").strip().splitlines():
        if not line and lines[-1].startswith("$"):
            continue
        if not re.match(r"step \d|\s*Time |Loading weights", line):
            lines.append(line)
        elif line.startswith("step") and not lines[-1].startswith("..."):
            lines += [line, "..."] if lines[-1].startswith("$") else []
    return "```console\n" + "\n".join(lines) + "\n```\n"


def is_stale(path: Path, text: str) -> bool:
    """Return whether a file differs from ``text``; for the picture, only words count."""
    if not path.exists():
        return True
    current = path.read_text(encoding="utf-8")
    return words(current) != words(text) if path == PICTURE else current != text


def main() -> None:
    """Write what is stale, or list it."""
    stale = {path: text for path, text in generated().items() if is_stale(path, text)}
    if "--check" in sys.argv:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"stale: {names}. Run python -m docs.generate." if stale else 0)
    if "--demo" in sys.argv:
        stale[DOCS / "index.md"] = _with_parts(DOCS / "index.md", {"demo": demo()})
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
