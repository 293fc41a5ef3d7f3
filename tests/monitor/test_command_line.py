"""Options of an export in the words that its command takes for them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click
import pytest

from zexport import (
    AdapterMode,
    CheckMode,
    Engine,
    ExportDType,
    ExportOptions,
    FindingKind,
    NameLayout,
    UsageError,
)
from zexport.cli.consolidate import consolidate
from zexport.cli.options import options_of
from zexport.monitor.command_line import words_of

ALL = ExportOptions(
    dtype=ExportDType.BF16,
    layout=NameLayout.MEMORY,
    engine=Engine.DEEPSPEED,
    exclude_frozen=True,
    max_shard_nbytes=2_000_001,
    renames=(("^a", "b=c"), ("d", "")),
    check=CheckMode.FULL,
    only="model",
    allow=frozenset({FindingKind.NAN, FindingKind.MIXED_STEPS}),
    adapter=AdapterMode.MERGE,
    adapter_name="second one",
    base_dtype=ExportDType.FP16,
    base=Path("a base"),
    adapter_config=Path("adapter_config.json"),
    jobs=7,
    max_memory_nbytes=3_000_003,
    overwrite=True,
)


def test_the_words_mean_every_option() -> None:
    usual = ExportOptions()
    unsaid = {f.name for f in fields(ALL) if getattr(ALL, f.name) == getattr(usual, f.name)}
    assert unsaid == {"hub_layout"}
    words = [*words_of(ALL), "checkpoint", "out"]
    with consolidate.make_context("consolidate", words) as context:
        given = context.params
    names = {one.name for one in click.Context(consolidate).command.params}
    taken = {f.name for f in fields(ALL)} & names | {"max_shard_size", "max_memory", "rename"}
    options = options_of(**{name: given[name] for name in taken})
    assert options == ALL


def test_usual_options_need_no_words() -> None:
    assert words_of(ExportOptions()) == ()


def test_an_option_without_a_word_is_not_lost() -> None:
    with pytest.raises(UsageError, match="hub_layout"):
        words_of(ExportOptions(hub_layout="first"))
    with pytest.raises(UsageError, match="renames"):
        words_of(ExportOptions(renames=(("a=", "b"),)))
