"""Values of the source's files, ready to be written again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    FileKind,
    Parameter,
    Recorded,
    Role,
    TrainingState,
)
from zexport.checkpoint.zero.file_names import parse_name
from zexport.checkpoint.zero.module_names import is_placeholder
from zexport.checkpoint.zero.records import ZERO3, ModelStates
from zexport.errors import UnsafeError
from zexport.export.plan import FilePlan, plan_torch_file
from zexport.formats.pickle_values import (
    LOSS_SCALERS,
    NEWOBJ,
    Global,
    Opaque,
    Ordered,
    TensorLeaf,
    TensorRef,
)
from zexport.formats.pickle_view import PickleView, view
from zexport.formats.torch_file import TorchFile
from zexport.formats.torch_writer import lay_out
from zexport.ranges.dtypes import DType
from zexport.ranges.source import ByteSource

_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"

_OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
        *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "universal_checkpoint_info", "num_experts", "optimizer_state_dict"),
    }
)
"""Keys that DeepSpeed writes; all others are client state."""


def with_leaves(value: object, file: TorchFile) -> object:
    """Return a copy of a value of ``file`` for another file, with tensors as leaves.

    Shared objects stay shared, and equal tensors become one.
    """
    leaves: dict[TensorRef, TensorLeaf] = {}
    copies: dict[int, object] = {}

    def copied(value: object) -> object:
        if isinstance(value, TensorRef):
            if value not in leaves:
                source = file.source(value)
                leaves[value] = TensorLeaf(value.shape, value.dtype, source, value.dtype)
            return leaves[value]
        if type(value) not in (dict, Ordered, list, tuple, Opaque):
            return value
        if id(value) not in copies:
            copies[id(value)] = _rebuilt(value, copied)
        return copies[id(value)]

    try:
        return copied(value)
    except RecursionError as error:
        raise UnsafeError(
            "a value is nested too deep, or contains itself",
            path=file.path,
            hint="Leave out client state with --drop-client-state",
        ) from error


def _rebuilt(value: object, copied: Callable[[object], object]) -> object:
    match value:
        case Ordered():
            copy = Ordered((key, copied(one)) for key, one in value.items())
            if value.attributes is not None:
                copy.attributes = copied(value.attributes)
            return copy
        case dict():
            return {key: copied(one) for key, one in value.items()}
        case list():
            return [copied(one) for one in value]
        case tuple():
            return tuple(copied(one) for one in value)
        case Opaque():
            return replace(
                value,
                args=tuple(map(copied, value.args)),
                state=copied(value.state),
                items=[*map(copied, value.items)],
                pairs=[(copied(key), copied(one)) for key, one in value.pairs],
            )
    return value


def written(recorded: Recorded | None, without: Collection[object] = ()) -> dict[object, object]:
    """Return recorded values, without some keys, for another file."""
    if recorded is None:
        return {}
    kept = (item for item in recorded.values.items() if item[0] not in without)
    return {key: with_leaves(one, recorded.file) for key, one in kept}


def unwritable(recorded: Recorded, keys: Iterable[str] | None = None) -> dict[str, UnsafeError]:
    """Return why keys of a file (default: its client state) cannot be written safely."""
    found = {}
    if keys is None:
        keys = (key for key in recorded.values if isinstance(key, str) and key not in _OWN_KEYS)
    for key in keys:
        try:
            lay_out({key: with_leaves(recorded.values[key], recorded.file)}, "client")
        except UnsafeError as error:
            found[key] = error
    return found


def loss_scaler(recorded: Recorded) -> Opaque | None:
    """Return the recorded loss scaler, rebuilt from its numbers."""
    value = recorded.values.get("loss_scaler")
    if value is None:
        return None
    callee, state = (value.callee, value.state) if isinstance(value, Opaque) else (None, None)
    if callee in tuple(LOSS_SCALERS) and isinstance(state, dict):
        return Opaque(callee, (), dict(state), opcode=NEWOBJ)
    raise UnsafeError(
        "loss_scaler is not one of DeepSpeed's two loss scalers",
        path=recorded.file.path,
        found=callee,
        hint="Do not load this file with torch.load; ask who wrote it",
    )


def _scaler(name: str, **state: object) -> Opaque:
    return Opaque(Global(_LOSS_SCALERS, name), (), state, opcode=NEWOBJ)


def static_loss_scaler() -> Opaque:
    """Return a loss scaler that does not scale; ZeRO-3 requires one."""
    return _scaler("LossScaler", cur_scale=1.0, dynamic=False)


def slots_of(one: Parameter) -> dict[str, DType]:
    """Return the dtypes of master weights and optimizer states.

    Weights that are trained in fp32 without ZeRO are their own master weights.
    """
    states = {slot: dtype for slot, dtype in one.slots.items() if slot not in (MASTER, MODULE)}
    return {MASTER: one.dtype, **states}


def source_of(one: Parameter, slot: str) -> ByteSource:
    """Return the elements of a slot that ``slots_of`` lists."""
    return one.source(None if slot == MASTER else slot)


class ModuleEntry(Struct, frozen=True):
    """An entry of the module's state dict; ``ref`` is empty if ``is_placeholder``.

    ``owner`` names its parameter (tied names have the same one). ZeRO-3 partitions it if
    ``is_parameter``.
    """

    owner: str
    ref: TensorRef
    is_placeholder: bool
    is_parameter: bool


def module_entries(cell: Cell) -> dict[str, ModuleEntry]:
    """Return the entries of the module's state dict by the name in the file.

    ZeRO-2 and 3 list frozen parameters. With ZeRO-0 and 1, an unlisted tensor is a parameter if it
    has a usual name, or the dtype that DeepSpeed casts parameters to; others are what modules add
    to the state dict.
    """
    if (model := cell.states) is None:
        return {}
    stage = model.zero_config.get("stage")
    is_listed, cast = stage in (2, ZERO3), model.cast_dtype
    listed = {*model.trained, *(name for group in cell.groups for name in group.names)}
    listed |= {*((model.frozen_shapes or ()) if is_listed else ())}

    def is_parameter(name: str) -> bool:
        one = cell.parameters.get(name)
        if one is None or one.role is Role.BUFFER:
            return False
        is_usual = name.rpartition(".")[2] in ("weight", "bias") or one.dtype is cast
        return not prod(one.shape) or name in listed or (is_usual and not is_listed)

    stored = model.root.get("module").table()
    names = [name for name, ref in stored.items() if isinstance(ref, TensorRef)]
    entries = {}
    for name, (own, ref) in zip(names, model.module.items(), strict=True):
        owner, is_elsewhere = cell.aliases.get(own, own), stage == ZERO3 and is_placeholder(ref)
        is_own = is_elsewhere if stage == ZERO3 else is_parameter(owner)
        entries[name] = ModuleEntry(owner, ref, is_elsewhere, is_own)
    return entries


def records_of(cell: Cell) -> tuple[Recorded, Recorded]:
    """Return all that rank 0's model states and optimizer states files record."""
    optimizer = cell.optimizer
    if cell.states is not None and optimizer is None and cell.groups:
        optimizer = _optimizer_without_zero(cell.states, cell.groups[0].scalars.file)
    if cell.states is None or optimizer is None:
        # Splitting a state raises if ranks have neither: a bug, never the input's fault.
        raise AssertionError(f"cell {cell.label} has no records")
    return Recorded(cell.states.file, cell.states.root.mapping()), optimizer


