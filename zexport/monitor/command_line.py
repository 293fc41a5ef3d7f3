"""The words of ``zexport consolidate`` and ``zexport watch`` that mean given options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import Enum

from zexport.errors import UsageError
from zexport.monitor.choices import WatchOptions
from zexport.options import ExportOptions
from zexport.text import shell_word

_OPTIONS = {
    "max_shard_nbytes": "--max-shard-size",
    "max_memory_nbytes": "--max-memory",
    "renames": "--rename",
    "interval_s": "--interval",
}


def words_of(options: ExportOptions | WatchOptions) -> tuple[str, ...]:
    """The words by which a command has these options; defaults are left out.

    Raises:
        UsageError: an option that no word means.
    """
    return tuple(_words(options))


def made_with(options: ExportOptions) -> str:
    """The words for what changes an export's content, as one types them."""
    usual = ExportOptions()
    content = replace(options, jobs=usual.jobs, max_memory_nbytes=None, check=usual.check)
    return " ".join(map(shell_word, words_of(content)))


def option_of(field: str) -> str:
    """The option of the command line that means a field of the options."""
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}")


def _words(options: ExportOptions | WatchOptions) -> Iterator[str]:
    usual = type(options)()
    renames = getattr(options, "renames", ())
    for one in fields(options):
        value = getattr(options, one.name)
        if value == getattr(usual, one.name):
            continue
        if one.name == "hub_layout" or any("=" in old for old, _ in renames):
            raise UsageError(f"no word of the command line means {one.name}", found=value)
        option = option_of(one.name)
        for item in sorted(value, key=str) if isinstance(value, frozenset) else _items(value):
            yield option
            if item is not True:
                yield _text(item)


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "=".join(value)
    return str(value.value if isinstance(value, Enum) else value)
