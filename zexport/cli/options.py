"""Option types, and options shared by several commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click

from zexport.errors import MissingExtraError, UsageError
from zexport.findings import FindingKind
from zexport.options import (
    SHARD_NBYTES_MIN,
    ExportDType,
    ExportOptions,
)
from zexport.report.text import size
from zexport.storage.client import use_storage_options
from zexport.storage.files import is_local
from zexport.storage.location import place

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = ExportOptions()
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class GivenPath(click.Path):
    """A local path, or an address of object storage."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        try:
            path = place(value)
            return super().convert(path, param, ctx) if is_local(path) else path
        except MissingExtraError:
            raise
        except UsageError as error:
            self.fail(error.statement(), param, ctx)
        except OSError as error:
            self.fail(f"{value!r}: {error.strerror}", param, ctx)


# The library reports missing and unreadable paths, with the exit codes of its errors.
PATH = GivenPath(path_type=Path, readable=False)


class ByteSize(click.ParamType[int]):
    """A number of bytes such as ``5GB`` (decimal, as on the Hub), ``512MiB`` or ``1000000``."""

    name = "size"

    def __init__(self, min_nbytes: int = 1) -> None:
        self._min_nbytes = min_nbytes

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
        nbytes = int(Decimal(match[1]) * _UNITS[match[2] or ""]) if match else 0
        if nbytes < self._min_nbytes:
            found = f"{value!r} is {size(nbytes)}" if nbytes else f"{value!r} is not a size"
            least = size(self._min_nbytes)
            self.fail(f"{found}; write {least} or more, such as 5GB or 512MiB", param, ctx)
        return nbytes


class KeyValue(click.ParamType[tuple[str, str]]):
    """A pair such as ``key=value``."""

    def __init__(self, form: str) -> None:
        self.name = form

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        key, equals, rest = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not {self.name.upper()}", param, ctx)
        return key, rest

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Return the pairs of a variable: one per line, or separated by blanks."""
        return rv.splitlines() if "\n" in rv else rv.split()


class Named(click.Choice[str]):
    """A member of an enumeration, by its value in any case; a dtype also by torch's name.

    Only the ``listed`` ones are in the help.
    """

    def __init__(self, members: type[Enum], listed: Iterable[Enum] = ()) -> None:
        self._members = members
        super().__init__([member.value for member in listed or members], case_sensitive=False)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            return self._members(str(value).lower())
        except ValueError:
            return super().convert(value, param, ctx)  # its error lists the values


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return several options as one decorator; the help lists them in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def number_option(
    option: str, default: int | None, text: str, *, least: int = 1
) -> Callable[[F], F]:
    """Return an option for an integer that is at least ``least``."""
    return click.option(
        option,
        type=click.IntRange(least),
        metavar="N",
        default=default,
        show_default=True,
        help=text,
    )


def choice_option(option: str, values: Enum | Sequence[str], text: str) -> Callable[[F], F]:
    """Return an option for one of several values: the first, or this member, is the default."""
    kind: click.Choice[str]
    if isinstance(values, Enum):
        kind, default = Named(type(values)), values.value
    else:
        kind, default = click.Choice(values, case_sensitive=False), values[0]
    return click.option(option, type=kind, default=default, show_default=True, help=text)


def _not_empty(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty value, such as of an unset shell variable: it would mean everything."""
    if value == "":
        raise click.BadParameter("it is empty; omit the option to export all")
    return value


def _checked_page(_ctx: click.Context, _param: click.Parameter, page: Path | None) -> Path | None:
    """Refuse a page that cannot be written before anything is read for it."""
    if page is not None:
        from zexport.report.html.page import check_page_path

        check_page_path(page)
    return page


def _use_storage_options(
    _ctx: click.Context, _param: click.Parameter, pairs: tuple[tuple[str, str], ...]
) -> None:
    if pairs:
        use_storage_options(dict(pairs))


