"""How one rank builds model, text and engine, begins the folder, and then trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zexport.errors import OutputError
from zexport.filenames import SOURCE_SIDECAR
from zexport.storage.files import make_folder, write_durably
from zexport.storage.retries import steadily
from zexport.train.collectives import Ranks, join_ranks
from zexport.train.loop import Place, resumed_place, train_steps
from zexport.train.model import add_adapter, freeze, make_model, meta_twin
from zexport.train.options import OPTIONS_FILE, TrainOptions, TrainSummary, check_free
from zexport.train.save import AdapterWriter, ModelWriter, Saver, open_like_config
from zexport.train.sidecar import describe_source
from zexport.train.text import Corpus, check_same, make_corpus, make_tokenizer, read_text

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_rank(options: TrainOptions, progress: Callable[[str], None]) -> TrainSummary:
    """Trains as one of the ranks of a launcher, and saves; rank 0 alone tells progress."""
    ranks = join_ranks(options.timeout)
    options = replace(options, world_size=ranks.world_size)
    saver, corpus = start_run(options, ranks)
    place = resumed_place(saver.engine, ranks, options) if options.resume else Place()
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
    """A begun folder, and an engine in it that has not taken a step.

    A collective call. ``make`` gives the model for options and vocabulary, ``groups`` the
    optimizer's parameter groups if several.
    """
    tokenizer, corpus, digests = _text(options, ranks)
    options = replace(options, digests=digests)
    base = make(options, corpus.vocab_size)
    dtype = DTYPES[options.dtype]
    ranks.from_first(lambda: claim_folder(options, base, dtype))
    base.config.dtype, base.config.architectures = dtype, [type(base).__name__]
    writer, model = _writer(options, base, tokenizer)
    freeze(model, options.freeze)
    twin = meta_twin(base, dtype)
    torch.manual_seed(options.seed + ranks.rank)  # the weights are the same, dropout is not
    engine = make_engine(model, ds_config(options), groups)
    source = describe_source(model, dtype, twin, adapter=options.lora)
    ranks.from_first(lambda: describe_run(options, base, writer, source))
    return Saver(engine, ranks, options, writer), corpus


def make_engine(
    model: torch.nn.Module,
    config: dict[str, Any],
    groups: Callable[[torch.nn.Module], Iterable[Any]] | None,
) -> DeepSpeedEngine:
    """The DeepSpeed engine around ``model``, which trains what requires a gradient."""
    import deepspeed  # noqa: PLC0415 - only after the accelerator is chosen

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained if groups is None else groups(model),
        config=config,
    )
    return engine


def _text(
    options: TrainOptions, ranks: Ranks
) -> tuple[PreTrainedTokenizerBase, Corpus, dict[str, str]]:
    """Tokenizer and corpus as rank 0 made them: other nodes need not see the same files."""

    def make() -> tuple[PreTrainedTokenizerBase, Corpus, dict[str, str]]:
        text = read_text(options.data)
        tokenizer = make_tokenizer(options, text)
        corpus = make_corpus(tokenizer, text, options)
        return tokenizer, corpus, check_same(options, tokenizer, text, corpus)

    return ranks.from_first(make)


def _writer(
    options: TrainOptions, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[ModelWriter | AdapterWriter, torch.nn.Module]:
    """What writes the gathered weights, and the module to train: ``base``, adapted if asked."""
    if options.lora:
        adapted = add_adapter(base, options.base)
        return AdapterWriter(adapted, tokenizer), adapted
    half = torch.bfloat16 if options.dtype == "fp32" else DTYPES[options.dtype]
    return ModelWriter(meta_twin(base, half), tokenizer), base


def claim_folder(options: TrainOptions, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """OUT exists and is ours, with an adapter's base model if that has no other home.

    It is rounded as DeepSpeed will round it. Called on rank 0, before an adapter changes its names.
    """
    out = options.out
    if options.resume:
        return
    try:
        check_free(out)
        make_folder(out)
        if options.lora and options.model is None:
            rounded = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
            meta_twin(model, dtype).save_pretrained(options.base, state_dict=rounded)
            open_like_config(options.base)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", path=out) from error


def describe_run(
    options: TrainOptions,
    model: PreTrainedModel,
    writer: ModelWriter | AdapterWriter,
    source: str,
) -> None:
    """Configuration, tokenizer, sidecar and options lie in OUT. Called on rank 0."""
    out = options.out
    try:
        model.config.save_pretrained(out)
        if model.can_generate():
            model.generation_config.save_pretrained(out)
        writer.tokenizer.save_pretrained(out)
        if isinstance(writer, AdapterWriter):
            writer.write_config(out)
        # The folder may be moved and resumed elsewhere: its own place is not part of the options.
        kept = replace(options, out=Path()).to_json()
        for name, text in ((SOURCE_SIDECAR, source), (OPTIONS_FILE, kept)):
            steadily(partial(write_durably, out / name, text.encode()))
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path=out) from error


WARMUP_STEPS = 4


def ds_config(options: TrainOptions) -> dict[str, Any]:
    """The configuration that ``deepspeed.initialize`` is given.

    A schedule that knew the last step would make a run of 20 steps, resumed to 40, differ from one
    of 40: so the rate warms up and stays.
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
