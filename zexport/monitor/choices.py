"""What the caller of a watch may choose."""

from __future__ import annotations

from dataclasses import dataclass

from zexport.errors import UsageError
from zexport.options import settle

_INTERVAL_MAX_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """The choices of a watch, with their defaults.

    Attributes:
        once: export what is complete, and end.
        then: a command after each export, run without a shell; the word ``{}`` is its folder, the
            word ``{step}`` its step.
        keep: so many exports stay, the newest; ``None`` for all.
        every: export checkpoints of steps that this divides.
        newest_only: leave out what a newer complete checkpoint has overtaken.
        interval_s: seconds between two looks at the run.
    """

    once: bool = False
    then: str = ""
    keep: int | None = None
    every: int = 1
    newest_only: bool = False
    interval_s: float = 15.0

    def __post_init__(self) -> None:
        """What is of another type, and numbers that mean nothing, are refused."""
        settle(self)
        for name, value, least in (
            ("keep", self.keep, 1),
            ("every", self.every, 1),
            ("interval_s", self.interval_s, 0.05),
        ):
            if value is not None and value < least:
                raise UsageError(f"{name} is too small", found=value, expected=f"{least} or more")
        if not self.interval_s <= _INTERVAL_MAX_S:  # nor what is no number
            raise UsageError(
                f"interval_s cannot be {self.interval_s}", expected=f"at most {_INTERVAL_MAX_S:,}"
            )
