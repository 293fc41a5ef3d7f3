"""Which checkpoints are a run's newest: what is never removed, nor passed over, for another."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zexport.checkpoint.resolve import name_pattern


class Age(Struct, frozen=True):
    """How old a checkpoint is: the step that it records, and when the last of it was written."""

    name: str
    step: int | None
    written_ns: int


def newest(ages: Iterable[Age], count: int) -> set[str]:
    """The names of so many of the newest, by when they were written, and by their steps.

    After a restart from an older step, or in a copy of a run, the two differ, and both may be what
    is meant. Models beside one another, such as an actor and a critic, are no ages of one run, and
    a training may go on from its ``checkpoint-N`` alone, though the tag that was saved at its end
    is newer: each kind of name has newest ones of its own.
    """
    kinds: dict[str, list[Age]] = {}
    for one in ages:
        kinds.setdefault(name_pattern(one.name), []).append(one)
    found = set[str]()
    for kind in kinds.values():
        by_time = sorted(kind, key=lambda one: one.written_ns)
        by_step = sorted(by_time, key=lambda one: -1 if one.step is None else one.step)
        found.update(one.name for one in (*by_time[-count:], *by_step[-count:]))
    return found
