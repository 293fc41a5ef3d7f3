"""What the form of a target depends on: its DeepSpeed config or the source's, or the loader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from zexport.checkpoint.resolve import Framework
from zexport.checkpoint.state import Structure, TrainingState
from zexport.checkpoint.zero.expert_layers import autoep_layers
from zexport.checkpoint.zero.ranks import WORLD_SIZE_MAX
from zexport.checkpoint.zero.records import ZERO3, ModelStates
from zexport.errors import UsageError, ZexportError
from zexport.options import ReshardOptions
from zexport.storage.contents import read_json_object

_AUTO = "auto"
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default (0.10 to 0.19, ``runtime/zero/config.py``)."""

_STAGES = (1, 2, ZERO3)
_LAYOUT = ("zero_optimization", "data_types")
_PRECISIONS = ("bf16", "bfloat16", "fp16")
_FILLS_IN_PRECISION = (Framework.HF_TRAINER, Framework.ACCELERATE)
"""Frameworks that add their own precision section (accelerate 1.15, ``set_mixed_precision``)."""

_VERSION = re.compile(r"\d{1,6}(\.\d{1,6})*", re.ASCII)
_FIRST = (0, 14, 5)
TAKES_EITHER_FORM = (0, 19, 3)
"""First DeepSpeed whose ZeRO-3 loads the files of other stages (``load_hp_checkpoint_state``)."""


