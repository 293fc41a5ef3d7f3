"""World size, stage and layout settings of the resumed run."""

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
from zexport.options import ReshardOptions, ResumeFormat
from zexport.storage.json import read_json_object, values_of

Config: TypeAlias = Mapping[str, object]
"""A DeepSpeed config."""

SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default (0.10 to 0.19, ``runtime/zero/config.py``)."""

_AUTO = "auto"
_LAYOUT = ("zero_optimization", "data_types")
_PRECISIONS = ("bf16", "bfloat16", "fp16")
_ADDS_PRECISION = (Framework.HF_TRAINER, Framework.ACCELERATE)
"""Frameworks that add their own precision section (accelerate 1.15, ``set_mixed_precision``)."""

_VERSION = re.compile(r"\d{1,6}(\.\d{1,6})*", re.ASCII)
_FIRST = (0, 14, 5)
TAKES_EITHER_FORM = (0, 19, 3)
"""First DeepSpeed whose ZeRO-3 loads the files of other stages (``load_hp_checkpoint_state``)."""


class TargetSettings(Struct, frozen=True):
    """Layout of rank files.

    Attributes:
        world_size: data-parallel ranks.
        stage: 1 to 3.
        sub_group_size: elements of a rank at which ZeRO-3 begins another sub-group.
        is_dealt_out: parameters of ZeRO-1/2 are in round-robin order (``round_robin_gradients``).
        is_bf16: names of optimizer states files begin with ``bf16_``.
        is_bf16_optimizer: BF16_Optimizer loads them, a variant of ZeRO-1.
        is_data_before_experts: adjacent ranks have the same experts
            (``use_data_before_expert_parallelism``); else different ones.
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


class UniversalSettings(Struct, frozen=True):
    """Form of a universal checkpoint.

    Attributes:
        for_deepspeed: version of DeepSpeed that loads it; null for any from 0.19.3 on.
        stage: ZeRO stage that loads it; null for 1, 2 and 3. Tensors for ZeRO-3 are flat.
    """

    for_deepspeed: str | None = None
    stage: int | None = None

    def __str__(self) -> str:
        """Describe which ranks can resume."""
        stages = "ZeRO-1, 2 or 3" if self.stage is None else f"ZeRO-{self.stage}"
        newest = "" if self.for_deepspeed is None else f", DeepSpeed {self.for_deepspeed}"
        return f"universal, for any number of ranks under {stages}{newest}"


Settings: TypeAlias = TargetSettings | UniversalSettings


class Target(Struct, frozen=True):
    """What to write; ``given`` is the content of ``--ds-config``."""

    settings: Settings
    given: Config | None = None
    warnings: tuple[str, ...] = ()


def decide_target(checkpoint: TrainingState, options: ReshardOptions) -> Target:
    """Return the settings, from options, a passed DeepSpeed config, or the checkpoint's config.

    Raises:
        UsageError: options contradict each other, or do not fit the checkpoint.
    """
    given = None if options.ds_config is None else _read(options.ds_config)
    config = source = source_config(checkpoint)
    if given is not None:
        added: Config = {}
        if checkpoint.location.framework in _ADDS_PRECISION and not {*given} & {*_PRECISIONS}:
            added = dict.fromkeys(_PRECISIONS, _AUTO)
        config = fill_auto({**given, **added}, source)
    if options.format is ResumeFormat.UNIVERSAL:
        return _universal_target(checkpoint, options, config, given)
    if options.for_deepspeed is not None:
        raise UsageError(
            "--for-deepspeed is only for universal checkpoints; every version loads rank files",
            hint="Leave it out, or add --format universal",
        )
    if options.world_size is None or not 0 < options.world_size <= WORLD_SIZE_MAX:
        raise UsageError(
            "--world-size is not a number of ranks",
            found=options.world_size,
            expected=f"1 to {WORLD_SIZE_MAX}",
        )
    zero = _at(config, "zero_optimization")
    stage, precision = _stage(checkpoint, options, config), _precision(config)
    if given is not None and source and precision != (expected := _precision(source)):
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
    is_round_robin = stage < ZERO3 and _at(zero, "round_robin_gradients") is True
    warnings = []
    if _at(zero, "load_from_fp32_weights") is False:
        warnings.append(
            "load_from_fp32_weights is false: DeepSpeed does not load the fp32 master weights, "
            "only the 16-bit weights"
        )
    if stage == ZERO3 and _at(zero, "elastic_checkpoint") is True:
        warnings.append("elastic_checkpoint is on: ZeRO-3 then loads no optimizer state")
    settings = TargetSettings(
        world_size=options.world_size,
        stage=stage,
        sub_group_size=int(size) if isinstance(size, int | float) and size > 0 else SUB_GROUP_SIZE,
        is_dealt_out=is_round_robin and not is_bf16_optimizer,
        is_bf16=is_bf16,
        is_bf16_optimizer=is_bf16_optimizer,
        is_data_before_experts=_at(config, "use_data_before_expert_parallelism") is True,
    )
    return Target(settings, given, tuple(warnings))


