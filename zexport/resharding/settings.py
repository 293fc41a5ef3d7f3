"""What the form of a target depends on: its DeepSpeed config or the source's, or the loader."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
from zexport.store.contents import read_json_object

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
        said = {key: _said(given[key], source.get(key)) for key in _LAYOUT if key in given}
        return {str(key): value for key, value in self.put_into({**given, **said}).items()}


class UniversalSettings(Struct, frozen=True):
    """What decides the form of a universal checkpoint: who is to load it.

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
        """Whether tensors are flat and by themselves, not in a dictionary in their shape.

        So ZeRO-3 takes them in versions in which one form for all stages is not to be had.
        """
        return self.stage == ZERO3


Settings: TypeAlias = TargetSettings | UniversalSettings
"""Settings of a target in either format."""


class _Config:
    """A DeepSpeed config whose ``auto`` values are those of the source."""

    def __init__(self, own: Mapping[str, object], source: Mapping[str, object]) -> None:
        self._own = own
        self._source = source

    def get(self, *keys: str) -> object:
        """Return the value at nested keys; the source's for ``auto``."""
        value = _at(self._own, keys)
        value = _at(self._source, keys) if value == _AUTO else value
        return None if value == _AUTO else value

    def is_on(self, *keys: str) -> bool:
        return self.get(*keys) is True

    def precision(self) -> str:
        """Return the dtype that the module trains in."""
        if any(self.is_on(key, "enabled") for key in ("bf16", "bfloat16")):
            return "bf16"
        return "fp16" if self.is_on("fp16", "enabled") else "fp32"


def _said(value: object, source: object) -> object:
    """Return a value with the source's in place of ``auto``, if JSON can express that."""
    if isinstance(value, Mapping):
        return {key: _said(one, _at(source, (key,))) for key, one in value.items()}
    if value == _AUTO and isinstance(source, Mapping):
        return {key: _said(_AUTO, one) for key, one in source.items() if isinstance(key, str)}
    return source if value == _AUTO and isinstance(source, str | int | float) else value


def _at(config: object, keys: tuple[str, ...]) -> object:
    for key in keys:
        if config == _AUTO:
            return _AUTO
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def settle(
    checkpoint: TrainingState, options: ReshardOptions
) -> tuple[TargetSettings, tuple[str, ...]]:
    """Return the settings of rank files, and warnings about them."""
    source, config = source_config(checkpoint), _config_of(checkpoint, options)
    stage = _stage(checkpoint, options, config)
    if options.ds_config and source:
        _check_precision(options.ds_config, config.precision(), _Config(source, {}).precision())
    is_bf16 = config.precision() == "bf16"
    offload = config.get("zero_optimization", "offload_optimizer", "device") == "cpu"
    offload = offload or config.is_on("zero_optimization", "cpu_offload")
    in_fp32 = config.get("data_types", "grad_accum_dtype") in ("fp32", "float32", "float")
    size = config.get("zero_optimization", "sub_group_size")
    is_bf16_optimizer = stage == 1 and is_bf16 and in_fp32 and not offload
    settings = TargetSettings(
        world_size=_world_size(options),
        stage=stage,
        sub_group_size=int(size) if isinstance(size, int | float) and size > 0 else SUB_GROUP_SIZE,
        is_dealt_out=stage < ZERO3
        and not is_bf16_optimizer
        and config.is_on("zero_optimization", "round_robin_gradients"),
        is_bf16=is_bf16,
        is_bf16_optimizer=is_bf16_optimizer,
        is_data_before_experts=config.is_on("use_data_before_expert_parallelism"),
    )
    return settings, tuple(_told(config, settings))


def source_config(checkpoint: TrainingState) -> Mapping[str, object]:
    """Return the DeepSpeed config in the model states files; empty if there is none."""
    model = next(iter(models_of(checkpoint)), None)
    return {} if model is None else model.config


def models_of(checkpoint: TrainingState) -> list[ModelStates]:
    """Return the model states of every model-parallel index, in order."""
    return [ranks.first for _, ranks in sorted(checkpoint.zero.items()) if ranks.model]


def _config_of(checkpoint: TrainingState, options: ReshardOptions) -> _Config:
    source = source_config(checkpoint)
    own = _read(options.ds_config) if options.ds_config else source
    is_filled_in = checkpoint.location.framework in _FILLS_IN_PRECISION
    if is_filled_in and own.keys().isdisjoint(_PRECISIONS):
        own = {**own, **dict.fromkeys(_PRECISIONS, _AUTO)}
    return _Config(own, source)


def _read(path: Path) -> Mapping[str, object]:
    try:
        given = read_json_object(path)
    except ZexportError as cause:
        raise UsageError(
            f"{cause.problem}, and was given with --ds-config",
            path=path,
            found=cause.found,
            hint="Give the JSON file that the run will have as its DeepSpeed configuration",
        ) from cause
    for key in (*_LAYOUT, *_PRECISIONS):
        if not isinstance(given.get(key), dict | bool | str | None):
            raise UsageError(
                f"has no object under {key}, and was given with --ds-config",
                path=path,
                found=type(given[key]).__name__,
                hint="Write it as DeepSpeed documents it",
            )
    config = _Config(given, {})
    if config.precision() == "bf16" and config.is_on("fp16", "enabled"):
        raise UsageError(
            "has bf16 and fp16 enabled, of which DeepSpeed takes one, and was given with "
            "--ds-config",
            path=path,
            hint="Leave one of them out",
        )
    return given


