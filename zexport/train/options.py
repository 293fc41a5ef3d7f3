"""What a training run is asked to do, what of it a resumed run must keep, and what came of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias

from blake3 import blake3

from zexport.errors import OutputError, UsageError
from zexport.storage.contents import read_json_object
from zexport.storage.json import SCHEMA, JsonObject, Natural, decoded, form_of

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
SaveKind: TypeAlias = Literal["partitioned", "gathered", "both"]

OPTIONS_FILE = "zexport_train.json"
"""Rank 0 writes the options here, in plain JSON, so that a resume can be judged without torch."""


_DEEPSPEED_KEYS = frozenset(
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
"""The keys of a DeepSpeed configuration; DeepSpeed passes over any other, and says nothing.

Source: DeepSpeed 0.10 to 0.19, ``runtime/config.py`` and ``runtime/constants.py``; within a section
DeepSpeed refuses what it does not know.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of one ``zexport train``; the field names are the command's option names.

    But for ``digests``, which a run notes of its text and tokenizer, to know them when it goes on.

    Attributes:
        ds_config: the parsed content of ``--ds-config``, merged over our DeepSpeed configuration.
        steps: the step to train up to, counted from the start of the run and not of the resume.
        save_every: steps between two saves; 0 saves at the end only.
        keep: newest checkpoints to keep; 0 keeps all.
        timeout: seconds that a collective call, and the start of the workers, may take.
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
    digests: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The options as a JSON object that :meth:`from_json` reads back equal."""
        return json.dumps(form_of(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainOptions:
        """The options that :meth:`to_json` wrote."""
        if decoded(text, dict[str, Any]).get("schema") != SCHEMA:
            raise ValueError(f"not an options object of schema {SCHEMA}")
        return decoded(text, cls)

    @property
    def base(self) -> Path:
        """The model an adapter belongs to: the one it was read from, or a copy in OUT."""
        return self.model or self.out / "base"

    @property
    def partitioned(self) -> bool:
        """Whether a save writes every rank's part."""
        return self.save in ("partitioned", "both")

    @property
    def gathered(self) -> bool:
        """Whether a save writes the whole weights from rank 0."""
        return self.save in ("gathered", "both")


FREE_ON_RESUME = frozenset(
    {"out", "steps", "save_every", "keep", "save", "resume", "timeout"},
)
"""What a resumed run may choose anew. The rest decides the weights and must stay as it was."""


