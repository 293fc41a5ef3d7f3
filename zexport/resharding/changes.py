"""What changes for the run that goes on: the rows of its updates, and what its configuration says.

DeepSpeed's loading puts the optimizer's settings of the checkpoint in the place of the run's own.
Source: DeepSpeed 0.19, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` (``load_state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from zexport.facts.statements import Statement, judge
from zexport.facts.training import TrainingFact
from zexport.resharding.state import Group
from zexport.train.options import told_of_keys

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "amsgrad")
_FIRST = {"lr": "initial_lr"}
"""What a group has of a setting beside its present value."""

_CHANGING = {"gradient_clipping": 0, "prescale_gradients": 0, "gradient_predivide_factor": 1}
"""What changes an update and is read from the configuration alone, with what changes none."""
_SWITCHED = ("progressive_layer_drop", "curriculum_learning")
"""Sections that change what an update is made of, where they are switched on."""

_AUTO, _NOTHING = "auto", "nothing"
_GIVEN, _TRAINED = "--ds-config", "the checkpoint"


_Config = Mapping[str, object]


def told_of_given(
    given: _Config,
    source: _Config,
    groups: Iterable[Group],
    *,
    is_whole: bool,
) -> Iterator[tuple[bool, str]]:
    """What to know of a given configuration, in sentences, each with whether it is a warning.

    ``source`` is the checkpoint's own, ``groups`` are the optimizer's as the checkpoint holds them.
    ``is_whole`` says that nobody adds to it what it leaves out, as frameworks do.
    """
    recorded = [one.settings.values for one in groups if one.settings is not None]
    lacking = _NOTHING if is_whole else None
    judged = judge(_statements(given, source, recorded, lacking), None)
    yield from ((True, text) for text in (*judged.warnings, *told_of_keys(given, source)))
    yield from ((False, text) for text in judged.notes)


def _statements(
    given: _Config, source: _Config, groups: Sequence[Mapping[Any, object]], lacking: str | None
) -> Iterator[Statement]:
    """What both say of optimizer and schedule; ``lacking`` is what leaving something out says."""
    yield from _of_classes(given, source, lacking)
    yield from _of_schedule(given, source, lacking)
    for key, neutral in _CHANGING.items():
        for by, config, default in ((_TRAINED, source, _NOTHING), (_GIVEN, given, lacking)):
            value = _plain(config[key]) if config.get(key) is not None else default
            told = _NOTHING if value == neutral else value
            yield Statement(TrainingFact.NEXT_UPDATES, told, by, key)
    for key in _SWITCHED:
        for by, config, default in ((_TRAINED, source, _NOTHING), (_GIVEN, given, lacking)):
            is_on = _section(config, key).get("enabled") is True
            told = "on" if is_on else _NOTHING if key in config else default
            yield Statement(TrainingFact.NEXT_UPDATES, told, by, key)
    for by, config in ((_TRAINED, source), (_GIVEN, given)):
        yield Statement(TrainingFact.NEXT_SETTINGS, _scale(config), by, "loss_scale")
    asked = _section(_section(given, "optimizer"), "params")
    recorded = _section(_section(source, "optimizer"), "params")
    for key in _SETTINGS:
        known = [one.get(name) for one in groups for name in (key, _FIRST.get(key, key))]
        values = [one for one in map(_plain, (*known, recorded.get(key))) if one is not None]
        if values:
            yield Statement(TrainingFact.NEXT_SETTINGS, list(dict.fromkeys(values)), _TRAINED, key)
            yield Statement(TrainingFact.NEXT_SETTINGS, _plain(asked.get(key)), _GIVEN, key)


def _scale(config: _Config) -> object:
    """The scale of the loss; nothing where that is not told.

    Source: DeepSpeed 0.19, ``runtime/zero/stage3.py`` (``load_state_dict``: the scaler of the files
    takes the place of the configuration's) and ``runtime/precision_config.py`` (0 is dynamic).
    """
    half = _section(config, "fp16")
    value = _plain(half.get("loss_scale", 0)) if half.get("enabled") is True else None
    return "dynamic" if value == 0 else value


def _of_classes(given: _Config, source: _Config, lacking: str | None) -> Iterator[Statement]:
    """The optimizer and the scheduler; without one DeepSpeed builds none, where a script may."""
    for fact, section, without in (
        (TrainingFact.NEXT_OPTIMIZER, "optimizer", None),
        (TrainingFact.NEXT_SCHEDULER, "scheduler", _NOTHING),
    ):
        trained = _section(source, section).get("type", without)
        named = _section(given, section).get("type", given.get(section, lacking))
        for by, value in ((_TRAINED, trained), (_GIVEN, named)) if trained else ():
            is_told = isinstance(value, str) and value != _AUTO
            yield Statement(fact, str(value).lower() if is_told else None, by)


def _of_schedule(given: _Config, source: _Config, lacking: str | None) -> Iterator[Statement]:
    """The numbers of a scheduler, of which its state has none but the step.

    Source: DeepSpeed 0.19, ``runtime/lr_schedules.py`` (``state_dict`` of ``WarmupLR``).
    """
    trained, named = (_section(config, "scheduler") for config in (source, given))
    if not trained or str(trained.get("type")).lower() != str(named.get("type")).lower():
        return
    own, other = (_section(one, "params") for one in (trained, named))
    for key in [*own, *(key for key in other if key not in own)]:
        yield Statement(TrainingFact.NEXT_SCHEDULE, _told(own.get(key, _NOTHING)), _TRAINED, key)
        yield Statement(TrainingFact.NEXT_SCHEDULE, _told(other.get(key, lacking)), _GIVEN, key)


def _told(value: object) -> object:
    """A number, or a word; nothing for ``auto``."""
    return value if isinstance(value, str) and value != _AUTO else _plain(value)


def _section(config: _Config, name: str) -> _Config:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _plain(value: object) -> object:
    """A number, or numbers in a line; nothing for what is neither, such as ``auto``."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return float(value) if isinstance(value, int | float) else None


class Batch(Struct, frozen=True):
    """The rows of one update: ranks times rows of a micro-batch times accumulated micro-batches.

    Under sequence parallelism (Ulysses) so many ranks as ``sequence`` says share the same rows.
    """

    ranks: int
    micro: int
    accumulation: int
    sequence: int = 1

    @property
    def rows(self) -> int:
        """Of all ranks together."""
        return self.ranks // self.sequence * self.micro * self.accumulation

    def __str__(self) -> str:
        """The product, as people write it."""
        shared = f" ({self.sequence:,} to a sequence)" if self.sequence > 1 else ""
        return (
            f"{self.ranks:,} rank{'s' * (self.ranks != 1)}{shared} x micro-batch {self.micro:,} "
            f"x accumulation {self.accumulation:,} = {self.rows:,} rows"
        )


def batch_of(config: Mapping[str, object], ranks: int, source: Batch | None = None) -> Batch | None:
    """The batch of a DeepSpeed configuration, or ``None`` where it does not say.

    As many ranks share a sequence as it says, or did in the ``source``, if that can be. Source:
    DeepSpeed 0.19.8, ``runtime/config.py`` (``_set_batch_related_parameters``): what is not given
    follows from what is, and accumulation is else 1.
    """
    whole, micro, accumulation = _numbers(config)
    sequence = _sequence(config, ranks, source)
    owners = ranks // sequence
    if micro is None and whole is not None:
        micro = whole // (owners * (accumulation or 1))
    if accumulation is None and micro and whole is not None:
        accumulation = whole // (owners * micro)
    return Batch(ranks, micro, accumulation or 1, sequence) if micro else None


def _numbers(config: Mapping[str, object]) -> tuple[int | None, int | None, int | None]:
    """Rows of an update, rows of a micro-batch and accumulation, as far as they are given."""
    return (
        _count(config.get("train_batch_size")),
        _count(config.get("train_micro_batch_size_per_gpu")),
        _count(config.get("gradient_accumulation_steps")),
    )


def _sequence(config: Mapping[str, object], ranks: int, source: Batch | None) -> int:
    """How many ranks share a sequence: so many as are told, if they divide the ranks.

    Accelerate 1.15 gives all three numbers alone, which fit for one size. Source: DeepSpeed 0.19.8,
    ``runtime/config.py`` (``world_size``) and ``__init__.py``: where both sizes are given, it makes
    groups of its own, and its files are of the data-parallel ranks alone.
    """
    whole, micro, accumulation = _numbers(config)
    told = _count(config.get("sequence_parallel_size"))
    if "data_parallel_size" in config:
        told = 1
    elif source is not None:
        told = told or source.sequence
    elif told is None and whole and micro and accumulation:
        told, rest = divmod(ranks * micro * accumulation, whole)
        told = 1 if rest else told
    return told if told and ranks % told == 0 else 1


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def told_of_batch(
    source: Batch | None, ranks: int, given: _Config | None
) -> Iterator[tuple[bool, str]]:
    """What to do about the batch, in sentences, each with whether it is a warning.

    Source: DeepSpeed 0.19.8, ``runtime/config.py`` (``_batch_assertion``).
    """
    target = batch_of(given or {}, ranks, source)
    whole = _count((given or {}).get("train_batch_size"))
    if target is not None and whole not in (None, target.rows):
        yield True, f"--ds-config does not start: train_batch_size is {whole:,}, and {target}"
        return
    if source is None:
        if target is None:
            yield (
                False,
                (
                    "the batch size is not recorded: an update has as many rows as before "
                    "where ranks x micro-batch x accumulation is as before"
                ),
            )
        return
    if target is not None:
        if target.rows != source.rows:
            yield True, f"an update changes from {source} to {target} by --ds-config"
        return
    if source.ranks != ranks:
        yield False, f"an update was {source}; {_kept(source, ranks)}"


def _kept(source: Batch, ranks: int) -> str:
    """How ``ranks`` make an update of as many rows."""
    sequence = source.sequence if ranks % source.sequence == 0 else 1
    share, rest = divmod(source.rows, ranks // sequence)
    if rest:
        near = Batch(ranks, source.micro, max(1, round(share / source.micro)), sequence)
        return f"{ranks:,} ranks cannot share that evenly: near it is {near}"
    micro = next(rows for rows in range(min(source.micro, share), 0, -1) if share % rows == 0)
    return f"keep it by {Batch(ranks, micro, share // micro, sequence)}"
