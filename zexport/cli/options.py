"""Option types, and options that several commands share: those of every export among them."""

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
    AdapterMode,
    CheckMode,
    Engine,
    ExportDType,
    ExportOptions,
    NameLayout,
)
from zexport.report.text import plural, size
from zexport.storage.client import use_storage_options
from zexport.storage.files import is_local
from zexport.storage.location import place

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = ExportOptions()
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = r"(?i)\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*"


class GivenPath(click.Path):
    """A path on this machine, or an address of object storage."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """The path, as ``click.Path`` has it."""
        try:
            path = place(value)
            return super().convert(path, param, ctx) if is_local(path) else path
        except MissingExtraError:
            raise
        except UsageError as error:
            self.fail(error.statement(), param, ctx)
        except OSError as error:
            self.fail(f"{value!r} leads nowhere: {error.strerror}", param, ctx)


# What is missing or may not be read is reported by the library, with the exit code of its errors.
PATH = GivenPath(path_type=Path, readable=False)


class ByteSize(click.ParamType[int]):
    """A number of bytes such as ``5GB`` (decimal, as on the hub), ``512MiB`` or ``1000000``."""

    name = "size"

    def __init__(self, least_nbytes: int = 1) -> None:
        self._least_nbytes = least_nbytes

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Bytes; fewer than the least are refused with what may have been meant."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(_SIZE, str(value))
        factors = _UNITS | _BINARY_UNITS
        nbytes = int(Decimal(match[1]) * factors[(match[2] or "").lower()]) if match else 0
        if nbytes < 1:
            self.fail(f"{value!r} is no size; write 5GB, 512MiB or a number of bytes", param, ctx)
        if match and nbytes < self._least_nbytes:
            is_enough = Decimal(match[1]) * _UNITS["m"] >= self._least_nbytes
            is_of_mb = is_enough and (match[2] or nbytes >= _UNITS["k"])
            meant = f"{match[1]}{'MB' if is_of_mb else 'GB'}"
            self.fail(
                f"{value!r} is {plural(nbytes, 'byte')}, too few for a file of weights (at least "
                f"{size(self._least_nbytes)}). Did you mean {meant}?",
                param,
                ctx,
            )
        return nbytes


class Rename(click.ParamType[tuple[str, str]]):
    """A renaming such as ``^model=transformer``: pattern, equals sign, replacement."""

    name = "regex=repl"
    said = "renaming; write REGEX=REPLACEMENT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """What is before the equals sign, and what after it."""
        key, equals, rest = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is no {self.said}", param, ctx)
        return key, rest


class StorageOption(Rename):
    """A setting of the store library such as ``region=eu-west-1``."""

    name = "key=value"
    said = "setting; write KEY=VALUE"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Settings of the environment: one a line, or parted by blanks where it is one line."""
        return rv.splitlines() if "\n" in rv else rv.split()


class Named(click.Choice[str]):
    """One of an enumeration's members, by its value; ``listed`` are those worth telling of."""

    def __init__(self, members: type[Enum], listed: Iterable[Enum] = ()) -> None:
        self._members = members
        super().__init__([member.value for member in listed or members], case_sensitive=False)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the member, in any case; a dtype also by torch's name."""
        try:
            return self._members(str(value).lower())
        except ValueError:
            return super().convert(value, param, ctx)  # its refusal lists the values


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one, which a command's help lists in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def number_option(
    option: str, default: int | None, said: str, *, least: int = 1
) -> Callable[[F], F]:
    """An option that is a whole number, ``least`` or more."""
    return click.option(
        option,
        type=click.IntRange(least),
        metavar="N",
        default=default,
        show_default=True,
        help=said,
    )


def _filled(_ctx: click.Context, _param: click.Parameter, prefix: str | None) -> str | None:
    """What names begin with; an empty one, as of a variable that is not set, means no part."""
    if prefix == "":
        raise click.BadParameter("it is empty; leave it out to export all")
    return prefix


def _checked_page(_: click.Context, __: click.Parameter, page: Path | None) -> Path | None:
    """``page``, where one can be written, before anything is read for it."""
    if page is not None:
        from zexport.report.page.page import check_place

        check_place(page)
    return page


def _use_options(
    _ctx: click.Context, _param: click.Parameter, given: tuple[tuple[str, str], ...]
) -> None:
    if given:
        use_storage_options(dict(given))


