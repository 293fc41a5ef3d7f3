"""Decisions of a watch: a table of what must never be removed, and random snapshots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from zexport import UsageError, WatchOptions
from zexport.monitor.policy import (
    Decision,
    Decisions,
    EventKind,
    Verdict,
    WatchEvent,
    decide,
)
from zexport.monitor.snapshot import Export, RunCheckpoint, Snapshot, Stamp, StampState
from zexport.report.json import ErrorInfo
from zexport.storage.storage import Version

S = 10**9
NOW = 1_000_000 * S
RUN = "/run"
OPTIONS = {"dtype": "fp32", "adapter": "auto"}


def _checkpoint(step: int, **changes: object) -> RunCheckpoint:
    name = str(changes.pop("name", f"checkpoint-{step}"))
    saved = int(changes.pop("saved", step))  # type: ignore[call-overload]
    files = {"rank_0.pt": Version(10, saved * S)}
    folder = Path(RUN, name)
    made = RunCheckpoint(name, folder, folder / "tag", files, NOW - 100 * S, step)
    return replace(made, **changes)


def _export(checkpoint: RunCheckpoint, **changes: object) -> Export:
    sources = {name: (one.nbytes, one.mtime_ns) for name, one in checkpoint.files.items()}
    made = Export(checkpoint.name, checkpoint.step, sources, dict(OPTIONS), f"m{checkpoint.name}")
    return replace(made, **changes)


def _stamp(checkpoint: RunCheckpoint, state: StampState = StampState.EXPORTED) -> Stamp:
    return Stamp(RUN, checkpoint.mark, f"m{checkpoint.name}", state)


def _snapshot(*checkpoints: RunCheckpoint, exported: int = -1) -> Snapshot:
    """Checkpoints of a run, of which the first are exported, by default all."""
    done = checkpoints[: exported if exported >= 0 else len(checkpoints)]
    return Snapshot(
        run=RUN,
        now_ns=NOW,
        checkpoints={one.name: one for one in checkpoints},
        exports={one.name: _export(one) for one in done},
        stamps={one.name: _stamp(one) for one in done},
    )


def _decide(
    seen: Snapshot, policy: WatchOptions, then_failed: dict[str, str] | None = None
) -> Decisions:
    return decide(seen, policy, OPTIONS, {}, then_failed or {})


FOUR = [_checkpoint(step) for step in (100, 200, 300, 400)]
OLDEST = FOUR[0].name
KEEP = WatchOptions(keep=2)
THEN = WatchOptions(keep=2, then="true")


def test_keep_removes_only_older_exports() -> None:
    decided = _decide(_snapshot(*FOUR), KEEP)
    verdicts = [one.verdict for one in decided.exports.values()]
    assert verdicts == [Verdict.REMOVE, Verdict.REMOVE, Verdict.KEEP, Verdict.KEEP]
    assert {one.verdict for one in decided.checkpoints.values()} == {Verdict.SKIP}


def _stamped(seen: Snapshot, **changes: object) -> Snapshot:
    return replace(seen, stamps={**seen.stamps, OLDEST: replace(seen.stamps[OLDEST], **changes)})


def _exported(seen: Snapshot, **changes: object) -> Snapshot:
    return replace(seen, exports={**seen.exports, OLDEST: replace(seen.exports[OLDEST], **changes)})


def test_random_snapshots_keep_the_promises() -> None:
    chance = Random(0)  # noqa: S311
    removed = 0
    for _ in range(3000):
        seen, policy, failed = _random(chance)
        decided = _decide(seen, policy, failed)
        assert decided.checkpoints.keys() == seen.checkpoints.keys()
        assert decided.exports.keys() == seen.exports.keys()
        own = set()
        for name, export in seen.exports.items():
            stamp = seen.stamps.get(name)
            is_own = stamp is not None and (stamp.run, stamp.manifest) == (RUN, export.manifest)
            own |= {name} if is_own else set()
            if decided.exports[name].verdict is not Verdict.REMOVE:
                continue
            removed += 1
            assert is_own
            assert stamp is not None
            assert stamp.state is not StampState.OWED
            assert policy.keep is not None
            assert not export.edited
            assert not export.link
            assert name not in seen.best | seen.busy
        left = {n for n in own if decided.exports[n].verdict is not Verdict.REMOVE}
        assert len(left) >= min(len(own), policy.keep or len(own))
        for value in ("step", "written_ns"):  # of the newest by either, one stays
            values = {n: getattr(seen.exports[n], value) or 0 for n in own}
            assert not own or any(values[n] == max(values.values()) for n in left)
        for name, one in decided.checkpoints.items():
            export = seen.exports.get(name)
            if one.verdict is Verdict.EXPORT and export is not None:
                assert name in own
                assert not export.edited
    assert removed > 500


def _random(chance: Random) -> tuple[Snapshot, WatchOptions, dict[str, str]]:
    steps = chance.sample(range(100, 2000, 100), chance.randint(1, 8))
    made = [
        _checkpoint(step, saved=chance.choice((step, chance.randint(1, 2000)))) for step in steps
    ]
    seen = _snapshot(*made)
    exports, stamps, checkpoints = {}, {}, dict(seen.checkpoints)
    for one in made:
        if chance.random() < 0.85:
            export = replace(seen.exports[one.name], edited=chance.choice(("", "", "", "x")))
            exports[one.name] = replace(export, link=chance.choice(("", "", "", "best")))
        if chance.random() < 0.85:
            stamp = replace(seen.stamps[one.name], run=chance.choice((RUN, RUN, RUN, "/other")))
            stamp = replace(stamp, state=chance.choice([*StampState]))
            stamps[one.name] = replace(stamp, mark=chance.choice((stamp.mark, stamp.mark, "older")))
        if chance.random() < 0.3:
            checkpoints[one.name] = _checkpoint(one.step or 0, saved=chance.randint(1, 2000))
        if chance.random() < 0.2:
            del checkpoints[one.name]
    seen = replace(
        seen,
        checkpoints=checkpoints,
        exports=exports,
        stamps=stamps,
        busy=frozenset(one.name for one in made if chance.random() < 0.1),
        best=frozenset(one.name for one in made if chance.random() < 0.1),
    )
    policy = WatchOptions(
        keep=chance.choice((None, 1, 2, 3)),
        then=chance.choice(("", "true")),
        newest_only=chance.random() < 0.3,
        every=chance.choice((1, 1, 200)),
    )
    failed = {name: one.manifest for name, one in exports.items() if chance.random() < 0.2}
    return seen, policy, failed


# --- the reason of each decision ---

ONE, NAMED = FOUR[0], frozenset({OLDEST})
FRESH = _checkpoint(100, changed_ns=NOW - 60 * S, folder=Path(RUN), tag_dir=Path(RUN))
PART = replace(ONE, missing="rank 1")
ALL = _snapshot(*FOUR)


def _said(decision: Decision) -> str:
    """Return verdict, ``!`` for a problem, event, and reason."""
    mark = "!" if decision.is_problem else ""
    return f"{decision.verdict}{mark} {decision.event or '-'}: {decision.reason}"


def _one(checkpoint: RunCheckpoint, **changes: object) -> Snapshot:
    return replace(_snapshot(checkpoint, exported=0), **changes)


def _ended(state: StampState) -> Snapshot:
    return _one(ONE, stamps={OLDEST: _stamp(ONE, state)})


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (_one(ONE), "export -: the Trainer has saved it"),
        (_one(replace(FRESH, is_still=True)), "export -: complete"),
        (_one(FRESH), "wait -: files changed in the last minute"),
        (_one(FRESH, now_ns=NOW + 1), "export -: complete"),
        (_one(replace(FRESH, links=Path("links"))), "export -: complete"),
        (_one(PART), "wait -: rank 1"),
        (_one(replace(PART, changed_ns=NOW - 600 * S)), "wait -: rank 1"),
        (_one(replace(PART, changed_ns=NOW - 600 * S - 1)), "export -: rank 1"),
        (_one(ONE, busy=NAMED), "wait -: another process is writing its export"),
        (_snapshot(ONE), "skip -: exported"),
        (replace(_snapshot(ONE), stamps={}), "skip -: exported"),
        (_exported(_snapshot(ONE), sources={}), "skip -: exported"),  # by its stamp
        (
            _exported(replace(_snapshot(ONE), stamps={}), sources={}),
            "skip! failed: contains an export of another checkpoint that this watch did not make",
        ),
        (
            _exported(_stamped(_snapshot(ONE), mark="older"), sources={}, edited="a\nb"),
            "skip! failed: was changed since, so it is not replaced: a\\nb",
        ),
        (
            _exported(_stamped(_snapshot(ONE), manifest="", state=StampState.BEGUN), sources={}),
            "skip! failed: contains an export of another checkpoint that this watch did not make",
        ),
        (_exported(_stamped(_snapshot(ONE), state=StampState.BEGUN), sources={}), "export -: the"),
        (_ended(StampState.RAN), "skip -: exported, and its --then command succeeded"),
        (_ended(StampState.REMOVED), "skip -: --keep removed its export"),
        *((_ended(own), "export -: the Trainer") for own in list(StampState)[:3]),
        (
            _one(_checkpoint(100, saved=101), stamps={OLDEST: _stamp(ONE, StampState.RAN)}),
            "export -: the Trainer has saved it",
        ),
    ],
)
def test_reason_for_each_checkpoint(seen: Snapshot, wanted: str) -> None:
    assert _said(_decide(seen, WatchOptions()).checkpoints[OLDEST]).startswith(wanted)


_BF16 = {"dtype": "bf16", "adapter": "keep", "check": "full", "hub_layout": "v5"}


@pytest.mark.parametrize(
    ("recorded", "asked", "differing"),
    [
        ({}, _BF16, ""),
        (_BF16, {"dtype": "bf16", "adapter": "auto"}, ""),
        (_BF16, {"dtype": "bf16", "adapter": "merge"}, "adapter keep"),
        (_BF16, {"dtype": None, "adapter": "keep"}, "dtype bf16"),
        (_BF16, {"adapter": "x", "base": "y"}, "adapter keep, base None, dtype bf16"),
        ({"dtype": "fp32"}, {"dtype": None}, ""),
        ({"dtype": "auto"}, {}, ""),
        ({"dtype": "fp32"}, {"dtype": "fp16"}, "dtype fp32"),
    ],
)
def test_export_with_other_options_is_named_and_not_made_again(
    recorded: dict[str, object], asked: dict[str, object], differing: str
) -> None:
    seen = _exported(_snapshot(ONE), options=recorded)
    (found,) = decide(seen, WatchOptions(), asked, {}, {}).checkpoints.values()
    assert _said(found) == (
        f"skip not-again: exported before with {differing}" if differing else "skip -: exported"
    )


def test_failed_export_is_retried_once_files_change() -> None:
    for mark, verdict in ((ONE.mark, "skip"), ("older", "export")):
        (found,) = decide(_one(ONE), WatchOptions(), {}, {OLDEST: mark}, {}).checkpoints.values()
        assert found.verdict == verdict


def test_every_excludes_other_steps() -> None:
    seen = _snapshot(*FOUR, replace(FOUR[0], name="unknown", step=None), exported=0)
    found = [*map(_said, _decide(seen, WatchOptions(every=200)).checkpoints.values())]
    assert found[0] == found[2] == "skip -: --every 200 excludes it"
    assert {one[:6] for one in (found[1], *found[3:])} == {"export"}


def test_checkpoints_that_newer_ones_make_unnecessary_are_skipped() -> None:
    def found(seen: Snapshot, policy: WatchOptions) -> list[str]:
        return [_said(one)[:13] for one in _decide(seen, policy).checkpoints.values()]

    newest, export = WatchOptions(newest_only=True), "export -: the"
    waiting = _snapshot(*FOUR[:3], replace(FOUR[3], missing="rank 1"), exported=0)
    assert found(_snapshot(*FOUR, exported=0), newest) == [*["skip skipped:"] * 3, export]
    assert found(waiting, newest) == ["skip skipped:", "skip skipped:", export, "wait -: rank "]
    older = replace(ALL, exports={name: ALL.exports[name] for name in [*ALL.exports][1:]})
    assert (
        _said(_decide(older, newest).checkpoints[OLDEST])
        == "skip -: a newer checkpoint is complete"
    )
    removed = _decide(older, WatchOptions(keep=3)).checkpoints[OLDEST]
    assert _said(removed) == "skip -: --keep 3 would remove its export"
    assert found(older, WatchOptions(keep=4))[0] == export
    assert found(replace(older, best=NAMED), WatchOptions(keep=3))[0] == export
    moved = replace(older, exports={}, stamps={FOUR[3].name: _stamp(FOUR[3], StampState.RAN)})
    assert found(moved, newest) == [*["skip -: a new"] * 3, "skip -: expor"]
    gone = replace(older, checkpoints={OLDEST: ONE})
    assert found(gone, WatchOptions(keep=3)) == ["skip -: --kee"]
    assert found(replace(gone, stamps={}), WatchOptions(keep=3)) == [export]  # not made by us


BEGUN = _stamped(ALL, state=StampState.BEGUN, manifest="")
OWED = _stamped(ALL, state=StampState.OWED)


@pytest.mark.parametrize(
    ("seen", "policy", "wanted"),
    [
        (ALL, KEEP, "remove -: --keep 2: newer exports exist"),
        (_stamped(ALL, run="/other"), KEEP, "keep -: this watch did not make it"),
        (BEGUN, KEEP, "finish -: an earlier watch made it"),
        (replace(BEGUN, checkpoints={}), KEEP, "finish -: an earlier watch made it"),
        (_stamped(BEGUN, run="/other"), KEEP, "keep -: this watch did not make it"),
        (_stamped(ALL, manifest=""), KEEP, "keep -: this watch did not make it"),
        (_exported(BEGUN, edited="x"), KEEP, "keep -: this watch did not make it"),
        (_exported(BEGUN, sources={}), KEEP, "keep -: this watch did not make it"),
        (_exported(BEGUN, manifest=""), KEEP, "keep -: this watch did not make it"),
        (OWED, THEN, "finish -: its --then command has not run"),
        (OWED, KEEP, "keep left: its --then command has not succeeded"),
        (OWED, WatchOptions(keep=4), "keep -: it is one of the newest"),
        (ALL, WatchOptions(), "keep -: it is one of the newest"),
        (_exported(ALL, step=500), KEEP, "keep -: it is one of the newest"),
        (_exported(ALL, sources={"a.pt": (1, NOW)}), KEEP, "keep -: it is one of the newest"),
        (replace(ALL, best=NAMED), KEEP, "keep left: it is the best checkpoint of the run"),
        (_exported(ALL, link="a\nb"), KEEP, "keep left: the link `a\\nb` leads to it"),
        (
            _exported(ALL, edited="a\nb"),
            *(KEEP, "keep! left: was changed since, so it is not removed: a\\nb"),
        ),
        (replace(ALL, busy=NAMED), KEEP, "keep -: another process is writing it"),
    ],
)
def test_reason_for_each_export(seen: Snapshot, policy: WatchOptions, wanted: str) -> None:
    assert _said(_decide(seen, policy).exports[OLDEST]) == wanted


def test_command_that_failed_for_an_export_does_not_run_again() -> None:
    for manifest, verdict in ((f"m{OLDEST}", "keep -"), ("older", "finish -")):
        found = _decide(OWED, THEN, {OLDEST: manifest}).exports[OLDEST]
        assert _said(found).startswith(verdict)


def test_newest_are_counted_for_each_model_by_step_and_by_time() -> None:
    def kept(*made: RunCheckpoint) -> list[str]:
        decided = _decide(_snapshot(*made), WatchOptions(keep=1)).exports
        return [name for name, one in decided.items() if one.verdict is Verdict.KEEP]

    made = [_checkpoint(step, name=f"seed{n}-{step}") for n in (1, 2) for step in (100, 200, 300)]
    assert kept(*made) == ["seed1-300", "seed2-300"]
    again = replace(made[0], files=_checkpoint(0, saved=999).files)  # restarted from an older step
    assert kept(again, *made[1:3]) == ["seed1-100", "seed1-300"]
    old = [replace(made[n], files=_checkpoint(0, saved=9).files) for n in range(3)]
    assert kept(*old, replace(again, name="seed1-x", step=None)) == ["seed1-300", "seed1-x"]
    first, unknown = (_checkpoint(step, name=f"epoch={step}.ckpt") for step in (0, 1))
    assert len(kept(first, replace(unknown, step=None))) == 2


@pytest.mark.parametrize("name", ["keep", "every", "interval_s"])
def test_numbers_of_a_watch_have_limits(name: str) -> None:
    for value in (0, -1, 10**9 + 1, "often", float("nan")):
        with pytest.raises(UsageError, match=f"^{name} cannot be"):
            WatchOptions(**{name: value})  # type: ignore[arg-type]
    for value in (1, 10**9):
        assert getattr(WatchOptions(**{name: value}), name) == value  # type: ignore[arg-type]


def test_event_has_the_exit_code_of_its_failure() -> None:
    event = WatchEvent(EventKind.FAILED, "checkpoint-1", 1, Path("out"))
    failure = ErrorInfo.of(UsageError("problem"))
    assert (event.code, dataclasses.replace(event, failure=failure).code) == (0, 2)
