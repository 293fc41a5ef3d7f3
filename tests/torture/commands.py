"""Kill and signal the command at random times."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.stopping import files

LIMIT_S = 300
_INTERRUPTED = 130


@dataclass(frozen=True)
class Export:
    """``zexport consolidate`` in a process of its own."""

    checkpoint: Path
    out_dir: Path
    shard_size: str = "10MB"

    def start(self) -> subprocess.Popen[str]:
        words = ("consolidate", self.checkpoint, self.out_dir, "--max-shard-size", self.shard_size)
        return subprocess.Popen(
            [sys.executable, "-m", "zexport", *map(str, words), "--json", "--jobs", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> list[str]:
        """Run to the end; return the resumed shards."""
        process = self.start()
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        resumed: list[str] = json.loads(out)["resumed"]
        return resumed


def make_checkpoint(folder: Path, numel: float) -> Path:
    """Write a ZeRO-3 checkpoint in a process of its own."""
    words = ("benchmarks.generate", folder, "--numel", numel, "--stage", 3)
    subprocess.run(
        [sys.executable, "-m", *map(str, words)], check=True, timeout=LIMIT_S, capture_output=True
    )
    return folder


def killed_at_random(export: Export, times: int, seed: int) -> Counter[str]:
    """Send SIGKILL, SIGTERM, SIGHUP or SIGINT at random times; count the outcomes."""
    export.finish()
    whole = files(export.out_dir)
    shutil.rmtree(export.out_dir)
    began = time.monotonic()
    export.finish()
    seconds = time.monotonic() - began
    chance = random.Random(seed)  # noqa: S311 - nothing secret
    found: Counter[str] = Counter()
    for _ in range(times):
        shutil.rmtree(export.out_dir)
        sent = chance.choice((signal.SIGKILL,) * 3 + (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
        process = export.start()
        time.sleep(chance.uniform(0, seconds))
        process.send_signal(sent)
        stderr, code = process.communicate(timeout=LIMIT_S)[1], process.returncode
        if code in (0, _INTERRUPTED) or ", in main\n" in stderr:
            assert code in (0, _INTERRUPTED), f"{sent.name} ended with {code}: {stderr}"
            assert "Traceback" not in stderr, stderr
            lines = [line for line in stderr.split("\n") if line]
            assert code == 0 or lines[-1].startswith("Interrupted."), stderr
        if export.out_dir.exists():
            word = "whole"
        else:
            assert code != 0
            word = "resumed" if export.finish() else "restarted"
        assert files(export.out_dir) == whole
        found.update((sent.name, word))
    return found