storage_option = click.option(
    "--storage-option",
    type=StorageOption(),
    multiple=True,
    expose_value=False,
    callback=_use_options,
    help="A setting of the store that addresses (s3://, gs://, az://) are in, such as "
    "endpoint=URL; repeatable.",
)
tag_option = click.option(
    "--tag",
    metavar="TAG",
    help="A checkpoint of several: global_step100, or newest.  [default: what `latest` names]",
)
links_option = click.option(
    "--follow-symlinks",
    is_flag=True,
    help="Also read links that lead out of the folders given.",
)
html_option = click.option(
    "--html",
    type=PATH,
    metavar="FILE",
    callback=_checked_page,
    help="Also write a page to look at: one HTML file that needs no network.",
)
json_option = click.option("--json", is_flag=True, help="Print one JSON object on stdout.")
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    metavar="N",
    default=_DEFAULTS.jobs,
    help="Worker threads, at most 256.  [default: one a core, up to 4]",
)
verify_option = click.option(
    "--verify",
    type=click.Choice(["readback", "disk", "none"], case_sensitive=False),
    default="readback",
    show_default=True,
    help="Read the result again before it gets its name; disk: from the disk, not from memory.",
)
check_option = click.option(
    "--check",
    type=Named(CheckMode),
    default=_DEFAULTS.check.value,
    show_default=True,
    help="How much of the fp32 weights is compared with the checkpoint's 16-bit copy.",
)
_REFUSED = [kind for kind in FindingKind if kind.is_refused]
allow_option = click.option(
    "--allow",
    type=Named(FindingKind, _REFUSED),
    multiple=True,
    metavar="KIND",
    help=f"Go on where this is found, and say so; repeatable. One of {', '.join(_REFUSED)}.",
)
progress_option = click.option(
    "--progress",
    type=click.Choice(["auto", "json"], case_sensitive=False),
    default="auto",
    show_default=True,
    help="Progress on stderr: a bar or plain lines, or JSON lines.",
)
progress_options = together(
    progress_option, click.option("-q", "--quiet", is_flag=True, help="No progress.")
)
adapter_config_option = click.option(
    "--adapter-config", type=PATH, help="adapter_config.json, where it lies elsewhere."
)
given_options = together(
    click.option("--base", type=PATH, help="Base model. Default: the one the manifest names."),
    adapter_config_option,
)
adapter_options = together(
    click.option(
        "--adapter",
        type=Named(AdapterMode),
        default=_DEFAULTS.adapter.value,
        show_default=True,
        help="Keep a peft adapter as peft saves it, or merge it into the base; auto merges if "
        "--base is given.",
    ),
    click.option("--adapter-name", metavar="NAME", help="One adapter of several."),
    adapter_config_option,
    click.option(
        "--base-dtype",
        type=Named(ExportDType),
        default=_DEFAULTS.base_dtype.value,
        show_default=True,
        help="Element type of the base while the adapter was trained; auto: what DeepSpeed's "
        "configuration says.",
    ),
)


export_options = together(
    click.option(
        "--dtype",
        type=Named(ExportDType),
        default=_DEFAULTS.dtype.value,
        show_default=True,
        help="Element type of the weights; auto: the one that the module trained in. Names of "
        "torch's, such as bfloat16, do too.",
    ),
    click.option(
        "--base",
        type=PATH,
        help="The model that training began from: a folder, or its name in the hub's cache. It "
        "gives config, tokenizer, and frozen weights that were not saved.",
    ),
    click.option(
        "--only",
        metavar="PREFIX",
        callback=_filled,
        help="Export one part of the module: what has PREFIX before its names, such as ema.",
    ),
    click.option(
        "--max-shard-size",
        type=ByteSize(SHARD_NBYTES_MIN),
        default="5GB",
        show_default=True,
        help="Largest safetensors file.",
    ),
    click.option(
        "--engine",
        type=Named(Engine),
        default=_DEFAULTS.engine.value,
        show_default=True,
        help="What rebuilds the weights; deepspeed: its own converter, to compare with.",
    ),
    click.option("--exclude-frozen", is_flag=True, help="Leave frozen weights out."),
    click.option(
        "--layout",
        type=Named(NameLayout),
        default=_DEFAULTS.layout.value,
        show_default=True,
        help="Tensor names: those on the hub, or those that the checkpoint records.",
    ),
    click.option(
        "--rename",
        type=Rename(),
        multiple=True,
        help="Rename tensors; repeatable, in the order given.",
    ),
    adapter_options,
    jobs_option,
    click.option("--max-memory", type=ByteSize(), help="Refuse what needs more memory."),
    check_option,
    allow_option,
)


def options_of(
    *,
    max_shard_size: int,
    max_memory: int | None,
    rename: tuple[tuple[str, str], ...],
    only: str | None,
    **chosen: Any,
) -> ExportOptions:
    """What was chosen, by the library's names for it."""
    return ExportOptions(
        max_shard_nbytes=max_shard_size,
        max_memory_nbytes=max_memory,
        renames=rename,
        only=only or _DEFAULTS.only,
        **chosen,
    )
