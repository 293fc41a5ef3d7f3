"""For whom a resharding is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zexport.report.text import plural
from zexport.resume.settings import UniversalSettings

if TYPE_CHECKING:
    from zexport.resume.settings import Settings


def for_whom(settings: Settings) -> str:
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
