"""A checkpoint for other ranks: planned, or planned and run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from zexport.api.export import OnProgress, run_export
from zexport.checkpoint.contents import ZeroCheckpoint
from zexport.checkpoint.opening import Checkpoint, open_checkpoint
from zexport.options import ReshardOptions
from zexport.plan.plan import ExportPlan
from zexport.resume import plan
from zexport.run.execute import ExportReport, VerifyMode


def plan_reshard(
    checkpoint: ZeroCheckpoint, out_dir: Path | str, options: ReshardOptions
) -> ExportPlan:
    """The whole plan of a resharding, which ``run_export`` runs; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks what a training goes on from.
        UnsupportedError: a state cannot be cut for other ranks.
        UnsafeError: a value to be carried along cannot be written safely.
        UsageError: an option cannot be meant.
    """
    return plan.plan_reshard(checkpoint, out_dir, options)


def reshard(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ReshardOptions,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode = VerifyMode.READBACK,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Turn a ZeRO checkpoint into one that the same training goes on from on other ranks.

    Args:
        checkpoint: any level of the checkpoint's folders; several where nodes kept their own parts.
        out_dir: the folder to make, of the same arrangement as the checkpoint's (a Trainer's
            ``checkpoint-N``, say); it appears complete or not at all.
        options: number of ranks, stage and more; see ``ReshardOptions``.
        tag: which checkpoint, where there are several.
        follow_symlinks: read what a link leads to, wherever that is.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step.

    Raises:
        ZexportError: one of its kinds; ``exit_code`` and ``kind`` tell which.
    """
    began = time.monotonic()
    opened = open_checkpoint(checkpoint, tag=tag, follow_symlinks=follow_symlinks)
    planned = plan_reshard(opened, out_dir, options)
    done = run_export(planned, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)