storage_option = click.option(
    "--storage-option",
    type=KeyValue("key=value"),
    multiple=True,
    expose_value=False,
    callback=_use_storage_options,
    help="Setting for s3://, gs:// and az:// addresses, such as endpoint=URL. Repeatable.",
)
tag_option = click.option(
    "--tag",
    metavar="TAG",
    help="Checkpoint to use, if there are several: global_step100, or newest.  [default: the one "
    "that `latest` names]",
)
links_option = click.option(
    "--follow-symlinks",
    is_flag=True,
    help="Follow symlinks that point outside the input folders.",
)
html_option = click.option(
    "--html",
    type=PATH,
    metavar="FILE",
    callback=_checked_page,
    help="Also write the result as one HTML file that works offline.",
)
json_option = click.option("--json", is_flag=True, help="Print one JSON object on stdout.")
quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Print no progress, report or notes, only warnings."
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    metavar="N",
    default=_DEFAULTS.jobs,
    help="Worker threads, 1 to 256.  [default: one per core, up to 4]",
)
memory_option = click.option(
    "--max-memory", type=ByteSize(), help="Memory limit, such as 1GB. Exits with 2 if too small."
)
verify_option = choice_option(
    "--verify",
    ["readback", "disk", "none"],
    "Reread and compare the files before publishing: from memory or disk (readback), only "
    "from disk (disk), or not at all (none).",
)
check_option = choice_option(
    "--check",
    _DEFAULTS.check,
    "How much of the fp32 master weights to compare with the 16-bit module weights.",
)
_REFUSED = [kind for kind in FindingKind if kind.is_refused]
allow_option = click.option(
    "--allow",
    type=Named(FindingKind, _REFUSED),
    multiple=True,
    metavar="KIND",
    help="Accept this finding and record it in the manifest. Repeatable. One of "
    f"{', '.join(_REFUSED)}.",
)
progress_option = choice_option(
    "--progress",
    ["auto", "json"],
    "Progress on stderr: a bar or plain lines (auto), or JSON lines (json).",
)
progress_options = together(
    progress_option, click.option("-q", "--quiet", is_flag=True, help="Print no progress.")
)
adapter_config_option = click.option(
    "--adapter-config",
    type=PATH,
    help="adapter_config.json, if it is not next to the checkpoint.",
)
given_options = together(
    click.option("--base", type=PATH, help="Base model.  [default: that of the manifest]"),
    adapter_config_option,
)

export_options = together(
    click.option(
        "--dtype",
        type=Named(ExportDType),
        help="dtype of the exported weights, also by torch's name; auto: that of the module "
        "weights.  [default: fp32; for FSDP, each weight's own]",
    ),
    click.option(
        "--base",
        type=PATH,
        help="Base model (folder or cached Hub name): supplies config, tokenizer and unsaved "
        "frozen weights.",
    ),
    click.option(
        "--only",
        metavar="PREFIX",
        callback=_not_empty,
        help="Export only the tensors below PREFIX, such as ema, and remove it from their names.",
    ),
    click.option(
        "--max-shard-size",
        type=ByteSize(SHARD_NBYTES_MIN),
        default="5GB",
        show_default=True,
        help="Maximum size of a safetensors file.",
    ),
    choice_option(
        "--engine",
        _DEFAULTS.engine,
        "Program that reassembles the weights; deepspeed: its own converter, for comparison.",
    ),
    click.option("--exclude-frozen", is_flag=True, help="Omit frozen weights."),
    click.option(
        "--keep-unloaded",
        is_flag=True,
        help="Also copy tensors of --base that the model class does not load, such as mtp.*.",
    ),
    choice_option(
        "--layout",
        _DEFAULTS.layout,
        "Tensor names: as on the Hub (hub), or as in the checkpoint (memory).",
    ),
    click.option(
        "--rename",
        type=KeyValue("regex=repl"),
        multiple=True,
        help="Rename tensors. Repeatable; applied in order.",
    ),
    choice_option(
        "--adapter",
        _DEFAULTS.adapter,
        "Keep a PEFT adapter, or merge it into the base model; auto: merge if --base is given.",
    ),
    click.option("--adapter-name", metavar="NAME", help="Adapter to export, if there are several."),
    adapter_config_option,
    choice_option(
        "--base-dtype",
        _DEFAULTS.base_dtype,
        "dtype of the base model during training of the adapter; auto: from the DeepSpeed config.",
    ),
    jobs_option,
    memory_option,
    check_option,
    allow_option,
)


def options_of(
    *,
    max_shard_size: int,
    max_memory: int | None,
    rename: tuple[tuple[str, str], ...],
    only: str | None,
    **others: Any,
) -> ExportOptions:
    """Return the values of ``export_options`` as ``ExportOptions``."""
    return ExportOptions(
        max_shard_nbytes=max_shard_size,
        max_memory_nbytes=max_memory,
        renames=rename,
        only=only or _DEFAULTS.only,
        **others,
    )
