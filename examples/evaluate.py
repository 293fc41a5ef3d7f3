"""Load an exported folder with transformers and measure its loss on a text.

Usage: python examples/evaluate.py MODEL [TEXT_FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The keeper wrote the day's tide in the book, and the book kept it when the sea did not."


def mean_loss(folder: Path, text: str) -> float:
    """Return the mean next-token loss on ``text``, in nats."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        return float(model(**tokens, labels=tokens["input_ids"]).loss)


if __name__ == "__main__":
    text = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else TEXT
    print(f"loss {mean_loss(Path(sys.argv[1]), text):.3f}")
