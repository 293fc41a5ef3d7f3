"""Cut the power at any moment of a command, as ``power_cuts`` models it, and run it again.

The output is absent or whole, what it replaces is not lost before, and both last once the command
has returned. Run again, the command ends with the same bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.forked import ForkedExport
from tests.support.power_cuts import Disk, Pair, inode
from tests.support.pruning import AS_STORED, state_of, trainers_run
from tests.support.real_cases import FIXTURES
from tests.support.stopping import Job, files, four_shards
from tests.torture.faults import SYNCS, Calls, ended, forked
from zexport import EventKind, ReshardOptions, WatchOptions, consolidate, prune, watch


@dataclass(frozen=True)
class Command:
    """A command that changes only ``root``, and what is promised of it after a power cut."""

    root: Path
    act: Callable[[], object]
    check: Callable[[bool, bool], None]  # gets whether it had returned, and was run again


def every_cut(folder: Path) -> str:
    names = {make.__name__: make for make in COMMANDS}
    return ", ".join(f"{name} {cut_everywhere(one(folder / name))}" for name, one in names.items())


def cut_everywhere(command: Command, count: int | None = None, step: int = 1) -> int:
    """Try what ``Disk.cuts`` yields, with a rerun of every ``step``-th; return how many."""
    disk, tried = Disk(command.root, command.act), 0
    command.check(True, True)
    for cut in disk.cuts(count):
        tried += 1
        ctimes = disk.put(cut)
        try:
            command.check(cut.end == len(disk.changes), False)
            if tried % step == 0:
                with _after_cut(ctimes):
                    assert ended(forked(command.act, Calls(names=()))) == 0, "the rerun fails"
                command.check(True, True)
        except AssertionError as error:
            error.add_note(f"{cut}, lost: {[disk.changes[at] for at in cut.lost]}")
            raise
    return tried


@contextmanager
def _after_cut(ctimes: Mapping[Pair, Pair]) -> Iterator[None]:
    """Show untouched files with their ctime before the cut; do not wait for disks."""
    stat = os.stat

    def shown(*args: Any, **named: Any) -> Any:
        status = stat(*args, **named)
        now, before = ctimes.get(inode(status), (0, 0))
        if status.st_ctime_ns != now:
            return status
        fields = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        return SimpleNamespace(**fields | {"st_ctime_ns": before})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", shown)
        for name in SYNCS:
            patch.setattr(os, name, lambda _: None)
        yield


def export(folder: Path) -> Command:
    job = replace(four_shards(folder), out=folder / "root" / "new" / "out")
    return _making(job, folder / "root", lambda: job.out.exists() or job.run())


def overwrite(folder: Path) -> Command:
    job = replace(four_shards(folder), out=folder / "root" / "out").with_options(overwrite=True)
    new = _making(job, folder / "root", job.run)
    replace(four_shards(folder / "older", seed=9), out=job.out).run()
    older, replaced = files(job.out), job.out.with_name("out.replaced")

    def check(has_ended: bool, is_done: bool) -> None:
        if has_ended or files(job.out if job.out.exists() else replaced) != older:
            new.check(True, is_done)

    return replace(new, check=check)


def parts(folder: Path) -> Command:
    job = replace(four_shards(folder), out=folder / "root" / "out")
    return _making(job, folder / "root", lambda: [job.part(n, 2) for n in (1, 2)])


def reshard(folder: Path) -> Command:
    source, out = FIXTURES / "z3_w2_bf16_frozen" / "ckpt", folder / "root" / "out"
    job = Job(source, out, ReshardOptions(world_size=3))
    return _making(job, folder / "root", lambda: out.exists() or job.run())


def _making(job: Job, root: Path, act: Callable[[], object]) -> Command:
    whole = job.made()
    shutil.rmtree(root)
    root.mkdir()

    def check(has_ended: bool, is_done: bool) -> None:
        assert job.out.exists() or not has_ended, "the output is lost"
        assert not job.out.exists() or files(job.out) == whole, "the output is not whole"
        assert not is_done or job.left() <= {"out", "out.partial.journal"}, job.left()

    return Command(root, act, check)


def pruning(folder: Path) -> Command:
    old, out = trainers_run(folder / "root" / "run"), folder / "out"
    consolidate(old, out, AS_STORED)
    pruned, before, whole = old.with_name(f"pruned-{old.name}"), state_of(old), dict[str, bytes]()

    def check(has_ended: bool, is_done: bool) -> None:
        dated = files(pruned) if pruned.exists() else {}
        found = {name: re.sub(rb'"at": "[^"]+"', b"", data) for name, data in dated.items()}
        whole.update(whole or found)
        assert found or (old.exists() and not has_ended), "no checkpoint is left"
        assert not found or found == whole, "the pruned checkpoint is not whole"
        assert not old.exists() or state_of(old) == before, "a resume finds less than before"
        left = {path.name for path in old.parent.iterdir() if path.suffix != ".lock"}
        assert not is_done or left == {"checkpoint-4", pruned.name}, left

    return Command(folder / "root", lambda: prune(old, out), check)


def watching(folder: Path) -> Command:
    """A watch that exports a checkpoint, and removes the export of the one before."""
    run, outs = folder / "root" / "run", folder / "root" / "outs"
    keep = WatchOptions(once=True, interval_s=0.2, keep=1)

    def act() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", ForkedExport)
            events = {one.event for one in watch(run, outs, keep)}
        assert events <= {EventKind.EXPORTED, EventKind.REMOVED}, events

    old, new = (outs / f"checkpoint-{step}" for step in (2, 4))
    trainers_run(run, steps=(2,))
    act()
    trainers_run(run, steps=(4,))
    before, whole = state_of(run), {old: files(old)}

    def check(has_ended: bool, is_done: bool) -> None:
        whole.setdefault(new, files(new))
        there = {path for path in whole if path.exists()}
        assert new in there or (there and not has_ended), "no export is left"
        assert all(files(path) == whole[path] for path in there), "an export is not whole"
        own = {path.name for path in (outs / ".zexport-watch").iterdir()}
        assert not is_done or (old not in there and own == {"stamps", "links"}), own
        assert state_of(run) == before, "the run has changed"

    return Command(folder / "root", act, check)


COMMANDS = (export, overwrite, parts, reshard, pruning, watching)
