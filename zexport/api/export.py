"""An export, or a checkpoint for other ranks: planned, run, or both at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from zexport.checkpoint.open import Checkpoint, open_checkpoint
from zexport.checkpoint.state import TrainingState
from zexport.errors import UsageError
from zexport.export.decide import decide
from zexport.export.gather import gather
from zexport.export.plan import ExportPlan
from zexport.model.hub_cache import model_folder
from zexport.options import (
    SHARD_NBYTES_MIN,
    Engine,
    ExportOptions,
    ReshardOptions,
    checks_arguments,
    chosen,
)
from zexport.run import execute
from zexport.run.begin import noted, versions_in
from zexport.run.destination import checked
from zexport.run.execute import ExportReport, Progress, VerifyMode
from zexport.store.address import Address, place

_GB_MEANT = 1000
"""Smaller numbers are of gigabytes, as the command line writes them."""

OnProgress = Callable[[Progress], None]


def plan_export(
    checkpoint: TrainingState, out_dir: Path | str, options: ExportOptions | None = None
) -> ExportPlan:
    """The whole plan of an export; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or weights were left out of it.
        UnsupportedError: its layout is not one that can be exported.
        UsageError: an option cannot be meant.
        OutputError: a training would resume from the folder, as it lies among checkpoints.
    """
    if options is not None and options.max_shard_nbytes < SHARD_NBYTES_MIN:
        few = options.max_shard_nbytes
        raise UsageError(
            "max_shard_nbytes is too few bytes for a file of weights",
            found=few,
            expected=f"{SHARD_NBYTES_MIN} or more",
            hint=f"Give bytes, such as {max(few, 5) * 10 ** (9 if few < _GB_MEANT else 6):_}",
        )
    return checked(plan_anywhere(checkpoint, out_dir, options))


def plan_anywhere(
    checkpoint: TrainingState, out_dir: Path | str, options: ExportOptions | None = None
) -> ExportPlan:
    """The plan of an export wherever its folder may lie, which is there already."""
    if options is not None and options.engine is Engine.DEEPSPEED:
        _check_on_disks(checkpoint, place(out_dir), options)
    known = versions_in(_beside(checkpoint, options))
    return noted(decide(gather(checkpoint, options), out_dir), known)


def plan_reshard(
    checkpoint: TrainingState, out_dir: Path | str, options: ReshardOptions
) -> ExportPlan:
    """The whole plan of a resharding, which ``run_export`` runs; nothing is written.

    Raises:
        CheckpointError: the checkpoint has problems, or lacks what a training goes on from.
        UnsupportedError: a state cannot be cut for other ranks.
        UnsafeError: a value to be carried along cannot be written safely.
        UsageError: an option cannot be meant.
    """
    from zexport.resharding import plan  # noqa: PLC0415 - no export needs it

    known = versions_in(_beside(checkpoint))
    return checked(noted(plan.plan_reshard(checkpoint, out_dir, options), known))


def _beside(checkpoint: TrainingState, options: ExportOptions | None = None) -> list[Path]:
    """The folders whose files may be copied: one that changes once it was judged is refused."""
    base = None if options is None else options.base
    root, parts = checkpoint.location.root, [part.root for part in checkpoint.parts]
    return [root, root.parent, *parts, *([model_folder(base)] if base is not None else [])]


def plan_folder(
    checkpoint: TrainingState, out_dir: Path | str, options: ExportOptions | ReshardOptions
) -> ExportPlan:
    """The plan of what the options are of."""
    if isinstance(options, ReshardOptions):
        return plan_reshard(checkpoint, out_dir, options)
    return plan_export(checkpoint, out_dir, options)


def _check_on_disks(checkpoint: TrainingState, out_dir: Path, options: ExportOptions) -> None:
    """Refuse addresses for DeepSpeed's own converter, which reads paths."""
    far = [
        one for one in (checkpoint.location.root, out_dir, options.base) if isinstance(one, Address)
    ]
    if far:
        raise UsageError(
            "the deepspeed engine reads and writes files of this machine alone",
            path=far[0],
            hint="Copy the checkpoint to this machine, or leave --engine out",
        )


def run_export(
    plan: ExportPlan,
    *,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    confirm: Callable[[], object] | None = None,
) -> ExportReport:
    """Make the plan's output folder, whole and on the disk, or nothing at all.

    Args:
        plan: from ``plan_export``.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step.
        confirm: called once all of the checkpoint is read; the folder gets no name if it raises.

    Raises:
        OutputError: the folder cannot be made.
        CheckpointError: a source cannot be read, is damaged, or was changed since the plan.
        UnsupportedError: the reference engine cannot rebuild this checkpoint.
        UnsafeError: the reference engine would have to run unknown code.
        VerificationError: what was written is not what was meant.
    """
    mode = chosen("verify", VerifyMode, verify)
    with ExitStack() as stack:
        reader = None
        if plan.reference is not None:
            from zexport.run.reference_engine import open_reference  # noqa: PLC0415 - imports DeepSpeed

            one = plan.reference
            reader = stack.enter_context(open_reference(one.root, one.tag, one.tensors))
        return execute.run_plan(
            plan, reader=reader, verify=mode, progress=progress, confirm=confirm or (lambda: None)
        )


@checks_arguments
def consolidate(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ExportOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    **choices: Any,
) -> ExportReport:
    """Turn a ZeRO checkpoint into a Hugging Face model folder.

    Args:
        checkpoint: any level of the checkpoint's folders; several where nodes kept their own parts.
        out_dir: the folder to make; it appears complete or not at all.
        options: element type, names, sizes; see ``ExportOptions``.
        tag: which checkpoint, where there are several.
        follow_symlinks: read what a link leads to, wherever that is.
        verify: how the result is read again before the folder gets its name.
        progress: told of every step.
        **choices: fields of ``options`` by name, such as ``dtype="bf16"``.

    Raises:
        TypeError: no option has such a name.
        ZexportError: one of its kinds; ``exit_code`` and ``kind`` tell which.
    """
    began = time.monotonic()
    opened = open_checkpoint(checkpoint, tag=tag, follow_symlinks=follow_symlinks)
    plan = plan_export(opened, out_dir, replace(options or ExportOptions(), **choices))
    done = run_export(plan, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)


@checks_arguments
def reshard(
    checkpoint: Checkpoint,
    out_dir: Path | str,
    options: ReshardOptions | None = None,
    *,
    tag: str | None = None,
    follow_symlinks: bool = False,
    verify: VerifyMode | str = VerifyMode.READBACK,
    progress: OnProgress | None = None,
    **choices: Any,
) -> ExportReport:
    """Turn a ZeRO checkpoint into one that the same training goes on from on other ranks.

    ``out_dir`` is of the same arrangement as the checkpoint (a Trainer's ``checkpoint-N``, say);
    ``options`` are number of ranks, stage and more, of which each may be given by its name, such as
    ``world_size=3``. All else is as for ``consolidate``.
    """
    began = time.monotonic()
    opened = open_checkpoint(checkpoint, tag=tag, follow_symlinks=follow_symlinks)
    plan = plan_reshard(opened, out_dir, replace(options or ReshardOptions(), **choices))
    done = run_export(plan, verify=verify, progress=progress)
    return replace(done, seconds=time.monotonic() - began)
