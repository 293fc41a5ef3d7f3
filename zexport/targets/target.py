"""What all targets have in common: three questions, put one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from zexport.plan.plan import FilePlan, SideFile
from zexport.weights.hub_names import Selection


class Target(Protocol):
    """What a folder is to be, for all that was collected; nothing is read any more."""

    def select(self) -> Selection:
        """Which weights are written, under which names and in which form."""
        ...

    def files(self, selection: Selection) -> tuple[FilePlan, ...]:
        """The files that hold them, laid out to the byte."""
        ...

    def side_files(self, selection: Selection, files: Sequence[FilePlan]) -> Iterable[SideFile]:
        """What completes the folder beside these."""
        ...
