"""Options and result of a run; options that a resumed run must keep."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from zexport.errors import OutputError, UsageError
from zexport.storage.json import SCHEMA, Natural, decoded, form_of

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
SaveKind: TypeAlias = Literal["partitioned", "gathered", "both"]

OPTIONS_FILE = "zexport_train.json"
"""The options as JSON in the run's folder, to check a resume without torch."""


class TrainOptions(Struct, frozen=True, kw_only=True):
    """The options of ``zexport train``, with the option names.

    Attributes:
        ds_config: content of ``--ds-config``, merged over zexport's DeepSpeed config.
        steps: step to train up to, counted from the start of the run.
        save_every: steps between two checkpoints; 0 saves only at the end.
        keep: newest checkpoints to keep; 0 keeps all.
        timeout: seconds that a collective call, and the start of the ranks, may take.
    """

    out: Path
    model: Path | None = None
    tokenizer: Path | None = None
    data: Path | None = None
    world_size: int = 2
    stage: int = 3
    dtype: Precision = "bf16"
    steps: int = 20
    save_every: int = 0
    keep: int = 0
    save: SaveKind = "partitioned"
    resume: bool = False
    ds_config: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    freeze: tuple[str, ...] = ()
    seed: int = 0
    lr: float = 3e-3
    batch_size: int = 4
    seq_len: int = 64
    vocab_size: int = 384
    hidden_size: int = 64
    layers: int = 2
    timeout: int = 600

    def to_json(self) -> str:
        return json.dumps(form_of(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainOptions:
        if decoded(text, dict[str, Any]).get("schema") != SCHEMA:
            raise ValueError(f"not an options object of schema {SCHEMA}")
        return decoded(text, cls)

    @property
    def base(self) -> Path:
        """Base model of an adapter: ``--model``, or a copy in OUT."""
        return self.model or self.out / "base"

    @property
    def partitioned(self) -> bool:
        """Whether rank files are saved."""
        return self.save in ("partitioned", "both")

    @property
    def gathered(self) -> bool:
        """Whether gathered weights are saved."""
        return self.save in ("gathered", "both")


_FREE_ON_RESUME = {"out", "steps", "save_every", "keep", "save", "resume", "timeout"}


def read_ds_config(path: Path) -> dict[str, Any]:
    """Return the DeepSpeed config in a JSON file, without keys that are ``auto``."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read as JSON: {error}", path=path) from error
    if not isinstance(config, dict):
        raise UsageError(
            "not a DeepSpeed config",
            path=path,
            found=type(config).__name__,
            expected="a JSON object",
        )
    return without_auto(config)


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed config without keys that are ``auto``."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def resume_options(asked: TrainOptions, explicit: Collection[str]) -> TrainOptions:
    """Return the options of the stored run, with those that may change.

    Raises:
        UsageError: an ``explicit`` option cannot change, or there is no checkpoint.
    """
    path = asked.out / OPTIONS_FILE
    if not path.is_file() or not (asked.out / "latest").is_file():
        raise UsageError(
            "no checkpoint to resume",
            path=asked.out,
            hint="Start a run without --resume (gathered weights cannot be resumed)",
        )
    try:
        stored = TrainOptions.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", path=path) from error
    for name in (one for one in TrainOptions.__struct_fields__ if one not in _FREE_ON_RESUME):
        now, then = getattr(asked, name), getattr(stored, name)
        if name in explicit and now != then:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} cannot change in a resumed run",
                path=asked.out,
                found=now,
                expected=then,
                hint=f"Leave {option} out, or train into another folder",
            )
    kept = {"save_every", "keep", "save"} - set(explicit)
    return replace(stored, **{name: getattr(asked, name) for name in _FREE_ON_RESUME - kept})


def merge_ds_config(options: TrainOptions, explicit: Collection[str]) -> TrainOptions:
    """Return the options with the values that ``--ds-config`` has for them.

    Raises:
        UsageError: it contradicts an ``explicit`` option.
    """
    config = options.ds_config
    found = {
        "batch_size": config.get("train_micro_batch_size_per_gpu"),
        "stage": _section(config, "zero_optimization").get("stage"),
        "dtype": next(
            (one for one in ("fp16", "bf16") if _section(config, one).get("enabled") is True), None
        ),
    }
    stated = {name: value for name, value in found.items() if value is not None}
    for name, value in stated.items():
        asked = getattr(options, name)
        if name in explicit and asked != value:
            raise UsageError(
                f"--ds-config contradicts --{name.replace('_', '-')}",
                found=value,
                expected=asked,
                hint="Change one of the two",
            )
    return replace(options, **stated)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def check_free(out: Path) -> None:
    """Raise if a folder for a new run is not empty."""
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(
            "not empty",
            path=out,
            hint="Continue the run with --resume, or choose another folder",
        )


class TrainSummary(Struct, frozen=True, kw_only=True):
    """The result of a run.

    Attributes:
        out: the run's folder.
        tag: the last checkpoint on disk; empty if none could be saved.
        steps: the last step.
        first_loss: loss of the first step of this command, averaged over the ranks.
        last_loss: the same of the last step.
        checkpoints: the tags on disk, oldest first.
        world_size: number of ranks.
        stage: ZeRO stage.
        partitioned: rank files were saved, so the run can be resumed.
        save_error: why the last save failed; always empty in output, because the command fails
            then.
    """

    out: Path
    tag: str
    steps: Natural
    first_loss: float
    last_loss: float
    checkpoints: tuple[str, ...]
    world_size: Natural
    stage: Natural
    partitioned: bool = True
    save_error: str = ""

    def to_json(self) -> str:
        return json.dumps(form_of(self))
