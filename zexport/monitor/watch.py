"""Export every checkpoint of a run, once it is complete: look, decide, act."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace as changed

from zexport.checkpoint.resolve import (
    is_tag_dir,
    list_tags,
    locate,
)
from zexport.errors import CheckpointError, NotACheckpointError, OutputError, UsageError
from zexport.export.overwrite import real_path
from zexport.export.report import VerifyMode
from zexport.filenames import MANIFEST_NAME
from zexport.monitor.hardlinks import keep, release
from zexport.monitor.jobs import (
    NO_ANSWER,
    Job,
    arguments_of,
    result_of,
    split_command,
    start_command,
    start_export,
)
from zexport.monitor.policy import (
    Decision,
    Decisions,
    EventKind,
    Verdict,
    WatchEvent,
    WatchOptions,
    decide,
)
from zexport.monitor.snapshot import (
    OWN_FOLDER,
    RunCheckpoint,
    Scanner,
    Snapshot,
    Stamp,
    StampState,
    check_as_seen,
    digest_of_manifest,
    first_edit,
    is_one_checkpoint,
    is_run,
    write_stamp,
)
from zexport.options import ExportOptions, checks_arguments, chosen
from zexport.report.json import ErrorInfo
from zexport.storage.files import (
    absolute,
    exists,
    is_file,
    is_folder,
    is_local,
    make_folder,
    matching,
    refresh,
    remove,
    storage_of,
    write_durably,
)
from zexport.storage.json import JsonObject, values_of
from zexport.storage.local import rename_durably
from zexport.storage.location import place
from zexport.storage.locks import is_being_written, locked_file
from zexport.storage.os_errors import reading, writing
from zexport.storage.symlink_policy import Boundary
from zexport.text import shell_word

_SCAN_S = 2.0
"""Between two scans of a watch that is to end."""

_SETTLE_S = 65.0
"""How long a watch that is to end waits for the last checkpoint: longer than a file settles."""

_RETRY_S = 60.0
"""A full disk may have space again, and a machine memory for a process that was killed."""

_NEXT_SAVE = 1.5
"""Free disk space that the next checkpoint may need, relative to the size of one."""

_NEVER = float("inf")
_LOST = Decision(Verdict.SKIP, "the run removed it before it was exported", EventKind.LOST)
_WANTED = frozenset((Verdict.EXPORT, Verdict.WAIT))
_TERMINATED = 130  # the exit code after SIGTERM or Ctrl-C


@checks_arguments
def watch(
    run: Path | str,
    outs: Path | str,
    options: WatchOptions | None = None,
    export: ExportOptions | None = None,
    *,
    follow_symlinks: bool = False,
    verify: str = "readback",
    is_over: Callable[[], bool] = lambda: False,
) -> Generator[WatchEvent]:
    """Export every checkpoint of a run once; yield events as they happen.

    The call only checks its arguments: the work is done while you iterate. Each export is a
    low-priority process, which ends when the generator is closed. Hard links keep checkpoints that
    wait. Nothing is written into the run.

    Args:
        run: folder that checkpoints are saved to; it need not exist yet.
        outs: folder for the exports; each has the name of its checkpoint.
        options: what to export, and what to do then.
        export: as for ``consolidate``.
        follow_symlinks: as for ``consolidate``.
        verify: as for ``consolidate``.
        is_over: called before every scan; once it returns true, the watch exports the rest and
            ends.

    Raises:
        NotACheckpointError: ``run`` does not exist, with ``once``.
        OutputError: another watch exports to ``outs``, or it cannot be written; raised by the first
            ``next``.
        UsageError: ``outs`` is in the run, or contains checkpoints; ``run`` is one checkpoint; the
            program of ``then`` does not exist.
    """
    run, outs = absolute(place(run)), absolute(place(outs))
    options, export = options or WatchOptions(), export or ExportOptions()
    _check_folders(run, outs, once=options.once)
    return _Watch(
        run=run,
        outs=outs,
        options=options,
        scanner=Scanner(run, outs, Boundary.of(run, follow=follow_symlinks)),
        arguments=(
            *arguments_of(export),
            *("--verify", chosen("verify", VerifyMode, verify).value),
            *("--follow-symlinks",) * follow_symlinks,
        ),
        recorded=values_of(export.recorded()),
        command=split_command(options.then),
        is_over=is_over,
    ).events()


def preview(
    run: Path | str,
    outs: Path | str,
    options: WatchOptions,
    export: ExportOptions,
    *,
    follow_symlinks: bool = False,
) -> tuple[Snapshot, Decisions]:
    """Return what a watch would see in its first scan, and decide."""
    run, outs = absolute(place(run)), absolute(place(outs))
    _check_folders(run, outs, once=True)
    split_command(options.then)
    seen = Scanner(run, outs, Boundary.of(run, follow=follow_symlinks)).see()
    return seen, decide(seen, options, values_of(export.recorded()), {}, {})


class _Task(Struct, frozen=True):
    """An export, or the command after one, while it runs.

    Attributes:
        job: its process.
        event: event of its success.
        began: when it began.
        stamp: the export's stamp.
        before: the stamp before that.
        checkpoint: the checkpoint to export; ``None`` for a command.
    """

    job: Job
    event: WatchEvent
    began: float
    stamp: Stamp
    before: Stamp | None = None
    checkpoint: RunCheckpoint | None = None


class _Watch(Struct):
    """One watch: what runs, has failed and was reported. Everything else is on disk.

    Attributes:
        tasks: at most one export and one command.
        failed: mark of each checkpoint whose export failed, and when to retry, by name.
        failed_then: digest of the manifest of each export whose command failed, by name.
        reported: names and reasons of events, each yielded once.
        has_exported: whether it exported something; else each scan from cron would report on
            old exports.
        ends_at: when a watch that is to end stops waiting; ``None`` before.
        last_scans: number of scans since it is to end.
    """

    run: Path
    outs: Path
    options: WatchOptions
    scanner: Scanner
    arguments: Sequence[str]
    recorded: JsonObject
    command: Sequence[str]
    is_over: Callable[[], bool]
    seen: Snapshot = Snapshot("", 0)
    decided: Decisions = Decisions({}, {})
    tasks: list[_Task] = []
    failed: dict[str, tuple[str, float]] = {}
    failed_then: dict[str, str] = {}
    reported: set[tuple[str, str]] = set()
    has_exported: bool = False
    ends_at: float | None = None
    last_scans: int = 0

    def events(self) -> Generator[WatchEvent]:
        with _locked(self.outs):
            try:
                while True:
                    if self.ends_at is None and (self.options.once or self.is_over()):
                        self.ends_at = time.monotonic() + (0 if self.options.once else _SETTLE_S)
                    try:
                        seen = self.scanner.see()
                    except CheckpointError:  # storage that fails now may work in the next scan
                        if self.ends_at is not None and time.monotonic() >= self.ends_at:
                            raise
                    else:
                        yield from self._decide(seen)
                        yield from self._act_on_exports()
                        yield from self._act_on_checkpoints()
                        if self._is_done():
                            break
                    yield from self._wait()
                for name, one in self.decided.checkpoints.items():
                    if one.verdict is Verdict.WAIT:  # it is not exported at the end
                        step = self.seen.checkpoints[name].step
                        yield self._event(EventKind.WAITING, name, step, why=one.reason)
            finally:
                for task in self.tasks:
                    task.job.end()

    def _decide(self, seen: Snapshot) -> Iterator[WatchEvent]:
        """Decide; report what the user should know, and was not reported before."""
        now, before, decided = time.monotonic(), self.seen.checkpoints, self.decided.checkpoints
        self.seen, self.last_scans = seen, self.last_scans + (self.ends_at is not None)
        is_ending = self.ends_at is not None
        failed = {n: mark for n, (mark, until) in self.failed.items() if is_ending or now < until}
        self.decided = decide(seen, self.options, self.recorded, failed, self.failed_then)
        for name in before.keys() - seen.checkpoints.keys() - seen.exports.keys():
            if decided[name].verdict in _WANTED and not self._is_at_work(name):
                yield from self._news(name, before[name].step, _LOST)
        for name, decision in self.decided.checkpoints.items():
            yield from self._news(name, seen.checkpoints[name].step, decision)
        for name, decision in self.decided.exports.items() if self.has_exported else ():
            yield from self._news(name, seen.exports[name].step, decision)

    def _news(self, name: str, step: int | None, decision: Decision) -> Iterator[WatchEvent]:
        if decision.event is None or not self._is_news(name, decision.reason):
            return
        if decision.is_problem:
            hint = "Move it away, or remove it"
            error = OutputError(decision.reason, path=self.outs / name, hint=hint)
            yield self._event(decision.event, name, step, failure=ErrorInfo.of(error))
        else:
            yield self._event(decision.event, name, step, why=decision.reason)

    def _act_on_exports(self) -> Iterator[WatchEvent]:
        for name, decision in self.decided.exports.items():
            step, stamp = self.seen.exports[name].step, self.seen.stamps.get(name)
            if stamp is None or self._is_at_work(name):
                continue
            if decision.verdict is Verdict.REMOVE:
                yield from self._remove(name, step, stamp)
            elif decision.verdict is not Verdict.FINISH:
                continue
            elif stamp.state is StampState.BEGUN:
                if self._is_news(name, f"exported {self.seen.exports[name].manifest}"):
                    yield self._event(EventKind.EXPORTED, name, step)
                self._write_made(name, stamp.mark)
            elif all(task.checkpoint is not None for task in self.tasks):
                event = self._event(EventKind.RAN, name, step)
                try:
                    job = start_command(self.command, event.out, step)
                except OSError as error:  # such as a script without a #! line
                    yield self._command_failed(event, stamp, f"cannot be run: {error.strerror}")
                else:
                    self.tasks.append(_Task(job, event, time.monotonic(), stamp))

    def _remove(self, name: str, step: int | None, stamp: Stamp) -> Iterator[WatchEvent]:
        """Remove an export; it is renamed first, so that no half of it looks complete."""
        out, away = self.outs / name, self.outs / OWN_FOLDER / f"removed-{name}"
        if first_edit(out) or digest_of_manifest(out) != stamp.manifest:
            return  # changed since the scan: the next one reports it
        try:
            with writing(out):
                write_stamp(self.outs, name, changed(stamp, state=StampState.REMOVED))
                if is_local(out):
                    release(away)
                    rename_durably(out, away)
                else:
                    write_durably(away, b"")
                    remove(out / MANIFEST_NAME)
                    remove(out)
                remove(away)
        except OutputError as error:
            if self._is_news(name, error.sentence()):
                yield self._event(EventKind.LEFT, name, step, failure=ErrorInfo.of(error))
        else:
            yield self._event(EventKind.REMOVED, name, step)

    def _act_on_checkpoints(self) -> Iterator[WatchEvent]:
        """Keep complete checkpoints, start the export of the oldest, release other links."""
        wanted = {task.checkpoint.links for task in self.tasks if task.checkpoint is not None}
        for name, decision in self.decided.checkpoints.items():
            one = self.seen.checkpoints[name]
            mark, until = self.failed.get(name, ("", 0.0))
            may_succeed = mark == one.mark and until < _NEVER
            if one.links in wanted and one.links is not None:
                continue
            if one.is_gone and self._needs_space(one):
                release(one.links)
                self.failed[name] = one.mark, _NEVER
                why = "the run removed it, and its disk needs the space for the next checkpoint"
                yield self._event(EventKind.LOST, name, one.step, why=why)
                continue
            if decision.verdict in _WANTED or may_succeed:
                wanted.add(one.links)
            if decision.verdict is Verdict.EXPORT:
                try:
                    kept = keep(one, self.outs, self.scanner.boundary)
                    wanted.add(kept.links)
                    # A command may still read the export that this one would replace.
                    is_free = all(task.checkpoint is None for task in self.tasks)
                    if is_free and not self._is_at_work(name):
                        with writing(self.outs):
                            self._start_export(kept)
                except (FileNotFoundError, CheckpointError):  # the next scan reports it
                    continue
                except OutputError as error:  # such as a disk that is away for a moment
                    event = self._event(EventKind.FAILED, name, one.step)
                    yield self._failed(event, one, ErrorInfo.of(error), may_succeed=True)
        for links in self.seen.links:
            if links not in wanted:
                release(links)

    def _needs_space(self, checkpoint: RunCheckpoint) -> bool:
        """Whether the run's disk is too full for its next checkpoint."""
        nbytes = sum(one.nbytes for one in checkpoint.files.values())
        with suppress(OSError):  # the run was removed
            free = storage_of(self.run).free_nbytes(self.run)
            return free is not None and free < nbytes * _NEXT_SAVE
        return False

    def _start_export(self, checkpoint: RunCheckpoint) -> None:
        name, mark = checkpoint.name, checkpoint.mark
        replaced = self.seen.exports.get(name)
        manifest = "" if replaced is None else replaced.manifest
        stamp = Stamp(self.seen.run, mark, manifest, StampState.BEGUN)
        write_stamp(self.outs, name, stamp)
        words = (*self.arguments, *("--overwrite",) * (replaced is not None), "--as-seen", mark)
        job = start_export(checkpoint.folder, self.outs / name, words)
        event = self._event(EventKind.EXPORTED, name, checkpoint.step)
        before = self.seen.stamps.get(name)
        self.tasks.append(_Task(job, event, time.monotonic(), stamp, before, checkpoint))

    def _wait(self) -> Iterator[WatchEvent]:
        """Wait until a process ends, or the next scan is due."""
        if not self.tasks:
            is_ending = self.ends_at is not None
            time.sleep(min(self.options.interval_s, _SCAN_S if is_ending else _NEVER))
            return
        self.tasks[0].job.wait(self.options.interval_s)
        for task in [*self.tasks]:
            if (code := task.job.wait(0)) is not None:
                seconds = time.monotonic() - task.began
                self.tasks.remove(task)
                refresh(task.event.out)
                event: WatchEvent | None
                if task.checkpoint is None:
                    event = self._command_ended(task, code)
                else:
                    event = self._export_ended(task, task.checkpoint, code)
                task.job.end()
                if event is not None:
                    yield replace(event, seconds=seconds)

    def _export_ended(self, task: _Task, checkpoint: RunCheckpoint, code: int) -> WatchEvent | None:
        """Return what happened; ``None`` if the next scan shows it."""
        event, name, before = task.event, checkpoint.name, task.before
        result = result_of(task.job, code, checkpoint.folder.parent, self.run)
        if (error := result.error) is None:
            self._write_made(name, checkpoint.mark)
            release(checkpoint.links)
            return replace(event, warnings=result.warnings)
        was_begun = before is not None and before.state is StampState.BEGUN
        if error.kind == NO_ANSWER or was_begun:
            is_published = digest_of_manifest(event.out) not in ("", task.stamp.manifest)
            if is_published or is_being_written(event.out):
                return None  # by this process, or by one that a killed watch has started
        if before is not None and not was_begun:
            self._write_stamp(name, before)
        else:  # an export that appears later is not this watch's
            with suppress(OSError):
                remove(self.outs / OWN_FOLDER / "stamps" / f"{name}.json")
        if not exists(checkpoint.tag_dir):
            self.reported.add((name, _LOST.reason))
            return replace(event, event=EventKind.LOST, why=_LOST.reason)
        try:
            check_as_seen(checkpoint.folder, checkpoint.mark, follow=self.scanner.boundary.follow)
        except CheckpointError:
            why = "the run saved it again; it is exported once it is complete"
            return replace(event, event=EventKind.CHANGED, why=why)
        is_killed = code < 0 or code == _TERMINATED
        may_succeed = is_killed or error.code == OutputError.exit_code
        return self._failed(event, checkpoint, error, may_succeed=may_succeed)

    def _failed(
        self, event: WatchEvent, checkpoint: RunCheckpoint, error: ErrorInfo, *, may_succeed: bool
    ) -> WatchEvent:
        until = time.monotonic() + _RETRY_S if may_succeed else _NEVER
        self.failed[checkpoint.name] = checkpoint.mark, until
        return replace(event, event=EventKind.FAILED, failure=error)

    def _write_made(self, name: str, mark: str) -> None:
        self.has_exported = True
        state = StampState.OWED if self.command else StampState.EXPORTED
        manifest = digest_of_manifest(self.outs / name)
        self.reported.add((name, f"exported {manifest}"))
        self._write_stamp(name, Stamp(self.seen.run, mark, manifest, state))

    def _write_stamp(self, name: str, stamp: Stamp) -> None:
        with suppress(OSError):  # on a full disk, the next scan finds the old one and tries again
            write_stamp(self.outs, name, stamp)

    def _command_ended(self, task: _Task, code: int) -> WatchEvent:
        if code:
            return self._command_failed(task.event, task.stamp, f"ended with code {code}")
        self._write_stamp(task.event.checkpoint, changed(task.stamp, state=StampState.RAN))
        return task.event

    def _command_failed(self, event: WatchEvent, stamp: Stamp, how: str) -> WatchEvent:
        self.failed_then[event.checkpoint] = stamp.manifest
        message = f"the --then command {how}; it runs again when the watch is started again"
        failure = ErrorInfo(OutputError.exit_code, "command", None, message, "")
        return replace(event, event=EventKind.COMMAND_FAILED, failure=failure)

    def _is_done(self) -> bool:
        """Whether nothing is left; the last checkpoint gets the time to settle."""
        decided, seen = self.decided.checkpoints, self.seen
        open_verdicts = {one.verdict for one in (*decided.values(), *self.decided.exports.values())}
        if not self.last_scans or self.tasks or open_verdicts & {Verdict.EXPORT, Verdict.FINISH}:
            return False
        waiting = [seen.checkpoints[n] for n, one in decided.items() if one.verdict is Verdict.WAIT]
        if any(one.name in seen.busy for one in waiting):
            return False
        is_settling = any(seen.now_ns - one.changed_ns < _SETTLE_S * 1e9 for one in waiting)
        has_time = self.ends_at is not None and time.monotonic() < self.ends_at
        return not waiting or (self.last_scans > 1 and not (is_settling and has_time))

    def _is_at_work(self, name: str) -> bool:
        return any(task.event.checkpoint == name for task in self.tasks)

    def _is_news(self, name: str, reason: str) -> bool:
        is_new = (name, reason) not in self.reported
        self.reported.add((name, reason))
        return is_new

    def _event(
        self,
        event: EventKind,
        name: str,
        step: int | None,
        *,
        why: str = "",
        failure: ErrorInfo | None = None,
    ) -> WatchEvent:
        return WatchEvent(event, name, step, self.outs / name, failure=failure, why=why)


