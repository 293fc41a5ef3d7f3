"""Real checkpoints in which some values are of another kind than DeepSpeed writes."""

from __future__ import annotations

import random
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.runner import main
from tests.fuzz.target import Target
from tests.support.checkpoints import Run, deepspeed_names, save, small_model
from zexport import plan_export
from zexport.checkpoint.opening import open_checkpoint
from zexport.inspect.inspect import inspect_checkpoint
from zexport.options import ExportOptions, NameLayout
from zexport.report.inspect_json import inspection_json

_DEEPEST = 8
_OPTIONS = ExportOptions(layout=NameLayout.MEMORY)
_RUNS = (Run(stage=3), Run(stage=2), Run(stage=1), Run(stage=1, bf16_optimizer=True))


class Foreign:
    """A class that no reader knows."""


def junk() -> Sequence[object]:
    """Values that do not belong where they are put."""
    shared: list[object] = []
    shared.append(shared)
    return [
        None,
        True,
        -1,
        0,
        1,
        3,
        2**62,
        -(2**70),
        10**300,
        1.5,
        float("nan"),
        "",
        "x",
        "../x",
        "\x1b[2J\n",
        "n" * 100_000,
        b"x",
        (),
        [],
        {},
        set(),
        [[]],
        [0],
        [-1],
        ["64"],
        [2**62, 2**62],
        [1] * 100,
        shared,
        {"x": [2]},
        {1: 2},
        {"\ud800": 1},
        OrderedDict(a="b", b="a"),
        Foreign(),
        Foreign,
        torch.zeros(3),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, 2).t(),
        torch.zeros(1).expand(10**12),
        torch.ones(4, dtype=torch.int8),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3, dtype=torch.uint16),
        torch.zeros(5, dtype=torch.bfloat16)[2:4],
        torch.Size([2, 3]),
        {"w": torch.zeros(2)},
    ]


@cache
def seeds() -> Sequence[bytes]:
    """Numbers from which the changes are drawn."""
    return [bytes([number]) * 8 for number in range(8)]


def read(data: bytes, folder: Path) -> object:
    """A checkpoint with one to three values exchanged, opened, inspected and planned."""
    draw = random.Random(data)
    run = draw.choice(_RUNS)
    root = folder / f"run{_RUNS.index(run)}"
    if not root.exists():
        save(small_model(), run, root)
    path = draw.choice(sorted(root.glob("*/*.pt")))
    whole = path.read_bytes()
    with deepspeed_names():
        state = torch.load(path, weights_only=False)
        for _ in range(draw.choice((1, 1, 2, 3))):
            exchange(draw, state)
        torch.save(state, path)
    try:
        inspection_json(inspect_checkpoint(root), tensors=True)
        return plan_export(open_checkpoint(root), folder / "out", _OPTIONS)
    finally:
        path.write_bytes(whole)
        shutil.rmtree(folder / "out", ignore_errors=True)


def exchange(draw: random.Random, state: dict[str, Any]) -> None:
    """Put a value that does not belong there in some place, take one out, or rename a key."""
    holder, key = draw.choice(list(_places(state)))
    if isinstance(holder, dict) and draw.random() < 0.2:
        value = holder.pop(key)
        if draw.random() < 0.5:
            holder[draw.choice(["x", "", "a/b", "\x1b", 5, "emb.weight"])] = value
    else:
        holder[key] = draw.choice(junk())


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every place in a nested value that something can be put into; it may contain itself."""
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        children: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        return
    for key, child in children:
        yield value, key
        yield from _places(child, depth + 1)


TARGET = Target("states", seeds, read)

if __name__ == "__main__":
    main(TARGET)
