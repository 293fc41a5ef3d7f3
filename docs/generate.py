"""Write what is made from the code: schemas, commands, tables, the README's picture.

``--check`` only says what is stale.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import zexport
from docs.forms import descriptions, schemas
from docs.picture import PICTURE, picture, words
from docs.support import SUPPORT
from zexport import compat
from zexport.cli.main import cli
from zexport.findings import FindingKind
from zexport.monitor.command_line import option_of

DOCS = Path(__file__).parent
SCHEMAS = tuple(sorted((DOCS / "schemas").glob("*.json")))
_CLI_HEAD = """\
# Commands

Made from the commands by `python -m docs.generate`; do not edit.
"""
_MEANING = {
    FindingKind.NAN: "elements are NaN",
    FindingKind.INF: "elements are infinite",
    FindingKind.ALL_ZERO: "every element is zero",
    FindingKind.FP32_OVERFLOW: "finite in the checkpoint, infinite as fp32",
    FindingKind.FP16_OVERFLOW: "finite in the checkpoint, infinite as fp16",
    FindingKind.BF16_OVERFLOW: "finite in the checkpoint, infinite as bf16",
    FindingKind.UPDATE_LOST: "of what an adapter changes, less than one element in twenty differs "
    "from the base once it is rounded to the dtype of the export",
    FindingKind.FP16_UNDERFLOW: "not zero in the checkpoint, zero as fp16: of a tensor, more than "
    "one element in a hundred",
    FindingKind.STEP_MISMATCH: "the optimizer counts other steps than the model files do",
    FindingKind.GATHERED_MISMATCH: "the gathered weights beside the checkpoint are not the "
    "masters, rounded",
    FindingKind.CAST_MISMATCH: "the module's own copy of a weight is not the master, rounded",
    FindingKind.REPLICA_MISMATCH: "ranks that should hold equal copies hold different ones",
    FindingKind.SHAPE_MISMATCH: "a weight has another shape than the config says",
    FindingKind.MIXED_STEPS: "rank files are of different steps",
    FindingKind.MIXED_SETTINGS: "rank files are of runs with different settings",
    FindingKind.MIXED_VERSIONS: "rank files are of different versions of DeepSpeed",
    FindingKind.STRAY_FILES: "there are rank files beyond the world size",
    FindingKind.BASE_MISMATCH: "the base is another model than the one that was trained",
}
_TYPES = {"boolean": "true or false", "array": "list", "object": "table"}


def pages() -> dict[Path, str]:
    """What every page that is made, wholly or in part, should be."""
    interfaces = DOCS / "interfaces.md"
    text = interfaces.read_text(encoding="utf-8")
    made = schemas()
    for path in SCHEMAS:
        schema = made.get(path.stem) or json.loads(path.read_text(encoding="utf-8"))
        text = _replaced(text, path.stem, "\n".join(_table(schema)) + "\n")
    support, errors = DOCS / "support.md", DOCS / "errors.md"
    return {
        **{
            DOCS / "schemas" / f"{name}.json": json.dumps(schema, indent=2) + "\n"
            for name, schema in made.items()
        },
        errors: _replaced(errors.read_text(encoding="utf-8"), "findings", findings_table()),
        DOCS / "cli.md": "\n".join([_CLI_HEAD, *_commands()]),
        interfaces: text,
        DOCS / "python.md": _python_page(),
        support: _replaced(support.read_text(encoding="utf-8"), "support", support_table()),
        PICTURE: picture(),
    }


def _replaced(text: str, mark: str, content: str) -> str:
    """``text`` with what stands between two comments of this name replaced."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    return re.sub(
        re.escape(begin) + ".*?" + re.escape(end), lambda _: begin + content + end, text, flags=re.S
    )


# --- python ---


def _python_page() -> str:
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    text = _replaced(text, "python", _public(zexport, zexport.__all__))
    return _replaced(text, "compat", _public(compat, compat.__all__))


def _public(module: ModuleType, names: list[str]) -> str:
    """The functions of a module with what they take, and its types with what they hold."""
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    functions = [one for one in found.values() if inspect.isfunction(one)]
    calls = "".join(_call(one) for one in functions)
    kinds = [one for one in found.values() if not inspect.isfunction(one)]
    return calls + "".join(_type_section(one) for one in sorted(kinds, key=_is_enumeration))


def _call(function: Any) -> str:
    """A function as it is called, each argument with its type and default, and what it gives."""
    signature = inspect.signature(function)
    marked, lines = False, list[str]()
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not marked:
            marked = True
            lines.append("*")
        lines.append(_argument(one))
    inner = "".join(f"    {line},\n" for line in lines)
    gives = f" -> {signature.return_annotation}"
    return (
        f"### `{function.__name__}`\n\n{_first(function)}\n\n"
        f"```text\n{function.__name__}(\n{inner}){gives}\n```\n\n"
    )


def _argument(one: inspect.Parameter) -> str:
    named = f"{'**' if one.kind is one.VAR_KEYWORD else ''}{one.name}: {_plain(one.annotation)}"
    if one.default is one.empty:
        return named
    return f"{named} = {'...' if callable(one.default) else _written(one.default)}"


def _plain(annotation: object) -> str:
    """A type as a caller has it."""
    return str(annotation).replace("Natural", "int")


def _written(value: object) -> str:
    return repr(value.value if isinstance(value, Enum) else value)


def _is_enumeration(kind: type) -> bool:
    return issubclass(kind, Enum)


