"""A watch passes every export option to ``zexport consolidate``."""

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
    WatchOptions,
    watch,
)
from zexport.cli.consolidate import consolidate
from zexport.cli.options import options_of
from zexport.monitor.jobs import arguments_of

ALL = ExportOptions(
    dtype=ExportDType.BF16,
    layout=NameLayout.MEMORY,
    engine=Engine.DEEPSPEED,
    exclude_frozen=True,
    keep_unloaded=True,
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


def test_every_option_has_an_argument() -> None:
    default = ExportOptions()
    same = {f.name for f in fields(ALL) if getattr(ALL, f.name) == getattr(default, f.name)}
    assert same == {"hub_layout"}
    with consolidate.make_context("consolidate", [*arguments_of(ALL), "ckpt", "out"]) as context:
        given = context.params
    names = {one.name for one in click.Context(consolidate).command.params}
    taken = {f.name for f in fields(ALL)} & names | {"max_shard_size", "max_memory", "rename"}
    assert options_of(**{name: given[name] for name in taken}) == ALL


@pytest.mark.parametrize("options", [{"hub_layout": "first"}, {"renames": (("a=", "b"),)}])
def test_option_without_an_argument_is_refused(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be set on the command line"):
        watch(tmp_path / "run", tmp_path / "outs", WatchOptions(), ExportOptions(**options))  # type: ignore[arg-type]
