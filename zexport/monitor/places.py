"""Where a watch may read and write: a run, and a folder for its exports that is none."""

from __future__ import annotations

from pathlib import Path

from zexport.checkpoint.resolve import is_tag_dir, list_run_checkpoints, list_tags
from zexport.errors import NotACheckpointError, UsageError
from zexport.export.overwrite import real_path
from zexport.monitor.ledger import OWN_FOLDER
from zexport.monitor.prunable import is_one_checkpoint
from zexport.storage.files import exists, is_folder
from zexport.storage.os_errors import reading, writing
from zexport.text import shell_word


def check_places(run: Path, outs: Path, *, once: bool) -> None:
    """Refuse to write into a run: into this one, or, given the wrong way round, into the other.

    A run that is not there is waited for, but by no single look.

    Raises:
        CheckpointError: nobody may look at ``run``, or its store refuses.
        OutputError: the same of ``outs``.
        NotACheckpointError: ``run`` is not there, and it is to be looked at once.
        UsageError: ``run`` is no run, or ``outs`` lies in it, or is one.
    """
    for place, at_work, holding in (
        (run, reading, "of the run's checkpoints"),
        (outs, writing, "that is to hold exports"),
    ):
        with at_work(place):
            is_other = exists(place) and not is_folder(place)
        if is_other:
            raise UsageError("is no folder", path=place, hint=f"Give the folder {holding}")
    with reading(run):
        is_tag = exists(run) and is_tag_dir(run)
        folder = run.parent if is_tag else run
        is_wrapped = exists(run) and is_one_checkpoint(folder)
    if is_tag or is_wrapped:
        above = folder.parent if is_wrapped else folder
        watched, one, all_outs = map(shell_word, (above, run, outs))
        raise UsageError(
            "is one checkpoint of a run",
            path=run,
            expected="the run's folder",
            hint=f"Watch the run: zexport watch {watched} {all_outs}{' --once' * once}; or export "
            f"this one: zexport consolidate {one} OUT. Other options stay as they are",
        )
    if real_path(outs).is_relative_to(real_path(run)):
        raise UsageError(
            "lies in the run, into which nothing is written",
            path=outs,
            hint="Give the exports a folder beside the run",
        )
    with writing(outs):
        is_known = exists(outs / OWN_FOLDER)  # to look into a thousand exports takes long
        is_new = not is_known and is_folder(outs)
        is_run = is_new and bool(list_tags(outs) or list_run_checkpoints(outs))
    if is_run:
        raise UsageError(
            "holds checkpoints, and is to hold exports",
            path=outs,
            hint="The run comes first, and a folder for its exports second",
        )
    if once and not exists(run):
        hint = "Give the folder of the run's checkpoints; without --once it is waited for"
        raise NotACheckpointError("does not exist", path=run, hint=hint)