def _type_section(kind: type) -> str:
    """What a type is, and its values or fields; those of options with default and option."""
    head = f"### `{kind.__name__}`\n\n{_first(kind)}\n\n"
    if issubclass(kind, Enum):
        return head + ", ".join(f'`"{one.value}"`' for one in kind) + "\n\n"
    above = [one for one in reversed(kind.__mro__) if one.__module__.startswith("zexport.")]
    types = {name: text for one in above for name, text in one.__annotations__.items()}
    known = {name: text for one in above for name, text in descriptions(one.__doc__ or "")}
    fields = [n for n, text in types.items() if n[0] != "_" and not text.startswith("ClassVar")]
    is_whole = not known or known.keys() >= {*fields}
    names = known if is_whole else dict.fromkeys((*fields, *known))
    rows = [(name, _plain(types.get(name, "")), known.get(name, "")) for name in names]
    if kind.__name__.endswith("Options"):
        usual = kind()
        columns = "| field | type | default | option | |\n|---|---|---|---|---|\n"
        cells = [
            (f"`{name}`", f"`{text}`", _default(name, getattr(usual, name)), _option(name), told)
            for name, text, told in rows
        ]
    else:
        columns = "| field | type | |\n|---|---|---|\n"
        cells = [(f"`{name}`", f"`{text}`" if text else "", told) for name, text, told in rows]
    lines = "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in cells)
    return head + (f"{columns}{lines}\n" if rows else "")


def _cell(text: str) -> str:
    """A text in a cell of a table; what is null in JSON is ``None`` here."""
    return re.sub(r"\bnull\b", "`None`", text.replace("|", "\\|"))


def _default(name: str, value: object) -> str:
    """A default as it is written; that of ``jobs`` depends on the machine."""
    if name == "jobs":
        return "one a core, up to 4"
    return f"`{_written(value)}`"


def _option(name: str) -> str:
    return "" if name == "hub_layout" else f"`{option_of(name)}`"


def _first(value: Any) -> str:
    """The first sentence of a docstring, on one line."""
    return _one_line(inspect.getdoc(value) or "")


# --- support ---


def support_table() -> str:
    """What is exported and what is refused."""
    head = "| layout | ZeRO stage | |\n|---|---|---|\n"
    return head + "".join(
        f"| {row.layout} | {row.stages} | "
        + (
            f"refused: {row.refused}"
            if row.refused
            else "; ".join(filter(None, ("exported", row.note)))
        )
        + " |\n"
        for row in SUPPORT
    )


# --- findings ---


def findings_table() -> str:
    """The kinds of findings, and which of them end an export."""
    head = "| kind | what was found | |\n|---|---|---|\n"
    return head + "".join(
        f"| `{kind.value}` | {_MEANING[kind]} | "
        f"{'refused, unless allowed' if kind.is_refused else 'told'} |\n"
        for kind in FindingKind
    )


# --- commands ---


def _commands() -> Iterator[str]:
    root = _context(cli, "zexport", None)
    yield _section("zexport", cli.get_help(root))
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        yield _section(f"zexport {name}", command.get_help(_context(command, name, root)))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    """A context with the command's own settings, as it has on a wide terminal."""
    return command.make_context(
        name, [], parent=parent, resilient_parsing=True, terminal_width=100, max_content_width=100
    )


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}\n```\n"


def _one_line(docstring: str) -> str:
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


# --- schemas ---


def _table(schema: Any) -> Iterator[str]:
    yield "| key | type | meaning |"
    yield "|---|---|---|"
    for key, kind, meaning in keys(schema, schema):
        yield f"| `{key}` | {kind} | {meaning} |"


def keys(schema: Any, node: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, type and meaning of everything below a node of a schema, in its order.

    ``[]`` stands for each item of a list, ``{}`` for each name of a table.
    """
    for name, value in node.get("properties", {}).items():
        entry = _resolved(schema, value)
        yield prefix + name, _type(schema, entry), entry["description"]
        yield from keys(schema, entry, f"{prefix}{name}.")
        for word, mark in (("items", "[]"), ("additionalProperties", "{}")):
            inner = _resolved(schema, entry.get(word, {}))
            yield from keys(schema, inner, f"{prefix}{name}{mark}.")


def _resolved(schema: Any, node: Any) -> Any:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _type(schema: Any, node: Any) -> str:
    if "const" in node:
        return f"`{json.dumps(node['const'])}`"
    if "enum" in node:
        return ", ".join(f"`{word}`" for word in node["enum"])
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    words: list[str] = [_TYPES.get(str(kind), str(kind)) for kind in kinds]
    for word in ("items", "additionalProperties"):
        if word in node:
            noun, _, rest = _type(schema, _resolved(schema, node[word])).partition(" ")
            plural = f"{noun} {rest}" if noun.startswith("`") else f"{noun}s {rest}"
            words[0] += f" of {plural}".rstrip()
    return " or ".join(words)


def is_stale(path: Path, text: str) -> bool:
    """Whether a page is other than it should be; of a picture, what is to be read in it."""
    there = path.read_text(encoding="utf-8")
    return words(there) != words(text) if path == PICTURE else there != text


def main() -> None:
    """Write the pages, or fail if one is not what it should be."""
    stale = {path: text for path, text in pages().items() if is_stale(path, text)}
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(p.name for p in stale)}; run {sys.argv[0]}" if stale else 0)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
