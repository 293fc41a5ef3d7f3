"""Model, text and tokenizer of a run, and the description of the model's Hub names."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from zexport import __version__
from zexport.errors import UsageError
from zexport.model.conversion import describe_model
from zexport.train.options import TrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HEADS, _KEY_VALUE_HEADS = 4, 2
_LORA_RANK = 8
_BEGIN, _END, _PAD = "<s>", "</s>", "<pad>"
_SCHEMA = 3


# Model


def make_model(options: TrainOptions, vocab_size: int) -> PreTrainedModel:
    """Return the model on the CPU in fp32; random weights depend on ``--seed``."""
    torch.manual_seed(options.seed)
    if options.model is None:
        return _built_in(options, vocab_size)

    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            "not a causal language model that transformers can load",
            path=options.model,
            found=str(error).partition("\n")[0].rstrip("."),
            hint="Pass a model folder with --model",
        ) from error
    known = model.get_input_embeddings().num_embeddings
    if known < vocab_size:
        raise UsageError(
            "the tokenizer has more tokens than the model",
            path=options.tokenizer or options.model,
            found=f"{vocab_size} tokens",
            expected=f"at most {known}",
            hint="Pass a matching one with --tokenizer",
        )
    return model


def _built_in(options: TrainOptions, vocab_size: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_VALUE_HEADS,
        max_position_embeddings=max(512, options.seq_len),
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    return model


def add_adapter(model: PreTrainedModel, base: Path) -> torch.nn.Module:
    """Return the model with a LoRA adapter on every linear layer, all else frozen."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - of the extra; takes seconds

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=_LORA_RANK,
        lora_alpha=2 * _LORA_RANK,
        target_modules="all-linear",
        base_model_name_or_path=str(base),
    )
    adapted: torch.nn.Module = get_peft_model(model, config)
    config.base_model_name_or_path = str(base)  # get_peft_model puts the model's own name there
    return adapted


def freeze(model: torch.nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match one of the patterns."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if re.search(pattern, name)]
        if not found:
            raise UsageError(
                f"--freeze {pattern} matches no parameter",
                expected=f"names like {next(iter(parameters))}",
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("--freeze leaves no parameter to train", hint="Freeze less")


def meta_twin(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the same model without data, to convert names of a partitioned model.

    It has the whole shapes, and the conversions of loading, which saving undoes.
    """
    with torch.device("meta"):
        twin: PreTrainedModel = type(model)(model.config)
    twin.tie_weights()
    twin.to(dtype)
    if hasattr(model, "_weight_conversions"):
        twin._weight_conversions = model._weight_conversions
    if model.can_generate():
        twin.generation_config = model.generation_config
    return twin


# Text


class Corpus(Struct, frozen=True):
    """Windows of ``seq_len`` tokens; only seed and position decide the order."""

    windows: torch.Tensor
    vocab_size: int
    seed: int

    def epoch(self, position: int) -> int:
        """Return how often the whole text has been drawn at ``position``."""
        return position // len(self.windows)

    def draw(self, position: int, count: int) -> torch.Tensor:
        """Return the windows ``position`` to ``position + count`` of the endless sequence."""
        epochs = range(self.epoch(position), self.epoch(position + count - 1) + 1)
        order = torch.cat([self._order(epoch) for epoch in epochs])
        start = position - epochs.start * len(self.windows)
        return self.windows[order[start : start + count]]

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.windows), generator=generator)


def make_text(options: TrainOptions) -> tuple[PreTrainedTokenizerBase, Corpus]:
    """Return the tokenizer, and the text of ``--data`` or the built-in one in windows of tokens."""
    if options.data is None:
        text = resources.files("zexport.train").joinpath("corpus.txt").read_text(encoding="utf-8")
    else:
        try:
            text = options.data.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot be read as UTF-8 text: {error}"
            raise UsageError(problem, path=options.data) from error
    tokenizer = _tokenizer(options, text)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    count = len(tokens) // options.seq_len
    if count == 0:
        raise UsageError(
            "the text is shorter than one sequence",
            path=options.data,
            found=f"{len(tokens)} tokens",
            expected=f"at least {options.seq_len}",
            hint="Use a longer text or a smaller --seq-len",
        )
    windows = tokens[: count * options.seq_len].reshape(count, options.seq_len)
    return tokenizer, Corpus(windows=windows, vocab_size=len(tokenizer), seed=options.seed)


def _tokenizer(options: TrainOptions, text: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``--tokenizer`` or ``--model``, or a byte-level BPE of the text."""
    folder = options.tokenizer or options.model
    if folder is None:
        return _learned_tokenizer(text, options.vocab_size)

    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            "not a tokenizer that transformers can load",
            path=folder,
            hint="Pass one with --tokenizer",
        ) from error
    return tokenizer


def _learned_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BEGIN, _END, _PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=_PAD,
        clean_up_tokenization_spaces=False,
    )


# Description


def describe_source(twin: PreTrainedModel, *, adapter: bool) -> str:
    """Return ``zexport_source.json``: the model's Hub names, so that exports need no transformers.

    Those of an adapter come from its base model.
    """
    what = {"adapter": True} if adapter else {"model": describe_model(twin, as_loaded=True)}
    created_by = f"zexport train {__version__}"
    return json.dumps({"schema": _SCHEMA, "created_by": created_by, **what}, indent=2) + "\n"
