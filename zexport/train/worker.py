"""One rank: join the others, build model, text and engine, write the run's folder, and train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed
from msgspec import Struct
from msgspec.structs import replace

from zexport.errors import ZexportError
from zexport.filenames import SOURCE_SIDECAR
from zexport.storage.files import make_folder, write_durably
from zexport.storage.os_errors import steadily, writing
from zexport.train.loop import Place, resume_from_latest, train_steps
from zexport.train.model import (
    Corpus,
    add_adapter,
    describe_source,
    freeze,
    make_model,
    make_text,
    meta_twin,
)
from zexport.train.options import OPTIONS_FILE, TrainOptions, TrainSummary, check_free
from zexport.train.save import AdapterWriter, ModelWriter, Saver, open_like_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WARMUP_STEPS = 4


class Ranks(Struct, frozen=True):
    """This rank among the others; ``group`` is gloo, whichever backend reduces gradients."""

    rank: int
    world_size: int
    device: torch.device
    group: torch.distributed.ProcessGroup

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order, on every rank. Collective."""
        values: list[T | None] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def from_first(self, make: Callable[[], T]) -> T:
        """Return on every rank what ``make`` returns, or raise what it raises, on rank 0."""
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
        """Close the connections once every rank is here. Collective."""
        torch.distributed.barrier(group=self.group)
        torch.distributed.destroy_process_group()

    def mean(self, value: float) -> float:
        """Return the mean over the ranks, with the same bits on every rank. Collective."""
        total = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.group)
        return float(total) / self.world_size


def join_ranks(timeout_s: int) -> Ranks:
    """Join the launcher's run; no collective call takes longer than the timeout.

    Uses nccl if every rank of this node has a GPU of its own, else gloo on the CPU.
    """
    sizes = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")  # of torchrun, deepspeed, others
    local_size = int(next(os.environ[name] for name in sizes if name in os.environ))
    local_rank = int(os.environ["LOCAL_RANK"])
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
    """Let DeepSpeed 0.19.8 train on any CPU, in any dtype, without compiling anything."""
    import deepspeed  # noqa: PLC0415 - only after the accelerator is chosen
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - likewise

    # Only inference uses this operator. It needs a compiler, and waits forever for the lock of a
    # killed compilation.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed asks for fp16 arithmetic in hardware; torch has its own kernels for every CPU.
    get_accelerator().is_fp16_supported = lambda: True


def run_rank(options: TrainOptions, progress: Callable[[str], None]) -> TrainSummary:
    """Train and save as one of the launcher's ranks; only rank 0 reports progress."""
    ranks = join_ranks(options.timeout)
    options = replace(options, world_size=ranks.world_size)
    saver, corpus = start_run(options, ranks)
    place = resume_from_latest(saver.engine, ranks, options) if options.resume else Place()
    summary = train_steps(saver, corpus, place, progress if ranks.is_first else lambda _: None)
    ranks.leave()
    return summary


def start_run(
    options: TrainOptions,
    ranks: Ranks,
    *,
    make: Callable[[TrainOptions, int], PreTrainedModel] = make_model,
    groups: Callable[[torch.nn.Module], Iterable[Any]] | None = None,
) -> tuple[Saver, Corpus]:
    """Write the run's folder and return an engine before its first step. Collective.

    ``make`` returns the model for options and vocabulary size, ``groups`` the optimizer's
    parameter groups.
    """
    import deepspeed  # noqa: PLC0415 - only after the accelerator is chosen

    tokenizer, corpus = ranks.from_first(lambda: make_text(options))  # other nodes lack the files
    base = make(options, corpus.vocab_size)
    dtype = _DTYPES[options.dtype]
    ranks.from_first(lambda: _claim_folder(options, base, dtype))
    base.config.dtype, base.config.architectures = dtype, [type(base).__name__]
    model: torch.nn.Module = base
    if options.lora:
        model = add_adapter(base, options.base)
        writer: ModelWriter | AdapterWriter = AdapterWriter(model, tokenizer)
    else:
        half = torch.bfloat16 if options.dtype == "fp32" else dtype
        writer = ModelWriter(meta_twin(base, half), tokenizer)
    freeze(model, options.freeze)
    twin = meta_twin(base, dtype)
    torch.manual_seed(options.seed + ranks.rank)  # the weights are the same, dropout is not
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained if groups is None else groups(model),
        config=_ds_config(options),
    )
    source = describe_source(twin, adapter=options.lora)
    ranks.from_first(lambda: _describe_run(options, base, writer, source))
    return Saver(engine, ranks, options, writer), corpus


def _claim_folder(options: TrainOptions, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Create OUT, with the base model of an adapter unless ``--model`` is passed.

    It is rounded as DeepSpeed rounds it, and saved before the adapter changes its names.
    """
    if options.resume:
        return
    with writing(options.out):
        check_free(options.out)
        make_folder(options.out)
        if options.lora and options.model is None:
            rounded = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
            meta_twin(model, dtype).save_pretrained(options.base, state_dict=rounded)
            open_like_config(options.base)


def _describe_run(
    options: TrainOptions,
    model: PreTrainedModel,
    writer: ModelWriter | AdapterWriter,
    source: str,
) -> None:
    """Write config, tokenizer, source description and options into OUT."""
    out = options.out
    with writing(out):
        model.config.save_pretrained(out)
        if model.can_generate():
            model.generation_config.save_pretrained(out)
        writer.tokenizer.save_pretrained(out)
        if isinstance(writer, AdapterWriter):
            writer.write_config(out)
        kept = replace(options, out=Path()).to_json()  # the folder may be moved
        for name, text in ((SOURCE_SIDECAR, source), (OPTIONS_FILE, kept)):
            steadily(partial(write_durably, out / name, text.encode()))


def _ds_config(options: TrainOptions) -> dict[str, Any]:
    """Return the DeepSpeed config: ``--ds-config`` merged over zexport's.

    The schedule only warms up: if it depended on the last step, a resumed run would differ from an
    uninterrupted one.
    """
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": options.lr,
                "betas": [0.9, 0.95],
                "weight_decay": 0.0,
                "torch_adam": True,  # needs no compiled operator
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": options.lr / _WARMUP_STEPS,
                "warmup_max_lr": options.lr,
                "warmup_num_steps": _WARMUP_STEPS,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": options.stage,
            "stage3_gather_16bit_weights_on_model_save": options.gathered,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if options.dtype == "bf16":
        ours["bf16"] = {"enabled": True}
    if options.dtype == "fp16":
        ours["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if "train_batch_size" in options.ds_config:
        del ours["gradient_accumulation_steps"]  # DeepSpeed derives the third of the three
    return _merged(ours, options.ds_config)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    result = {**ours, **theirs}
    for key in ours.keys() & theirs.keys():
        if isinstance(ours[key], dict) and isinstance(theirs[key], dict):
            result[key] = _merged(ours[key], theirs[key])
    return result
