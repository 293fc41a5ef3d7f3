"""What a watch tells of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from zexport.report.failure import Told
from zexport.storage.json import JsonObject, Natural, form_of


class EventKind(StrEnum):
    """What has become of a checkpoint, or of its export."""

    EXPORTED = "exported"
    FAILED = "failed"
    LOST = "lost"
    """The run removed it before it could be kept, or its disk needs the room."""
    CHANGED = "changed"
    """The run saved it anew while it was exported; what came of that is not kept."""
    SKIPPED = "skipped"
    """A newer one was complete before its turn came."""
    WAITING = "waiting"
    """It is not complete."""
    RAN = "ran"
    """The command after the export has ended well."""
    COMMAND_FAILED = "command-failed"
    REMOVED = "removed"
    """The export was older than those that are kept."""
    LEFT = "left"
    """The export is older than those that are kept, and stays all the same."""
    NOT_AGAIN = "not-again"
    """It was exported before, and is not again, though somebody may expect it."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of what a watch tells.

    Attributes:
        event: what has happened.
        checkpoint: name of the checkpoint.
        step: the optimizer steps that it records.
        out: the folder of its export.
        seconds: how long it took.
        warnings: what should be known before the export is used.
        failure: why there is no export, or what is wrong.
        why: the reason, where it is no error.
    """

    event: EventKind
    checkpoint: str
    step: Natural | None
    out: Path
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    failure: Told | None = None
    why: str = ""

    @property
    def code(self) -> int:
        """The exit code of a watch of which nothing worse is to be told."""
        return 0 if self.failure is None else self.failure.code

    def to_json(self) -> JsonObject:
        """The event as JSON values, with a ``schema`` number."""
        return form_of(self)
