"""What a finished training run tells: in JSON for programs and in a few lines for people."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run.

    Attributes:
        tag: the last checkpoint on disk; empty if none could be saved.
        steps: the step the training ended with.
        first_loss, last_loss: mean over the ranks, of the first and the last step of this run.
        checkpoints: the tags on disk now, oldest first.
        save_error: why the last save failed; empty if it did not.
    """

    out: Path
    tag: str
    steps: int
    first_loss: float
    last_loss: float
    checkpoints: tuple[str, ...]
    world_size: int
    stage: int
    partitioned: bool = True
    save_error: str = ""

    def to_json(self) -> str:
        """One JSON object on one line, with a ``schema`` number."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> TrainSummary:
        """The summary that :meth:`to_json` wrote."""
        stored = json.loads(text)
        del stored["schema"]
        stored["out"] = Path(stored["out"])
        stored["checkpoints"] = tuple(stored["checkpoints"])
        return cls(**stored)

    def to_text(self) -> str:
        """Three lines: how the loss went, what was saved, and what to type next."""
        here = Path.cwd()
        out = self.out.relative_to(here) if self.out.is_relative_to(here) else self.out
        where = out / self.tag if self.partitioned else out / "gathered" / self.tag
        lines = [
            f"trained {self.steps} steps on {self.world_size} ranks, ZeRO stage {self.stage}:"
            f" loss {self.first_loss:.3f} -> {self.last_loss:.3f}",
            f"checkpoint: {where}",
        ]
        if self.partitioned:
            run, model = shlex.quote(str(out)), shlex.quote(f"{out}-model")
            lines.append(f"next: zexport consolidate {run} {model}")
        return "\n".join(lines)
