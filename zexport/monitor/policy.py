"""Decide what to export, wait for, skip, keep or delete: a pure function with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from zexport.errors import UsageError
from zexport.monitor.snapshot import (
    Export,
    RunCheckpoint,
    Snapshot,
    StampState,
    model_of,
)
from zexport.options import AdapterMode, ExportDType, settle
from zexport.report.json import ErrorInfo
from zexport.storage.json import JsonObject, JsonReport, Natural
from zexport.text import printable

UNCHANGED_S = 600
"""A checkpoint that has not changed for so long is exported: the error names what is missing."""

_SETTLED_S = 60
"""A complete checkpoint that has not changed for so long is not being written."""

_MOST = 1_000_000_000
_NOT_COMPARED = frozenset({"check", "hub_layout"})
"""Recorded options that do not change an export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Options of a watch.

    Attributes:
        once: scan once and exit.
        then: a command to run after each export, without a shell; the word ``{}`` is its folder,
            the word ``{step}`` its step.
        keep: number of newest exports of each model to keep; ``None`` keeps all.
        every: export checkpoints of steps divisible by this.
        newest_only: skip a checkpoint if a newer one is complete.
        interval_s: seconds between two scans.
    """

    once: bool = False
    then: str = ""
    keep: int | None = None
    every: int = 1
    newest_only: bool = False
    interval_s: float = 15.0

    def __post_init__(self) -> None:
        settle(self)
        for name, value, least in (
            ("keep", self.keep, 1),
            ("every", self.every, 1),
            ("interval_s", self.interval_s, 0.05),
        ):
            if value is not None and not least <= value <= _MOST:  # nan, too
                raise UsageError(f"{name} cannot be {value}", expected=f"{least} to {_MOST:,}")


class EventKind(StrEnum):
    """What happened to a checkpoint, or to its export."""

    EXPORTED = "exported"
    FAILED = "failed"
    LOST = "lost"
    """The run deleted it before its export, or its disk is full."""
    CHANGED = "changed"
    """The run saved it again during its export, which was discarded."""
    SKIPPED = "skipped"
    WAITING = "waiting"
    """It is incomplete, and the watch ends."""
    RAN = "ran"
    """The ``--then`` command succeeded."""
    COMMAND_FAILED = "command-failed"
    REMOVED = "removed"
    """``--keep`` removed the export."""
    LEFT = "left"
    """``--keep`` would remove the export, but it is protected."""
    NOT_AGAIN = "not-again"
    """It was exported before, with other options."""


@dataclass(frozen=True, slots=True, repr=False)
class WatchEvent(JsonReport):
    """One event of a watch.

    Attributes:
        event: what happened.
        checkpoint: name of the checkpoint.
        step: its step.
        out: folder of its export.
        seconds: how long it took.
        warnings: warnings of the export.
        failure: why there is no export, or what is wrong.
        why: the reason, if it is no error.
    """

    event: EventKind
    checkpoint: str
    step: Natural | None
    out: Path
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    failure: ErrorInfo | None = None
    why: str = ""

    @property
    def code(self) -> int:
        """The exit code of a watch with no worse event."""
        return 0 if self.failure is None else self.failure.code


class Verdict(StrEnum):
    """What to do with a checkpoint or an export."""

    EXPORT = "export"
    SKIP = "skip"
    WAIT = "wait"
    KEEP = "keep"
    FINISH = "finish"
    """Record an export that another watch began, or run the ``--then`` command."""
    REMOVE = "remove"


class Decision(Struct, frozen=True):
    """A verdict with its reason.

    Attributes:
        verdict: what to do.
        reason: why.
        event: kind of event that reports the reason, once; ``None`` to report nothing.
        is_problem: whether the user must act: the event is a failure.
    """

    verdict: Verdict
    reason: str
    event: EventKind | None = None
    is_problem: bool = False


class Decisions(Struct, frozen=True):
    """Decisions on all checkpoints, oldest first, and on all exports, by name."""

    checkpoints: dict[str, Decision]
    exports: dict[str, Decision]


def decide(
    seen: Snapshot,
    policy: WatchOptions,
    options: JsonObject,
    failed: Mapping[str, str],
    failed_then: Mapping[str, str],
) -> Decisions:
    """Return what to do with each checkpoint and each export.

    Args:
        seen: what is there.
        policy: what the user wants.
        options: recorded options of new exports.
        failed: marks of checkpoints whose export failed, by name.
        failed_then: digests of manifests of exports whose command failed, by name.
    """
    own = {name: one for name, one in seen.exports.items() if _is_own(seen, one)}
    decided = {
        name: _on_checkpoint(seen, policy, options, one, failed)
        for name, one in seen.checkpoints.items()
    }
    _skip_older(seen, policy, own, decided)
    kept = set(own) if policy.keep is None else newest(own.values(), policy.keep)
    exports = {
        name: _on_export(seen, policy, one, is_kept=name in kept, failed_then=failed_then)
        for name, one in seen.exports.items()
    }
    return Decisions(decided, exports)


def _on_checkpoint(
    seen: Snapshot,
    policy: WatchOptions,
    options: JsonObject,
    checkpoint: RunCheckpoint,
    failed: Mapping[str, str],
) -> Decision:
    """Return the decision on one checkpoint, without regard to newer ones."""
    export, left = seen.exports.get(checkpoint.name), EventKind.FAILED
    if why := _done(seen, checkpoint):
        if others := _other_options(export, options):
            return Decision(Verdict.SKIP, f"exported before with {others}", EventKind.NOT_AGAIN)
        return Decision(Verdict.SKIP, why)
    if (checkpoint.step or 0) % policy.every:
        return Decision(Verdict.SKIP, f"--every {policy.every} excludes it")
    if checkpoint.name in seen.busy:
        return Decision(Verdict.WAIT, "another process is writing its export")
    if why := waits_for(checkpoint, seen.now_ns):
        return Decision(Verdict.WAIT, why)
    if failed.get(checkpoint.name) == checkpoint.mark:
        return Decision(Verdict.SKIP, "its export failed, and its files are unchanged")
    if export is not None and not _is_own(seen, export):
        why = "contains an export of another checkpoint that this watch did not make"
        return Decision(Verdict.SKIP, why, left, is_problem=True)
    if export is not None and export.edited:
        why = f"was changed since, so it is not replaced: {printable(export.edited)}"
        return Decision(Verdict.SKIP, why, left, is_problem=True)
    saved = "the Trainer has saved it" if checkpoint.is_trainers else "complete"
    return Decision(Verdict.EXPORT, checkpoint.missing or saved)


def _skip_older(
    seen: Snapshot,
    policy: WatchOptions,
    own: Mapping[str, Export],
    decided: dict[str, Decision],
) -> None:
    """Skip checkpoints that newer ones make unnecessary."""
    in_turn = {
        n: one for n, one in seen.checkpoints.items() if decided[n].verdict is Verdict.EXPORT
    }
    done: dict[str, RunCheckpoint | Export] = {**own}
    done |= {name: one for name, one in seen.checkpoints.items() if _done(seen, one)}
    for name, one in in_turn.items():
        by_then = {**done, name: one}
        if policy.newest_only and name not in newest({**in_turn, **by_then}.values(), 1):
            event = EventKind.SKIPPED if name in newest(by_then.values(), 1) else None
            decided[name] = Decision(Verdict.SKIP, "a newer checkpoint is complete", event)
        elif (
            policy.keep is not None
            and name not in newest(by_then.values(), policy.keep)
            and name not in seen.best
        ):
            decided[name] = Decision(Verdict.SKIP, f"--keep {policy.keep} would remove its export")


def _on_export(
    seen: Snapshot,
    policy: WatchOptions,
    export: Export,
    *,
    is_kept: bool,
    failed_then: Mapping[str, str],
) -> Decision:
    name, stamp, left = export.name, seen.stamps.get(export.name), EventKind.LEFT
    is_owed = stamp is not None and stamp.state is StampState.OWED
    if not _is_own(seen, export):
        if _is_adoptable(seen, export):
            return Decision(Verdict.FINISH, "an earlier watch made it")
        return Decision(Verdict.KEEP, "this watch did not make it")
    if is_owed and policy.then and failed_then.get(name) != export.manifest:
        return Decision(Verdict.FINISH, "its --then command has not run")
    if is_kept:
        return Decision(Verdict.KEEP, "it is one of the newest")
    if is_owed:
        event = None if policy.then else left
        return Decision(Verdict.KEEP, "its --then command has not succeeded", event)
    if name in seen.best:
        return Decision(Verdict.KEEP, "it is the best checkpoint of the run", left)
    if export.link:
        return Decision(Verdict.KEEP, f"the link `{printable(export.link)}` leads to it", left)
    if export.edited:
        why = f"was changed since, so it is not removed: {printable(export.edited)}"
        return Decision(Verdict.KEEP, why, left, is_problem=True)
    if name in seen.busy:
        return Decision(Verdict.KEEP, "another process is writing it")
    return Decision(Verdict.REMOVE, f"--keep {policy.keep}: newer exports exist")


def waits_for(checkpoint: RunCheckpoint, now_ns: int) -> str:
    """Return why a checkpoint is not exported yet; empty if it is complete."""
    age_s = (now_ns - checkpoint.changed_ns) / 1e9
    if age_s > UNCHANGED_S or checkpoint.links is not None:
        return ""
    if checkpoint.missing:
        return checkpoint.missing
    if checkpoint.is_trainers or checkpoint.is_still or age_s > _SETTLED_S:
        return ""
    return "files changed in the last minute"


def newest(found: Iterable[RunCheckpoint | Export], count: int) -> set[str]:
    """Return the names of the ``count`` newest of each model by step, and of those by time.

    After a restart from an older step, and in a copied run, the two differ.
    """
    models: dict[str, list[RunCheckpoint | Export]] = {}
    for one in found:
        models.setdefault(model_of(one.name, {one.step}), []).append(one)
    names = set[str]()
    for alike in models.values():
        by_time = sorted(alike, key=lambda one: (one.written_ns, one.name))
        by_step = sorted(by_time, key=lambda one: -1 if one.step is None else one.step)
        names.update(one.name for one in (*by_time[-count:], *by_step[-count:]))
    return names


def _is_own(seen: Snapshot, export: Export) -> bool:
    """Whether a watch of this run made the export that is there."""
    stamp = seen.stamps.get(export.name)
    return stamp is not None and stamp.run == seen.run and stamp.manifest == export.manifest != ""


def _done(seen: Snapshot, checkpoint: RunCheckpoint) -> str:
    """Return why a checkpoint needs no export; empty if it needs one."""
    export, stamp = seen.exports.get(checkpoint.name), seen.stamps.get(checkpoint.name)
    if export is not None:
        is_stamped = stamp is not None and stamp.state is not StampState.BEGUN
        marks = stamp and (stamp.manifest, stamp.mark)
        is_same = is_stamped and marks == (export.manifest, checkpoint.mark)
        return "exported" if is_same or export.is_of(checkpoint) else ""
    if stamp is None or stamp.mark != checkpoint.mark:
        return ""
    return {
        StampState.RAN: "exported, and its --then command succeeded",
        StampState.REMOVED: "--keep removed its export",
    }.get(stamp.state, "")


def _is_adoptable(seen: Snapshot, export: Export) -> bool:
    """Whether a killed watch, which leaves the stamp of what it has begun, made an export."""
    stamp, checkpoint = seen.stamps.get(export.name), seen.checkpoints.get(export.name)
    if stamp is None or stamp.state is not StampState.BEGUN or stamp.run != seen.run:
        return False
    is_other = stamp.manifest == export.manifest or export.edited
    return not is_other and (checkpoint is None or export.is_of(checkpoint))


_DEFAULT_DTYPES = (ExportDType.FP32.value, ExportDType.AUTO.value)
"""What a manifest records if no dtype was asked for: the second for FSDP."""


def _other_options(export: Export | None, options: JsonObject) -> str:
    """Return the recorded options that differ from those of a new export, as text."""
    if export is None or not export.options:
        return ""
    keys = (export.options.keys() | options.keys()) - _NOT_COMPARED
    if options.get("adapter") == AdapterMode.AUTO:  # the manifest has what that meant
        keys -= {"adapter"}
    if options.get("dtype") is None and export.options.get("dtype") in _DEFAULT_DTYPES:
        keys -= {"dtype"}
    other = [key for key in sorted(keys) if export.options.get(key) != options.get(key)]
    return ", ".join(f"{key} {export.options.get(key)}" for key in other)
