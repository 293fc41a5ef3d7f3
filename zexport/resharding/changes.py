"""What changes for the resumed run: its updates, and its global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from msgspec import Struct

from zexport.train.options import told_of_keys

_AUTO, _NOTHING = "auto", "nothing"
_NUMBERS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)

_Config: TypeAlias = Mapping[str, object]


def describe_config_changes(given: _Config, source: _Config, *, is_complete: bool) -> Iterator[str]:
    """Yield warnings about a given DeepSpeed config.

    ``source`` is the checkpoint's config. ``is_complete``: no framework adds sections to it.
    """
    before = _updates(source, _NOTHING)
    changed = [
        f"{key} changes from {before[key]} to {new}"
        for key, new in _updates(given, _NOTHING if is_complete else _AUTO).items()
        if new != before[key]
        and _AUTO not in (before[key], new)
        and (key, before[key]) != ("optimizer", _NOTHING)  # the script may make it
    ]
    if changed:
        yield f"--ds-config: {', '.join(changed)}; updates will differ"
    yield from told_of_keys(given, source)


def _updates(config: _Config, default: str) -> dict[str, object]:
    """Return what updates depend on, by key; ``default`` for what the config leaves out."""
    clipping = config.get("gradient_clipping")
    found: dict[str, object] = {
        "gradient_clipping": default if clipping is None else clipping or _NOTHING
    }
    for name in ("optimizer", "scheduler"):
        section = config.get(name)
        kind = section.get("type") if isinstance(section, Mapping) else section
        found[name] = kind.lower() if isinstance(kind, str) else default
    return found


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
            f"{self.rows:,} ({self.ranks:,} rank{'s' * (self.ranks != 1)}{shared} x micro-batch "
            f"{self.micro:,} x accumulation {self.accumulation:,})"
        )


def batch_of(config: _Config, ranks: int, source: Batch | None = None) -> Batch | None:
    """Return the batch of a DeepSpeed config; ``None`` if it is not recorded.

    Ranks that share a sequence are as recorded, or as in ``source``, if that divides the ranks.
    Source: DeepSpeed 0.19.8, ``runtime/config.py`` (``_set_batch_related_parameters``): the third
    number follows from two, and accumulation defaults to 1.
    """
    whole, micro, accumulation = (_count(config.get(key)) for key in _NUMBERS)
    sequence = _count(config.get("sequence_parallel_size"))
    if "data_parallel_size" in config:  # with both sizes, only data-parallel ranks have files
        sequence = 1
    elif source is not None:
        sequence = sequence or source.sequence
    elif sequence is None and whole and micro and accumulation:  # all that Accelerate 1.15 gives
        sequence, rest = divmod(ranks * micro * accumulation, whole)
        sequence = 1 if rest else sequence
    sequence = sequence if sequence and ranks % sequence == 0 else 1
    owners = ranks // sequence
    if micro is None and whole is not None:
        micro = whole // (owners * (accumulation or 1))
    if accumulation is None and micro and whole is not None:
        accumulation = whole // (owners * micro)
    return Batch(ranks, micro, accumulation or 1, sequence) if micro else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def describe_batch_change(
    source: Batch | None, ranks: int, given: _Config | None
) -> Iterator[tuple[bool, str]]:
    """Yield a sentence about the global batch, with whether it is a warning."""
    target = batch_of(given or {}, ranks, source)
    if source is None:
        return
    if target is None and source.ranks != ranks:
        yield False, f"global batch: {source} before; {_kept(source, ranks)}"
    elif target is not None and target.rows != source.rows:
        yield True, f"--ds-config: the global batch changes from {source} to {target}"


def _kept(source: Batch, ranks: int) -> str:
    """Describe how ``ranks`` keep the global batch."""
    sequence = source.sequence if ranks % source.sequence == 0 else 1
    share, rest = divmod(source.rows, ranks // sequence)
    if rest:
        near = Batch(ranks, source.micro, max(1, round(share / source.micro)), sequence)
        return f"impossible on {ranks:,} ranks. Closest: {near}"
    micro = next(rows for rows in range(min(source.micro, share), 0, -1) if share % rows == 0)
    return f"keep it with {Batch(ranks, micro, share // micro, sequence)}"
