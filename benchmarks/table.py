"""Samples as a reader sees them: a table with ratios, and the targets with what was reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measure import Sample
from benchmarks.methods import EXPORTS, Name

Samples = Mapping[Name, Sequence[Sample]]

_MB = 1e6
_MAX_SPREAD = 3.0  # of the copy; beyond it the disk, not the program, was measured
_MAX_RSS = 200 * _MB
_COLUMNS = (
    "command",
    "runs",
    "min s",
    "median s",
    "x cp",
    "x as fast as DeepSpeed's",
    "CPU s",
    "MB read",
    "peak RSS MB",
)


@dataclass(frozen=True, slots=True)
class Target:
    """Something to reach and what was measured."""

    text: str
    measured: str
    met: bool


def seconds(samples: Sequence[Sample]) -> float:
    """Median wall time."""
    return median(sample.seconds for sample in samples)


def spread(samples: Sequence[Sample]) -> float:
    """How many times the shortest run the longest took."""
    times = [sample.seconds for sample in samples]
    return max(times) / min(times)


def inconclusive(results: Samples) -> bool:
    """Whether a copy itself varied so much that ratios to it say nothing."""
    copies = (Name.COPY_FP32, Name.COPY_BF16)
    return any(spread(results[name]) > _MAX_SPREAD for name in copies if name in results)


def render(title: str, results: Samples) -> str:
    """One case's table in GitHub's markdown."""
    lines = [f"### {title}", ""]
    if inconclusive(results):
        lines += [f"**Inconclusive**: `cp` itself varied more than {_MAX_SPREAD:g}-fold.", ""]
    lines += [_row(_COLUMNS), _row(["---"] + ["---:"] * (len(_COLUMNS) - 1))]
    lines += [_row(_cells(name, results)) for name in Name if name in results]
    return "\n".join(lines)


def render_targets(targets: Sequence[Target]) -> str:
    """The list of targets, each with what was measured."""
    lines = ["| target | measured | |", "|---|---|---|"]
    lines += [_row([t.text, t.measured, "met" if t.met else "**missed**"]) for t in targets]
    return "\n".join(lines)


def targets_at_size(title: str, results: Samples) -> Iterator[Target]:
    """What is to be reached at the chosen size."""
    if Name.DEEPSPEED in results:
        factor = seconds(results[Name.DEEPSPEED]) / seconds(results[Name.FP32])
        text = f"{title}: at least 5 times as fast as DeepSpeed's script"
        yield Target(text, f"{factor:.1f}", factor >= 5)
    yield _copy_target(title, results, Name.FP32_BARE, 1.5)
    yield _copy_target(title, results, Name.FP32, 2.5)
    yield _memory_target(title, results)


def targets_at_scale(title: str, results: Samples, smaller: Samples) -> Iterator[Target]:
    """What is to be reached at a multiple of the size, where fixed costs no longer count."""
    yield _copy_target(title, results, Name.FP32_BARE, 1.2)
    yield _memory_target(title, results)
    names = [name for name in EXPORTS if name in results and name in smaller]
    ratios = [_peak(results[name]) / _peak(smaller[name]) for name in names]
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    text = f"{title}: peak RSS as at the smaller size, 20 % at most apart"
    yield Target(text, f"{farthest:.2f} times", abs(farthest - 1) <= 0.2)


def _copy_target(title: str, results: Samples, name: Name, limit: float) -> Target:
    ratio = seconds(results[name]) / seconds(results[Name.COPY_FP32])
    text = f"{title}: `{name.value}` at most {limit:g} times cp + sync"
    doubt = " (inconclusive)" if inconclusive(results) else ""
    return Target(text, f"{ratio:.2f}{doubt}", ratio <= limit)


def _memory_target(title: str, results: Samples) -> Target:
    peak = max(_peak(results[name]) for name in EXPORTS if name in results)
    text = f"{title}: peak RSS at most {_MAX_RSS / _MB:.0f} MB"
    return Target(text, f"{peak / _MB:.0f} MB", peak <= _MAX_RSS)


def _peak(samples: Sequence[Sample]) -> int:
    return max(sample.peak_rss for sample in samples)


def _cells(name: Name, results: Samples) -> list[str]:
    samples = results[name]
    to_copy = ""
    if name.copy in results:
        to_copy = f"{seconds(samples) / seconds(results[name.copy]):.2f}"
    to_deepspeed = ""
    if name in (Name.FP32, Name.FP32_BARE) and Name.DEEPSPEED in results:
        to_deepspeed = f"{seconds(results[Name.DEEPSPEED]) / seconds(samples):.1f}"
    read = samples[-1].nbytes_read
    return [
        f"`{name.value}`",
        str(len(samples)),
        f"{min(sample.seconds for sample in samples):.2f}",
        f"{seconds(samples):.2f}",
        to_copy,
        to_deepspeed,
        f"{median(sample.cpu_seconds for sample in samples):.2f}",
        "" if read is None else f"{read / _MB:.0f}",
        f"{_peak(samples) / _MB:.0f}",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