def read_ds_config(path: Path) -> dict[str, Any]:
    """The DeepSpeed configuration in a JSON file, without the keys left to ``"auto"``.

    The Hugging Face Trainer's word for what the caller knows.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read as JSON: {error}", path=path) from error
    if not isinstance(config, dict):
        raise UsageError(
            "is not a DeepSpeed configuration",
            path=path,
            found=type(config).__name__,
            expected="a JSON object",
        )
    return without_auto(config)


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what it leaves to others."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def resumed(asked: TrainOptions, explicit: Collection[str]) -> TrainOptions:
    """The options of the stored run, with what was typed (``explicit``) anew for this one."""
    stored = _stored_options(asked.out)
    for name in (one.name for one in fields(TrainOptions) if one.name not in FREE_ON_RESUME):
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
    return replace(stored, **{name: getattr(asked, name) for name in FREE_ON_RESUME - kept})


def _stored_options(out: Path) -> TrainOptions:
    path = out / OPTIONS_FILE
    if not path.is_file() or not (out / "latest").is_file():
        raise UsageError(
            "holds no checkpoint to resume",
            path=out,
            hint="Leave --resume out to begin a run (one saved with --save gathered alone"
            " cannot be resumed)",
        )
    try:
        return TrainOptions.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", path=path) from error


def settled(options: TrainOptions, explicit: Collection[str]) -> TrainOptions:
    """The options that ``--ds-config`` has as well, as it has them."""
    theirs = options.ds_config
    says: dict[str, object] = {}
    rows = theirs.get("train_micro_batch_size_per_gpu")
    says |= {} if rows is None else {"batch_size": rows}
    if "stage" in _section(theirs, "zero_optimization"):
        says["stage"] = _section(theirs, "zero_optimization")["stage"]
    for dtype in ("bf16", "fp16"):
        if _section(theirs, dtype).get("enabled") is True:
            says["dtype"] = dtype
    for name, value in says.items():
        asked = getattr(options, name)
        if name in explicit and asked != value:
            raise UsageError(
                f"--ds-config contradicts --{name.replace('_', '-')}",
                found=value,
                expected=asked,
                hint="Change one of the two",
            )
    return replace(options, **says)  # type: ignore[arg-type]


def without_effect(options: TrainOptions, explicit: Collection[str]) -> Iterator[str]:
    """Tells of options that change nothing, or not what they say."""
    for name in ("hidden_size", "layers") if options.model else ():
        if name in explicit:
            yield f"--{name.replace('_', '-')} changes nothing: the model is that of --model"
    if (options.model or options.tokenizer) and "vocab_size" in explicit:
        yield "--vocab-size changes nothing: the tokenizer is one that was given"
    positions = _config_of(options.model).get("max_position_embeddings") if options.model else None
    if isinstance(positions, int) and options.seq_len > positions:
        yield f"--seq-len {options.seq_len} is more than the model's {positions} positions"
    theirs = options.ds_config
    rate = _section(_section(theirs, "optimizer"), "params").get("lr")
    if rate not in (None, options.lr) and "scheduler" not in theirs:
        yield f"the lr of --ds-config changes nothing: its schedule goes to --lr {options.lr}"
    yield from told_of_keys(theirs)


def told_of_keys(config: Mapping[str, object], known: Collection[str] = ()) -> Iterator[str]:
    """Tells of keys that change nothing, with what may have been meant.

    ``known`` are keys that the run had before.
    """
    for key in sorted(config.keys() - _DEEPSPEED_KEYS - {*known}):
        near = get_close_matches(key, _DEEPSPEED_KEYS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        yield f"--ds-config has {key!r}, which DeepSpeed does not know and passes over{meant}"


def _config_of(model: Path) -> JsonObject:
    """The config of a model's folder; empty where it has none, which loading it tells."""
    path = model / "config.json"
    return read_json_object(path) if path.is_file() else {}


def config_digest(options: TrainOptions) -> str:
    """What the config of the model says that a run began with; empty where that is built in."""
    if options.model is None:
        return ""
    return blake3(json.dumps(_config_of(options.model), sort_keys=True).encode()).hexdigest()


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def check_free(out: Path) -> None:
    """Refuse a folder in which something lies already."""
    if out.exists() and not out.is_dir():
        raise OutputError("is not a folder", path=out)
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(
            "is not empty",
            path=out,
            hint="Continue the run in it with --resume, or name another folder",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The result of a run.

    Attributes:
        out: the run's folder.
        tag: the last checkpoint on disk; empty if none could be saved.
        steps: the step the training ended with.
        first_loss: mean over the ranks, of the first step of this run.
        last_loss: the same of the last step.
        checkpoints: the tags on disk, oldest first.
        world_size: ranks.
        stage: ZeRO stage.
        partitioned: every rank's part was saved, so that the run can be resumed.
        save_error: why the last save failed; empty if it did not, as always where it is printed: a
            run whose last save failed ends with an error.
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
        """One JSON object on one line, with a ``schema`` number."""
        return json.dumps(form_of(self))

    @classmethod
    def from_json(cls, text: str) -> TrainSummary:
        """The summary that :meth:`to_json` wrote."""
        return decoded(text, cls)

    def to_text(self) -> str:
        """Three lines: how the loss went, what was saved, and what to type next."""
        here = Path.cwd()
        out = self.out.relative_to(here) if self.out.is_relative_to(here) else self.out
        where = out / self.tag if self.partitioned else out / "gathered" / self.tag
        lines = [
            f"trained {self.steps} steps on {self.world_size} ranks, ZeRO stage {self.stage}:"
            f" loss {self.first_loss:.3f} -> {self.last_loss:.3f}",
            f"checkpoint: {where}",
        ]
        if self.partitioned:
            run, model = shlex.quote(str(out)), shlex.quote(f"{out}-model")
            lines.append(f"next: zexport consolidate {run} {model}")
        return "\n".join(lines)
