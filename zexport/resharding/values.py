"""Values of a source's files for a target's: client state, loss scaler, slots of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from zexport.checkpoint.state import (
    MASTER,
    MODULE,
    Cell,
    FileKind,
    Parameter,
    Recorded,
    TrainingState,
)
from zexport.checkpoint.zero.file_names import parse_name
from zexport.checkpoint.zero.records import ModelStates
from zexport.errors import UnsafeError
from zexport.export.plan import FilePlan, plan_torch_file
from zexport.formats.pickle_globals import FRAGMENT
from zexport.formats.pickle_values import (
    FragmentAddress,
    Global,
    Made,
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

_DEPTH_MAX = 100
_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_SCALER_FIELDS = {
    "LossScaler": frozenset({"cur_scale", "dynamic"}),
    "DynamicLossScaler": frozenset(
        {
            *("cur_scale", "dynamic", "cur_iter", "last_overflow_iter", "scale_factor"),
            *("scale_window", "min_scale", "delayed_shift", "cur_hysteresis"),
            *("consecutive_hysteresis", "raise_error_at_min_scale", "dtype"),
        }
    ),
}
"""Fields of DeepSpeed's two classes (0.10 to 0.19, ``runtime/fp16/loss_scaler.py``)."""

_NUMBERS = (bool, int, float, type(None))

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
    """Return a value of ``file`` for writing elsewhere, with its tensors as leaves.

    Equal tensors share their storage and stay one.
    """
    return _Copy(file).of(value, 0)


def written(said: Recorded | None, without: Collection[object] = ()) -> dict[object, object]:
    """Return what is recorded, without some keys, for writing elsewhere."""
    if said is None:
        return {}
    kept = (item for item in said.values.items() if item[0] not in without)
    return {key: with_leaves(one, said.file) for key, one in kept}


class _Copy:
    """A copy of a value in which shared objects stay shared."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._leaves: dict[TensorRef, TensorLeaf] = {}
        self._made: dict[int, object] = {}

    def of(self, value: object, depth: int) -> object:
        if isinstance(value, TensorRef):
            return self._leaf(value)
        copy = _COPIES.get(type(value))
        if copy is None:
            return value
        if depth > _DEPTH_MAX:
            raise UnsafeError(
                f"holds a value that is nested more than {_DEPTH_MAX} deep",
                path=self._file.path,
                hint="Leave out client state with --drop-client-state",
            )
        if id(value) not in self._made:
            self._made[id(value)] = copy(value, lambda part: self.of(part, depth + 1))
        return self._made[id(value)]

    def _leaf(self, tensor: TensorRef) -> TensorLeaf:
        if tensor not in self._leaves:
            source = self._file.source(tensor)
            self._leaves[tensor] = TensorLeaf(tensor.shape, tensor.dtype, source, tensor.dtype)
        return self._leaves[tensor]


_Part = Callable[[object], object]


def _copy_ordered(value: Ordered, of: _Part) -> object:
    copy = Ordered((key, of(one)) for key, one in value.items())
    if value.attributes is not None:
        copy.attributes = of(value.attributes)
    return copy


def _copy_opaque(value: Opaque, of: _Part) -> object:
    return replace(
        value,
        args=tuple(map(of, value.args)),
        state=of(value.state),
        items=[*map(of, value.items)],
        pairs=[(of(key), of(one)) for key, one in value.pairs],
    )


_COPIES: Mapping[type, Callable[..., object]] = {
    FragmentAddress: lambda value, _: Opaque(
        FRAGMENT, (), {"numel": value.numel, "start": value.start}, made=Made.BY_NEW
    ),
    dict: lambda value, of: {key: of(one) for key, one in value.items()},
    Ordered: _copy_ordered,
    list: lambda value, of: [*map(of, value)],
    tuple: lambda value, of: tuple(map(of, value)),
    Opaque: _copy_opaque,
}


def unwritable(said: Recorded, keys: Iterable[str] | None = None) -> dict[str, UnsafeError]:
    """Return why keys of a file (default: its client state) cannot be written safely."""
    found = {}
    if keys is None:
        keys = (key for key in said.values if isinstance(key, str) and key not in _OWN_KEYS)
    for key in keys:
        try:
            lay_out({key: with_leaves(said.values[key], said.file)}, "client")
        except UnsafeError as error:
            found[key] = error
    return found


def loss_scaler(said: Recorded) -> Opaque | None:
    """Return the recorded loss scaler, rebuilt from its numbers."""
    value = said.values.get("loss_scaler")
    if value is None:
        return None
    callee, state = (value.callee, value.state) if isinstance(value, Opaque) else (None, None)
    if isinstance(callee, Global) and callee.module == _LOSS_SCALERS and isinstance(state, dict):
        fields = _SCALER_FIELDS.get(callee.name)
        if fields and state.keys() <= fields and all(map(_is_plain, state.values())):
            return Opaque(callee, (), dict(state), made=Made.BY_NEW)
    raise UnsafeError(
        "the loss scaler is none of DeepSpeed's two, or has other fields than numbers",
        path=said.file.path,
        found=callee,
        hint="Do not load this file with torch.load; ask who made it",
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, Global) and value.module == "torch")


def static_loss_scaler() -> Opaque:
    """Return a scaler that does not scale, for ZeRO-3, which needs one."""
    state: dict[str, object] = {"cur_scale": 1.0, "dynamic": False}
    return Opaque(Global(_LOSS_SCALERS, "LossScaler"), (), state, made=Made.BY_NEW)


def slots_of(one: Parameter) -> dict[str, DType]:
    """Return the dtypes of its master weights and optimizer states.

    Weights that are trained in fp32 without ZeRO are their own master weights.
    """
    states = {slot: dtype for slot, dtype in one.slots.items() if slot not in (MASTER, MODULE)}
    return {MASTER: one.dtype, **states}


def source_of(one: Parameter, slot: str) -> ByteSource:
    """Return the elements of a slot that ``slots_of`` lists."""
    return one.source(None if slot == MASTER else slot)


def records_of(cell: Cell) -> tuple[Recorded, Recorded]:
    """Return all that rank 0's model states and optimizer states record."""
    optimizer = cell.optimizer
    if cell.states is not None and optimizer is None and cell.groups:
        optimizer = _recorded_optimizer(cell.states, cell.groups[0].scalars.file)
    if cell.states is None or optimizer is None:
        # Splitting a state raises if ranks have neither: a bug, never the input's fault.
        raise AssertionError(f"cell {cell.label} has no records")
    return Recorded(cell.states.file, cell.states.root.mapping()), optimizer


def _recorded_optimizer(model: ModelStates, file: TorchFile) -> Recorded:
    """Return what ZeRO's optimizer states file would have except states, of a run without ZeRO.

    The rest of a loss scaler is in the config (``runtime/constants.py``).
    """
    optimizer = view(file, "states").get("optimizer")
    root, fp16 = optimizer.table(), PickleView(file.path, "fp16", model.config.get("fp16")).table()
    scale, is_dynamic = root.get("cur_scale"), root.get("dynamic_loss_scale") is True
    state: dict[str, object] = {"cur_scale": scale if isinstance(scale, int | float) else 1.0}
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
    callee = Global(_LOSS_SCALERS, name)
    states = {key: value for key, value in root.items() if key == "clip_grad"} | {
        "loss_scaler": Opaque(callee, (), state | {"dynamic": is_dynamic}, made=Made.BY_NEW),
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
