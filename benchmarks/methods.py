"""The commands that are compared: name, command line, reference."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from benchmarks.measure import Sample, copy, run


class Name(Enum):
    """A command, as the table calls it."""

    FP32 = "zexport fp32"
    FP32_BARE = "zexport fp32 --no-verify"
    BF16 = "zexport bf16"
    BF16_BARE = "zexport bf16 --no-verify"
    DEEPSPEED = "zero_to_fp32 --safe_serialization"
    COPY_FP32 = "cp + sync -d, fp32"
    COPY_BF16 = "cp + sync -d, bf16"

    @property
    def copy(self) -> Name:
        """The copy of the same bytes; a copy's own is itself."""
        return Name.COPY_BF16 if "bf16" in self.value else Name.COPY_FP32


FP32_EXPORTS = (Name.FP32, Name.FP32_BARE)
EXPORTS = (*FP32_EXPORTS, Name.BF16, Name.BF16_BARE)
_DTYPE = {Name.FP32: "fp32", Name.FP32_BARE: "fp32", Name.BF16: "bf16", Name.BF16_BARE: "bf16"}
_BARE = {Name.FP32_BARE, Name.BF16_BARE}


@dataclass(frozen=True, slots=True)
class Method:
    """A command ready to run.

    Attributes:
        name: what it is called.
        measure: runs it once into a folder that does not exist yet.
        rounds: in how many of the rounds it takes part.
    """

    name: Name
    measure: Callable[[Path], Sample]
    rounds: int


def zexport() -> list[str]:
    """The installed command, as a user starts it."""
    script = Path(sys.executable).with_name("zexport")
    return [str(script)] if script.exists() else [sys.executable, "-m", "zexport"]


def export(checkpoint: Path, name: Name, env: Mapping[str, str]) -> Callable[[Path], Sample]:
    """A run of ``zexport consolidate``; bytes read are those of its report."""
    argv = [*zexport(), "consolidate", "--dtype", _DTYPE[name], "--json"]
    if name in _BARE:
        argv.append("--no-verify")

    def measure(out: Path) -> Sample:
        sample, stdout = run([*argv, str(checkpoint), str(out)], env)
        return replace(sample, nbytes_read=int(json.loads(stdout)["nbytes_read"]))

    return measure


def deepspeed(checkpoint: Path, env: Mapping[str, str]) -> Callable[[Path], Sample]:
    """A run of DeepSpeed's own script; it ends before its bytes are on the disk."""
    argv = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(checkpoint)]

    def measure(out: Path) -> Sample:
        return run([*argv, str(out), "--safe_serialization"], env)[0]

    return measure


def methods(
    checkpoint: Path,
    references: Mapping[Name, Path],
    env: Mapping[str, str],
    *,
    exports: Sequence[Name],
    rounds: int,
    deepspeed_rounds: int,
) -> list[Method]:
    """Exports, the copies of what they make, and DeepSpeed's script unless its rounds are 0.

    Args:
        checkpoint: what is exported.
        references: for each copy, a finished export whose files it copies.
        env: environment of every command.
        exports: which exports take part.
        rounds: rounds of exports and copies.
        deepspeed_rounds: rounds of DeepSpeed's script.
    """
    found = [Method(name, export(checkpoint, name, env), rounds) for name in exports]
    for name, reference in references.items():
        found.append(Method(name, partial(copy, reference, env), rounds))
    if deepspeed_rounds:
        found.append(Method(Name.DEEPSPEED, deepspeed(checkpoint, env), deepspeed_rounds))
    return found
