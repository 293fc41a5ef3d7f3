"""How one rank builds model, text and engine, and then trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zexport.train.ds_config import ds_config
from zexport.train.folder import claim_folder, describe_run
from zexport.train.gathered_model import AdapterWriter, ModelWriter, meta_twin
from zexport.train.loop import Place, resumed_place, train_steps
from zexport.train.model import add_adapter, freeze, make_model
from zexport.train.options import TrainOptions
from zexport.train.outcome import TrainSummary
from zexport.train.ranks import Ranks, join_ranks
from zexport.train.save import Saver
from zexport.train.sidecar import describe_source
from zexport.train.text import Corpus, make_corpus, make_tokenizer, read_text

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_rank(options: TrainOptions, progress: Callable[[str], None]) -> TrainSummary:
    """Trains as one of the ranks that a launcher started, and saves; every rank must call it.

    Progress lines come from rank 0 alone.
    """
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
    """A begun folder, and an engine in it that has not taken a step. A collective call.

    ``make`` gives the model for options and vocabulary, ``groups`` the optimizer's parameter groups
    where there is more than the one.
    """
    tokenizer, corpus = _text(options, ranks)
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


def _text(options: TrainOptions, ranks: Ranks) -> tuple[PreTrainedTokenizerBase, Corpus]:
    """Tokenizer and corpus as rank 0 made them: other nodes need not see the same files."""

    def make() -> tuple[PreTrainedTokenizerBase, Corpus]:
        text = read_text(options.data)
        tokenizer = make_tokenizer(options, text)
        return tokenizer, make_corpus(tokenizer, text, options)

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
