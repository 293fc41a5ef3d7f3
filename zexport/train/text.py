"""The text that is learned: its tokenizer, its tokens, and their order by seed and position."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from zexport.errors import UsageError
from zexport.train.options import TrainOptions, config_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEGIN, _END, _PAD = "<s>", "</s>", "<pad>"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Windows of ``seq_len`` tokens, drawn in an order that seed and position alone decide."""

    windows: torch.Tensor
    vocab_size: int
    seed: int

    def epoch(self, position: int) -> int:
        """How often the whole text has been drawn when ``position`` windows have been."""
        return position // len(self.windows)

    def draw(self, position: int, count: int) -> torch.Tensor:
        """The windows number ``position`` to ``position + count`` of the endless sequence."""
        epochs = range(self.epoch(position), self.epoch(position + count - 1) + 1)
        order = torch.cat([self._order(epoch) for epoch in epochs])
        start = position - epochs.start * len(self.windows)
        return self.windows[order[start : start + count]]

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.windows), generator=generator)


def read_text(data: Path | None) -> str:
    """The text of ``--data``, or the one that comes with zexport."""
    if data is None:
        return resources.files("zexport.train").joinpath("corpus.txt").read_text(encoding="utf-8")
    try:
        return data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read as UTF-8 text: {error}", path=data) from error


def make_tokenizer(options: TrainOptions, text: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``--tokenizer`` or ``--model``, or a byte-level BPE of the text."""
    folder = options.tokenizer or options.model
    if folder is None:
        return _learned_tokenizer(text, options.vocab_size)

    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds; rank 0 alone needs it

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            "holds no tokenizer that transformers can read",
            path=folder,
            hint="Name one with --tokenizer",
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


def check_same(
    options: TrainOptions, tokenizer: PreTrainedTokenizerBase, text: str, corpus: Corpus
) -> dict[str, str]:
    """The digests of text, tokenizer and config: those of when a run began, if it goes on."""
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()
    tokenized = vocabulary + corpus.windows.numpy().tobytes()
    now = {"text": text.encode(), "tokenizer": tokenized}
    digests = {what: blake3(content).hexdigest() for what, content in now.items()}
    digests["model's config"] = config_digest(options)
    for what, digest in digests.items():
        if options.digests.get(what, digest) != digest:
            raise UsageError(
                f"the {what} is another than the run began with",
                path=options.out,
                hint="Put the files back as they were, or train into another folder",
            )
    return digests


def make_corpus(tokenizer: PreTrainedTokenizerBase, text: str, options: TrainOptions) -> Corpus:
    """The text cut into windows of ``--seq-len`` tokens."""
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
    return Corpus(windows=windows, vocab_size=len(tokenizer), seed=options.seed)
