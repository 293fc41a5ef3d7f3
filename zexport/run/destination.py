"""What lies where an output folder is to be: a training's checkpoints, or an older result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zexport.checkpoint.resolve import list_run_checkpoints
from zexport.errors import OutputError, VerificationError
from zexport.export.plan import ExportPlan, Origin
from zexport.filenames import MANIFEST_NAME
from zexport.run.manifest import read_manifest
from zexport.run.staging import real_path
from zexport.store.address import Address
from zexport.store.files import reading, writing
from zexport.store.folders import children, is_file, is_folder

_COUNTED = re.compile(r"checkpoint-(\d+)")
"""What a Trainer counts, and removes by ``save_total_limit``; it resumes from a whole name's.

Source: transformers 5.23, ``trainer_utils.py`` (``sort_checkpoints``, ``get_last_checkpoint``).
"""


def checked(plan: ExportPlan) -> ExportPlan:
    """The plan, with what is to be known of the place where the folder is to lie.

    That is what a training may do with it there, and what it replaces.

    A checkpoint for other ranks may be meant to be resumed from there: that is told.

    Raises:
        OutputError: a training would resume from the folder, and it is an export.
    """
    target = real_path(plan.out_dir)
    plan = replace(plan, warnings=(*plan.warnings, *_replaced(target, plan)))
    name = _COUNTED.match(target.name)
    if name is None or isinstance(target, Address) or not is_folder(target.parent):
        return plan
    with reading(target.parent):
        there = list_run_checkpoints(target.parent)
    if target.name in there or not any(map(_COUNTED.match, there)):
        return plan
    is_resumed = name[0] == target.name
    if is_resumed and not plan.form.is_checkpoint:
        raise OutputError(
            "would be taken for a checkpoint of the run in that folder, from which a training "
            "resumes, and it has weights alone",
            path=target,
            hint="Choose a name that does not begin with checkpoint-, or another folder",
        )
    if is_resumed and int(name[1]) == plan.origin.step:
        return plan
    what = "resumes from it if it is the highest number, and " * is_resumed
    told = (
        f"{target.name} lies among a run's checkpoints: a Trainer {what}counts and may remove it "
        "as one of them (save_total_limit); another name, or another folder, is safe"
    )
    return replace(plan, warnings=(told, *plan.warnings))


def _replaced(target: Path, plan: ExportPlan) -> Iterator[str]:
    """Yield what ``--overwrite`` replaces."""
    with writing(target):
        if not (plan.overwrite and is_folder(target) and children(target)):
            return
        is_export = is_file(target / MANIFEST_NAME)
    older = None
    with suppress(VerificationError):
        if is_export:
            older = Origin.recorded(read_manifest(target).provenance.get("checkpoint"))
    what = "a model" if older is None else f"what was made from {older}"
    yield f"this replaces {target}, which held {what}"
