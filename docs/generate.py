"""Write ``docs/cli.md`` from the commands themselves; ``--check`` only says whether it is stale."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from zexport.cli.main import cli

PAGE = Path(__file__).with_name("cli.md")
_HEAD = """\
# Commands

Made from the commands by `python docs/generate.py`; do not edit.
"""


def reference() -> str:
    """The whole page: each command with its help, as the terminal shows it 100 columns wide."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    root = click.Context(cli, info_name="zexport", terminal_width=100, max_content_width=100)
    yield _section("zexport", cli.get_help(root))
    for name in cli.list_commands(root):
        command = cli.commands[name]
        context = click.Context(command, info_name=name, parent=root, terminal_width=100)
        yield _section(f"zexport {name}", command.get_help(context))


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}\n```\n"


def main() -> None:
    """Write the page, or fail if it is not what it should be."""
    if "--check" not in sys.argv:
        PAGE.write_text(reference(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != reference():
        sys.exit(f"{PAGE.name} is stale: run python docs/generate.py")


if __name__ == "__main__":
    main()
