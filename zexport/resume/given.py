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
from zexport.train.options import told_of_keys

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")
_FIRST = {"lr": "initial_lr"}
"""What a group has of a setting beside its present value."""

_CHANGING = ("gradient_clipping", "prescale_gradients", "gradient_predivide_factor")
"""What changes an update, and is read from the configuration alone."""

_AUTO, _NOTHING = "auto", "nothing"
_GIVEN, _TRAINED = "--ds-config", "the checkpoint"


_Config = Mapping[str, object]


def told_of_given(
    given: _Config,
    source: _Config,
    groups: Iterable[Group],
    ranks: int | None,
    *,
    is_whole: bool,
) -> Iterator[tuple[bool, str]]:
    """What to know of a given configuration, in sentences, each with whether it is a warning.

    Args:
        given: the configuration.
        source: the checkpoint's own.
        groups: the optimizer's groups, as the checkpoint holds them.
        ranks: how many are to load it, where that is one number.
        is_whole: whether nobody adds to it what it leaves out, as frameworks do.
    """
    recorded = [one.settings.values for one in groups if one.settings is not None]
    lacking = _NOTHING if is_whole else None
    judged = judge(_statements(given, source, recorded, lacking), None)
    yield from ((True, text) for text in (*judged.warnings, *told_of_keys(given, source)))
    yield from ((True, text) for text in (contradiction(given, ranks) if ranks else ()))
    yield from ((False, text) for text in judged.notes)


def _statements(
    given: _Config, source: _Config, groups: Sequence[Mapping[Any, object]], lacking: str | None
) -> Iterator[Statement]:
    """What both say of optimizer and schedule; ``lacking`` is what leaving something out says."""
    for fact, section in ((Fact.NEXT_OPTIMIZER, "optimizer"), (Fact.NEXT_SCHEDULER, "scheduler")):
        trained = _section(source, section).get("type")
        named = _section(given, section).get("type", given.get(section, lacking))
        for by, value in ((_TRAINED, trained), (_GIVEN, named)) if trained else ():
            is_told = isinstance(value, str) and value != _AUTO
            yield Statement(fact, str(value).lower() if is_told else None, by)
    for key in (key for key in _CHANGING if source.get(key)):
        yield Statement(Fact.NEXT_UPDATES, _plain(source.get(key)), _TRAINED, key)
        value = given.get(key, lacking)
        yield Statement(
            Fact.NEXT_UPDATES, value if value == lacking else _plain(value), _GIVEN, key
        )
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
