"""Checkpoints of FSDP in every form, made by torch on four CPU ranks, and the live values.

``python -m tests.support.fsdp_checkpoints FOLDER`` makes them all; each folder of it has ``ckpt/``,
``case.json``, ``truth.safetensors`` and ``optim.safetensors``, as the real cases have.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

REPOSITORY = Path(__file__).parents[2]
WORLD = 4
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {"Llama": {"tie_word_embeddings": True}, "Mixtral": {"num_local_experts": 3}}
FAMILIES |= {"Qwen3Moe": _EXPERTS}
FORMS = (
    *("fsdp1_dcp", "fsdp1_ranks", "fsdp2_dcp", "fsdp2_ranks", "fsdp2_safetensors"),
    *("fsdp2_tp_dcp", "fsdp2_tp_ranks", "hsdp_ranks"),
)


def made(folder: Path, *kinds: str) -> Path:
    """The folder, with all checkpoints in it, or those of some methods of ``_Maker``."""
    command = [sys.executable, "-m", "tests.support.fsdp_checkpoints", str(folder), *kinds]
    done = subprocess.run(
        command, cwd=REPOSITORY, check=False, timeout=400, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def shared(factory: pytest.TempPathFactory) -> Path:
    """The folder with all checkpoints, which the test processes make once."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "fsdp"
    with (base / "fsdp.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made(base / "fsdp.new").rename(folder)
    return folder


def _model() -> Any:
    """A model with what is cut unevenly, tied, frozen, or no parameter."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.up = nn.Linear(4, 6)
            self.down = nn.Linear(6, 4)
            self.one_row = nn.Linear(4, 1, bias=False)
            self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(requires_grad=False)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight
            self.register_parameter("ä b", nn.Parameter(torch.randn(3)))
            self.empty = nn.Parameter(torch.randn(0, 4), requires_grad=False)
            self.register_buffer("counts", torch.arange(3))
            self.register_buffer("flags", torch.tensor([True, False]))

        def forward(self, ids: Any) -> Any:
            x = self.frozen(self.embed(ids)) * (1 + self.one_row(self.embed(ids)))
            x = self.down(torch.relu(self.up(x))) + getattr(self, "ä b").sum()
            return self.head(x)

    torch.manual_seed(0)
    return Model()


def _stepped(model: Any, steps: int = 2) -> Any:
    """The optimizer of a model, with two parameter groups, after some steps."""
    import torch

    own = [one for one in model.parameters() if one.requires_grad]
    decayed = [one for one in own if one.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [one for one in own if one.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(11)).square().mean().backward()
        optimizer.step()
    return optimizer


def _whole(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The live values, whole, as torch itself gathers them."""
    from torch.distributed.checkpoint import state_dict as api

    options = api.StateDictOptions(full_state_dict=True)
    weights = api.get_model_state_dict(model, options=options)
    states = api.get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return weights, {
        f"{name}|{key}": value for name, own in states.items() for key, value in own.items()
    }


def _write(folder: Path, weights: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    for name, tensors in (("truth", weights), ("optim", states)):
        plain = {key: one.detach().clone().contiguous() for key, one in tensors.items()}
        save_file(plain, folder / f"{name}.safetensors")
    (folder / "case.json").write_text(json.dumps({"verdict": "export"}))


class _Maker:
    """One of the ranks that make all checkpoints together."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def case(self, name: str, weights: Mapping[str, Any], states: Mapping[str, Any]) -> Path:
        """Return the folder of a checkpoint; its live values are next to it."""
        from torch import distributed

        if self.rank == 0:
            (self.folder / name / "ckpt").mkdir(parents=True)
            _write(self.folder / name, weights, states)
        distributed.barrier()
        return self.folder / name / "ckpt"

    def save_ranks(self, to: Path, model: Any, optimizer: Any) -> None:
        """Rank files as verl writes them."""
        import torch

        tail = f"world_size_{WORLD}_rank_{self.rank}.pt"
        torch.save(model.state_dict(), to / f"model_{tail}")
        torch.save(optimizer.state_dict(), to / f"optim_{tail}")
        torch.save({"lr_scheduler": {"last_epoch": 2}}, to / f"extra_state_{tail}")

    def fsdp2(self) -> None:
        """DCP of both, rank files, sharded safetensors."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as api
        from torch.distributed.fsdp import fully_shard

        model = _model()
        fully_shard(model)
        optimizer = _stepped(model)
        whole = _whole(model, optimizer)
        weights = api.get_model_state_dict(model)
        states = api.get_optimizer_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": states}
        dcp.save(both, checkpoint_id=self.case("fsdp2_dcp", *whole))
        self.save_ranks(self.case("fsdp2_ranks", *whole), model, optimizer)
        to = self.case("fsdp2_safetensors", *whole)
        writer = dcp.HuggingFaceStorageWriter(str(to), save_distributed=True)
        dcp.save({name: one.clone() for name, one in weights.items()}, storage_writer=writer)
        dcp.save({"optimizer": states}, checkpoint_id=to / "optimizer")

    def meshes(self) -> None:
        """FSDP2 with replicas of shards, and with tensor parallelism."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as api
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        model = _model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))
        optimizer = _stepped(model)
        self.save_ranks(self.case("hsdp_ranks", *_whole(model, optimizer)), model, optimizer)

        model = _model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        optimizer = _stepped(model)
        whole = _whole(model, optimizer)
        self.save_ranks(self.case("fsdp2_tp_ranks", *whole), model, optimizer)
        flat = api.StateDictOptions(flatten_optimizer_state_dict=True)
        states = api.get_optimizer_state_dict(model, optimizer, options=flat)
        both = {"model": api.get_model_state_dict(model), "optimizer": states}
        dcp.save(both, checkpoint_id=self.case("fsdp2_tp_dcp", *whole))

    def fsdp1(self) -> None:
        """DCP of both, and rank files, whose optimizer has pieces of flattened parameters."""
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        model = FullyShardedDataParallel(
            _model(), use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = _stepped(model)
        whole = _whole(model, optimizer)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        both = {"model": model.state_dict(), "optimizer": states}
        dcp.save(both, checkpoint_id=self.case("fsdp1_dcp", *whole))
        self.save_ranks(self.case("fsdp1_ranks", whole[0], {}), model, optimizer)

    def families(self) -> None:
        """Models of transformers, untrained, with their config, in three forms."""
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as api
        from torch.distributed.fsdp import fully_shard

        from tests.support.hf_models import tiny_config, tiny_model

        for family, more in FAMILIES.items():
            model = tiny_model(f"{family}ForCausalLM", tiny_config(family, **more))
            model.config.architectures = [f"FSDP{family}ForCausalLM"]
            fully_shard(model)
            weights = api.get_model_state_dict(model)
            dcp.save({"model": weights}, checkpoint_id=self.case(f"{family}_dcp", {}, {}))
            to = self.case(f"{family}_ranks", {}, {})
            torch.save(model.state_dict(), to / f"model_world_size_{WORLD}_rank_{self.rank}.pt")
            to = self.case(f"{family}_safetensors", {}, {})
            writer = dcp.HuggingFaceStorageWriter(str(to), save_distributed=True)
            dcp.save({name: one.clone() for name, one in weights.items()}, storage_writer=writer)
            for at in ("dcp/ckpt", "ranks/ckpt/huggingface", "safetensors/ckpt")[
                self.rank :: WORLD
            ]:
                model.config.save_pretrained(self.folder / f"{family}_{at}")


def _rank(folder: Path, rank: int, kinds: Sequence[str]) -> None:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/.group", rank=rank, world_size=WORLD
    )
    maker = _Maker(folder, rank)
    for kind in kinds or ("fsdp2", "meshes", "fsdp1", "families"):
        getattr(maker, kind)()
    distributed.barrier()
    distributed.destroy_process_group()


def _main(folder: Path, *kinds: str) -> None:
    """Make them in forks of this process, which has imported torch."""
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    if not kinds:
        import tests.support.hf_models  # noqa: F401 - slow

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(WORLD):
        if not (pid := os.fork()):
            try:
                _rank(folder, rank, kinds)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        ranks.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    (folder / ".group").unlink(missing_ok=True)
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
