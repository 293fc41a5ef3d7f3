"""``python -m benchmarks.fsdp``: an FSDP checkpoint exported, and merged by Accelerate and verl.

verl takes part where it is installed: ``pip install --no-deps verl tensordict pyvers omegaconf``.
Every command runs once a round, in random order, with the source in the page cache; ratios are of
medians. Then each command reads a checkpoint with one flipped bit per chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom
from statistics import median
from tempfile import mkdtemp

from benchmarks.llama import fit
from benchmarks.machine import machine_in_words
from benchmarks.measure import CommandFailedError, Sample, copy, run
from benchmarks.methods import zexport
from benchmarks.table import seconds, spread

_WORLD = 4
BARE, WHOLE = "zexport --no-verify, DCP", "zexport, DCP"
RANKS, COPY, MERGE = "zexport --no-verify, rank files", "cp + sync -d", "accelerate merge-weights"
VERL = "verl.model_merger, rank files"
TARGETS = {BARE: 1.3, RANKS: 1.3}
"""Limit, as a multiple of the copy."""

Commands = dict[str, Callable[[Path], Sample]]


def main() -> None:
    """Measure and print; ends with code 1 when a command fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp", description=__doc__)
    parser.add_argument("--numel", type=float, default=1.4e9, help="parameters (1.4e9)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command (5)")
    parser.add_argument("--work", type=Path, default=Path("build"), help="where to work (build)")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    work = Path(mkdtemp(prefix="fsdp-", dir=asked.work)).resolve()
    print(f"{machine_in_words(work)}.\n")
    try:
        _measure(work, int(asked.numel), asked.rounds)
    except CommandFailedError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(work)


def _measure(work: Path, numel: int, rounds: int) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*launch, f"--nproc-per-node={_WORLD}", __file__, str(numel), str(work)], env)
    folder, ranks = work / "pytorch_model_fsdp_0", work / "actor"
    commands: Commands = {
        BARE: _export(folder, env, "--no-verify"),
        WHOLE: _export(folder, env),
        RANKS: _export(ranks, env, "--no-verify"),
        COPY: partial(copy, work / "reference", env),
        MERGE: _merge(folder, env),
    }
    if find_spec("verl") is not None:
        commands[VERL] = _verl(ranks, env)
    commands[RANKS](work / "out")  # learns the model's names, which is done once
    shutil.rmtree(work / "out")
    commands[WHOLE](work / "reference")
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name in SystemRandom().sample([*commands], len(commands)):
            os.sync()
            samples[name].append(commands[name](work / "out"))
            shutil.rmtree(work / "out")
    for path in (*folder.glob("*.distcp"), *ranks.glob("*.pt")):
        _flip(path)
    noticed = {}
    for name in commands.keys() - {COPY}:
        try:
            commands[name](work / "out")
            noticed[name] = "no"
        except CommandFailedError:
            noticed[name] = "yes"
        shutil.rmtree(work / "out", ignore_errors=True)
    print(_table(samples, noticed))


def _export(checkpoint: Path, env: Mapping[str, str], *more: str) -> Callable[[Path], Sample]:
    argv = [*zexport(), "consolidate", str(checkpoint)]
    return lambda out: run([*argv, str(out), "--layout", "memory", "--quiet", *more], env)[0]


def _merge(folder: Path, env: Mapping[str, str]) -> Callable[[Path], Sample]:
    """A run of Accelerate's own converter; it ends before its bytes are on the disk."""
    argv = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    return lambda out: run([*argv, str(folder), str(out)], env)[0]


def _verl(folder: Path, env: Mapping[str, str]) -> Callable[[Path], Sample]:
    argv = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    argv += ["--local_dir", str(folder), "--target_dir"]
    return lambda out: run([*argv, str(out)], env)[0]


def _flip(path: Path) -> None:
    """Flip one bit in the data of each chunk, which is a record named ``*/data/N``."""
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x03\x04")
    while at >= 0:
        name = int.from_bytes(content[at + 26 : at + 28], "little")
        extra = int.from_bytes(content[at + 28 : at + 30], "little")
        if b"/data/" in content[at + 30 : at + 30 + name]:
            content[at + 30 + name + extra] ^= 1
        at = content.find(b"PK\x03\x04", at + 30 + name + extra)
    path.write_bytes(content)


def _table(samples: Mapping[str, Sequence[Sample]], noticed: Mapping[str, str]) -> str:
    rows = [
        "| command | median s | x cp | spread | CPU s | peak RSS MB | at most | flips noticed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in samples.items():
        cells = (
            name,
            f"{seconds(found):.2f}",
            f"{seconds(found) / seconds(samples[COPY]):.2f}",
            f"{spread(found):.1f}",
            f"{median(sample.cpu_seconds for sample in found):.1f}",
            f"{max(sample.peak_rss for sample in found) / 1e6:.0f}",
            f"{TARGETS[name]:g}" if name in TARGETS else "",
            noticed.get(name, ""),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def make(numel: int, work: Path) -> None:
    """Save one rank's shards of a bf16 model: as a DCP folder, and as verl's rank file."""
    import torch
    import torch.distributed.checkpoint as dcp
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from transformers import PreTrainedTokenizerFast

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("fsdp",))
    state, rank, model = {}, distributed.get_rank(), fit(numel)
    for one in model.parameters(frozen=False):
        rows = torch.arange(one.shape[0]).chunk(_WORLD)
        own = len(rows[rank]) if rank < len(rows) else 0
        local = torch.randn((own, *one.shape[1:])).bfloat16()
        stride = torch.empty(one.shape, device="meta").stride()
        state[one.name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(one.shape), stride=stride
        )
    dcp.save({"model": state}, checkpoint_id=work / "pytorch_model_fsdp_0")
    if rank == 0:
        (work / "actor" / "huggingface").mkdir(parents=True)
        files = {"fsdp_config": {"world_size": _WORLD}, "huggingface/config": model.config()}
        for name, content in files.items():
            (work / "actor" / f"{name}.json").write_text(json.dumps(content))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
        tokenizer.save_pretrained(work / "actor" / "huggingface")
    distributed.barrier()
    torch.save(state, work / "actor" / f"model_world_size_{_WORLD}_rank_{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        make(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
