"""Trainings moved to other ranks and stages: saved, resharded, loaded by DeepSpeed, compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import zexport
from tests.support.oracles import same
from tests.support.raw_states import States, raw_states, universal_states
from tests.support.sharded_runs import Job, Spec, run_jobs
from zexport import ResumeFormat

LOSSES_AGREE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 2e-3}
"""How far the next losses may be apart, relative: sums over ranks round in another order."""


@dataclass(frozen=True)
class Move:
    """A run of ``source`` resumed as ``target``, from rank files or a universal checkpoint."""

    source: Spec
    target: Spec
    is_universal: bool = False

    @property
    def job(self) -> Spec:
        """What the target is run with."""
        if not self.is_universal:
            return self.target
        config = self.target.ds_config | {"checkpoint": {"load_universal": True}}
        return replace(self.target, ds_config=config)

    def __str__(self) -> str:
        one, other = self.source, self.target
        what = (
            f"{one.dtype} {one.optimizer} {'+'.join(sorted(one.parts))} {one.zero} {one.ds_config}"
        )
        return f"z{one.stage} w{one.world} -> z{other.stage} w{other.world} {other.zero} ({what})"


def departures(moves: Sequence[Move], root: Path) -> dict[str, list[str]]:
    """Return the differences of each move that has any."""
    sources: dict[str, Job] = {}
    for move in moves:
        sources.setdefault(repr(move.source), Job(move.source, root / f"source{len(sources)}"))
    _run_by_world(sources.values(), root / "sources")
    jobs = []
    for index, move in enumerate(moves):
        source = sources[repr(move.source)].out
        resharded = source / "universal" if move.is_universal else root / f"resharded{index}"
        jobs.append(Job(move.job, root / f"target{index}", resharded))
        if not resharded.exists():
            config = root / f"target{index}.json"
            config.write_text(json.dumps(move.target.config()), encoding="utf-8")
            zexport.reshard(source / "saved", resharded, _options(move, config))
    _run_by_world(jobs, root / "targets")
    found = {
        str(move): list(_differences(move, sources[repr(move.source)], job))
        for move, job in zip(moves, jobs, strict=True)
    }
    return {move: differences for move, differences in found.items() if differences}


def _options(move: Move, config: Path) -> zexport.ReshardOptions:
    if move.is_universal:
        return zexport.ReshardOptions(format=ResumeFormat.UNIVERSAL)
    target = move.target
    return zexport.ReshardOptions(world_size=target.world, stage=target.stage, ds_config=config)


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
    if move.is_universal:
        _leave_out_what_is_not_loaded(move, before, after)
    for fact in ("steps", "scheduler", "client", "scaler", "groups"):
        is_without = fact == "scaler" and not (before[fact] and after[fact])  # as BF16_Optimizer is
        if before[fact] != after[fact] and not is_without:
            yield f"{fact}: {before[fact]} became {after[fact]}"
    yield from _differing("module", before["module"], after["module"])
    saved, again = (raw_states(_tag(it.out / "saved"), before["order"]) for it in (source, target))
    assert target.source is not None
    read = universal_states if move.is_universal else raw_states
    resharded = read(_tag(target.source))
    yield from _differing("resharded state", saved, resharded)
    # DeepSpeed itself widens states as it loads them, such as Muon's in stages 1 and 2.
    yield from _differing("state", saved, {k: _like(v, saved.get(k)) for k, v in again.items()})
    if "losses" in after and move.source.optimizer != "adafactor":  # its norms are of a rank's part
        # In fp16, at the largest scale that may do, rounding decides whether a step is taken.
        count = 2 if before["skipped"] == after["skipped"] else 1
        pairs = zip(before["losses"], after["losses"], strict=True)
        for one, other in islice(pairs, count):
            if abs(one - other) > LOSSES_AGREE[move.source.dtype] * abs(one):
                yield f"losses: {before['losses']} became {after['losses']}"


def _leave_out_what_is_not_loaded(move: Move, before: Any, after: Any) -> None:
    """DeepSpeed loads only the optimizer of a universal checkpoint; under ZeRO-3 no group settings.

    There, what groups have differently is the new run's own, and all share one count of steps.
    """
    names = {name for group in before["order"] for name in group}
    lost = {name for name in before["module"] if name not in names} - {"head.weight"}
    for facts in (before, after):
        facts["module"] = {k: one for k, one in facts["module"].items() if k not in lost}
    own = {"lr", "initial_lr", "weight_decay"} if len(before["order"]) > 1 else set()
    if move.target.stage == 3 and own:
        for facts in (before, after):
            facts["groups"] = [{k: g[k] for k in g.keys() - own} for g in facts["groups"]]
    if lost or (move.target.stage == 3 and own):
        del after["losses"]


def _tag(folder: Path) -> Path:
    latest = next(folder.glob("latest*"))
    return folder / latest.read_text(encoding="utf-8").strip()


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
