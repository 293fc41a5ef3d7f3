"""Trainings moved to other ranks and stages: saved, resharded, loaded by DeepSpeed, compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zexport
from tests.support.oracles import same
from tests.support.raw_states import States, raw_states
from tests.support.sharded_runs import Job, Spec, run_jobs

LOSSES_AGREE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 2e-3}
"""How far the next losses may be apart, relative: sums over ranks round in another order."""


@dataclass(frozen=True)
class Move:
    """A run of ``source`` that goes on as ``target``."""

    source: Spec
    target: Spec

    def __str__(self) -> str:
        one, other = self.source, self.target
        what = (
            f"{one.dtype} {one.optimizer} {'+'.join(sorted(one.parts))} {one.zero} {one.ds_config}"
        )
        return f"z{one.stage} w{one.world} -> z{other.stage} w{other.world} {other.zero} ({what})"


def departures(moves: Sequence[Move], root: Path) -> dict[str, list[str]]:
    """What differs, by move; those moves alone of which something does."""
    sources: dict[str, Job] = {}
    for move in moves:
        sources.setdefault(repr(move.source), Job(move.source, root / f"source{len(sources)}"))
    _run_by_world(sources.values(), root / "sources")
    jobs = [
        Job(move.target, root / f"target{index}", root / f"resharded{index}")
        for index, move in enumerate(moves)
    ]
    for move, job in zip(moves, jobs, strict=True):
        assert job.source is not None
        config = root / f"{job.out.name}.json"
        config.write_text(json.dumps(move.target.config()), encoding="utf-8")
        options = zexport.ReshardOptions(
            world_size=move.target.world, stage=move.target.stage, ds_config=config
        )
        zexport.reshard(sources[repr(move.source)].out / "saved", job.source, options)
    _run_by_world(jobs, root / "targets")
    found = {
        str(move): list(_differences(move, sources[repr(move.source)], job))
        for move, job in zip(moves, jobs, strict=True)
    }
    return {move: differences for move, differences in found.items() if differences}


def _run_by_world(jobs: Iterable[Job], folder: Path) -> None:
    """All jobs, those of one number of ranks in one group."""
    by_world: dict[int, list[Job]] = {}
    for job in jobs:
        by_world.setdefault(job.spec.world, []).append(job)
    for world, of_world in by_world.items():
        run_jobs(world, of_world, folder / str(world))


def _differences(move: Move, source: Job, target: Job) -> Iterator[str]:
    """What is not the same: in the running engine, in what it saved again, in what it then did."""
    before, after = _facts(source), _facts(target)
    for fact in ("steps", "scheduler", "client", "scaler", "groups"):
        is_without = fact == "scaler" and not (before[fact] and after[fact])  # as BF16_Optimizer is
        if before[fact] != after[fact] and not is_without:
            yield f"{fact}: {before[fact]} became {after[fact]}"
    yield from _differing("module", before["module"], after["module"])
    folders = (source.out / "saved", target.source, target.out / "saved")
    saved, resharded, again = (raw_states(_tag(it), before["order"]) for it in folders if it)
    yield from _differing("resharded state", saved, resharded)
    # DeepSpeed itself widens states as it loads them, such as Muon's in stages 1 and 2.
    yield from _differing("state", saved, {k: _like(v, saved.get(k)) for k, v in again.items()})
    if move.source.optimizer != "adafactor":  # its norms are over what one rank holds
        for one, other in zip(before["losses"], after["losses"], strict=True):
            if abs(one - other) > LOSSES_AGREE[move.source.dtype] * abs(one):
                yield f"losses: {before['losses']} became {after['losses']}"


def _tag(folder: Path) -> Path:
    return folder / (folder / "latest").read_text(encoding="utf-8").strip()


def _like(value: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    narrow = None if other is None else value.to(other.dtype)
    return narrow if narrow is not None and torch.equal(narrow.to(value.dtype), value) else value


def _differing(what: str, before: States, after: States) -> Iterator[str]:
    names = before.keys() | after.keys()
    wrong = [
        name
        for name in sorted(names)
        if name not in before or name not in after or not same(before[name], after[name])
    ]
    if wrong:
        yield f"{what}: {len(wrong)} of {len(names)} differ: {wrong[:6]}"


def _facts(job: Job) -> Any:
    return torch.load(job.out / "facts.pt", weights_only=False)
