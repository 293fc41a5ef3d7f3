"""What a finished training run tells: in JSON for programs and in a few lines for people."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run.

    Attributes:
        out: the run's folder.
        tag: the last checkpoint on disk; empty if none could be saved.
        steps: the step the training ended with.
        first_loss: mean over the ranks, of the first step of this run.
        last_loss: the same of the last step.
        checkpoints: the tags on disk, oldest first.
        world_size: ranks.
        stage: ZeRO stage.
        partitioned: every rank's part was saved, so that the run can be resumed.
        save_error: why the last save failed; empty if it did not, as always where it is printed: a
            run whose last save failed ends with an error.
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
        from zexport.store.json import form_of  # noqa: PLC0415 - --help does without

        return json.dumps(form_of(self))

    @classmethod
    def from_json(cls, text: str) -> TrainSummary:
        """The summary that :meth:`to_json` wrote."""
        from zexport.store.json import decoded  # noqa: PLC0415 - --help does without

        return decoded(text, cls)

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
