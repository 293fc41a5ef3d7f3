"""Trainings moved to other ranks and stages: saved, resharded, loaded by DeepSpeed, compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
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
    if "losses" in after:
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


# Kinds of runs, stages and world sizes to test

DTYPES = ("fp32", "bf16", "fp16")
WORLDS = (1, 2, 3, 4)
OPTIMIZERS = ("amsgrad", "sgd", "momentum", "rmsprop")

_MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
_DEALT_OUT = {"round_robin_gradients": True}
_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
_PLAIN: frozenset[str] = frozenset()
_ADAGRAD = Spec(2, dtype="fp32", optimizer="adagrad", parts=frozenset({"frozen", "buffers"}))
"""DeepSpeed resumes it only under ZeRO-1 and ZeRO-2, and with one group."""

_IN_PAIRS = frozenset({"sequence", "frozen", "groups"})


KINDS = {
    **{name: Spec(2, dtype="fp32", optimizer=name) for name in OPTIMIZERS},
    "muon": Spec(
        2, optimizer="muon", parts=_PLAIN, zero={"reduce_scatter": False}, ds_config=_MUON
    ),
    "tied": Spec(2, parts=frozenset({"tied", "groups"})),
    "tied and frozen": Spec(1, parts=frozenset({"tied", "frozen", "groups"})),
    "static loss scale": Spec(2, dtype="fp16", ds_config=_STATIC),
    "only frozen": Spec(2, dtype="fp32", parts=frozenset({"frozen"})),
    "only buffers": Spec(2, parts=frozenset({"buffers"})),
    "sub-groups": Spec(3, zero={"sub_group_size": 30}),
    "larger sub-groups": Spec(3, zero={"sub_group_size": 77}),
    "round robin": Spec(2, zero=_DEALT_OUT),
    "aligned": Spec(2, zero={"parameter_alignment": True}),
    "offloaded": Spec(3, zero={"offload_optimizer": {"device": "cpu"}}),
    "BF16_Optimizer": Spec(1, ds_config=_IN_FP32),
    "every step skipped": Spec(2, dtype="fp16", steps=1),
}
"""Kinds of runs; stage and world size vary."""


def any_move(chance: Random) -> Move:
    """Return a random kind of run between random stages and world sizes."""
    stage, world, to_stage, to_world = (chance.choice(one) for one in ((1, 2, 3), WORLDS) * 2)
    name = chance.choice([*KINDS, *DTYPES])
    source = _source(stage, world, name) if name in DTYPES else replace(KINDS[name], world=world)
    if name not in ("BF16_Optimizer", "round robin", "aligned"):
        source = replace(source, stage=stage)
    if name in DTYPES and chance.random() < 0.3:
        one_group = replace(source, parts=frozenset({"tied", "buffers"}))
        return _by_universal(one_group, to_stage, to_world)
    return _to(source, to_stage, to_world)


def some_moves() -> Iterator[Move]:
    """Each stage, dtype and rare kind once, between two ranks and three; some universal."""
    for stage, world, dtype, *target in (
        (0, 1, "fp32", 2, 2),
        (0, 2, "bf16", 3, 3),
        (1, 3, "bf16", 3, 2),
        (2, 3, "fp16", 1, 1),
    ):
        yield _to(_source(stage, world, dtype), *target)
    rare = ("amsgrad", "muon", "tied", "sub-groups", "round robin", "BF16_Optimizer")
    for index, kind in enumerate(KINDS[name] for name in rare):
        yield _to(replace(kind, world=2 + index % 2), 2 + (index + kind.stage) % 2, 3 - index % 2)
    yield _to(_ADAGRAD, 1, 3)
    yield Move(Spec(3, 2), Spec(2, 3, zero=_DEALT_OUT))
    yield Move(Spec(3, 4, parts=_IN_PAIRS), Spec(2, 2, parts=_IN_PAIRS))
    yield _by_universal(Spec(2, 2, parts=frozenset({"tied"}), zero=_DEALT_OUT), 3, 3)
    yield _by_universal(_source(3, 3, "fp16"), 1, 1)


def _by_universal(source: Spec, stage: int, world: int) -> Move:
    target = replace(source, stage=stage, world=world, zero={}, ds_config={})
    return Move(source, target, is_universal=True)


def _source(stage: int, world: int, dtype: str) -> Spec:
    """Return a run of AdamW; ZeRO-0 numbers weights, which is only certain if all are trained."""
    parts = {"frozen", "buffers", "groups"} - ({"frozen"} if stage == 0 else set())
    steps = 6 if dtype == "fp16" else 3
    return Spec(stage, world, dtype, parts=frozenset(parts), steps=steps)


def _to(source: Spec, stage: int, world: int) -> Move:
    """Return the same run resumed elsewhere, without settings of ZeRO-1/2 under ZeRO-3."""
    zero = dict(source.zero)
    if stage == 3:
        zero.pop("round_robin_gradients", None)
        zero.pop("parameter_alignment", None)
    return Move(source, replace(source, stage=stage, world=world, zero=zero))
