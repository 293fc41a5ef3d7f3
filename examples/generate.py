"""Load an exported folder strictly and continue a prompt.

Usage: python examples/generate.py MODEL PROMPT
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, prompt: str) -> None:
    """Print the model's continuation of ``prompt``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {what: sorted(names) for what, names in loading.items() if names}
    if wrong:
        sys.exit(f"{folder} does not load cleanly: {wrong}")
    tokens = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**tokens, max_new_tokens=40, do_sample=False)
    print(f"loaded {model.num_parameters():,} parameters, no missing and no unexpected key")
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
