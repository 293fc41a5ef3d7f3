"""Reshardings to test: kinds of runs, stages and world sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tests.support.resharding import Move
from tests.support.sharded_runs import Spec

DTYPES = ("fp32", "bf16", "fp16")
WORLDS = (1, 2, 3, 4)
OPTIMIZERS = ("amsgrad", "sgd", "momentum", "rmsprop", "adafactor", "lion")

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
    "two schedules": Spec(2, parts=frozenset({"schedules", "groups"})),
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
        (3, 2, "fp32", 3, 3),
    ):
        yield _to(_source(stage, world, dtype), *target)
    rare = ("amsgrad", "momentum", "rmsprop", "lion", "muon", "tied", "sub-groups", "round robin",
            "aligned", "BF16_Optimizer", "every step skipped")  # fmt: skip
    for index, kind in enumerate(KINDS[name] for name in rare):
        yield _to(replace(kind, world=2 + index % 2), 2 + (index + kind.stage) % 2, 3 - index % 2)
    yield _to(_ADAGRAD, 1, 3)
    yield Move(Spec(3, 2), Spec(2, 3, zero=_DEALT_OUT))
    yield Move(Spec(3, 4, parts=_IN_PAIRS), Spec(2, 2, parts=_IN_PAIRS))
    dealt_out = Spec(2, 2, parts=frozenset({"tied"}), zero=_DEALT_OUT)
    for stage, world in ((1, 3), (3, 2)):
        yield _by_universal(dealt_out, stage, world)
    yield _by_universal(_source(3, 3, "fp16"), 1, 1)
    yield _by_universal(replace(KINDS["only buffers"], optimizer="momentum"), 2, 2)


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
