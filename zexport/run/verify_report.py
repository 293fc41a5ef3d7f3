"""What a verification found: every contradiction, or that there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from zexport.store.json import Json

REPORT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One contradiction; ``file`` or ``tensor`` is empty where it has none.

    Attributes:
        file: name of the file within the output folder.
        tensor: name of the tensor in the output.
        problem: what is wrong, without a full stop.
    """

    file: str
    tensor: str
    problem: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and everything that is wrong with it.

    Attributes:
        out_dir: the folder.
        files: files whose bytes were compared.
        tensors: tensors whose bytes were compared.
        against_checkpoint: whether every tensor was also made again from the checkpoint.
        problems: all of them.
    """

    out_dir: Path
    files: int
    tensors: int
    against_checkpoint: bool
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Json]:
        """The report as JSON values, with a ``schema`` number."""
        return {
            "schema": REPORT_SCHEMA,
            "out_dir": str(self.out_dir),
            "ok": self.ok,
            "files": self.files,
            "tensors": self.tensors,
            "against_checkpoint": self.against_checkpoint,
            "problems": [asdict(problem) for problem in self.problems],
        }