class TargetSettings(Struct, frozen=True):
    """What decides which element lies where in files for another world size or stage.

    Attributes:
        world_size: data-parallel ranks.
        stage: 1 to 3.
        sub_group_size: elements of a rank at which ZeRO-3 begins another sub-group.
        is_dealt_out: whether ZeRO-1/2 deals parameters out (``round_robin_gradients``).
        is_bf16: whether optimizer files are named after bf16.
        is_bf16_optimizer: whether BF16_Optimizer is what loads them, as a form of ZeRO-1.
        is_data_before_experts: whether neighbours share experts
            (``use_data_before_expert_parallelism``); else they have different ones.
    """

    world_size: int
    stage: int
    sub_group_size: int = SUB_GROUP_SIZE
    is_dealt_out: bool = False
    is_bf16: bool = False
    is_bf16_optimizer: bool = False
    is_data_before_experts: bool = False

    def __str__(self) -> str:
        """Describe which ranks can resume."""
        ranks = f"{self.world_size:,} rank{'s' * (self.world_size != 1)}"
        optimizer = ", BF16_Optimizer" if self.is_bf16_optimizer else ""
        order = ", round robin" if self.is_dealt_out else ""
        return f"for {ranks} under ZeRO-{self.stage}{optimizer}{order}"

    def put_into(self, config: object) -> dict[object, object]:
        """Return a DeepSpeed config with these settings."""
        config = config if isinstance(config, dict) else {}
        zero = config.get("zero_optimization")
        found = dict(zero) if isinstance(zero, dict) else {}
        found |= {"stage": self.stage, "round_robin_gradients": self.is_dealt_out}
        if self.stage == ZERO3:
            found["sub_group_size"] = self.sub_group_size
        return {**config, "zero_optimization": found}

    def typed(
        self, given: Mapping[str, object], source: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return a given config with the values that these settings were decided by.

        A program that takes ``auto`` for DeepSpeed's default would read the flat data in another
        order.
        """
        filled = {key: _filled(given[key], source.get(key)) for key in _LAYOUT if key in given}
        return {str(key): value for key, value in self.put_into({**given, **filled}).items()}


class UniversalSettings(Struct, frozen=True):
    """What decides the form of a universal checkpoint: the DeepSpeed that loads it.

    Attributes:
        for_deepspeed: the version of DeepSpeed; null for any from 0.19.3 on.
        stage: the ZeRO stage that it is for; null for 1, 2 and 3.
    """

    for_deepspeed: str | None = None
    stage: int | None = None

    def __str__(self) -> str:
        """Describe which ranks can resume."""
        stages = "ZeRO-1, 2 or 3" if self.stage is None else f"ZeRO-{self.stage}"
        newest = "" if self.for_deepspeed is None else f", DeepSpeed {self.for_deepspeed}"
        return f"universal, for any number of ranks under {stages}{newest}"

    @property
    def is_flat(self) -> bool:
        """Whether tensors are flat, as ZeRO-3 loads them before 0.19.3; else in their shape."""
        return self.stage == ZERO3


Settings: TypeAlias = TargetSettings | UniversalSettings
"""Settings of a target in either format."""


def _filled(value: object, source: object) -> object:
    """Return a value with the source's in place of ``auto``, if JSON can express that."""
    if isinstance(value, Mapping):
        return {key: _filled(one, _at(source, key)) for key, one in value.items()}
    if value == _AUTO and isinstance(source, Mapping):
        return {key: _filled(_AUTO, one) for key, one in source.items() if isinstance(key, str)}
    return source if value == _AUTO and isinstance(source, str | int | float) else value


def _at(config: object, *keys: str) -> object:
    """Return the value at nested keys; ``None`` if it is missing or ``auto``."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return None if config == _AUTO else config


def _precision(config: object) -> str:
    """Return the dtype that the module trains in."""
    on = [key for key in _PRECISIONS if _at(config, key, "enabled") is True]
    return on[0].replace("bfloat16", "bf16") if on else "fp32"


def settle(
    checkpoint: TrainingState, options: ReshardOptions
) -> tuple[TargetSettings, tuple[str, ...]]:
    """Return the settings of rank files, and warnings about states that the run does not load."""
    source, config = source_config(checkpoint), _config_of(checkpoint, options)
    zero = _at(config, "zero_optimization")
    stage, precision = _stage(checkpoint, options, config), _precision(config)
    if options.ds_config and source and precision != (expected := _precision(source)):
        # File names and the loss scaler are the source's.
        raise UsageError(
            "--ds-config has another dtype than the checkpoint",
            path=options.ds_config,
            found=precision,
            expected=expected,
            hint=f"Leave {precision} out of it"
            if expected == "fp32"
            else f'Write "{expected}": {{"enabled": "auto"}} into it',
        )
    offload = _at(zero, "offload_optimizer", "device") == "cpu" or _at(zero, "cpu_offload") is True
    in_fp32 = _at(config, "data_types", "grad_accum_dtype") in ("fp32", "float32", "float")
    size, is_bf16 = _at(zero, "sub_group_size"), precision == "bf16"
    is_bf16_optimizer = stage == 1 and is_bf16 and in_fp32 and not offload
    is_dealt_out = stage < ZERO3 and _at(zero, "round_robin_gradients") is True
    settings = TargetSettings(
        world_size=_world_size(options),
        stage=stage,
        sub_group_size=int(size) if isinstance(size, int | float) and size > 0 else SUB_GROUP_SIZE,
        is_dealt_out=is_dealt_out and not is_bf16_optimizer,
        is_bf16=is_bf16,
        is_bf16_optimizer=is_bf16_optimizer,
        is_data_before_experts=_at(config, "use_data_before_expert_parallelism") is True,
    )
    warnings = []
    if _at(zero, "load_from_fp32_weights") is False:
        warnings.append(
            "load_from_fp32_weights is false: DeepSpeed does not load the fp32 master weights, and "
            "takes the 16-bit weights"
        )
    if stage == ZERO3 and _at(zero, "elastic_checkpoint") is True:
        warnings.append("elastic_checkpoint is on, with which ZeRO-3 loads nothing")
    return settings, tuple(warnings)


def source_config(checkpoint: TrainingState) -> Mapping[str, object]:
    """Return the DeepSpeed config in the model states files; empty if there is none."""
    model = next(iter(models_of(checkpoint)), None)
    return {} if model is None else model.config


def models_of(checkpoint: TrainingState) -> list[ModelStates]:
    """Return the model states of every model-parallel index, in order."""
    return [ranks.first for _, ranks in sorted(checkpoint.zero.items()) if ranks.model]


def _config_of(checkpoint: TrainingState, options: ReshardOptions) -> object:
    """Return the target's DeepSpeed config; ``auto`` is the source's value."""
    source = source_config(checkpoint)
    if options.ds_config is None:
        return source
    given = _read(options.ds_config)
    is_filled_in = checkpoint.location.framework in _FILLS_IN_PRECISION
    if is_filled_in and given.keys().isdisjoint(_PRECISIONS):
        given = {**given, **dict.fromkeys(_PRECISIONS, _AUTO)}
    return _filled(given, source)


def _read(path: Path) -> Mapping[str, object]:
    """Return a given DeepSpeed config, which DeepSpeed must accept."""
    try:
        given = read_json_object(path)
    except ZexportError as cause:
        raise UsageError(
            f"{cause.problem}, and was given with --ds-config",
            path=path,
            found=cause.found,
            hint="Pass the JSON file of the run's DeepSpeed config",
        ) from cause
    for key in (*_LAYOUT, *_PRECISIONS):
        if not isinstance(given.get(key), dict | bool | str | None):
            kind = type(given[key]).__name__
            raise UsageError(f"--ds-config: {key} is not an object", path=path, found=kind)
    if _precision(given) == "bf16" and _at(given, "fp16", "enabled") is True:
        raise UsageError("--ds-config enables bf16 and fp16; DeepSpeed accepts one", path=path)
    return given


def settle_universal(
    checkpoint: TrainingState, options: ReshardOptions
) -> tuple[UniversalSettings, tuple[str, ...]]:
    """Return the settings of a universal checkpoint, and warnings about the config.

    DeepSpeed ignores round robin when it loads one. Source: 0.14.5 to 0.19.8,
    ``runtime/zero/stage_1_and_2.py`` (``_link_all_hp_params``).
    """
    if options.stage is not None:
        _check_stage(options.stage, _STAGES, checkpoint)
    version, config = options.for_deepspeed, _config_of(checkpoint, options)
    is_for_all = version is None or release(version) >= TAKES_EITHER_FORM
    stage = None if is_for_all else _stage(checkpoint, options, config)
    warnings = []
    if stage != ZERO3 and _at(config, "zero_optimization", "round_robin_gradients") is True:
        warnings.append(
            "round_robin_gradients is on: under ZeRO-1 and 2, DeepSpeed silently loads a universal "
            "checkpoint into wrong weights. Switch it off in the run that loads this one"
        )
    return UniversalSettings(version, stage), tuple(warnings)


def release(version: str) -> tuple[int, ...]:
    """Parse a version of DeepSpeed."""
    found = _VERSION.match(version)
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    if numbers < _FIRST:
        raise UsageError(
            "--for-deepspeed is no version that loads universal checkpoints of this form",
            found=version,
            expected="0.14.5 or newer",
            hint="Reshard to rank files with --world-size, which every version loads",
        )
    return numbers


def _world_size(options: ReshardOptions) -> int:
    if options.world_size is None or not 0 < options.world_size <= WORLD_SIZE_MAX:
        raise UsageError(
            "--world-size is no number of ranks",
            found=options.world_size,
            expected=f"1 to {WORLD_SIZE_MAX}",
        )
    return options.world_size


def _stage(checkpoint: TrainingState, options: ReshardOptions, config: object) -> int:
    """Return the target's ZeRO stage; options win over the config, and may not contradict it.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_validate_zero3_moe_compatibility``).
    """
    stated = _at(config, "zero_optimization", "stage") if options.ds_config else None
    if None not in (stated, options.stage) and stated != options.stage:
        raise UsageError(
            "--stage and --ds-config mean different stages",
            path=options.ds_config,
            found=f"stage {stated}",
            expected=f"{options.stage}",
        )
    recorded = _at(source_config(checkpoint), "zero_optimization", "stage")
    told = (options.stage, stated, checkpoint.stage, recorded)
    chosen, models = next((one for one in told if one is not None), 0), models_of(checkpoint)
    possible: tuple[int, ...] = _STAGES
    if checkpoint.structure is Structure.EXPERTS and not any(map(autoep_layers, models)):
        possible = (1, 2)
    grids = [model.grid for model in models if model.grid is not None]
    if checkpoint.structure is Structure.PIPELINE or any(one.stages > 1 for one in grids):
        possible = (1,)
    return _check_stage(chosen, possible, checkpoint)


def _check_stage(stage: object, possible: tuple[int, ...], checkpoint: TrainingState) -> int:
    """Return ``stage``; raise if DeepSpeed does not train the model with it, or writes no files."""
    if type(stage) is int and stage in possible:
        return stage
    raise UsageError(
        f"this checkpoint cannot be resharded to ZeRO-{stage}",
        path=checkpoint.location.tag_dir,
        found=f"stage {stage}",
        expected=" or ".join(map(str, possible)),
        hint="Pass another with --stage",
    )
