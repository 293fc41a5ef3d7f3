"""Client state, buffers and other module tensors after resharding, as real DeepSpeed loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.forked import typed
from tests.support.sharded_runs import run_ranks

pytestmark = pytest.mark.deepspeed

NINES = [9.0, 9.0, 9.0, 9.0]
_TARGETS = [(0, 3, 2), (2, 3, 2), (3, 3, 2), (3, 3, 3), (3, 2, 2), (1, 2, 2)]
"""ZeRO stage before, ZeRO stage and number of ranks after; all sources have two ranks."""


class Scaled(nn.Linear):
    """A layer that adds a tensor to its state dict, as bitsandbytes does; ``seen`` is a metric."""

    absmax = seen = torch.zeros(0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.absmax = state_dict.pop(f"{prefix}weight.absmax")
        self.seen = state_dict.pop(f"{prefix}seen")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _model() -> nn.Sequential:
    model = nn.Sequential(Scaled(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))
    model[2].requires_grad_(False)
    scale = torch.ones(5)
    model.register_buffer("scale", scale)
    model.register_buffer("again", scale)
    return model


def _engine(stage: int, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = _model()
    trained = [one for one in model.parameters() if one.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(trained)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _save(rank: int, *, root: Path) -> None:
    for stage in range(4):
        engine = _engine(stage, seed=0)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        scaled, norm, _ = model = engine.module
        scaled.absmax = scaled.seen = torch.tensor(NINES)
        norm.running_mean.fill_(rank + 1)
        model.scale.fill_(3)
        engine.save_checkpoint(str(root / f"z{stage}"), client_state={"sampler_pos": 10 + rank})
        engine.destroy()


def _load(rank: int, *, jobs: list[tuple[int, Path]]) -> None:
    for stage, folder in jobs:
        engine = _engine(stage, seed=1)
        _, client = engine.load_checkpoint(str(folder), load_module_strict=True)
        scaled, norm, still = model = engine.module
        loaded = {
            "absmax": scaled.absmax.tolist(),
            "seen": scaled.seen.tolist(),
            "scale": [model.scale.tolist(), model.again.tolist()],
            "frozen": getattr(still.weight, "ds_tensor", still.weight).detach().flatten().tolist(),
            "running_mean": norm.running_mean.tolist(),
            "sampler_pos": client["sampler_pos"],
        }
        torch.save(loaded, folder / f"loaded{rank}.pt")
        engine.destroy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all stages, resharded ones, and with each what every rank loads of it."""
    root = tmp_path_factory.mktemp("own")
    run_ranks(2, partial(_save, root=root), root / "saving")
    jobs: dict[int, list[tuple[int, Path]]] = {
        2: [(stage, root / f"z{stage}") for stage in range(4)]
    }
    for source, stage, ranks in _TARGETS:
        out = root / f"z{source}-z{stage}-{ranks}"
        done = typed("reshard", root / f"z{source}", out, "-n", ranks, "--stage", stage)
        assert done.returncode == 0, done.stderr
        (root / f"{out.name}.txt").write_text(done.stdout)
        jobs.setdefault(ranks, []).append((stage, out))
    for ranks, own in jobs.items():
        run_ranks(ranks, partial(_load, jobs=own), root / f"loading{ranks}")
    return root


def _loaded(folder: Path) -> list[Any]:
    return [torch.load(path) for path in sorted(folder.glob("loaded*.pt"))]


@pytest.mark.parametrize(("source", "stage", "ranks"), _TARGETS)
def test_module_tensors_other_than_parameters_load(
    source: int, stage: int, ranks: int, root: Path
) -> None:
    """Buffers of two names are among them; a frozen weight is still partitioned."""
    (before, *_), after = (
        _loaded(root / f"z{source}"),
        _loaded(root / f"z{source}-z{stage}-{ranks}"),
    )
    assert len(after) == ranks
    for one in (before, *after):
        assert (one["absmax"], one["seen"]) == (NINES, NINES)
        assert one["scale"] == [[3.0] * 5] * 2
    as_saved = [state["frozen"] for state in _loaded(root / f"z{2 if stage < 3 else 3}")]
    if ranks == len(as_saved):
        assert [state["frozen"] for state in after] == as_saved


def test_each_rank_keeps_its_client_state_and_buffers_at_the_same_world_size(root: Path) -> None:
    assert _loaded(root / "z3-z3-2") == _loaded(root / "z3")
    assert [one["sampler_pos"] for one in _loaded(root / "z3")] == [10, 11]
    assert [one["running_mean"][0] for one in _loaded(root / "z3")] == [1.0, 2.0]
    assert "differ" not in (root / "z3-z3-2.txt").read_text()
    assert typed("verify", root / "z3-z3-2", "--against", root / "z3").returncode == 0


@pytest.mark.parametrize("out", ["z3-z3-3", "z3-z2-2"])
def test_rank_0s_client_state_is_used_elsewhere_with_a_warning(out: str, root: Path) -> None:
    for one in _loaded(root / out):
        assert (one["sampler_pos"], one["running_mean"]) == (10, [1.0] * 6)
    told = " ".join((root / f"{out}.txt").read_text().split())
    assert "differ between ranks (sampler_pos, 1.running_mean" in told


def test_an_export_has_the_buffers_of_rank_0_and_names_them(root: Path, tmp_path: Path) -> None:
    done = typed("consolidate", root / "z3", tmp_path / "model")
    told = " ".join(done.stdout.split())
    assert "buffers differ between ranks, the export has those of rank 0: 1.running_mean" in told
    mean = load_file(tmp_path / "model" / "model.safetensors")["1.running_mean"]
    assert mean.tolist() == [1.0] * 6
