"""The options of an export, which ``consolidate`` and ``watch`` share."""

from __future__ import annotations

from typing import Any

import click

from zexport.cli.options import (
    PATH,
    ByteSize,
    Named,
    Rename,
    adapter_options,
    allow_option,
    check_option,
    jobs_option,
    together,
)
from zexport.findings import FindingKind
from zexport.options import Engine, ExportDType, ExportOptions, NameLayout

_DEFAULTS = ExportOptions()
_SHARD_NBYTES_MIN = 10**6

export_options = together(
    click.option(
        "--dtype",
        type=Named(ExportDType),
        default=_DEFAULTS.dtype.value,
        show_default=True,
        help="Element type of the weights; auto: the one that the module trained in.",
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
        default=_DEFAULTS.only,
        help="Export one part of the module: what has PREFIX before its names, such as ema.",
    ),
    click.option(
        "--max-shard-size",
        type=ByteSize(_SHARD_NBYTES_MIN),
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
    allow: tuple[FindingKind, ...],
    **chosen: Any,
) -> ExportOptions:
    """What was chosen, by the library's names for it."""
    return ExportOptions(
        max_shard_nbytes=max_shard_size,
        max_memory_nbytes=max_memory,
        renames=rename,
        allow=frozenset(allow),
        **chosen,
    )
