"""What beginning, parts and finishing share: the plan, its unfinished folder, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zexport.plan.plan import ExportPlan
from zexport.run.progress import Meter
from zexport.run.readback import Checks, VerifyMode
from zexport.run.receipts import Receipts


@dataclass(frozen=True, slots=True)
class Workplace:
    """An unfinished folder and what is to be in it.

    Attributes:
        plan: what is to be written.
        folder: where.
        receipts: for what is written already.
        verify: how it is read again.
        meter: counts the bytes.
    """

    plan: ExportPlan
    folder: Path
    receipts: Receipts
    verify: VerifyMode
    meter: Meter

    @classmethod
    def of(cls, plan: ExportPlan, folder: Path, verify: VerifyMode, meter: Meter) -> Workplace:
        """The workplace in a folder that exists."""
        return cls(plan, folder, Receipts(folder, plan), verify, meter)

    def checks(self) -> Checks:
        """Reading again what was written."""
        return Checks(self.folder, self.verify, self.meter)
