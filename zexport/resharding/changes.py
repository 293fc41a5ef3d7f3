"""What changes for the resumed run: global batch, and what its DeepSpeed config says.

Loading a checkpoint replaces the run's optimizer settings by the recorded ones.
Source: DeepSpeed 0.19, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` (``load_state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from zexport.checkpoint.state import Group
from zexport.printable import some
from zexport.train.options import told_of_keys

_RESTORED = ("lr", "betas", "eps", "weight_decay", "momentum", "amsgrad")
"""Settings of the optimizer that loading takes from the checkpoint."""

_NEUTRAL = {"gradient_clipping": 0, "prescale_gradients": 0, "gradient_predivide_factor": 1}
"""Config keys that change an update, with the values that do not."""

_SWITCHES = ("progressive_layer_drop", "curriculum_learning")
"""Config sections that change an update if they are enabled."""

_AUTO, _NOTHING = "auto", "nothing"

_Config = Mapping[str, object]


def describe_config_changes(
    given: _Config, source: _Config, groups: Sequence[Group], *, is_complete: bool
) -> Iterator[tuple[bool, str]]:
    """Yield sentences about a given DeepSpeed config, each with whether it is a warning.

    ``source`` is the checkpoint's config. ``is_complete``: no framework adds sections to it.
    """
    default = _NOTHING if is_complete else _AUTO
    before, after = _updates(source, _NOTHING), _updates(given, default)
    is_same_scheduler = before["scheduler"] == after["scheduler"]
    changed = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, _NOTHING), after.get(key, default)
        is_skipped = key == "optimizer" and old == _NOTHING  # the script may make it
        is_skipped |= key.startswith("scheduler.") and not is_same_scheduler
        if not is_skipped and old != new and _AUTO not in (old, new):
            changed.append(f"{key} changes from {old} to {new}")
    if changed:
        yield True, f"--ds-config: {some(changed, 8)}; updates will differ"
    recorded = [one.settings.values for one in groups if one.settings is not None]
    params = _section(_section(source, "optimizer"), "params")
    restored = []
    for key, new in _section(_section(given, "optimizer"), "params").items():
        if key in _RESTORED and new != _AUTO:
            names = (key, "initial_lr") if key == "lr" else (key,)
            known = [one[name] for one in (*recorded, params) for name in names if name in one]
            if known and _plain(new) not in map(_plain, known):
                restored.append(f"{key} {_plain(new)} (checkpoint: {_plain(known[0])})")
    old, new = _loss_scale(source), _loss_scale(given)
    if old != new and _AUTO not in (old, new):
        restored.append(f"loss_scale {new} (checkpoint: {old})")
    if restored:
        yield (
            False,
            f"--ds-config: {some(restored, 8)} has no effect; loading restores the checkpoint's",
        )
    yield from ((True, text) for text in told_of_keys(given, source))


def _updates(config: _Config, default: str) -> dict[str, object]:
    """Return what the updates depend on, by key; ``default`` for what the config leaves out."""
    found: dict[str, object] = {}
    for name in ("optimizer", "scheduler"):
        kind = _section(config, name).get("type", config.get(name, default))
        found[name] = kind.lower() if isinstance(kind, str) else default
    # A scheduler's state has only its step (DeepSpeed 0.19, runtime/lr_schedules.py, WarmupLR).
    for key, value in _section(_section(config, "scheduler"), "params").items():
        found[f"scheduler.{key}"] = _plain(value)
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        found[key] = default if value is None else _NOTHING if value == neutral else _plain(value)
    for key in _SWITCHES:
        is_on = _section(config, key).get("enabled") is True
        found[key] = "on" if is_on else _NOTHING if key in config else default
    return found


def _loss_scale(config: _Config) -> object:
    """Return the loss scale, which the checkpoint's scaler replaces (0 is dynamic).

    Source: DeepSpeed 0.19, ``runtime/zero/stage3.py`` (``load_state_dict``) and
    ``runtime/precision_config.py``.
    """
    half = _section(config, "fp16")
    return (half.get("loss_scale") or "dynamic") if half.get("enabled") is True else _AUTO


def _section(config: _Config, name: str) -> _Config:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _plain(value: object) -> object:
    return [*value] if isinstance(value, tuple) else value


class Batch(Struct, frozen=True):
    """A global batch: ranks x micro-batch x gradient accumulation.

    With sequence parallelism (Ulysses), ``sequence`` ranks share the same rows.
    """

    ranks: int
    micro: int
    accumulation: int
    sequence: int = 1

    @property
    def rows(self) -> int:
        """Rows of one update."""
        return self.ranks // self.sequence * self.micro * self.accumulation

    def __str__(self) -> str:
        """Describe the product."""
        shared = f" ({self.sequence:,} to a sequence)" if self.sequence > 1 else ""
        return (
            f"{self.ranks:,} rank{'s' * (self.ranks != 1)}{shared} x micro-batch {self.micro:,} "
            f"x accumulation {self.accumulation:,} = {self.rows:,} rows"
        )


def batch_of(config: Mapping[str, object], ranks: int, source: Batch | None = None) -> Batch | None:
    """Return the batch of a DeepSpeed config; ``None`` if it is not stated.

    Ranks that share a sequence are as stated, or as in ``source`` if possible. Source: DeepSpeed
    0.19.8, ``runtime/config.py`` (``_set_batch_related_parameters``): the third number follows from
    two, and accumulation defaults to 1.
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
    """Return global batch, micro-batch and accumulation, as far as they are given."""
    return (
        _count(config.get("train_batch_size")),
        _count(config.get("train_micro_batch_size_per_gpu")),
        _count(config.get("gradient_accumulation_steps")),
    )


def _sequence(config: Mapping[str, object], ranks: int, source: Batch | None) -> int:
    """Return how many ranks share a sequence: as stated, if that divides the ranks.

    Accelerate 1.15 gives only all three numbers, which fit one size. Source: DeepSpeed 0.19.8,
    ``runtime/config.py`` (``world_size``) and ``__init__.py``: if both sizes are given, it creates
    its own groups, and only data-parallel ranks have files.
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
    """Yield sentences about the global batch, each with whether it is a warning.

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
    """Describe how ``ranks`` keep the global batch."""
    sequence = source.sequence if ranks % source.sequence == 0 else 1
    share, rest = divmod(source.rows, ranks // sequence)
    if rest:
        near = Batch(ranks, source.micro, max(1, round(share / source.micro)), sequence)
        return f"{ranks:,} ranks cannot share that evenly: near it is {near}"
    micro = next(rows for rows in range(min(source.micro, share), 0, -1) if share % rows == 0)
    return f"keep it by {Batch(ranks, micro, share // micro, sequence)}"
