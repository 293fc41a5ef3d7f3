"""The benchmark as one program: ``python -m benchmarks.run`` makes, measures, prints, clears."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from tempfile import mkdtemp

from benchmarks.cases import Case
from benchmarks.machine import machine_in_words
from benchmarks.measure import CommandFailedError, Sample
from benchmarks.methods import EXPORTS, FP32_EXPORTS, Method, Name, export, methods
from benchmarks.startup import measure_startup, render_startup, startup_targets, train_small
from benchmarks.table import (
    Target,
    render,
    render_targets,
    targets_at_scale,
    targets_at_size,
)

_STAGES = {"2": (2, False), "3": (3, False), "2-frozen": (2, True), "3-frozen": (3, True)}
_REFERENCES = {Name.FP32: Name.COPY_FP32, Name.BF16: Name.COPY_BF16}
_OUTPUT_NBYTES = {Name.FP32: 4, Name.BF16: 2}  # per parameter


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Attributes:
        numel: parameters of the first size.
        world_size: ranks.
        rounds: runs of each command.
        deepspeed_rounds: runs of DeepSpeed's script, which is slow.
        stages: names among ``_STAGES``.
        scale: the second size as a multiple of the first; 0 for none.
        quick: whether the sizes are for trying the benchmark itself.
        work: a folder that keeps its checkpoints, or None for one that is removed.
        keep: whether a folder made for this run stays.
    """

    numel: int
    world_size: int
    rounds: int
    deepspeed_rounds: int
    stages: tuple[str, ...]
    scale: int
    quick: bool
    work: Path | None
    keep: bool


def main() -> None:
    """Measure and print; ends with code 1 when a command fails."""
    options = _parse(sys.argv[1:])
    with _work_folder(options) as work:
        env = {**os.environ, "XDG_CACHE_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1"}
        print(f"{datetime.now(UTC):%Y-%m-%d}. {machine_in_words(work)}.\n")
        try:
            targets = [
                target
                for stage in options.stages
                for target in _measure_stage(stage, work, env, options)
            ]
            targets += _measure_start(work, env, options)
        except CommandFailedError as error:
            sys.exit(str(error))
    if options.quick:
        print("No targets: a quick run is too small for its ratios to mean anything.")
    else:
        print(render_targets(targets))


