"""What a given configuration says otherwise than the training did, and what comes of it.

DeepSpeed's loading puts the optimizer's settings of the checkpoint in the place of the run's own.
Source: DeepSpeed 0.19, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` (``load_state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zexport.facts.statements import Statement, judge
from zexport.facts.table import Fact
from zexport.resume.batch import contradiction
from zexport.resume.state import Group
from zexport.train.ds_keys import told_of_keys

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")
_FIRST = {"lr": "initial_lr"}
"""What a group has of a setting beside its present value."""

_GIVEN, _TRAINED = "--ds-config", "the checkpoint"


_Config = Mapping[str, object]


def told_of_given(
    given: _Config, source: _Config, groups: Iterable[Group], ranks: int | None
) -> Iterator[tuple[bool, str]]:
    """What to know of a given configuration, in sentences, each with whether it is a warning.

    Args:
        given: the configuration.
        source: the checkpoint's own.
        groups: the optimizer's groups, as the checkpoint holds them.
        ranks: how many are to load it, where that is one number.
    """
    recorded = [one.settings.values for one in groups if one.settings is not None]
    judged = judge(_statements(given, source, recorded), None)
    yield from ((True, text) for text in (*judged.warnings, *told_of_keys(given, source)))
    yield from ((True, text) for text in (contradiction(given, ranks) if ranks else ()))
    yield from ((False, text) for text in judged.notes)


def _statements(
    given: _Config, source: _Config, groups: Sequence[Mapping[Any, object]]
) -> Iterator[Statement]:
    for fact, section in ((Fact.NEXT_OPTIMIZER, "optimizer"), (Fact.NEXT_SCHEDULER, "scheduler")):
        for by, config in ((_TRAINED, source), (_GIVEN, given)):
            named = _section(config, section).get("type")
            yield Statement(fact, named.lower() if isinstance(named, str) else None, by)
    asked = _section(_section(given, "optimizer"), "params")
    recorded = _section(_section(source, "optimizer"), "params")
    for key in _SETTINGS:
        known = [one.get(name) for one in groups for name in (key, _FIRST.get(key, key))]
        values = [one for one in map(_plain, (*known, recorded.get(key))) if one is not None]
        if values:
            yield Statement(Fact.NEXT_SETTINGS, list(dict.fromkeys(values)), _TRAINED, key)
            yield Statement(Fact.NEXT_SETTINGS, _plain(asked.get(key)), _GIVEN, key)


def _section(config: _Config, name: str) -> _Config:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _plain(value: object) -> object:
    """A number, or numbers in a line; nothing for what is neither, such as ``auto``."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return float(value) if isinstance(value, int | float) else None
