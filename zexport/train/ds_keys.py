"""The keys of a DeepSpeed configuration; DeepSpeed passes over any other, and says nothing.

Source: DeepSpeed 0.10 to 0.19, ``runtime/config.py`` and ``runtime/constants.py``; within a section
DeepSpeed refuses what it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

_KEYS = frozenset(
    {
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("managed_gradient_accumulation", "optimizer", "scheduler", "zero_optimization"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "fp16", "bf16"),
        *("bfloat16", "amp", "torch_autocast", "data_types", "communication_data_type"),
        *("seq_parallel_communication_data_type", "sequence_parallel_size", "gradient_clipping"),
        *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
        *("fp32_allreduce", "disable_allgather", "disable_python_gc", "sparse_gradients"),
        *("steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "log_level"),
        *("activation_checkpointing", "checkpoint", "datastates_ckpt", "nebula", "aio"),
        *("dataloader_drop_last", "data_efficiency"),
        *("curriculum_learning", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
        *("flops_profiler", "timers", "autotuning", "elasticity", "compile"),
        *("hybrid_engine", "pipeline", "tensor_parallel", "expert_parallel", "vocabulary_size"),
        *("use_data_before_expert_parallelism", "weight_quantization", "quantize_training"),
        *("compression_training", "sparse_attention", "eigenvalue", "progressive_layer_drop"),
        "graph_harvesting",
    }
)


def told_of_keys(config: Mapping[str, object], known: Collection[str] = ()) -> Iterator[str]:
    """Tells of keys that change nothing, with what may have been meant.

    ``known`` are keys that the run had before.
    """
    for key in sorted(config.keys() - _KEYS - {*known}):
        near = get_close_matches(key, _KEYS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        yield f"--ds-config has {key!r}, which DeepSpeed does not know and passes over{meant}"
