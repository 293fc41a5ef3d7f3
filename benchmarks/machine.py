"""The machine in words, without which no figure means anything."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "deepspeed", "transformers", "safetensors")


def machine_in_words(work: Path) -> str:
    """Processor, memory, the file system under ``work``, and the versions that matter."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    processor = model.group(1) if model else platform.machine()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    df = ["df", "--output=fstype", str(work)]
    filesystem = subprocess.run(df, capture_output=True, check=True, text=True).stdout.split()[-1]
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"{processor}, {cores} cores, {memory:.0f} GiB of memory, {filesystem}, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {packages}"
    )
