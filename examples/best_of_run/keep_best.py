"""Copy the best model according to lm-eval.

Usage: python keep_best.py WORK_FOLDER
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path


def scores(folder: Path) -> dict[int, float]:
    """Return the perplexity of each step, from the files of lm-eval."""
    found = {}
    for path in folder.glob("step-*.json"):
        result = json.loads(path.read_text())["results"]["tide"]
        perplexity = result["word_perplexity,none"]
        step = int(path.stem.split("_")[0].removeprefix("step-"))
        found[step] = math.inf if math.isnan(perplexity) else perplexity
    return found


def main(work: Path) -> None:
    """Print all scores, and copy the best model to ``best``."""
    perplexity = scores(work / "scores")
    if not perplexity:
        raise SystemExit(f"{work / 'scores'}: no step-*.json")
    best = min(perplexity, key=lambda step: perplexity[step])
    shutil.rmtree(work / "best", ignore_errors=True)
    shutil.copytree(work / "models" / f"checkpoint-{best}", work / "best")
    for step in sorted(perplexity):
        print(f"step {step}: perplexity {perplexity[step]:.2f}" + ", the best" * (step == best))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
