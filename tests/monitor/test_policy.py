"""Decisions of a watch: a table of what must never be removed, and random snapshots."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from zexport import WatchOptions
from zexport.monitor.policy import Decisions, Verdict, decide
from zexport.monitor.snapshot import Export, RunCheckpoint, Snapshot, Stamp, StampState
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


@pytest.mark.parametrize(
    ("protect", "policy"),
    [
        (lambda seen: replace(seen, stamps={}), KEEP),
        (lambda seen: _stamped(seen, run="/other"), KEEP),
        (lambda seen: _stamped(seen, manifest="of a hand-made export"), KEEP),
        (lambda seen: _stamped(seen, state=StampState.BEGUN, manifest=""), KEEP),
        (lambda seen: _stamped(seen, state=StampState.OWED), KEEP),
        (lambda seen: _stamped(seen, state=StampState.OWED), THEN),
        (lambda seen: _exported(seen, edited="config.json was changed"), KEEP),
        (lambda seen: _exported(seen, link="best"), KEEP),
        (lambda seen: replace(seen, best=frozenset({OLDEST})), KEEP),
        (lambda seen: replace(seen, busy=frozenset({OLDEST})), KEEP),
        (lambda seen: _exported(seen, step=500), KEEP),
        (lambda seen: _exported(seen, sources={"rank_0.pt": (10, NOW)}), KEEP),
        (lambda seen: seen, WatchOptions()),
        (lambda seen: seen, WatchOptions(keep=4)),
    ],
    ids=[
        *("no stamp", "stamp of another run", "replaced by hand", "begun", "then owed"),
        *("then owed and given", "edited", "link", "best", "being written", "highest step"),
        *("newest by time", "no --keep", "few enough"),
    ],
)
def test_protected_export_is_never_removed(protect, policy) -> None:  # type: ignore[no-untyped-def]
    seen = protect(_snapshot(*FOUR))
    assert _decide(seen, policy).exports[OLDEST].verdict is not Verdict.REMOVE


def _stamped(seen: Snapshot, **changes: object) -> Snapshot:
    return replace(seen, stamps={**seen.stamps, OLDEST: replace(seen.stamps[OLDEST], **changes)})


def _exported(seen: Snapshot, **changes: object) -> Snapshot:
    return replace(seen, exports={**seen.exports, OLDEST: replace(seen.exports[OLDEST], **changes)})


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (None, Verdict.EXPORT),
        (StampState.BEGUN, Verdict.EXPORT),
        (StampState.EXPORTED, Verdict.EXPORT),
        (StampState.OWED, Verdict.EXPORT),
        (StampState.RAN, Verdict.SKIP),
        (StampState.REMOVED, Verdict.SKIP),
    ],
)
def test_export_that_is_gone_is_made_again_unless_that_was_meant(
    state: StampState | None, verdict: Verdict
) -> None:
    (one,) = FOUR[:1]
    seen = replace(
        _snapshot(one), exports={}, stamps={one.name: _stamp(one, state)} if state else {}
    )
    assert _decide(seen, WatchOptions()).checkpoints[one.name].verdict is verdict
    saved_again = replace(seen, checkpoints={one.name: _checkpoint(100, saved=101)})
    decided = _decide(saved_again, WatchOptions()).checkpoints[one.name]
    assert decided.verdict is Verdict.EXPORT


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("edited", ["", "config.json was changed"])
def test_only_its_own_unedited_export_is_replaced(is_own: bool, edited: str) -> None:
    one = FOUR[0]
    seen = _exported(_snapshot(one), edited=edited)
    seen = replace(seen, checkpoints={one.name: _checkpoint(100, saved=101)})
    decided = _decide(seen if is_own else replace(seen, stamps={}), WatchOptions())
    found = decided.checkpoints[one.name]
    assert (found.verdict is Verdict.EXPORT) == (is_own and not edited) == (not found.is_problem)


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
