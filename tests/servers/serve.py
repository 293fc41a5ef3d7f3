"""Have vLLM serve model folders in turn, in vLLM's own environment: ``serve.py JOBS``.

JOBS is a JSON list of objects: ``folder``, ``adapter`` or null, ``dtype``, ``prompt``, ``tokens``
and ``answer``, the file that gets the prompt with the greedy tokens behind it, and each position's
log-probabilities of the whole vocabulary; or ``error``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR"
)

import torch._inductor.compile_fx  # noqa: F401 - imported once, here, not in each child
import vllm.lora.layers
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What vLLM generates, and how likely it held every token to be."""
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    server = LLM(
        model=job["folder"],
        dtype=job["dtype"],
        enable_lora=adapter is not None,
        enforce_eager=True,
        max_logprobs=-1,
        max_model_len=128,
        skip_tokenizer_init=True,
    )
    greedily = SamplingParams(
        temperature=0,
        max_tokens=job["tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        prompt_logprobs=-1,
    )
    prompt = TokensPrompt(prompt_token_ids=job["prompt"])
    (result,) = server.generate([prompt], greedily, lora_request=adapter, use_tqdm=False)
    said = result.outputs[0]
    rows = [*result.prompt_logprobs[1:], *said.logprobs]
    return {
        "tokens": [*job["prompt"], *said.token_ids],
        "rows": [[row[token].logprob for token in range(len(row))] for row in rows],
    }


def in_a_child(job: dict[str, Any]) -> None:
    """Each job in a fork of this process, which has imported vLLM and started nothing."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        content = answer(job)
    except BaseException:
        content = {"error": traceback.format_exc()}
    Path(job["answer"]).write_text(json.dumps(content))
    os._exit(0)


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        in_a_child(one)
