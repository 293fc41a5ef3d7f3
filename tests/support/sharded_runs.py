"""Runs of real DeepSpeed on CPU ranks: trained and saved, or loaded, saved again and trained on.

One group of ranks does many runs in a row, and all groups are forked from a process that has
imported DeepSpeed. Every run sees the same rows at each step, however many ranks share them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_S = 600
ROWS = 12
"""Of a step, over all ranks: one, two, three and four ranks divide it."""

_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
_SLOW_TO_IMPORT = [
    *("torch", "deepspeed", "torch._inductor.compile_fx", "setuptools"),
    *("transformers.trainer", "transformers.models.mixtral.modeling_mixtral"),
    *("transformers.models.llama.modeling_llama", "datasets", "peft"),
]
CLIENT_STATE = {"seen": [1, 2], "best": 0.25, "place": {"epoch": 1}}


@dataclass(frozen=True)
class Spec:
    """What a run is made with; ``parts`` of it are frozen, tied, buffers, groups.

    With ``sequence`` among them, ranks share sequences in pairs.
    """

    stage: int
    world: int = 2
    dtype: str = "bf16"
    optimizer: str = "adamw"
    parts: frozenset[str] = frozenset({"frozen", "buffers", "groups"})
    zero: dict[str, Any] = field(default_factory=dict, hash=False)
    ds_config: dict[str, Any] = field(default_factory=dict, hash=False)
    steps: int = 3

    def config(self) -> dict[str, Any]:
        """The configuration that DeepSpeed is given; fp16 begins with steps that overflow."""
        fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
        precision = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": fp16}, "fp32": {}}
        return {
            "train_micro_batch_size_per_gpu": ROWS // self.world,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.5,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **precision[self.dtype],
            **self.ds_config,
        }


@dataclass(frozen=True)
class Job:
    """A run from the beginning, or from ``source``; ``out`` gets ``saved`` and ``facts.pt``."""

    spec: Spec
    out: Path
    source: Path | None = None


def run_jobs(world: int, jobs: Sequence[Job], folder: Path) -> None:
    """Do all jobs in order with ``world`` ranks; if one fails, raise with what the ranks said."""
    for job in jobs:
        job.out.mkdir(parents=True, exist_ok=True)
    run_ranks(world, partial(_do_all, jobs=tuple(jobs)), folder)


def run_ranks(world: int, act: Callable[[int], None], folder: Path) -> None:
    """Call ``work(rank)`` on ``world`` ranks and keep their output in ``folder``.

    Raises:
        AssertionError: one failed; with what it said.
    """
    folder.mkdir(parents=True)
    with _environment():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_SLOW_TO_IMPORT)
        ranks = [
            context.Process(target=_rank, args=(rank, world, act, folder), daemon=True)
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
    for one in ranks:
        one.join(LIMIT_S)
        one.kill()
    logs = [folder / f"rank{rank}.log" for rank, one in enumerate(ranks) if one.exitcode != 0]
    assert not logs, "\n".join(log.read_text(encoding="utf-8")[-4000:] for log in logs)


@contextmanager
def _environment() -> Iterator[None]:
    """What the process that is forked from reads when it imports DeepSpeed."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(rank: int, world: int, act: Callable[[int], None], folder: Path) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in place.items()} | _ENVIRONMENT)
    try:
        _join(rank, world, folder)
        gc.freeze()  # DeepSpeed collects at each start of ZeRO-3: not again what it is made of
        act(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads of DeepSpeed have aborted a tidy exit


def _join(rank: int, world: int, folder: Path) -> None:
    import deepspeed
    import torch

    from zexport.train.worker import prepare_cpu

    torch.set_num_threads(1)
    prepare_cpu()
    store = f"file://{folder / 'store'}"
    deepspeed.init_distributed(
        "gloo", init_method=store, rank=rank, world_size=world, auto_mpi_discovery=False
    )


def _do_all(rank: int, jobs: Sequence[Job]) -> None:
    for job in jobs:
        sys.stdout.write(f"{job}\n")
        _do(job, rank)


def _do(job: Job, rank: int) -> None:
    import torch
    from deepspeed.utils import groups

    spec = job.spec
    engine, order = make_engine(spec, seed=7 if job.source is None else 8)
    client: Any = CLIENT_STATE
    if job.source is None:
        for _ in range(spec.steps):
            step(engine)
    else:
        path, client = engine.load_checkpoint(str(job.source))
        assert path is not None, job.source
    facts = live_facts(engine) | {"order": order}
    facts["client"] = {key: client.get(key) for key in CLIENT_STATE}
    engine.save_checkpoint(str(job.out / "saved"), tag="tag", client_state=dict(CLIENT_STATE))
    facts["losses"] = [step(engine) for _ in range(2)]
    facts["skipped"] = engine.skipped_steps
    if rank == 0:
        torch.save(facts, job.out / "facts.pt")
    engine.destroy()
    groups.mpu = None


def make_engine(spec: Spec, seed: int) -> tuple[Any, list[list[str]]]:
    """An engine that has taken no step, and the names of its parameters by group."""
    import deepspeed
    import torch

    torch.manual_seed(seed)
    model = make_model(spec.parts)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    config, groups = spec.config(), groups_of(spec, trained)
    names = {id(one): name for name, one in trained.items()}
    order = [[names[id(one)] for one in group["params"]] for group in groups]
    own = "optimizer" in config
    if spec.optimizer == "muon":
        for name, one in trained.items():
            one.use_muon = one.ndim == 2 and name.startswith(("up", "down"))
    engine, *_ = deepspeed.initialize(
        mpu=_in_pairs() if "sequence" in spec.parts else None,
        model=model,
        optimizer=None if own else make_optimizer(spec, groups),
        model_parameters=list(trained.values()) if own else None,
        lr_scheduler=make_schedule,
        config=config,
    )
    return engine, order


def _in_pairs() -> Any:
    """Return the sequence-parallel groups (Ulysses) that Accelerate passes to DeepSpeed."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(2)
    return parallel_state_sp


def make_schedule(optimizer: Any) -> Any:
    from torch.optim import lr_scheduler

    return lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def make_model(parts: frozenset[str]) -> Any:
    """Some 230 weights of odd shapes; one is smaller than most numbers of ranks."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.up = nn.Linear(6, 7)
            self.norm = nn.LayerNorm(7)
            self.down = nn.Linear(7, 6)
            self.gain = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(6, 11, bias=False)
            if "tied" in parts:
                self.head.weight = self.embed.weight
            if "frozen" in parts:
                self.norm.requires_grad_(False)
                self.still = nn.Linear(6, 6).requires_grad_(False)
            if "buffers" in parts:
                self.register_buffer("count", torch.tensor(2**40 + 1))
                self.register_buffer("mask", torch.arange(6) % 3 > 0)
                self.register_buffer("scale", torch.rand(6) + 0.5)

        def forward(self, tokens: Any) -> Any:
            hidden = self.embed(tokens)
            hidden = hidden + self.down(torch.relu(self.norm(self.up(hidden)))) * self.gain
            if "frozen" in parts:
                hidden = hidden + self.still(hidden)
            if "buffers" in parts:
                hidden = hidden * self.scale.to(hidden.dtype)
                self.count += 1
            return self.head(hidden)

    return Model()


def groups_of(spec: Spec, trained: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups: one, or three of which the last is a single weight."""
    if "groups" not in spec.parts:
        return [{"params": list(trained.values()), "weight_decay": 0.02}]
    kinds: list[list[Any]] = [[], [], []]
    for name, one in trained.items():
        kinds[2 if name == "gain" else int(one.ndim < 2)].append(one)
    settings = [{"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 3e-3}, {"lr": 5e-3}]
    return [{"params": kind, **one} for kind, one in zip(kinds, settings, strict=True)]


def make_optimizer(spec: Spec, groups: list[dict[str, Any]]) -> Any:
    """The optimizer by its short name."""
    from torch import optim

    makers = {
        "adamw": lambda: optim.AdamW(groups, lr=1e-2),
        "adagrad": lambda: optim.Adagrad(groups, lr=1e-2),
        "amsgrad": lambda: optim.AdamW(groups, lr=1e-2, amsgrad=True),
        "sgd": lambda: optim.SGD(groups, lr=1e-2),
        "momentum": lambda: optim.SGD(groups, lr=1e-2, momentum=0.9),
        "rmsprop": lambda: optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    }
    return makers[spec.optimizer]()


def step(engine: Any) -> float:
    """Run one step on rows chosen by its number and return the mean loss over all ranks."""
    import torch
    from torch import distributed

    rank, world = distributed.get_rank(), distributed.get_world_size()
    rows = torch.Generator().manual_seed(engine.global_steps)
    tokens = torch.randint(0, 11, (ROWS, 5), generator=rows)[rank::world]
    logits = engine(tokens[:, :-1]).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    distributed.all_reduce(total)
    return float(total) / world


def live_facts(engine: Any) -> dict[str, Any]:
    """Return the engine's settings and counters, without weights and optimizer state."""
    from deepspeed import zero

    weights = dict(engine.module.named_parameters(remove_duplicate=False))
    with zero.GatheredParameters(
        [*weights.values()], enabled=engine.zero_optimization_stage() == 3
    ):
        module = {name: one.detach().clone() for name, one in weights.items()}
    module |= {name: one.clone() for name, one in engine.module.named_buffers()}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "module": module,
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups],
        "steps": (engine.global_steps, engine.skipped_steps, engine.global_samples),
        "scheduler": engine.lr_scheduler.state_dict(),
        "scaler": dict(vars(scaler)) if hasattr(scaler, "cur_scale") else {},
    }
