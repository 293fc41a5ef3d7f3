"""How the ranks of a run talk to each other about anything but gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed

from zexport.errors import ZexportError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others; ``group`` is of gloo, whatever carries the gradients."""

    rank: int
    world_size: int
    device: torch.device
    group: torch.distributed.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone makes folders and speaks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank. A collective call."""
        values: list[T | None] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0, on every rank. A collective call."""
        message: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.is_first:
            try:
                message = [(make(), None)]
            except (ZexportError, OSError) as error:
                message = [(None, error)]
        torch.distributed.broadcast_object_list(message, src=0, group=self.group)
        value, failure = message[0]
        if failure is not None:
            raise failure
        return cast("T", value)

    def leave(self) -> None:
        """Nothing more will be said: connections are closed once everyone is here. Collective."""
        torch.distributed.barrier(group=self.group)
        torch.distributed.destroy_process_group()

    def mean(self, value: float) -> float:
        """The mean of every rank's value, the same bits on every rank. A collective call."""
        total = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.group)
        return float(total) / self.world_size


def join_ranks(timeout_s: int) -> Ranks:
    """This process as a rank of the launcher's run; no collective call lasts beyond the timeout.

    It uses nccl where every local rank has a GPU of its own, else gloo on the CPU.
    """
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(_local_world_size())
    wants_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    on_gpu = not wants_cpu and torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

    import deepspeed  # noqa: PLC0415 - only after the accelerator is chosen

    if not on_gpu:
        prepare_cpu()
    timeout = timedelta(seconds=timeout_s)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=timeout, verbose=False)
    return Ranks(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        device=torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"),
        group=torch.distributed.new_group(backend="gloo", timeout=timeout),
    )


def prepare_cpu() -> None:
    """DeepSpeed 0.19.8 trains on any CPU, in any precision, and compiles nothing for it."""
    import deepspeed  # noqa: PLC0415 - only after the accelerator is chosen
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - likewise

    # The operator serves inference alone. Compiling it needs a compiler, and a lock that a killed
    # compilation left behind would be waited for without end.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asks for fp16 arithmetic in hardware; torch has its own kernels for every CPU.
    get_accelerator().is_fp16_supported = lambda: True


def _local_world_size() -> str:
    """Ranks of this node: torchrun's name for it, or the deepspeed launcher's, or all of them."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    return next(os.environ[name] for name in names if name in os.environ)
