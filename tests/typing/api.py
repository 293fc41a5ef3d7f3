"""What the types of the public functions promise; only type-checked, never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import zexport
from zexport import Finding


def the_whole_job(path: Path, out: Path) -> None:
    checkpoint = assert_type(zexport.open_checkpoint(path), zexport.TrainingState)
    assert_type(checkpoint.tensors, tuple[zexport.StoredTensor, ...])
    assert_type(checkpoint.problems, tuple[zexport.ZexportError, ...])
    options = zexport.ExportOptions(dtype=zexport.ExportDType.BF16, layout=zexport.NameLayout.HUB)
    plan = assert_type(zexport.plan_export(checkpoint, out, options), zexport.ExportPlan)
    report = assert_type(
        zexport.run_export(plan, verify=zexport.VerifyMode.DISK, progress=say),
        zexport.ExportReport,
    )
    assert_type(report.findings, tuple[Finding, ...])
    verdict = assert_type(zexport.verify_export(out, against=path), zexport.VerifyReport)
    assert_type(verdict.ok, bool)
    difference = assert_type(zexport.diff_models(out, path, jobs=2), zexport.DiffReport)
    assert_type(difference.tensors, tuple[zexport.TensorDiff, ...])
    assert_type(difference.count(zexport.Outcome.EQUAL), int)
    assert_type(difference.is_equal, bool)
    assert_type(zexport.consolidate(path, out, options, tag="newest"), zexport.ExportReport)


def say(progress: zexport.Progress) -> None:
    assert_type(progress.nbytes_done, int)
