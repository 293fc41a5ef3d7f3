"""Checkpoints that Accelerate and the Trainer themselves save under FSDP2, on two CPU ranks.

``torchrun -m tests.support.fsdp_frameworks accelerate|trainer SHARDED|FULL OUT`` leaves
``OUT.truth.safetensors``, the live weights, and ``OUT.model``, config and tokenizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def made(framework: str, form: str, out: Path) -> Path:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "tests.support.fsdp_frameworks", framework, form, str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, check=False, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


def _use_fsdp() -> None:
    """Accelerate uses FSDP only on accelerators: report ranks of GPUs, which then run on CPUs."""
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _by_accelerate(model: Any, form: str, out: Path) -> Any:
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    _use_fsdp()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type=f"{form}_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(16).reshape(2, 8)
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(out / "checkpoint_0"))
    return model


def _by_trainer(model: Any, form: str, out: Path) -> Any:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    config = {
        "version": 2,
        "state_dict_type": f"{form}_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    }
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        fsdp="full_shard auto_wrap",
        fsdp_config=config,
        report_to=[],
    )
    arguments.device  # noqa: B018 - sets up the ranks
    _use_fsdp()
    rows = {"input_ids": [[i] * 8 for i in range(8)], "labels": [[i] * 8 for i in range(8)]}
    trainer = Trainer(model, arguments, train_dataset=Dataset.from_dict(rows))
    trainer.train()
    return trainer.model_wrapped


def _main(framework: str, form: str, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import state_dict as api

    from tests.support.hf_models import tiny_config, tiny_model

    model = tiny_model("LlamaForCausalLM", tiny_config(tie_word_embeddings=True))
    if os.environ["RANK"] == "0":
        model.config.save_pretrained(out.with_name(f"{out.name}.model"))
    run = {"accelerate": _by_accelerate, "trainer": _by_trainer}[framework]
    trained = run(model, form, out)
    options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = api.get_model_state_dict(trained, options=options)
    if os.environ["RANK"] == "0":
        plain = {name: one.clone().contiguous() for name, one in weights.items()}
        save_file(plain, out.with_name(f"{out.name}.truth.safetensors"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:3], Path(sys.argv[3]))  # type: ignore[misc]
