"""What a verification found: every contradiction, or that there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zexport.store.json import JsonObject, Natural, form_of


@dataclass(frozen=True, slots=True)
class Problem:
    """One contradiction.

    Attributes:
        file: name of the file within the output folder; empty where it has none.
        tensor: name of the tensor in the output; empty where it has none.
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
        ok: whether nothing is wrong.
        files: files whose bytes were compared.
        tensors: tensors whose bytes were compared.
        against_checkpoint: whether every tensor was also made again from the checkpoint.
        problems: everything that is wrong.
    """

    out_dir: Path
    ok: bool = field(init=False)
    files: Natural
    tensors: Natural
    against_checkpoint: bool
    problems: tuple[Problem, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", not self.problems)

    def to_json(self) -> JsonObject:
        """The report as JSON values, with a ``schema`` number."""
        return form_of(self)
