"""What another number of ranks means for the batch: how many rows an update is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct


class Batch(Struct, frozen=True):
    """The rows of one update: ranks times rows of a micro-batch times accumulated micro-batches."""

    ranks: int
    micro: int
    accumulation: int

    @property
    def rows(self) -> int:
        """Of all ranks together."""
        return self.ranks * self.micro * self.accumulation

    def __str__(self) -> str:
        """The product, as people write it."""
        return (
            f"{self.ranks:,} rank{'s' * (self.ranks != 1)} x micro-batch {self.micro:,} "
            f"x accumulation {self.accumulation:,} = {self.rows:,} rows"
        )


def batch_of(config: Mapping[str, object], ranks: int) -> Batch | None:
    """The batch of a DeepSpeed configuration, or ``None`` where it does not say.

    Source: DeepSpeed 0.19.8, ``runtime/config.py`` (``_set_batch_related_parameters``): what is not
    given follows from what is, and accumulation is else 1.
    """
    whole = _count(config.get("train_batch_size"))
    micro = _count(config.get("train_micro_batch_size_per_gpu"))
    accumulation = _count(config.get("gradient_accumulation_steps"))
    if micro is None and whole is not None:
        micro = whole // (ranks * (accumulation or 1))
    if accumulation is None and micro and whole is not None:
        accumulation = whole // (ranks * micro)
    return Batch(ranks, micro, accumulation or 1) if micro else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def contradiction(config: Mapping[str, object], ranks: int) -> Iterator[str]:
    """Tells of numbers with which DeepSpeed does not start: all three are given, and do not fit.

    Source: DeepSpeed 0.19.8, ``runtime/config.py`` (``_batch_assertion``).
    """
    whole = _count(config.get("train_batch_size"))
    micro = _count(config.get("train_micro_batch_size_per_gpu"))
    if whole is None or micro is None:
        return
    accumulation = _count(config.get("gradient_accumulation_steps"))
    batch = Batch(ranks, micro, accumulation or max(1, whole // (ranks * micro)))
    if batch.rows != whole:
        yield f"--ds-config does not start: train_batch_size is {whole:,}, and {batch}"


def told_of_batch(
    source: Batch | None, ranks: int, target: Batch | None
) -> Iterator[tuple[bool, str]]:
    """What to do about the batch, in sentences, each with whether it is a warning."""
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
    share, rest = divmod(source.rows, ranks)
    if rest:
        near = Batch(ranks, source.micro, max(1, round(share / source.micro)))
        return f"{ranks:,} ranks cannot share that evenly: near it is {near}"
    micro = next(rows for rows in range(min(source.micro, share), 0, -1) if share % rows == 0)
    return f"keep it by {Batch(ranks, micro, share // micro)}"