def _optimizer_without_zero(model: ModelStates, file: TorchFile) -> Recorded:
    """Return what ZeRO would record, except optimizer states.

    The config has what the file lacks of a loss scaler (``runtime/constants.py``).
    """
    optimizer = view(file, "states").get("optimizer")
    root, fp16 = optimizer.table(), PickleView(file.path, "fp16", model.config.get("fp16")).table()
    scale, is_dynamic = root.get("cur_scale"), root.get("dynamic_loss_scale") is True
    scale = scale if isinstance(scale, int | float) else 1.0
    state: dict[str, object] = {"cur_scale": scale, "dynamic": False}
    if is_dynamic:
        kept = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        state = {key: optimizer.need(key).value for key in kept} | {
            "dynamic": True,
            "min_scale": fp16.get("min_loss_scale", 1),
            "delayed_shift": fp16.get("hysteresis", 2),
            "cur_hysteresis": fp16.get("hysteresis", 2),
            "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
            "raise_error_at_min_scale": True,
            "dtype": Global("torch", "float16"),
        }
    name = "DynamicLossScaler" if is_dynamic else "LossScaler"
    states = {key: value for key, value in root.items() if key == "clip_grad"} | {
        "loss_scaler": _scaler(name, **state),
        "dynamic_loss_scale": is_dynamic,
    }
    config = {"ds_config": model.config, "ds_version": model.version}
    return Recorded(file, {"optimizer_state_dict": states, **config})


def copied_files(state: TrainingState, tag: str, *kinds: FileKind) -> Iterator[FilePlan]:
    """Yield copies of files that belong to no rank, such as the layers of a pipeline."""
    for file in state.torch_files:
        name = parse_name(file.path)
        if name is not None and name.kind in kinds:
            yield plan_torch_file(f"{tag}/{file.path.name}", with_leaves(file.value, file))
