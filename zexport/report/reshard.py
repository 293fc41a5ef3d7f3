"""What a resharding would do, and what it did, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zexport.report.export import print_export, print_plan
from zexport.report.text import Console, plural
from zexport.resume.settings import UniversalSettings

if TYPE_CHECKING:
    from zexport.plan.summary import PlanSummary
    from zexport.resume.settings import Settings
    from zexport.run.execute import ExportReport


def print_reshard_plan(
    console: Console,
    plan: PlanSummary,
    side_nbytes: Mapping[str, int],
    settings: Settings,
    *,
    quiet: bool = False,
) -> None:
    """The plan for people; nothing has been written."""
    print_plan(console, plan, side_nbytes, quiet=quiet, what=_for_whom(settings))


def print_reshard(console: Console, report: ExportReport, settings: Settings) -> None:
    """The report for people."""
    print_export(console, report, what=_for_whom(settings))


def _for_whom(settings: Settings) -> str:
    """Which ranks go on from it."""
    if isinstance(settings, UniversalSettings):
        stages = "ZeRO-1, 2 or 3" if settings.stage is None else f"ZeRO-{settings.stage}"
        version = settings.for_deepspeed
        newest = "" if version is None else f", DeepSpeed {version}"
        return f"universal, for any number of ranks under {stages}{newest}"
    words = [f"for {plural(settings.world_size, 'rank')} under ZeRO-{settings.stage}"]
    if settings.is_bf16_optimizer:
        words.append("BF16_Optimizer")
    if settings.is_dealt_out:
        words.append("round robin")
    return ", ".join(words)
