"""The checkpoints that are measured: how each is made, its size, and what of it is needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.llama import Llama, fit
from benchmarks.measure import run

_BUFFER = 1 << 20
_SLACK = 1 << 16  # the records after the fp32 master weights and the zip's directory


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint of one layout and size.

    Attributes:
        work: the folder that contains it.
        numel: parameters wanted.
        world_size: ranks.
        stage: ZeRO stage.
        frozen: whether the lower half of the model is frozen.
    """

    work: Path
    numel: int
    world_size: int
    stage: int
    frozen: bool

    @property
    def folder(self) -> Path:
        """Where the checkpoint is, and under what name it is kept for the next run."""
        frozen = "-frozen" if self.frozen else ""
        return self.work / f"zero{self.stage}{frozen}-w{self.world_size}-{self.numel}"

    @property
    def model(self) -> Llama:
        """The model in it."""
        return fit(self.numel)

    @property
    def title(self) -> str:
        """The case in words."""
        frozen = ", lower half frozen" if self.frozen else ""
        billions = self.model.numel / 1e9
        return f"ZeRO-{self.stage}{frozen}, {billions:.3g} B parameters, {self.world_size} ranks"

    @property
    def nbytes(self) -> int:
        """Upper bound: fp32 weights, optimizer state, and 16-bit weights in ZeRO-2."""
        return self.model.numel * 14

    def make(self, env: Mapping[str, str]) -> None:
        """Write the checkpoint unless it is there."""
        if self.folder.exists():
            return
        sizes = {"--numel": self.numel, "--world-size": self.world_size, "--stage": self.stage}
        options = [word for option, size in sizes.items() for word in (option, str(size))]
        if self.frozen:
            options.append("--frozen")
        run([sys.executable, "-m", "benchmarks.generate", str(self.folder), *options], env)

    def warm(self) -> None:
        """Bring what an export needs into the page cache, and not the moments."""
        for path in sorted(self.folder.rglob("*_states.pt")):
            _read(path, masters_start(path) if path.name.endswith("_optim_states.pt") else 0)


def masters_start(path: Path) -> int:
    """Return an offset in an optimizer states file at or shortly before its fp32 weights.

    In the files of either stage the fp32 weights follow exp_avg and exp_avg_sq and have their
    size, so they are the last third; the offset may include some optimizer state.
    """
    return max(0, path.stat().st_size * 2 // 3 - _SLACK)


def _read(path: Path, start: int) -> None:
    buffer = bytearray(_BUFFER)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while file.readinto(buffer):
            pass