def _check_precision(path: Path, found: str, expected: str) -> None:
    """Raise for another dtype: file names and the loss scaler are the source's."""
    if found != expected:
        is_plain = expected == "fp32"
        way = f'Write "{expected}": {{"enabled": "auto"}} into it'
        raise UsageError(
            "is for a training in another element type than the checkpoint's",
            path=path,
            found=found,
            expected=expected,
            hint=f"Leave {found} out of it" if is_plain else way,
        )


def settle_universal(
    checkpoint: TrainingState, options: ReshardOptions
) -> tuple[UniversalSettings, tuple[str, ...]]:
    """Return the settings of a universal checkpoint, and warnings about the config."""
    if options.stage not in (None, *_STAGES):
        raise _no_files_of(options.stage, checkpoint)
    version, config = options.for_deepspeed, _config_of(checkpoint, options)
    is_for_all = version is None or release(version) >= TAKES_EITHER_FORM
    stage = None if is_for_all else _stage(checkpoint, options, config)
    settings = UniversalSettings(version, stage)
    return settings, tuple(_told_of_dealing_out(config, settings))


def _told_of_dealing_out(config: _Config, settings: UniversalSettings) -> Iterator[str]:
    """Yield a warning: DeepSpeed ignores round robin when it loads a universal checkpoint.

    Source: 0.14.5 to 0.19.8, ``runtime/zero/stage_1_and_2.py`` (``_link_all_hp_params``).
    """
    if settings.stage != ZERO3 and config.is_on("zero_optimization", "round_robin_gradients"):
        yield (
            "round_robin_gradients is on, with which DeepSpeed under ZeRO-1 and 2 gives weights "
            "the values of others when it loads a universal checkpoint, and says nothing: switch "
            "it off in the run that loads this one"
        )


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


def _stage(checkpoint: TrainingState, options: ReshardOptions, config: _Config) -> int:
    """Return the target's ZeRO stage; options win over the config, and may not contradict it."""
    stated = config.get("zero_optimization", "stage") if options.ds_config else None
    if None not in (stated, options.stage) and stated != options.stage:
        raise UsageError(
            "--stage and --ds-config mean different stages",
            path=options.ds_config,
            found=f"stage {stated}",
            expected=f"{options.stage}",
        )
    recorded = _at(source_config(checkpoint), ("zero_optimization", "stage"))
    told = (options.stage, stated, checkpoint.stage, recorded)
    chosen = next((one for one in told if one is not None), 0)
    if chosen not in _STAGES or type(chosen) is not int:
        raise _no_files_of(chosen, checkpoint)
    grids = [model.grid for model in models_of(checkpoint)]
    is_pipeline = any(one is not None and one.stages > 1 for one in grids)
    if (is_pipeline or checkpoint.structure is Structure.PIPELINE) and chosen != 1:
        raise UsageError(
            f"a pipeline cannot train with ZeRO-{chosen}",
            path=checkpoint.location.tag_dir,
            expected="stage 1",
            hint="Name it with --stage",
        )
    if checkpoint.structure is Structure.EXPERTS:
        _check_stage_of_experts(checkpoint, chosen)
    return chosen


def _check_stage_of_experts(checkpoint: TrainingState, chosen: int) -> None:
    """Raise for a stage with which DeepSpeed does not train them.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_validate_zero3_moe_compatibility``).
    """
    is_autoep = any(map(autoep_layers, models_of(checkpoint)))
    if chosen == ZERO3 and not is_autoep:
        raise UsageError(
            "DeepSpeed trains no DeepSpeed-MoE under ZeRO-3",
            path=checkpoint.location.tag_dir,
            found="stage 3",
            expected="stage 1 or 2",
            hint="Name one with --stage",
        )


def _no_files_of(stage: object, checkpoint: TrainingState) -> UsageError:
    return UsageError(
        f"ZeRO-{stage} has no files to reshard to",
        path=checkpoint.location.tag_dir,
        found=f"stage {stage}",
        expected="1, 2 or 3",
        hint="Name one with --stage",
    )


def _told(config: _Config, settings: TargetSettings) -> Iterator[str]:
    """Yield settings with which the run does not load everything."""
    if config.get("zero_optimization", "load_from_fp32_weights") is False:
        yield (
            "load_from_fp32_weights is false: the run will take its masters from the 16-bit "
            "weights, whatever these files hold"
        )
    if settings.stage == ZERO3 and config.is_on("zero_optimization", "elastic_checkpoint"):
        yield "elastic_checkpoint is on, with which ZeRO-3 loads nothing"
