"""Errors and inspections as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from zexport.errors import ZexportError
from zexport.storage.json import JsonObject, Natural, form_of, values_of

if TYPE_CHECKING:
    from zexport.checkpoint.state import CheckpointFile, TrainingState
    from zexport.inspect.statistics import TensorStatistics
    from zexport.inspect.summary import Inspection


_SAME_KEYS = ("stage", "world_size", "global_steps", "optimizer", "lr_step")


class ErrorInfo(Struct, frozen=True):
    """An error.

    Attributes:
        code: exit code of the command.
        kind: stable word for programs; docs/errors.md lists all.
        path: the file or folder at fault.
        message: path, problem, found and expected, hint.
        hint: what to do; may be empty.
    """

    code: Natural
    kind: str
    path: Path | None
    message: str
    hint: str

    @classmethod
    def of(cls, error: ZexportError) -> ErrorInfo:
        return cls(error.exit_code, error.kind, error.path, error.sentence(), error.hint)


class Failure(Struct, frozen=True):
    """Why a command failed.

    Attributes:
        error: the error.
    """

    error: ErrorInfo


def inspection_json(
    inspection: Inspection,
    *,
    tensors: bool = False,
    statistics: Sequence[TensorStatistics] | None = None,
) -> JsonObject:
    """Return the inspection as one JSON object.

    ``checkpoint`` is null if it is ambiguous. It has ``tensors`` if ``tensors`` or ``statistics``
    are given. Unknown numbers are null.
    """
    verdict, checkpoint = inspection.verdict, inspection.checkpoint
    content = None
    if checkpoint is not None:
        content = _checkpoint(inspection, checkpoint)
        if tensors or statistics is not None:
            content["tensors"] = list(_tensors(checkpoint, statistics))
    values = msgspec.to_builtins(
        {
            "path": inspection.path,
            "verdict": {
                "outcome": verdict.outcome,
                "exportable": verdict.outcome == "exportable",
                "sentence": verdict.sentence,
                "next_step": verdict.next_step,
            },
            "tags": inspection.tags,
            "checkpoint": content,
            "problems": [*map(ErrorInfo.of, inspection.problems)],
        },
        enc_hook=str,
    )
    return form_of(json.loads(json.dumps(values)))


def _checkpoint(inspection: Inspection, checkpoint: TrainingState) -> dict[str, object]:
    from zexport.checkpoint.state import Role  # noqa: PLC0415 - errors do not need it
    from zexport.ranges.dtypes import DType  # noqa: PLC0415

    location, parallelism = checkpoint.location, checkpoint.parallelism
    counts = inspection.counts()
    return {
        "root": location.root,
        "tag": location.tag,
        "tag_chosen": location.chosen.name.lower(),
        "framework": location.framework.name.lower(),
        "layout": checkpoint.layout or None,
        "parallelism": {
            "pipeline_stages": parallelism.stages,
            "tensor_ranks": parallelism.tensor_ranks,
            "expert_ranks": parallelism.expert_ranks,
            "experts": parallelism.experts,
        },
        **{name: getattr(checkpoint, name) for name in _SAME_KEYS},
        "deepspeed_version": checkpoint.ds_version,
        "module_dtype": checkpoint.module_dtype and checkpoint.module_dtype.torch_name,
        "master_dtype": checkpoint.master_dtype and checkpoint.master_dtype.torch_name,
        "parameters": {
            "trainable": counts[Role.TRAINABLE],
            "frozen": counts[Role.FROZEN],
            "buffers": counts[Role.BUFFER],
            "tied": inspection.tied(),
        },
        "aliases": checkpoint.aliases,
        "adapters": inspection.adapters,
        "left_out": checkpoint.left_out,
        "frozen_left_out": checkpoint.frozen_left_out or bool(checkpoint.left_out),
        "export_nbytes": {
            "read": inspection.nbytes_read(),
            "write_fp32": inspection.nbytes_written(DType.F32),
            "write_bf16": inspection.nbytes_written(DType.BF16),
        },
        "files": [_file(file) for file in checkpoint.files],
        "missing": {
            "optimizer_ranks": checkpoint.missing_ranks,
            "model_ranks": checkpoint.missing_model_ranks,
            "files": inspection.missing_files,
            "sidecars": inspection.missing_model_files,
        },
        "weight_files": inspection.weight_files,
        "warnings": [*checkpoint.newer, *checkpoint.warnings],
        "notes": checkpoint.notes,
    }


def _file(file: CheckpointFile) -> dict[str, object]:
    return {
        "name": file.name,
        "kind": file.kind.name.lower(),
        "rank": file.rank,
        "nbytes": file.nbytes,
        "needed": file.needed,
        "unknown_globals": [str(one) for one in file.unknown_globals],
    }


def _tensors(
    checkpoint: TrainingState, statistics: Sequence[TensorStatistics] | None
) -> Iterator[dict[str, object]]:
    """Yield every tensor; ``statistics`` is null if files with its values are missing."""
    found = {one.name: one for one in statistics or ()}
    for tensor in checkpoint.tensors:
        entry: dict[str, object] = {
            "name": tensor.name,
            "role": tensor.role,
            "dtype": tensor.dtype.torch_name,
            "shape": tensor.shape,
            "numel": tensor.numel,
        }
        if statistics is not None:
            values = values_of(found[tensor.name]) if tensor.name in found else None
            entry["statistics"] = values and {k: v for k, v in values.items() if k != "name"}
        yield entry
