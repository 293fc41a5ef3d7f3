"""Which trainings are moved where: every kind of source, to every stage and world size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

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
"""DeepSpeed has one group of it, and resumes it under ZeRO-1 and 2 alone."""

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
    "frozen alone": Spec(2, dtype="fp32", parts=frozenset({"frozen"})),
    "buffers alone": Spec(2, parts=frozenset({"buffers"})),
    "sub-groups": Spec(3, zero={"sub_group_size": 30}),
    "larger sub-groups": Spec(3, zero={"sub_group_size": 77}),
    "round robin": Spec(2, zero=_DEALT_OUT),
    "aligned": Spec(2, zero={"parameter_alignment": True}),
    "offloaded": Spec(3, zero={"offload_optimizer": {"device": "cpu"}}),
    "BF16_Optimizer": Spec(1, ds_config=_IN_FP32),
    "every step skipped": Spec(2, dtype="fp16", steps=1),
}
"""What is special of a source; stage and number of ranks are varied."""


def every_move() -> Iterator[Move]:
    """All stages and numbers of ranks to all others, and each kind to several."""
    for dtype, stage, world in product(DTYPES, range(4), WORLDS):
        source = _source(stage, world, dtype)
        yield from (_to(source, *place) for place in product((1, 2, 3), WORLDS))
    for name, kind in KINDS.items():
        stages = (
            (kind.stage,) if name in ("BF16_Optimizer", "round robin", "aligned") else (1, 2, 3)
        )
        for stage, world, target in product(stages, (2, 3), (*product((1, 2, 3), (1, 3, 4)),)):
            yield _to(replace(kind, stage=stage, world=world), *target)
    for stage, world, target in product((1, 2), (2, 3), (*product((1, 2), (1, 3, 4)),)):
        yield _to(replace(_ADAGRAD, stage=stage, world=world), *target)
    for stage, world in product((1, 2, 3), WORLDS):  # what the target's own configuration decides
        source = Spec(stage, world)
        for zero in (_DEALT_OUT, {"parameter_alignment": True}):
            yield Move(source, Spec(2, 3, zero=zero))
        yield Move(source, Spec(3, 2, zero={"sub_group_size": 40}))
        yield Move(source, Spec(1, 3, ds_config=_IN_FP32))
    for stage, world, target, others in product(range(4), (2, 4), (1, 2, 3), (2, 4)):
        yield Move(Spec(stage, world, parts=_IN_PAIRS), Spec(target, others, parts=_IN_PAIRS))
    yield from _every_universal_move()


def _every_universal_move() -> Iterator[Move]:
    """Wherever DeepSpeed loads it: small groups and other optimizers not under each stage."""
    one_group = frozenset({"tied", "buffers"})
    for dtype, stage, world in product(DTYPES, (1, 2, 3), (2, 3)):
        source = Spec(stage, world, dtype, parts=one_group, steps=6)
        yield from (_by_universal(source, *place) for place in product((1, 2, 3), WORLDS))
        places = ((1, 1), (2, 1), *product((3,), WORLDS))
        yield from (_by_universal(_source(stage, world, dtype), *place) for place in places)
    for name in ("amsgrad", "sgd", "momentum", "rmsprop", "lion"):
        source = replace(KINDS[name], parts=one_group)
        yield from (_by_universal(source, *place) for place in product((1, 2), WORLDS))
    for name in ("sub-groups", "round robin", "aligned", "BF16_Optimizer"):
        source = replace(KINDS[name], parts=one_group)
        yield from (_by_universal(source, *place) for place in product((1, 2, 3), WORLDS))
    source = Spec(3, 2, parts=one_group)
    for target in (
        *(Spec(2, world, zero={"parameter_alignment": True}) for world in WORLDS),
        Spec(1, 3, ds_config=_IN_FP32),
        Spec(3, 3, zero={"sub_group_size": 40}),
    ):
        yield Move(source, replace(target, parts=one_group), is_universal=True)


def some_moves() -> Iterator[Move]:
    """Each stage, element type and rare kind once, between two ranks and three."""
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
    yield from some_universal_moves()


def some_universal_moves() -> Iterator[Move]:
    """Every stage, of runs that dealt out, had groups, or another optimizer."""
    dealt_out = Spec(2, 2, parts=frozenset({"tied"}), zero=_DEALT_OUT)
    for stage, world in ((1, 3), (3, 2)):
        yield _by_universal(dealt_out, stage, world)
    yield _by_universal(_source(3, 3, "fp16"), 1, 1)
    yield _by_universal(replace(KINDS["buffers alone"], optimizer="momentum"), 2, 2)


def _by_universal(source: Spec, stage: int, world: int) -> Move:
    target = replace(source, stage=stage, world=world, zero={}, ds_config={})
    return Move(source, target, is_universal=True)


def _source(stage: int, world: int, dtype: str) -> Spec:
    """A run of AdamW; ZeRO-0 numbers its weights, which is certain where all are trained."""
    parts = {"frozen", "buffers", "groups"} - ({"frozen"} if stage == 0 else set())
    steps = 6 if dtype == "fp16" else 3
    return Spec(stage, world, dtype, parts=frozenset(parts), steps=steps)


def _to(source: Spec, stage: int, world: int) -> Move:
    """The same run elsewhere; what only one stage has is left to it."""
    zero = dict(source.zero)
    if stage == 3:
        zero.pop("round_robin_gradients", None)
        zero.pop("parameter_alignment", None)
    return Move(source, replace(source, stage=stage, world=world, zero=zero))
