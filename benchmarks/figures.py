"""Costs at the edges: start, many ranks, many parameters, tensors, states (``benchmarks.figures``).

The checkpoints are holes in files, so that they take no room. Each figure is the least CPU time of
some runs, interleaved with those of another checkout where one is given, or the peak of memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import measure

_HERE = Path(__file__).resolve().parent.parent
_LIBRARIES = "import numpy, ml_dtypes, blake3, isal, click"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command took at the least: CPU seconds, and at the most: MiB of memory."""

    seconds: float
    peak_mib: int


def least(
    commands: Mapping[str, tuple[Path, Sequence[str]]], out: Path, rounds: int
) -> dict[str, Usage]:
    """Run each command with its checkout and return the usage; ``out`` is removed each time."""
    found: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(rounds + 1):  # the first fills caches
        for name, (tree, words) in commands.items():
            found[name].append(_usage(tree, words))
            shutil.rmtree(out, ignore_errors=True)
    return {
        name: Usage(min(u.seconds for u in each[1:]), max(u.peak_mib for u in each[1:]))
        for name, each in found.items()
    }


def _usage(tree: Path, words: Sequence[str]) -> Usage:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, half of a start is compiling
    # without -P the working directory goes before the tree
    sample, _ = measure.run([sys.executable, "-P", *words], env)
    return Usage(sample.cpu_seconds, sample.peak_rss >> 20)


def _llama(hidden: int, layers: int, inner: int, words: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for part in "qkvo":
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (hidden, hidden)
        for part, shape in (("gate", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"{prefix}mlp.{part}_proj.weight"] = shape
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
    return shapes


def _run(words: str, *paths: Path) -> list[str]:
    return ["-m", "zexport", words, *map(str, paths), *(["--quiet"] if len(paths) > 1 else [])]


def start(work: Path, trees: Sequence[Path], rounds: int) -> None:
    """What an export and an inspection cost beyond their libraries, which is at most 0.10 s."""
    _apart(_write, work / "tiny", _llama(16, 2, 32, 64), 2)
    out = work / "out"
    commands = {"libraries": (_HERE, ["-c", _LIBRARIES])}
    for tree in trees:
        commands[f"{tree}: consolidate"] = (tree, _run("consolidate", work / "tiny", out))
        commands[f"{tree}: inspect"] = (tree, _run("inspect", work / "tiny"))
        commands[f"{tree}: --help"] = (tree, ["-m", "zexport", "--help"])
    found = least(commands, out, rounds)
    for name, usage in found.items():
        beyond = usage.seconds - found["libraries"].seconds
        _tell(f"{name}: {usage.seconds:.3f} s, {beyond:+.3f} s to the libraries")


def ranks(work: Path, trees: Sequence[Path], rounds: int) -> None:
    """0.5 B parameters on 512 ranks and on 4: at most 1.3 times the CPU time."""
    out = work / "out"
    commands = {}
    for count in (4, 512):
        _apart(_write, work / f"ranks{count}", _llama(1024, 24, 4096, 32000), count)
        for tree in trees:
            words = _run("consolidate", work / f"ranks{count}", out)
            commands[f"{tree}: {count} ranks"] = (tree, words)
    found = least(commands, out, rounds)
    for tree in trees:
        few, many = (found[f"{tree}: {count} ranks"].seconds for count in (4, 512))
        _tell(f"{tree}: {many:.2f} s on 512 ranks, {few:.2f} s on 4: {many / few:.2f} times")


def plan(work: Path, trees: Sequence[Path], rounds: int) -> None:
    """A plan of DeepSeek-V3 on 256 ranks: at most 2.5 s and 150 MB; names are cached before."""
    _apart(_write_deepseek, work / "deepseek")
    words = [*_run("consolidate", work / "deepseek", work / "out"), "--dry-run"]
    for name, usage in least(
        {f"{tree}": (tree, words) for tree in trees}, work / "out", rounds
    ).items():
        _tell(f"{name}: {usage.seconds:.1f} s, {usage.peak_mib} MiB")


def _write_deepseek(folder: Path) -> None:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    _write(folder, shapes, 256)
    config.save_pretrained(folder)


def _write(folder: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> None:
    from tests.support.sparse_checkpoint import write_sparse_zero3

    write_sparse_zero3(folder, shapes, ranks)


def _apart(write: Callable[..., None], *args: object) -> None:
    """Write in a process of its own: memory held here would count as that of the commands."""
    writer = multiprocessing.get_context("spawn").Process(target=write, args=args)
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(f"{write.__name__} ended with {writer.exitcode}")


def tensors(work: Path, trees: Sequence[Path], rounds: int) -> None:
    """100,000 tensors, in one file and in many: at most 200 MB."""
    shapes = {f"model.layers.{number}.weight": (64,) for number in range(100_000)}
    _apart(_write, work / "many", shapes, 2)
    out = work / "out"
    commands = {}
    for tree in trees:
        words = _run("consolidate", work / "many", out)
        commands[f"{tree}: one file"] = (tree, words)
        commands[f"{tree}: files of 1 MB"] = (tree, [*words, "--max-shard-size", "1MB"])
    for name, usage in least(commands, out, rounds).items():
        _tell(f"{name}: {usage.peak_mib} MiB, {usage.seconds:.1f} s")


def states(work: Path, trees: Sequence[Path], rounds: int) -> None:
    """The state of 20,000 tensors from 64 ranks to 48: at most 200 MB."""
    experts = (f"layers.{number // 256}.experts.{number % 256}.w" for number in range(20_000))
    _apart(_write, work / "states", dict.fromkeys(experts, (16, 64)), 64)
    words = [*_run("reshard", work / "states", work / "out"), "--world-size", "48"]
    commands = {f"{tree}": (tree, words) for tree in trees}
    for name, usage in least(commands, work / "out", rounds).items():
        _tell(f"{name}: {usage.peak_mib} MiB, {usage.seconds:.1f} s")


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


_SECTIONS: dict[str, Callable[[Path, Sequence[Path], int], None]] = {
    "start": start,
    "ranks": ranks,
    "plan": plan,
    "tensors": tensors,
    "states": states,
}


def main() -> None:
    """Print the figures of the sections that were asked for, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {sorted(_SECTIONS)}; all"
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured side by side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where the files go, such as /dev/shm")
    options = parser.parse_args()
    trees = [_HERE, *([options.against.resolve()] if options.against else [])]
    for name in options.sections or _SECTIONS:
        print(f"{name}: {_SECTIONS[name].__doc__}", flush=True)
        with TemporaryDirectory(dir=options.work, prefix="zexport-figures-") as work:
            _SECTIONS[name](Path(work), trees, options.rounds)


if __name__ == "__main__":
    main()
