"""Keep the best model that lm-eval found.

Usage: python keep_best.py WORK_FOLDER
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path


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
    """Print all scores, and copy the best model to ``best``."""
    perplexity = scores(work / "scores")
    if not perplexity:
        raise SystemExit(f"{work / 'scores'} has no step-*.json: nothing is kept")
    best = min(perplexity, key=lambda step: perplexity[step])
    shutil.rmtree(work / "best", ignore_errors=True)  # of an earlier call
    shutil.copytree(work / "models" / f"checkpoint-{best}", work / "best")
    for step in sorted(perplexity):
        print(f"step {step}: perplexity {perplexity[step]:.2f}" + ", the best" * (step == best))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