def _check_folders(run: Path, outs: Path, *, once: bool) -> None:
    """Raise if ``run`` is no run, or ``outs`` is in it or contains checkpoints itself.

    Raises:
        CheckpointError: ``run`` cannot be read.
        OutputError: ``outs`` cannot be read.
        NotACheckpointError: ``run`` does not exist, and it is scanned once.
        UsageError: they are not what they should be.
    """
    with reading(run):
        is_one = exists(run) and is_tag_dir(run)
        if exists(run) and not is_one and len(tags := list_tags(run)) == 1:
            location = locate(run, tags[0])
            is_one = not location.keeps_runs and is_one_checkpoint(location)
    if is_one:
        raise UsageError(
            "is one checkpoint of a run",
            path=run,
            expected="the run's folder",
            hint="Watch the folder above, or export only this checkpoint: zexport consolidate "
            f"{shell_word(run)} OUT",
        )
    if real_path(outs).is_relative_to(real_path(run)):
        hint = "Choose a folder outside of the run"
        raise UsageError("is in the run, and watch writes nothing there", path=outs, hint=hint)
    with writing(outs):
        is_swapped = is_folder(outs) and not exists(outs / OWN_FOLDER) and is_run(outs)
    if is_swapped:
        hint = "Pass the run's folder first, then a folder for exports"
        raise UsageError("contains checkpoints, not exports", path=outs, hint=hint)
    if once and not exists(run):
        hint = "Check the path. Without --once, watch waits for it"
        raise NotACheckpointError("does not exist", path=run, hint=hint)


@contextmanager
def _locked(outs: Path) -> Iterator[None]:
    """Keep other watches from exporting to a folder; finish what a killed one was removing.

    Raises:
        OutputError: another watch does, or the folder cannot be written.
    """
    own = outs / OWN_FOLDER
    with writing(own):
        make_folder(own)
    with ExitStack() as stack:
        if is_local(own):  # buckets have no locks; the manifest is written only if there is none
            reason = "another watch exports to this folder"
            stack.enter_context(locked_file(own / "lock", outs, reason))
        _finish_removals(outs)
        yield


def _finish_removals(outs: Path) -> None:
    own = outs / OWN_FOLDER
    with writing(own):
        refresh(own)
        release(own / "unfinished")
        for away in matching(own, "removed-*"):
            out = outs / away.name.removeprefix("removed-")
            if not is_local(out) and exists(out) and not is_file(out / MANIFEST_NAME):
                remove(out)
            remove(away)
