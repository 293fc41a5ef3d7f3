"""An inspection as JSON: every key that a program may rely on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from zexport.checkpoint.contents import Parallelism, Role, StoredTensor, ZeroCheckpoint
from zexport.inspect.inspect import Inspection, Outcome
from zexport.ranges.dtypes import DType
from zexport.report.failure import Told
from zexport.store.json import Json, JsonObject, values_of

if TYPE_CHECKING:
    from zexport.inspect.adapters import AdapterSummary
    from zexport.inspect.statistics import TensorStatistics
    from zexport.inspect.tags import TagSummary
    from zexport.inspect.weight_files import WeightFile

_SCHEMA = 1


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
    return {
        "schema": _SCHEMA,
        "path": str(inspection.path),
        "verdict": {
            "outcome": verdict.outcome.value,
            "exportable": verdict.outcome is Outcome.EXPORTABLE,
            "sentence": verdict.sentence,
            "next_step": verdict.next_step,
        },
        "tags": [_tag(tag) for tag in inspection.tags],
        "checkpoint": content,
        "problems": [values_of(Told.of(problem)) for problem in inspection.problems],
    }


def _tag(tag: TagSummary) -> JsonObject:
    return {
        "name": tag.name,
        "step": tag.step,
        "optimizer_files": tag.optimizer_files,
        "world_size": tag.world_size,
        "complete": tag.is_complete,
        "chosen": tag.is_chosen,
    }


def _checkpoint(inspection: Inspection, checkpoint: ZeroCheckpoint) -> JsonObject:
    location = checkpoint.location
    return {
        "root": str(location.root),
        "tag": location.tag,
        "tag_chosen": location.chosen.name.lower(),
        "framework": location.framework.name.lower(),
        "layout": checkpoint.layout or None,
        "parallelism": _parallelism(checkpoint.parallelism),
        "stage": checkpoint.stage,
        "world_size": checkpoint.world_size,
        "deepspeed_version": checkpoint.ds_version,
        "global_steps": checkpoint.global_steps,
        "optimizer": checkpoint.optimizer,
        "lr_step": checkpoint.lr_step,
        "module_dtype": _dtype(checkpoint.module_dtype),
        "master_dtype": _dtype(checkpoint.master_dtype),
        "parameters": _parameters(inspection),
        "aliases": dict(checkpoint.aliases),
        "adapters": [_adapter(adapter) for adapter in inspection.adapters],
        "left_out": list(checkpoint.left_out),
        "frozen_left_out": checkpoint.frozen_left_out or bool(checkpoint.left_out),
        "export_nbytes": {
            "read": inspection.nbytes_read(),
            "write_fp32": inspection.nbytes_written(DType.F32),
            "write_bf16": inspection.nbytes_written(DType.BF16),
        },
        "files": _files(checkpoint),
        "missing": {
            "optimizer_ranks": list(checkpoint.missing_ranks),
            "model_ranks": list(checkpoint.missing_model_ranks),
            "files": list(inspection.missing_files()),
            "sidecars": list(inspection.missing_sidecars),
        },
        "weight_files": [_weight_file(file) for file in inspection.weight_files],
        "warnings": [*checkpoint.newer, *checkpoint.warnings],
    }


def _adapter(adapter: AdapterSummary) -> JsonObject:
    config = adapter.config
    return {
        "name": adapter.name,
        "tensors": adapter.tensors,
        "has_base": adapter.has_base,
        "method": None if config is None else config.peft_type,
        "rank": None if config is None else config.rank,
        "targets": [] if config is None else [*config.targets],
        "saved_modules": [] if config is None else [*config.saved_modules],
    }


def _dtype(dtype: DType | None) -> str | None:
    return None if dtype is None else dtype.torch_name


def _parallelism(parallelism: Parallelism) -> JsonObject:
    return {
        "pipeline_stages": parallelism.stages,
        "tensor_ranks": parallelism.tensor_ranks,
        "expert_ranks": [*parallelism.expert_ranks],
        "experts": [*parallelism.experts],
    }


def _parameters(inspection: Inspection) -> JsonObject:
    counts = inspection.counts()
    return {
        "trainable": asdict(counts[Role.TRAINABLE]),
        "frozen": asdict(counts[Role.FROZEN]),
        "buffers": asdict(counts[Role.BUFFER]),
        "tied": asdict(inspection.tied()),
    }


def _files(checkpoint: ZeroCheckpoint) -> list[Json]:
    return [
        {
            "name": file.name,
            "kind": file.kind.name.lower(),
            "rank": file.rank,
            "nbytes": file.nbytes,
            "needed": file.needed,
            "unknown_globals": [str(known) for known in file.unknown_globals],
        }
        for file in checkpoint.files
    ]


def _weight_file(file: WeightFile) -> JsonObject:
    return {
        "name": file.path.name,
        "nbytes": file.nbytes,
        "tensors": file.tensors,
        "placeholders": list(file.placeholders),
        "unknown_globals": [str(known) for known in file.unknown_globals],
        "problem": file.problem,
    }


def _tensors(
    checkpoint: ZeroCheckpoint, statistics: Sequence[TensorStatistics] | None
) -> Iterator[JsonObject]:
    found = {entry.name: entry for entry in statistics or ()}
    for tensor in checkpoint.tensors:
        entry = _tensor(tensor)
        if statistics is not None:
            entry["statistics"] = _statistics(found, tensor.name)
        yield entry


def _tensor(tensor: StoredTensor) -> JsonObject:
    return {
        "name": tensor.name,
        "role": tensor.role.value,
        "dtype": tensor.dtype.torch_name,
        "shape": list(tensor.shape),
        "numel": tensor.numel,
    }


def _statistics(found: Mapping[str, TensorStatistics], name: str) -> JsonObject | None:
    """The numbers of one tensor; ``None`` where its values are not all there."""
    entry = found.get(name)
    if entry is None:
        return None
    return {
        "norm": entry.norm,
        "min": entry.minimum,
        "max": entry.maximum,
        "mean": entry.mean,
        "nan": entry.nan,
        "inf": entry.inf,
    }
