"""Work that makes a folder, whole or in parts, as often as a test wants it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import zexport
from tests.support.checkpoints import Model, Run, save, values
from zexport import ExportOptions, NameLayout, ReshardOptions

SHARDS = tuple(f"model-0000{n}-of-00004.safetensors" for n in range(1, 5))
SHARD_NBYTES = 1_000_000
SHARD_WORDS = ("--layout", "memory", "--max-shard-size", "1MB")


@dataclass(frozen=True)
class Job:
    """An export or a resharding of a checkpoint into a folder."""

    source: Path
    out: Path
    options: ExportOptions | ReshardOptions

    def run(self, **choices: Any) -> zexport.ExportReport:
        if isinstance(self.options, ReshardOptions):
            return zexport.reshard(self.source, self.out, self.options, **choices)
        return zexport.consolidate(self.source, self.out, self.options, **choices)

    def part(self, number: int, count: int) -> zexport.ExportReport | zexport.PartReport:
        share = zexport.Share(number, count)
        if isinstance(self.options, ReshardOptions):
            return zexport.reshard_part(self.source, self.out, share, self.options)
        return zexport.consolidate_part(self.source, self.out, share, self.options)

    def with_options(self, **changes: Any) -> Job:
        """The same with other options."""
        options: ExportOptions | ReshardOptions = replace(self.options, **changes)
        return replace(self, options=options)

    @property
    def partial(self) -> Path:
        """The unfinished folder."""
        return self.out.with_name(f"{self.out.name}.partial")

    def made(self) -> dict[str, bytes]:
        """What it makes, which is removed again."""
        self.run()
        found = files(self.out)
        shutil.rmtree(self.out)
        return found

    def restore(self, kept: Path) -> None:
        """Have the unfinished folder be what it was when it was copied to ``kept``."""
        shutil.rmtree(self.out, ignore_errors=True)
        for name in (self.partial, self.partial.with_name(f"{self.partial.name}.journal")):
            shutil.rmtree(name, ignore_errors=True)
        shutil.copytree(kept, self.partial)
        self.partial.with_name(f"{self.partial.name}.lock").write_bytes(b"a zexport export\n")

    def typed(
        self, *words: str, version: str = zexport.__version__
    ) -> subprocess.CompletedProcess[str]:
        """What the command of a version of zexport does, with the options of ``four_shards``."""
        code = (
            f"import zexport; zexport.__version__ = {version!r}\n"
            "from zexport.__main__ import main; main()\n"
        )
        line = ("consolidate", self.source, self.out, "--layout", "memory", *words)
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, line), "--max-shard-size", "1MB"],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip

    def left(self) -> set[str]:
        """The names that it has left where it works, its locks left out."""
        names = {path.name for path in self.out.parent.iterdir()}
        return {n for n in names if n.startswith(self.out.name) and not n.endswith(".lock")}


def four_shards(folder: Path, seed: int = 0, *, fsdp: bool = False) -> Job:
    """An export of four shards of one size; those of ZeRO share their records."""
    layers = {f"layers.{n}.w": values((500, 500), seed + n) for n in range(4)}
    root = folder / "ckpt"
    if fsdp:
        dcp.save({"model": layers}, checkpoint_id=root, no_dist=True)
    else:
        save(Model([layers]), Run(stage=2), root)
    options = ExportOptions(layout=NameLayout.MEMORY, max_shard_nbytes=SHARD_NBYTES, jobs=2)
    return Job(root, folder / "out", options)


def flip(path: Path, at: int) -> None:
    """Change a bit of a file, which keeps its times."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def place_of(layer: int, path: Path) -> int:
    """Where a weight that ``four_shards`` exports begins in the optimizer's file."""
    return path.read_bytes().rindex(values((500, 500), layer).numpy().tobytes())


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
