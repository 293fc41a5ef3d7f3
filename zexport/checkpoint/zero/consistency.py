"""Do rank files come from one checkpoint? Values that all of them record must be equal."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from zexport.checkpoint.zero.file_names import original_name
from zexport.checkpoint.zero.ranks import Ranks
from zexport.checkpoint.zero.records import ZERO3, ModelStates, OptimizerStates
from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.findings import FindingKind
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.torch_file import TorchFile
from zexport.storage.files import read_range, same_bytes
from zexport.text import some

COPY_ALL = "Copy all rank files of one checkpoint again"

_FINDINGS = {
    "global step": FindingKind.MIXED_STEPS,
    "skipped steps": FindingKind.MIXED_STEPS,
    "optimizer step": FindingKind.MIXED_STEPS,
    "DeepSpeed version": FindingKind.MIXED_VERSIONS,
    "LR scheduler step": FindingKind.MIXED_SETTINGS,
    "DeepSpeed config": FindingKind.MIXED_SETTINGS,
    "optimizer settings": FindingKind.MIXED_SETTINGS,
}
_OF_INDEX = ("list of weights", "partition count", "number of flat groups", "optimizer settings")
"""Values that other pipeline stages have differently."""

_CONFIG_KEYS = (
    *("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16", "data_types"),
    *("train_batch_size", "gradient_accumulation_steps", "gradient_clipping"),
)
"""Config sections that affect training; ranks may differ in others, and in where they offload."""

_GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "amsgrad")
"""Settings from users and schedules. Others may differ: Prodigy computes ``d`` on each rank."""

_SAMPLE_NBYTES, _DISTINCT_MIN = 4096, 64


def check_consistency(ranks: Mapping[int, Ranks]) -> Iterator[ZexportError]:
    """Yield the first contradiction between rank files for each value that they record."""
    first: dict[tuple[str, int], tuple[TorchFile, object]] = {}
    differing = set[str]()
    for index, one in ranks.items():
        models = {id(model.file.value): model for model in one.model.values()}  # equal pickles
        recorded = [(model.file, _of_model(model)) for model in models.values()]
        recorded += [(states.file, _of_optimizer(states)) for states in one.optimizer.values()]
        for file, values in recorded:
            for name, value in values.items():
                if value in (None, (), {}):
                    continue
                key = name, index if name in _OF_INDEX else 0
                kept, due = first.setdefault(key, (file, value))
                if value != due and name not in differing:
                    differing.add(name)
                    yield DamagedCheckpointError(
                        f"rank files come from different checkpoints: {name} differs",
                        path=file.path,
                        found=_shown(value, due),
                        expected=f"{_shown(due, value)}, as in {kept.path.name}",
                        hint=COPY_ALL,
                        finding=_FINDINGS.get(name),
                    )
    # Resuming without optimizer states is legitimate, and DeepSpeed 0.10 counts one step more.
    model = next((one.first for one in ranks.values() if one.model), None)
    step = first.get(("optimizer step", 0))
    if step is not None and model is not None and model.steps is not None:
        (kept, taken), steps = step, model.steps - model.skipped_steps
        if taken not in (steps, steps + 1):
            yield DamagedCheckpointError(
                "optimizer step does not match the model states file",
                path=kept.path,
                found=taken,
                expected=f"{steps} or {steps + 1}",
                finding=FindingKind.STEP_MISMATCH,
            )


def _shown(value: object, other: object) -> str:
    """Return a value, or the entries of a dictionary that the other one has differently."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return str(value)
    keys = [key for key in {**value, **other} if value.get(key) != other.get(key)]
    return some([f"{key} {value.get(key, 'missing')}" for key in keys], 8)


def _of_model(one: ModelStates) -> dict[str, object]:
    shapes = {
        name: f"#{number} {[*shape]}"
        for group in one.param_shapes
        for number, (name, shape) in enumerate(group.items())
    }
    return {
        "global step": one.steps,
        "skipped steps": one.skipped_steps,
        "data-parallel size": one.dp_world_size,
        "DeepSpeed version": one.version,
        "LR scheduler step": one.lr_step,
        "DeepSpeed config": _config(one.file),
        "list of weights": {} if one.has_experts else {**shapes, **(one.frozen_shapes or {})},
    }


def _of_optimizer(one: OptimizerStates) -> dict[str, object]:
    groups = one.inner.table().get("param_groups")
    settings = {
        number: {key: group[key] for key in _GROUP_KEYS if key in group}
        for number, group in enumerate(groups if isinstance(groups, list) else ())
        if isinstance(group, dict)
    }
    return {
        "ZeRO stage": one.stage,
        "optimizer step": one.taken_steps,
        "partition count": one.partition_counts,
        "number of flat groups": len(one.master_weights),
        "DeepSpeed version": one.version,
        "DeepSpeed config": _config(one.file),
        "optimizer settings": PickleView(one.file.path, "", settings).plain_values(),
    }


def _config(file: TorchFile) -> dict[str, object]:
    config = view(file, "states").get("ds_config").table()
    used = {key: config[key] for key in _CONFIG_KEYS if key in config}
    return {
        key: value
        for key, value in PickleView(file.path, "", used).plain_values().items()
        if not key.startswith("zero_optimization.offload")
    }


def find_duplicates(ranks: Ranks) -> Iterator[ZexportError]:
    """Yield ZeRO-3 optimizer states files that were copied over another rank's.

    Only files that nowhere contain their rank can be (their zip's root is no rank file name).
    """
    first: dict[Hashable, TorchFile] = {}
    for one in ranks.optimizer.values():
        is_named = original_name(one.file) is not None
        if one.stage != ZERO3 or one.shared_groups or is_named or (one.taken_steps or 0) < 1:
            continue
        file = first.setdefault(_sample(one) or id(one), one.file)
        if file is not one.file and same_bytes(file.path, one.file.path):
            yield DamagedCheckpointError(
                "equal to the optimizer states file of another rank, one is a copy",
                path=one.file.path,
                found=f"the same tensors as {file.path.name}",
                hint=COPY_ALL,
            )


def _sample(one: OptimizerStates) -> bytes:
    """Return the first bytes of some tensor; nothing if other ranks may have the same.

    These are padding (all zeros) and constants.
    """
    for ref in (*one.master_weights, *(r for kept in one.kept for r in kept.tensors.values())):
        extents = one.file.source(ref).extents(0, min(ref.nbytes, _SAMPLE_NBYTES))
        data = b"".join(read_range(it.path, it.offset, it.nbytes) for it in extents)
        if len({*data}) >= _DISTINCT_MIN:
            return data
    return b""