def _universal_target(
    checkpoint: TrainingState, options: ReshardOptions, config: Config, given: Config | None
) -> Target:
    """Return the form of a universal checkpoint, with a warning about round robin.

    DeepSpeed ignores round robin when it loads one. Source: 0.14.5 to 0.19.8,
    ``runtime/zero/stage_1_and_2.py`` (``_link_all_hp_params``).
    """
    version, stage = options.for_deepspeed, None
    if version is not None and release(version) < TAKES_EITHER_FORM:
        stage = _stage(checkpoint, options, config)
    elif options.stage is not None:
        _check_stage(options.stage, (1, 2, ZERO3), checkpoint)
    warnings = []
    if stage != ZERO3 and _at(config, "zero_optimization", "round_robin_gradients") is True:
        warnings.append(
            "round_robin_gradients is on: under ZeRO-1 and 2, DeepSpeed silently loads a universal "
            "checkpoint into wrong weights. Switch it off in the run that loads this one"
        )
    return Target(UniversalSettings(version, stage), given, tuple(warnings))


def release(version: str) -> tuple[int, ...]:
    """Parse a version of DeepSpeed."""
    found = _VERSION.match(version)
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    if numbers < _FIRST:
        raise UsageError(
            "--for-deepspeed: this version loads no universal checkpoint of this form",
            found=version,
            expected="0.14.5 or newer",
            hint="Reshard to rank files with --world-size, which every version loads",
        )
    return numbers


def _stage(checkpoint: TrainingState, options: ReshardOptions, config: Config) -> int:
    """Return the ZeRO stage; ``--stage`` may not contradict the config.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_validate_zero3_moe_compatibility``).
    """
    stated = _at(config, "zero_optimization", "stage") if options.ds_config else None
    if None not in (stated, options.stage) and stated != options.stage:
        raise UsageError(
            "--stage and --ds-config contradict each other",
            path=options.ds_config,
            found=f"stage {stated}",
            expected=f"{options.stage}",
        )
    models = models_of(checkpoint)
    recorded = _at(source_config(checkpoint), "zero_optimization", "stage")
    known = (options.stage, stated, checkpoint.stage, recorded)
    possible: tuple[int, ...] = (1, 2, ZERO3)
    if checkpoint.structure is Structure.EXPERTS and not any(map(autoep_layers, models)):
        possible = (1, 2)
    if checkpoint.structure is Structure.PIPELINE or any(
        model.grid is not None and model.grid.stages > 1 for model in models
    ):
        possible = (1,)
    return _check_stage(next((one for one in known if one is not None), 0), possible, checkpoint)


def _check_stage(stage: object, possible: tuple[int, ...], checkpoint: TrainingState) -> int:
    if type(stage) is not int or stage not in possible:
        raise UsageError(
            f"this checkpoint cannot be resharded to ZeRO-{stage}",
            path=checkpoint.location.tag_dir,
            found=f"stage {stage}",
            expected=" or ".join(map(str, possible)),
            hint="Pass another with --stage",
        )
    return stage


def _read(path: Path) -> Config:
    """Return the content of ``--ds-config``, which DeepSpeed must accept."""
    try:
        given: Config = values_of(read_json_object(path))
    except ZexportError as cause:
        raise UsageError(
            f"--ds-config: {cause.problem}",
            path=path,
            found=cause.found,
            hint="Pass the JSON file of the run's DeepSpeed config",
        ) from cause
    return given


def models_of(checkpoint: TrainingState) -> list[ModelStates]:
    """Return the model states of every model-parallel index, in order."""
    return [ranks.first for _, ranks in sorted(checkpoint.zero.items()) if ranks.model]


def source_config(checkpoint: TrainingState) -> Config:
    """Return the DeepSpeed config in the model states files; empty if it is missing."""
    return next((model.config for model in models_of(checkpoint)), {})


def layout_config(settings: TargetSettings, given: Config, checkpoint: TrainingState) -> Config:
    """Return ``given`` with the settings, and with the source's values for ``auto`` in the layout.

    A program that replaces ``auto`` by DeepSpeed's default would read flat data in another order.
    """
    layout = {key: given[key] for key in _LAYOUT if key in given}
    filled = fill_auto(layout, source_config(checkpoint))
    return {str(key): value for key, value in settings.put_into({**given, **filled}).items()}


def fill_auto(given: Config, source: Config) -> Config:
    """Return a config with the source's values for ``auto``, if JSON can express them."""
    return {key: _filled(one, source.get(key)) for key, one in given.items()}


def _filled(value: object, source: object) -> object:
    if isinstance(value, Mapping):
        return fill_auto(value, source if isinstance(source, Mapping) else {})
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
