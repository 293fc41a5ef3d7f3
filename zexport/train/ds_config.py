"""The DeepSpeed configuration of a run: ours, with that of ``--ds-config`` merged over it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from zexport.errors import UsageError
from zexport.train.options import TrainOptions

WARMUP_STEPS = 4


def ds_config(options: TrainOptions) -> dict[str, Any]:
    """The configuration that ``deepspeed.initialize`` is given.

    The learning rate warms up and then stays: a schedule that knew the last step would make a run
    of 20 steps, resumed to 40, differ from one of 40.
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
                "warmup_min_lr": options.lr / WARMUP_STEPS,
                "warmup_max_lr": options.lr,
                "warmup_num_steps": WARMUP_STEPS,
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
        del ours["gradient_accumulation_steps"]  # DeepSpeed works out the third of the three
    return _merged(ours, options.ds_config)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    result = {**ours, **theirs}
    for key in ours.keys() & theirs.keys():
        if isinstance(ours[key], dict) and isinstance(theirs[key], dict):
            result[key] = _merged(ours[key], theirs[key])
    return result


def settled(options: TrainOptions, explicit: Collection[str]) -> TrainOptions:
    """The options with ``stage`` and ``dtype`` as ``--ds-config`` has them."""
    theirs = options.ds_config
    says: dict[str, object] = {}
    if "stage" in _section(theirs, "zero_optimization"):
        says["stage"] = _section(theirs, "zero_optimization")["stage"]
    for dtype in ("bf16", "fp16"):
        if _section(theirs, dtype).get("enabled") is True:
            says["dtype"] = dtype
    for name, value in says.items():
        asked = getattr(options, name)
        if name in explicit and asked != value:
            raise UsageError(
                f"--ds-config contradicts --{name}",
                found=value,
                expected=asked,
                hint="Change one of the two",
            )
    return replace(options, **says)  # type: ignore[arg-type]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
