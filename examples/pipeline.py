"""The same step from Python: export the checkpoint of a run, verify it, evaluate it.

Usage: python examples/pipeline.py RUN MODEL
"""

from __future__ import annotations

import sys
from pathlib import Path

from evaluate import TEXT, mean_loss

import zexport


def main(run: Path, model: Path) -> None:
    """Export ``run`` to ``model`` and print a summary."""
    checkpoint = zexport.open_checkpoint(run)
    print(f"{checkpoint.layout}, {checkpoint.world_size} ranks, step {checkpoint.global_steps}")

    options = zexport.ExportOptions(dtype=zexport.ExportDType.BF16, overwrite=True)
    report = zexport.run_export(zexport.plan_export(checkpoint, model, options))
    for finding in report.findings:
        print(f"{finding.tensor}: {finding.kind} {finding.count}")

    verdict = zexport.verify_export(model, against=run)
    if not verdict.ok:
        sys.exit(f"verification failed: {verdict.problems}")
    print(f"{report.tensors} tensors verified, loss {mean_loss(model, TEXT):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
