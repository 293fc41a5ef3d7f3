"""Inspection of a checkpoint as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zexport.checkpoint.state import CheckpointFile, Role, TrainingState
from zexport.export.plan import Origin
from zexport.inspect.summary import AdapterSummary, Inspection, Outcome, TagSummary, WeightFile
from zexport.ranges.dtypes import DType
from zexport.report.text import (
    Console,
    first_of,
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
    from zexport.inspect.statistics import TensorStatistics

_TAGS_SHOWN = 16
_FILES_SHOWN = 8
_STYLES = {"bad": "bold red", "warning": "bold yellow", "plain": "bold"}
_METHODS = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr"}
_COLORS = {
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
    """Print the inspection; ``tensors`` and ``files`` add one line for each."""
    checkpoint, verdict = inspection.checkpoint, inspection.verdict
    if checkpoint is None:
        print_text(console, near(inspection.path), "bold")
        _print_tags(console, inspection.tags)
    else:
        print_text(console, near_text(str(Origin.of(checkpoint))), "bold")
        print_facts(console, facts(inspection, checkpoint))
        if len(inspection.tags) > 1:
            _print_tags(console, inspection.tags)
        _print_contents(console, inspection, checkpoint, files=files, tensors=tensors)
    if statistics is not None:
        columns = ("Values of", ">Norm", ">Min", ">Max", ">Mean", ">NaN", ">Inf")
        rows = []
        for one in statistics:
            numbers = (one.norm, one.min, one.max, one.mean)
            cells = ("-" if number is None else f"{number:.5g}" for number in numbers)
            rows.append((one.name, *cells, f"{one.nan:,}", f"{one.inf:,}"))
        print_table(console, columns, rows)
    for title, items, mood in remarks(inspection):
        print_list(console, title, items, _STYLES[mood])
    print_line(console)
    print_text(console, f"Verdict: {verdict.sentence}.", _COLORS[verdict.outcome])
    step, *others = verdict.next_step.split("  # ")
    print_text(console, f"Next: {step}", indent=6)
    for other in others:
        print_line(console, f"      # {other}")


def facts(inspection: Inspection, checkpoint: TrainingState) -> Iterator[tuple[str, str]]:
    """Yield labels and values of the checkpoint; some values are empty."""
    location = checkpoint.location
    data, ranks = checkpoint.world_size, checkpoint.ranks
    master = checkpoint.master_dtype and f"{checkpoint.master_dtype.torch_name} master weights"
    module = checkpoint.module_dtype and f"{checkpoint.module_dtype.torch_name} module weights"
    lr_step = None if checkpoint.lr_step is None else f"LR scheduler at step {checkpoint.lr_step:,}"
    yield "Folder", f"{near(location.root)} ({location.framework.value})"
    yield "Tag", f"{location.tag} ({location.chosen.value})"
    yield "Step", "" if checkpoint.global_steps is None else f"{checkpoint.global_steps:,}"
    yield "Layout", checkpoint.layout
    if data is not None and ranks is not None:
        yield "World size", f"{data:,}" if ranks == data else f"{ranks:,} ({data:,} data-parallel)"
    yield "Written by", f"DeepSpeed {checkpoint.ds_version}" if checkpoint.ds_version else ""
    yield "Weights", ", ".join(filter(None, (master, module)))
    yield "Optimizer", ", ".join(filter(None, (checkpoint.optimizer, lr_step)))
    for adapter in inspection.adapters:
        yield "Adapter", _adapter(adapter)
    if inspection.tensors:
        fp32, bf16 = (size(inspection.nbytes_written(dtype)) for dtype in (DType.F32, DType.BF16))
        yield "Export", f"reads {size(inspection.nbytes_read())}"
        yield "", f"writes {fp32} as fp32, {bf16} as bf16"


def _adapter(adapter: AdapterSummary) -> str:
    base = f"{'with' if adapter.has_base else 'without'} the base model"
    if adapter.method is None:
        return f"{adapter.name}, no adapter_config.json, {base}"
    rank = "" if adapter.rank is None else f" of rank {adapter.rank}"
    parts = (
        f"{adapter.name}: {_METHODS.get(adapter.method, adapter.method)}{rank}",
        f"on {some(adapter.targets, 8)}" if adapter.targets else "",
        f"modules_to_save {some(adapter.saved_modules, 8)}" if adapter.saved_modules else "",
        base,
    )
    return ", ".join(filter(None, parts))


def _print_tags(console: Console, tags: Sequence[TagSummary]) -> None:
    rows = map(tag_row, tags[-_TAGS_SHOWN:])
    print_table(console, ("Tag", ">Step", ">Size", "Rank files", ""), rows, "Tags")
    print_rest(console, len(tags) - _TAGS_SHOWN, "--json", "older")


def tag_row(tag: TagSummary) -> tuple[str, ...]:
    """Return name, step, size and rank files of a tag, and whether it is the chosen one."""
    state = {True: "complete", False: "incomplete", None: ""}[tag.complete]
    of = "" if tag.world_size is None else f" of {tag.world_size:,}"
    return (
        tag.name,
        "" if tag.step is None else f"{tag.step:,}",
        "" if tag.nbytes is None else size(tag.nbytes),
        f"{tag.optimizer_files:,}{of} {state}".rstrip() if tag.optimizer_files else state,
        "this one" if tag.chosen else "",
    )


def _print_contents(
    console: Console,
    inspection: Inspection,
    checkpoint: TrainingState,
    *,
    files: bool,
    tensors: bool,
) -> None:
    if inspection.tensors:
        counts = inspection.counts()
        counted = (
            ("trainable", counts[Role.TRAINABLE]),
            ("frozen", counts[Role.FROZEN]),
            ("buffers", counts[Role.BUFFER]),
            ("tied (stored once, counted above)", inspection.tied()),
        )
        rows = [(name, f"{count.tensors:,}", f"{count.numel:,}") for name, count in counted]
        print_table(console, ("Parameters", ">Tensors", ">Elements"), rows)
    listed = [(file, "needed" if file.needed else "not needed") for file in checkpoint.files]
    if files:
        rows = [(file.name, size(file.nbytes), needed) for file, needed in listed]
        print_table(console, ("File", ">Size", "For an export"), rows)
    else:
        groups: dict[tuple[str, str], list[int]] = {}
        for file, needed in listed:
            kind = file.kind.value.partition(" (")[0]
            groups.setdefault((kind, needed), []).append(file.nbytes)
        summed = []
        for (kind, needed), sizes in groups.items():
            each = "up to " * (min(sizes) != max(sizes)) + size(max(sizes))
            summed.append((kind, f"{len(sizes):,}", each, size(sum(sizes)), needed))
        print_table(console, ("Files", ">Number", ">Each", ">Total", "For an export"), summed)
    if tensors:
        lines = [
            (t.name, t.role.value, t.dtype.torch_name, str(list(t.shape)), f"{t.numel:,}")
            for t in checkpoint.tensors
        ]
        lines += [(alias, "tied", "", f"= {n}", "") for alias, n in checkpoint.aliases.items()]
        print_table(console, ("Tensor", "Role", "Type", "Shape", ">Elements"), lines)


def remarks(inspection: Inspection) -> Iterator[tuple[str, Sequence[str], str]]:
    """Yield titles, sentences (possibly none), and whether they are bad, a warning or plain."""
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return
    missing = inspection.missing_files
    listed = first_of(missing, _FILES_SHOWN)
    folder = near(checkpoint.location.tag_dir)
    yield f"{plural(len(missing), 'missing file')}; copy into {folder}", listed, "bad"
    yield "Problems", [problem.sentence() for problem in inspection.problems], "bad"
    files: list[CheckpointFile | WeightFile] = [*checkpoint.files, *inspection.weight_files]
    code = [
        f"{one.name}: {some([*map(str, one.unknown_globals)], 8)}"
        for one in files
        if one.unknown_globals
    ]
    yield "Unknown code in pickles (not run)", code, "warning"
    warnings = [*checkpoint.newer, *checkpoint.warnings]
    notes = [*checkpoint.notes]
    left_out = notes if inspection.adapters else warnings  # an adapter's base model is elsewhere
    if checkpoint.left_out:
        count = plural(len(checkpoint.left_out), "weight")
        left_out.append(f"{count} not saved: {some(checkpoint.left_out, 8)}")
    elif checkpoint.frozen_left_out:
        left_out.append(
            "no frozen weights are recorded; if the model had some, they were not saved"
        )
    if inspection.missing_model_files:
        names = " and ".join(inspection.missing_model_files)
        left_out.append(f"{names}: missing. Pass --base MODEL to copy from there")
    yield "Warnings", warnings, "warning"
    yield "Notes", (*notes, *_weight_files(inspection.weight_files)), "plain"


def _weight_files(files: Sequence[WeightFile]) -> Iterator[str]:
    empty = [file.name for file in files if file.placeholders]
    whole = [file.name for file in files if not (file.placeholders or file.problem)]
    for file in files:
        if file.problem:
            yield f"{file.name}: cannot be read: {file.problem}"
    if empty:
        yield f"{some(empty, 2)}: placeholders; the export takes the weights from the rank files"
    if whole:
        yield f"{some(whole, 2)}: weights that the export does not read"