def _parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--numel", type=float, default=0.4e9, help="parameters (0.4e9)")
    parser.add_argument("--world-size", type=int, default=4, help="ranks (4)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each command (7)")
    parser.add_argument(
        "--deepspeed-rounds", type=int, default=7, help="runs of DeepSpeed's script (7)"
    )
    parser.add_argument(
        "--stages", default="3,2-frozen", help=f"some of {', '.join(_STAGES)} (3,2-frozen)"
    )
    parser.add_argument("--scale", type=int, default=4, help="also at this many times the size (4)")
    parser.add_argument("--quick", action="store_true", help="1e7 parameters, 3 rounds")
    parser.add_argument("--work", type=Path, help="keep checkpoints here for the next run")
    parser.add_argument("--keep", action="store_true", help="do not remove the folder of this run")
    found = parser.parse_args(argv)
    stages = tuple(found.stages.split(","))
    if unknown := set(stages) - set(_STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    return Options(
        numel=int(1e7 if found.quick else found.numel),
        world_size=found.world_size,
        rounds=3 if found.quick else found.rounds,
        deepspeed_rounds=1 if found.quick else found.deepspeed_rounds,
        stages=stages,
        scale=found.scale,
        quick=found.quick,
        work=found.work,
        keep=found.keep,
    )


@contextmanager
def _work_folder(options: Options) -> Iterator[Path]:
    """The folder for checkpoints and outputs; under ``build`` so that it is on this disk."""
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        yield options.work.resolve()
        return
    build = Path("build").resolve()
    build.mkdir(exist_ok=True)
    work = Path(mkdtemp(prefix="bench-", dir=build))
    try:
        yield work
    finally:
        if not options.keep:
            shutil.rmtree(work)


def _measure_stage(
    stage: str, work: Path, env: Mapping[str, str], options: Options
) -> list[Target]:
    number, frozen = _STAGES[stage]
    case = Case(work, options.numel, options.world_size, number, frozen)
    results = _measure_case(case, env, options, EXPORTS, options.deepspeed_rounds)
    targets = list(targets_at_size(case.title, results))
    if options.scale:
        large = Case(work, options.numel * options.scale, options.world_size, number, frozen)
        at_scale = _measure_case(large, env, options, FP32_EXPORTS, deepspeed_rounds=0)
        targets += targets_at_scale(large.title, at_scale, results)
    return targets


def _measure_case(
    case: Case,
    env: Mapping[str, str],
    options: Options,
    exports: Sequence[Name],
    deepspeed_rounds: int,
) -> dict[Name, list[Sample]]:
    """The samples of one checkpoint, its table printed and its outputs removed."""
    references = [name for name in _REFERENCES if name in exports]
    _check_space(case, references)
    _note(f"{case.title}: making the checkpoint")
    case.make(env)
    outputs = case.work / "outputs"
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir()
    copies = {}
    for name in references:  # untimed: this also fills the cache of names
        copies[_REFERENCES[name]] = outputs / f"reference-{name.name.lower()}"
        export(case.folder, name, env)(copies[_REFERENCES[name]])
    commands = methods(
        case.folder,
        copies,
        env,
        exports=exports,
        rounds=options.rounds,
        deepspeed_rounds=deepspeed_rounds,
    )
    results = _interleave(case, commands, outputs / "out")
    shutil.rmtree(outputs)
    if options.work is None and not options.keep:
        shutil.rmtree(case.folder)
    print(render(case.title, results), end="\n\n", flush=True)
    return results


def _interleave(case: Case, commands: Sequence[Method], out: Path) -> dict[Name, list[Sample]]:
    """Every command once a round, in random order, each on a settled disk and a warm cache."""
    results: dict[Name, list[Sample]] = {command.name: [] for command in commands}
    for number in range(max(command.rounds for command in commands)):
        order = [command for command in commands if number < command.rounds]
        SystemRandom().shuffle(order)
        for command in order:
            os.sync()
            case.warm()
            sample = command.measure(out)
            shutil.rmtree(out)
            results[command.name].append(sample)
            _note(f"round {number + 1}: {command.name.value}: {sample.seconds:.2f} s")
    return results


def _measure_start(work: Path, env: Mapping[str, str], options: Options) -> list[Target]:
    """The start's targets; a quick run inspects a generated checkpoint, not a trained one."""
    if options.quick:
        case = Case(work, 10**6, 2, 3, frozen=False)
        case.make(env)
        folder = case.folder
    else:
        folder = work / "trained"
        if not folder.exists():
            _note("training a small checkpoint")
            # Not env: torch keeps DeepSpeed's compiled parts under the user's own cache folder.
            train_small(folder, os.environ)
    times = measure_startup(folder, env, max(options.rounds, 7))
    print(render_startup(times), end="\n\n", flush=True)
    return list(startup_targets(times))


def _check_space(case: Case, references: Sequence[Name]) -> None:
    """End with a sentence before anything is written to a disk that is too small."""
    source = 0 if case.folder.exists() else case.nbytes
    outputs = sum(_OUTPUT_NBYTES[name] for name in references) + _OUTPUT_NBYTES[Name.FP32]
    needed = source + outputs * case.model.numel
    free = shutil.disk_usage(case.work).free
    _note(f"{case.title}: takes up to {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free")
    if needed > free:
        sys.exit(
            f"{case.work}: not enough space (found {free / 1e9:.1f} GB, expected "
            f"{needed / 1e9:.1f} GB). Choose another folder with --work or a smaller --numel."
        )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
