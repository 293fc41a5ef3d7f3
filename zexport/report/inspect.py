"""What is in a checkpoint, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from zexport.checkpoint.state import CheckpointFile, Role, TrainingState
from zexport.export.plan import Origin
from zexport.inspect.inspect import AdapterSummary, Inspection, Outcome
from zexport.ranges.dtypes import DType
from zexport.report.text import (
    Console,
    near,
    near_text,
    plural,
    print_facts,
    print_line,
    print_list,
    print_rest,
    print_table,
    print_text,
    size,
)
from zexport.text import some

if TYPE_CHECKING:
    from zexport.inspect.around import TagSummary, WeightFile
    from zexport.inspect.statistics import TensorStatistics

_TAGS_SHOWN = 16
_STYLES = {"bad": "bold red", "warning": "bold yellow", "plain": ""}
_METHOD = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr"}
"""How people write what peft calls its methods."""
_COLOR = {
    Outcome.EXPORTABLE: "bold green",
    Outcome.NEEDS_BASE: "bold yellow",
    Outcome.CHOOSE_TAG: "bold yellow",
    Outcome.NOT_EXPORTABLE: "bold red",
}


def print_inspection(
    console: Console,
    inspection: Inspection,
    tensors: bool = False,
    *,
    files: bool = False,
    statistics: Sequence[TensorStatistics] | None = None,
) -> None:
    """The inspection for people, with a line for each tensor or rank file; the verdict is last."""
    checkpoint = inspection.checkpoint
    what = str(inspection.path if checkpoint is None else Origin.of(checkpoint))
    print_text(console, near_text(what), "bold")
    if checkpoint is not None:
        print_facts(console, facts(inspection, checkpoint))
    if checkpoint is None or len(inspection.tags) > 1:
        _print_tags(console, inspection.tags)
    if checkpoint is not None:
        _print_contents(console, inspection)
        _print_files(console, checkpoint, one_a_line=files)
    if tensors and checkpoint is not None:
        _print_tensors(console, checkpoint)
    if statistics is not None:
        columns = ("Values of", ">Norm", ">Min", ">Max", ">Mean", ">NaN", ">Inf")
        print_table(console, columns, map(_statistics_row, statistics))
    for title, items, mood in remarks(inspection):
        print_list(console, title, items, _STYLES[mood])
    print_line(console)
    print_text(
        console, f"Verdict: {inspection.verdict.sentence}.", _COLOR[inspection.verdict.outcome]
    )
    _print_next(console, inspection.verdict.next_step)


def _print_next(console: Console, step: str) -> None:
    """What to do next: a command stays on one line, to be copied, with another way below it."""
    if not step.startswith("zexport "):
        print_text(console, f"Next: {step}", indent=6)
        return
    command, *others = step.split("  # ")
    print_line(console, f"Next: {command}")
    for other in others:
        print_line(console, f"      # {other}")


def facts(inspection: Inspection, checkpoint: TrainingState) -> Iterator[tuple[str, str]]:
    """What is said of the checkpoint in a word or two, by what it is about; some are empty."""
    location = checkpoint.location
    written = f"DeepSpeed {checkpoint.ds_version}" if checkpoint.ds_version else ""
    step = checkpoint.global_steps
    masters = checkpoint.master_dtype and f"{checkpoint.master_dtype.torch_name} masters"
    module = checkpoint.module_dtype and f"{checkpoint.module_dtype.torch_name} module"
    yield "Folder", f"{near(location.root)} ({location.framework.value})"
    yield "Tag", f"{location.tag} ({location.chosen.value})"
    yield "Step", "" if step is None else f"{step:,}"
    yield "Layout", checkpoint.layout
    yield "World size", _world_size(checkpoint)
    yield "Written by", written
    yield "Weights", ", ".join(part for part in (masters, module) if part)
    yield "Optimizer", _optimizer(checkpoint)
    yield from (("Adapter", _adapter(adapter)) for adapter in inspection.adapters)
    if inspection.tensors:
        fp32, bf16 = (size(inspection.nbytes_written(t)) for t in (DType.F32, DType.BF16))
        yield "An export", f"reads {size(inspection.nbytes_read())}"
        yield "", f"writes {fp32} as fp32, {bf16} as bf16"


def _world_size(checkpoint: TrainingState) -> str:
    data, ranks = checkpoint.world_size, checkpoint.ranks
    if data is None or ranks is None:
        return ""
    return f"{data:,}" if ranks == data else f"{ranks:,}, of which {data:,} share their data"


def _adapter(adapter: AdapterSummary) -> str:
    base = "with" if adapter.has_base else "without"
    if adapter.method is None:
        return f"{adapter.name}, no adapter_config.json, {base} the base model"
    rank = "" if adapter.rank is None else f" of rank {adapter.rank}"
    parts = [
        f"{adapter.name}: {_METHOD.get(adapter.method, adapter.method)}{rank}",
        f"on {some(adapter.targets, 8)}" if adapter.targets else "",
        f"{some(adapter.saved_modules, 8)} trained whole" if adapter.saved_modules else "",
        f"{base} the base model",
    ]
    return ", ".join(filter(None, parts))


def _optimizer(checkpoint: TrainingState) -> str:
    step = checkpoint.lr_step
    parts = (checkpoint.optimizer, None if step is None else f"schedule at step {step:,}")
    return ", ".join(part for part in parts if part)


def _print_tags(console: Console, tags: Sequence[TagSummary]) -> None:
    print_table(
        console,
        ("Tag", ">Step", ">Size", "Files of ranks", ""),
        (tag_row(tag) for tag in tags[-_TAGS_SHOWN:]),
        "Tags",
    )
    print_rest(console, len(tags) - _TAGS_SHOWN, "--json", "older")


def tag_row(tag: TagSummary) -> tuple[str, ...]:
    """Name, step, size and files of a checkpoint, and whether it is the one that is shown."""
    whole = {True: "complete", False: "incomplete", None: ""}[tag.complete]
    of = "" if tag.world_size is None else f" of {tag.world_size:,}"
    return (
        tag.name,
        "" if tag.step is None else f"{tag.step:,}",
        "" if tag.nbytes is None else size(tag.nbytes),
        f"{tag.optimizer_files:,}{of} {whole}".rstrip(),
        "this one" if tag.chosen else "",
    )


def _print_contents(console: Console, inspection: Inspection) -> None:
    if not inspection.tensors:
        return
    counts = inspection.counts()
    counted = (
        ("trainable", counts[Role.TRAINABLE]),
        ("frozen", counts[Role.FROZEN]),
        ("buffers", counts[Role.BUFFER]),
        ("tied (stored once, counted above)", inspection.tied()),
    )
    rows = [(name, f"{count.tensors:,}", f"{count.numel:,}") for name, count in counted]
    print_table(console, ("Parameters", ">Tensors", ">Elements"), rows)


def _print_files(console: Console, checkpoint: TrainingState, *, one_a_line: bool) -> None:
    if one_a_line:
        rows = [(f.name, size(f.nbytes), _needed(f)) for f in checkpoint.files]
        print_table(console, ("File", ">Size", "For an export"), rows)
        return
    groups: dict[tuple[str, str], list[int]] = {}
    for file in checkpoint.files:
        kind = file.kind.value.partition(" (")[0]
        groups.setdefault((kind, _needed(file)), []).append(file.nbytes)
    print_table(
        console,
        ("Files", ">Number", ">Each", ">Together", "For an export"),
        (
            (kind, f"{len(sizes):,}", _each(sizes), size(sum(sizes)), needed)
            for (kind, needed), sizes in groups.items()
        ),
    )


def _needed(file: CheckpointFile) -> str:
    return "needed" if file.needed else "not needed"


def _each(sizes: Sequence[int]) -> str:
    low, high = size(min(sizes)), size(max(sizes))
    return low if low == high else f"up to {high}"


def _print_tensors(console: Console, checkpoint: TrainingState) -> None:
    rows = [
        (t.name, t.role.value, t.dtype.torch_name, str(list(t.shape)), f"{t.numel:,}")
        for t in checkpoint.tensors
    ]
    rows += [(alias, "tied", "", f"= {name}", "") for alias, name in checkpoint.aliases.items()]
    columns = ("Tensor", "Role", "Type", "Shape", ">Elements")
    print_table(console, columns, rows)


def _statistics_row(found: TensorStatistics) -> tuple[str, ...]:
    numbers = (found.norm, found.min, found.max, found.mean)
    written = ("-" if number is None else f"{number:.5g}" for number in numbers)
    return (found.name, *written, f"{found.nan:,}", f"{found.inf:,}")


def remarks(inspection: Inspection) -> Iterator[tuple[str, Iterable[str], str]]:
    """What should be known of the checkpoint: titles, sentences (perhaps none), and their mood."""
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return
    missing = inspection.missing_files()
    title = (
        f"{plural(len(missing), 'missing file')}, to be fetched into {checkpoint.location.tag_dir}"
    )
    yield title, _shortened(missing), "bad"
    yield "Problems", [problem.sentence() for problem in inspection.problems], "bad"
    unknown = _unknown_globals(inspection, checkpoint)
    yield "Unknown code in pickles (it was not run)", unknown, "warning"
    left_out = (*_left_out(checkpoint),)
    is_adapter = bool(inspection.adapters)  # whose base is where it was
    warnings = (*checkpoint.newer, *checkpoint.warnings, *(() if is_adapter else left_out))
    yield "Warnings", (*warnings, *_lacking(inspection)), "warning"
    notes = (*checkpoint.notes, *(left_out if is_adapter else ()))
    yield "Notes", (*notes, *_beside(inspection.weight_files)), "plain"


def _shortened(names: Sequence[str], shown: int = 8) -> Iterator[str]:
    yield from names[:shown]
    if len(names) > shown:
        yield f"and {len(names) - shown:,} more; --json lists all of them"


def _unknown_globals(inspection: Inspection, checkpoint: TrainingState) -> Iterator[str]:
    files: tuple[CheckpointFile | WeightFile, ...] = (*checkpoint.files, *inspection.weight_files)
    for file in files:
        if file.unknown_globals:
            yield f"{file.name}: {some([str(one) for one in file.unknown_globals], 8)}"


def _left_out(checkpoint: TrainingState) -> Iterator[str]:
    if checkpoint.left_out:
        yield (
            f"{plural(len(checkpoint.left_out), 'weight')} left out when it was saved: "
            f"{some(checkpoint.left_out, 8)}"
        )
    elif checkpoint.frozen_left_out:
        yield (
            "no frozen weights are recorded, as always where the Hugging Face Trainer saves LoRA: "
            "if there were any, they are in no file"
        )


def _lacking(inspection: Inspection) -> Iterator[str]:
    if inspection.missing_sidecars:
        yield (
            f"not beside the checkpoint: {' and '.join(inspection.missing_sidecars)}; with --base "
            "MODEL, an export takes what is missing from there"
        )


def _beside(files: Sequence[WeightFile]) -> Iterator[str]:
    """What the weight files beside the tag are, and where the real weights are if not there."""
    for file in files:
        if file.problem:
            yield f"{file.name} beside the tag cannot be read: {file.problem}"
    hollow = [file for file in files if file.placeholders]
    if hollow:
        empty = sum(len(file.placeholders) for file in hollow)
        yield (
            f"{_names(hollow)}: placeholders, {empty:,} of {_tensors_in(hollow)} are empty; the "
            "real weights are in the rank files, and an export needs no gathering on save"
        )
    real = [file for file in files if not file.placeholders and not file.problem]
    if real:
        yield (
            f"{_names(real)} ({size(sum(file.nbytes for file in real))}, {_tensors_in(real)}): "
            "weights beside the tag, which an export does not read"
        )


def _names(files: Sequence[WeightFile]) -> str:
    return some([file.name for file in files], 2)


def _tensors_in(files: Sequence[WeightFile]) -> str:
    return plural(sum(file.tensors for file in files), "tensor")
