"""An inspection as JSON: every key that a program may rely on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zexport.checkpoint.state import CheckpointFile, Role, TrainingState
from zexport.inspect.inspect import Inspection, Outcome
from zexport.ranges.dtypes import DType
from zexport.report.failure import Told
from zexport.storage.json import JsonObject, form_of, values_of

if TYPE_CHECKING:
    from zexport.inspect.statistics import TensorStatistics


def inspection_json(
    inspection: Inspection,
    *,
    tensors: bool = False,
    statistics: Sequence[TensorStatistics] | None = None,
) -> JsonObject:
    """The inspection as one JSON object.

    Keys that are always there: ``schema``, ``path``, ``verdict`` (``outcome``, ``exportable``,
    ``sentence``, ``next_step``), ``tags``, ``checkpoint``, ``problems``. ``checkpoint`` is null
    where nothing says which one is meant; otherwise it holds all that the text shows, in bytes. Its
    ``tensors`` is there with ``tensors`` or ``statistics``, a tensor's ``statistics`` with the
    latter; numbers that are not known are null.
    """
    verdict = inspection.verdict
    checkpoint = inspection.checkpoint
    content = None
    if checkpoint is not None:
        content = _checkpoint(inspection, checkpoint)
        if tensors or statistics is not None:
            content["tensors"] = list(_tensors(checkpoint, statistics))
    return form_of(
        {
            "path": str(inspection.path),
            "verdict": {
                "outcome": verdict.outcome.value,
                "exportable": verdict.outcome is Outcome.EXPORTABLE,
                "sentence": verdict.sentence,
                "next_step": verdict.next_step,
            },
            "tags": [values_of(tag) for tag in inspection.tags],
            "checkpoint": content,
            "problems": [values_of(Told.of(problem)) for problem in inspection.problems],
        }
    )


def _checkpoint(inspection: Inspection, checkpoint: TrainingState) -> JsonObject:
    location, parallelism = checkpoint.location, checkpoint.parallelism
    counts = inspection.counts()
    return {
        "root": str(location.root),
        "tag": location.tag,
        "tag_chosen": location.chosen.name.lower(),
        "framework": location.framework.name.lower(),
        "layout": checkpoint.layout or None,
        "parallelism": {
            "pipeline_stages": parallelism.stages,
            "tensor_ranks": parallelism.tensor_ranks,
            "expert_ranks": [*parallelism.expert_ranks],
            "experts": [*parallelism.experts],
        },
        "stage": checkpoint.stage,
        "world_size": checkpoint.world_size,
        "deepspeed_version": checkpoint.ds_version,
        "global_steps": checkpoint.global_steps,
        "optimizer": checkpoint.optimizer,
        "lr_step": checkpoint.lr_step,
        "module_dtype": checkpoint.module_dtype and checkpoint.module_dtype.torch_name,
        "master_dtype": checkpoint.master_dtype and checkpoint.master_dtype.torch_name,
        "parameters": {
            "trainable": values_of(counts[Role.TRAINABLE]),
            "frozen": values_of(counts[Role.FROZEN]),
            "buffers": values_of(counts[Role.BUFFER]),
            "tied": values_of(inspection.tied()),
        },
        "aliases": dict(checkpoint.aliases),
        "adapters": [values_of(adapter) for adapter in inspection.adapters],
        "left_out": list(checkpoint.left_out),
        "frozen_left_out": checkpoint.frozen_left_out or bool(checkpoint.left_out),
        "export_nbytes": {
            "read": inspection.nbytes_read(),
            "write_fp32": inspection.nbytes_written(DType.F32),
            "write_bf16": inspection.nbytes_written(DType.BF16),
        },
        "files": [_file(file) for file in checkpoint.files],
        "missing": {
            "optimizer_ranks": list(checkpoint.missing_ranks),
            "model_ranks": list(checkpoint.missing_model_ranks),
            "files": list(inspection.missing_files()),
            "sidecars": list(inspection.missing_sidecars),
        },
        "weight_files": [values_of(file) for file in inspection.weight_files],
        "warnings": [*checkpoint.newer, *checkpoint.warnings],
        "notes": list(checkpoint.notes),
    }


def _file(file: CheckpointFile) -> JsonObject:
    return {
        "name": file.name,
        "kind": file.kind.name.lower(),
        "rank": file.rank,
        "nbytes": file.nbytes,
        "needed": file.needed,
        "unknown_globals": [str(known) for known in file.unknown_globals],
    }


def _tensors(
    checkpoint: TrainingState, statistics: Sequence[TensorStatistics] | None
) -> Iterator[JsonObject]:
    """Every tensor; its statistics are ``None`` where its values are not all there."""
    found = {entry.name: entry for entry in statistics or ()}
    for tensor in checkpoint.tensors:
        told: JsonObject = {
            "name": tensor.name,
            "role": tensor.role.value,
            "dtype": tensor.dtype.torch_name,
            "shape": list(tensor.shape),
            "numel": tensor.numel,
        }
        if statistics is not None:
            entry = found.get(tensor.name)
            numbers = None if entry is None else values_of(entry)
            told["statistics"] = numbers and {k: v for k, v in numbers.items() if k != "name"}
        yield told
