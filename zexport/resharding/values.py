"""What is carried from a source's files besides tensors: client state, loss scaler, settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from zexport.checkpoint.untrusted import Value
from zexport.errors import UnsafeError, UnsupportedError
from zexport.formats.inert import (
    FragmentAddress,
    Global,
    Made,
    Opaque,
    Ordered,
    TensorLeaf,
    TensorRef,
)
from zexport.formats.known_globals import FRAGMENT
from zexport.formats.torch_file import TorchFile
from zexport.formats.torch_writer import lay_out
from zexport.resharding.state import Recorded
from zexport.store.json import as_table

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
"""The fields of DeepSpeed's two classes (0.10 to 0.19, ``runtime/fp16/loss_scaler.py``)."""

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
"""What DeepSpeed itself writes into a model or optimizer file; the rest is the client's."""


def with_leaves(value: object, file: TorchFile) -> object:
    """A value of ``file`` to be written elsewhere: its tensors, and no others, are made anew.

    Equal tensors stay one, as they share their storage.
    """
    return _Copy(file).of(value, 0)


def written(said: Recorded | None, without: Collection[object] = ()) -> dict[object, object]:
    """All that is recorded, but some keys, to be written elsewhere."""
    if said is None:
        return {}
    kept = (item for item in said.values.items() if item[0] not in without)
    return {key: with_leaves(one, said.file) for key, one in kept}


class _Copy:
    """The copy of a value, in which what was one object still is."""

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
    """Those of a file's keys, the client's by default, that cannot be written safely; why not."""
    found = {}
    if keys is None:
        keys = (key for key in said.values if isinstance(key, str) and key not in _OWN_KEYS)
    for key in keys:
        try:
            lay_out({key: with_leaves(said.values[key], said.file)}, "client")
        except UnsafeError as error:
            found[key] = error
    return found


def check_numbered(file: TorchFile, inner: Value) -> None:
    """Refuse what an optimizer keeps beside its numbered states: nobody knows how to cut it.

    torch's ``Optimizer.state_dict`` takes over keys of its state that are no parameters, and an
    optimizer around another adds keys of its own.
    """
    said = inner.mapping_or_empty()
    found = [key for key in said if key not in ("state", "param_groups")]
    if found := [*found, *Value(file.path, "state", said.get("state")).mapping_or_empty()]:
        raise UnsupportedError(
            f"the optimizer keeps {found[0]!r} beside the states of its weights, which cannot "
            "be cut for other ranks",
            path=file.path,
            hint="Resume with as many ranks, or from an export's weights, with a new optimizer",
        )


def loss_scaler(said: Recorded) -> Opaque | None:
    """A loss scaler from its numbers, as one of DeepSpeed's two classes; ``None`` without one."""
    value = said.values.get("loss_scaler")
    if value is None:
        return None
    callee = value.callee if isinstance(value, Opaque) else None
    is_known = isinstance(callee, Global) and callee.module == _LOSS_SCALERS
    fields = _SCALER_FIELDS.get(callee.name) if isinstance(callee, Global) and is_known else None
    state = value.state if isinstance(value, Opaque) else None
    if (
        fields is None
        or not isinstance(state, dict)
        or not state.keys() <= fields
        or not all(_is_plain(one) for one in state.values())
    ):
        raise UnsafeError(
            "holds a loss scaler that is none of DeepSpeed's two, or has other fields",
            path=said.file.path,
            found=str(callee) if fields is None else type(state).__name__,
            expected="LossScaler or DynamicLossScaler, with numbers alone",
            hint="Do not load this file with torch.load; ask who made it",
        )
    return Opaque(callee, (), dict(state), made=Made.BY_NEW)


def _is_plain(value: object) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, Global) and value.module == "torch")


def static_loss_scaler(said: Value | None = None) -> Opaque:
    """A scaler that does not change; without another it does not scale, as ZeRO-3 must have one."""
    scale = None if said is None else said.get("cur_scale").value
    state: dict[str, object] = {}
    state["cur_scale"] = scale if isinstance(scale, int | float) else 1.0
    state["dynamic"] = False
    return _scaler("LossScaler", state)


def dynamic_loss_scaler(said: Value, config: Mapping[str, object]) -> Opaque:
    """The scaler of a run without ZeRO, whose optimizer keeps what changes of it by itself.

    Source: DeepSpeed 0.19.8, ``runtime/fp16/unfused_optimizer.py`` (``state_dict``) and
    ``runtime/fp16/loss_scaler.py``; the rest is in the configuration (``runtime/constants.py``).
    """
    fp16 = as_table(config.get("fp16"))
    kept = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    state = {key: said.need(key).value for key in kept}
    hysteresis = fp16.get("hysteresis", 2)
    state |= {
        "dynamic": True,
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }
    return _scaler("DynamicLossScaler", state)


def _scaler(name: str, state: dict[str, object]) -> Opaque:
    return Opaque(Global(_LOSS_SCALERS, name), (), state, made=Made.BY_NEW)
