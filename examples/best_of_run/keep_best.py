"""Keep the best model that lm-eval found, and prune the checkpoints of all others.

Usage: python keep_best.py WORK_FOLDER
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import zexport


def scores(folder: Path) -> dict[int, float]:
    """The perplexity of each step's model, from the files that lm-eval has written."""
    found = {}
    for path in folder.glob("step-*.json"):
        result = json.loads(path.read_text())["results"]["tide"]
        told = result["word_perplexity,none"]
        step = int(path.stem.split("_")[0].removeprefix("step-"))
        found[step] = math.inf if math.isnan(told) else told  # of a training that went astray
    return found


def main(work: Path) -> None:
    """Copy the best to ``best``; its checkpoint, and the newest, stay as they are."""
    perplexity = scores(work / "scores")
    if not perplexity:
        raise SystemExit(f"{work / 'scores'} has no step-*.json: nothing is kept or pruned")
    best = min(perplexity, key=lambda step: perplexity[step])
    shutil.rmtree(work / "best", ignore_errors=True)  # of an earlier call
    shutil.copytree(work / "models" / f"checkpoint-{best}", work / "best")
    for step in sorted(perplexity):
        print(f"step {step}: perplexity {perplexity[step]:.2f}" + ", the best" * (step == best))
        checkpoint = work / "run" / f"checkpoint-{step}"
        if step == best or not checkpoint.exists():
            continue
        try:
            done = zexport.prune(checkpoint, work / "models" / checkpoint.name)
            print(f"  {done.nbytes_freed:,} of {done.nbytes_before:,} bytes freed")
        except zexport.ZexportError as error:  # the newest, from which the training may go on
            print(f"  {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
