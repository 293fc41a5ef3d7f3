"""A run without ZeRO as a state: whole weights in one file, the optimizer's numbered, not named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from zexport.checkpoint.contents import Role, StoredTensor, whole_tensor
from zexport.checkpoint.layouts.bind import MASTERS
from zexport.checkpoint.layouts.master_matching import match_in_order
from zexport.checkpoint.layouts.unnamed_masters import FUSED, NAMED, UNFUSED, form_of
from zexport.checkpoint.layouts.zero0 import take_zero0_inventory
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.optimizer_states import GroupState, group_state, optimizer_in
from zexport.checkpoint.untrusted import Value
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import ByteSource, Extent, Window
from zexport.ranges.replicas import Replica
from zexport.resharding.read_cells import module_entries, said_by
from zexport.resharding.state import CellState, Group, Parameter, Recorded
from zexport.resharding.values import check_numbered, dynamic_loss_scaler, static_loss_scaler

_HINT = "Resume the run with ZeRO stage 1, save, and reshard that"


def read_zero0(index: int, model: ModelStates) -> tuple[CellState, tuple[Replica, ...]]:
    """The state of one index, and copies that must be equal."""
    inventory = take_zero0_inventory(model)
    known = {tensor.name: tensor for tensor in inventory.tensors}
    reader = NumberedGroups(model.file, model.optimizer, known)
    groups = tuple(reader.read())
    trained = {one.name for group in groups for one in group.parameters}
    frozen = {
        name: tensor
        for name, tensor in known.items()
        if tensor.role is not Role.BUFFER and name not in trained
    }
    state = CellState(
        index=index,
        groups=groups,
        frozen=frozen,
        module=tuple(module_entries(model, model, inventory, is_zero3=False, trained=trained)),
        aliases=inventory.aliases,
        model=said_by(model),
        optimizer=Recorded(model.file, optimizer_file(model.file, model)),
    )
    return state, tuple(reader.replicas)


class NumberedGroups:
    """The parameter groups of an optimizer that numbers parameters throughout.

    ``known`` are the weights that it may have been given, by name, in the order of the module;
    ``experts`` the names of those that are experts'.
    """

    def __init__(
        self,
        file: TorchFile,
        optimizer: Value,
        known: Mapping[str, StoredTensor],
        experts: Collection[str] = (),
    ) -> None:
        self.replicas: list[Replica] = []
        self._file = file
        self._known = known
        self._experts = experts
        self._optimizer = optimizer
        self._form = form_of(optimizer)
        self._inner = optimizer
        if optimizer.has("optimizer_state_dict"):
            self._inner = optimizer.get("optimizer_state_dict")
        if self._form == NAMED or not self._inner.has("param_groups"):
            raise IncompleteCheckpointError(
                "has no state of each parameter's to go on from",
                path=file.path,
                found=self._form or "no param_groups",
                expected="an optimizer with its groups and, in 16 bits, fp32 masters",
                hint=_HINT,
            )

    def read(self) -> Iterator[Group]:
        """Every group, its parameters in the order that the optimizer was given them in."""
        groups = [group.mapping_or_empty() for group in self._inner.get("param_groups").items()]
        numbers = [
            [item.number() for item in group.need("params").items()]
            for group in self._inner.get("param_groups").items()
        ]
        check_numbered(self._file, self._inner)
        is_fused = self._form == FUSED
        names = {} if is_fused else self._names(numbers)
        flats = self._optimizer.get(FUSED).items() if is_fused else [None] * len(groups)
        for said, own, flat in zip(groups, numbers, flats, strict=True):
            settings = {key: one for key, one in said.items() if key != "params"}
            states = [group_state(self._inner.value, number) for number in own]
            parameters = tuple(
                self._laid_end_to_end(flat.tensor(), states)
                if flat is not None
                else map(self._parameter, (names[number] for number in own), states)
            )
            yield Group(
                parameters=parameters,
                settings=Recorded(self._file, settings),
                scalars=Recorded(self._file, self._scalars(states)),
                of_experts=any(one.name in self._experts for one in parameters),
            )

    def _names(self, numbers: Sequence[Sequence[int]]) -> dict[int, str]:
        """The name of every numbered parameter: its master's, or what order and shape leave."""
        if self._form == UNFUSED:
            return self._by_masters(numbers)
        groups = self._inner.get("param_groups").items()
        flags = [group.get("moe").value is True for group in groups]
        kinds = [
            [(flag, self._shape(number)) for number in own]
            for flag, own in zip(flags, numbers, strict=True)
        ]
        floating = [
            tensor
            for tensor in self._known.values()
            if tensor.role is not Role.BUFFER and tensor.dtype.is_floating and tensor.numel
        ]
        if rounded := [one for one in floating if one.dtype.itemsize < DType.F32.itemsize]:
            raise IncompleteCheckpointError(
                "holds no fp32 masters, which a training with ZeRO goes on from",
                path=self._file.path,
                found=f"weights in {rounded[0].dtype.torch_name} alone",
                hint="Begin anew from an export's weights, with a new optimizer",
            )
        try:
            own = [(any(flags) and one.name in self._experts, one.shape) for one in floating]
            spans = match_in_order(own, kinds)
        except LayoutError as cause:
            raise self._unnamed(cause.problem) from cause
        flat = [number for own in numbers for number in own]
        for span in spans:
            if not span.is_certain:
                one, other = (floating[at].name for at in (span.first, span.last))
                raise self._unnamed(f"{one!r} and {other!r} are of one shape")
        pairs = zip(flat, spans, strict=True)
        return {number: floating[span.first].name for number, span in pairs}

    def _by_masters(self, numbers: Sequence[Sequence[int]]) -> dict[int, str]:
        """The master of a number is that of the weight which was found to have it."""
        names = {_place(tensor.source): name for name, tensor in self._known.items()}
        names.pop(None, None)  # of tensors without a byte
        found: dict[int, str] = {}
        masters = self._optimizer.get(UNFUSED).items()
        for own, group in zip(numbers, masters, strict=True):
            for number, item in zip(own, group.items(), strict=True):
                name = names.get(_place(self._file.source(item.tensor())))
                if name is None:
                    raise self._unnamed(f"master {number} is no weight's beyond doubt")
                found[number] = name
        return found

    def _shape(self, number: int) -> tuple[int, ...]:
        """The shape of a numbered parameter, which its states have."""
        tensors = group_state(self._inner.value, number).tensors.values()
        first = next(iter(tensors), None)
        if first is None:
            raise self._unnamed(f"nothing is kept of parameter {number}")
        return first.shape

    def _unnamed(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"numbers the optimizer's states, and no name of a weight fits beyond doubt: {why}",
            path=self._file.path,
            hint=_HINT,
        )

    def _laid_end_to_end(
        self, flat: TensorRef, states: Sequence[GroupState]
    ) -> Iterator[Parameter]:
        """The parameters of a fused group, whose masters and states are one run each."""
        whole = self._file.source(flat)
        begin = next(iter(whole.extents(0, whole.nbytes))).offset if flat.numel else 0
        own = [
            (place[0].offset - begin, tensor)
            for tensor in self._known.values()
            if (place := _place(tensor.source)) is not None
            and tensor.role is Role.TRAINABLE
            and begin <= place[0].offset < begin + whole.nbytes
        ]
        offset = 0
        for at, tensor in sorted(own, key=lambda pair: pair[0]):
            if at != offset * flat.dtype.itemsize:
                raise self._unnamed(f"what lies before {tensor.name!r} is no weight's")
            tensors = {MASTERS: tensor}
            for key, ref in (item for state in states for item in state.tensors.items()):
                self._check_shape(key, tensor.name, ref, flat.shape)
                size = ref.dtype.itemsize
                part = Window(self._file.source(ref), offset * size, tensor.numel * size)
                tensors[key] = StoredTensor(
                    tensor.name, tensor.shape, ref.dtype, Role.TRAINABLE, part
                )
            yield Parameter(tensor.name, tensor.shape, tensors)
            offset += tensor.numel
        if offset != flat.numel:
            raise self._unnamed(f"{flat.numel - offset} elements of a group are no weight's")

    def _check_shape(self, key: str, name: str, ref: TensorRef, shape: tuple[int, ...]) -> None:
        """Refuse a state that is not one element for each of the masters'."""
        if ref.shape != shape:
            raise UnsupportedError(
                f"the optimizer's state {key!r} of {name!r} is not one element for each of the "
                "weight's, and cannot be cut for ranks",
                path=self._file.path,
                found=f"shape {list(ref.shape)}",
                expected=f"{list(shape)}",
                hint="Begin anew from an export's weights, with a new optimizer",
            )

    def _parameter(self, name: str, state: GroupState) -> Parameter:
        whole = self._known[name]
        tensors = {MASTERS: whole}
        for key, ref in state.tensors.items():
            self._check_shape(key, name, ref, whole.shape)
            tensors[key] = whole_tensor(self._file, name, ref, Role.TRAINABLE)
        return Parameter(name, whole.shape, tensors)

    def _scalars(self, states: Sequence[GroupState]) -> dict[str, object]:
        """What is kept of single parameters; a group of ZeRO's has it once, so all are alike."""
        if within := sorted({name for state in states for name in state.within}):
            raise UnsupportedError(
                f"the optimizer's state {within[0]!r} lies within another, and cannot be cut for "
                "ranks",
                path=self._file.path,
                hint="Begin anew from an export's weights, with a new optimizer",
            )
        first = dict(states[0].scalars) if states else {}
        for state in states[1:]:
            for name, value in {**first, **state.scalars}.items():
                one, other = first.get(name), state.scalars.get(name)
                if isinstance(one, TensorRef) and isinstance(other, TensorRef):
                    kept, copy = map(self._file.source, (one, other))
                    self.replicas.append(Replica(f"the optimizer's {name}", kept, copy))
                elif one != other:
                    raise UnsupportedError(
                        f"the optimizer keeps another {name!r} of some weights than of the rest",
                        path=self._file.path,
                        found=value,
                        expected="the same of all weights of a group, as ZeRO has one for them",
                    )
        return first


def _place(source: ByteSource | None) -> tuple[Extent, int] | None:
    """The first byte of a source, and how long it is; ``None`` without a byte in a file."""
    if source is None:
        return None
    return next(
        ((first, source.nbytes) for first in source.extents(0, min(1, source.nbytes))), None
    )


def optimizer_file(file: TorchFile, model: ModelStates) -> dict[str, object]:
    """What an optimizer file of ZeRO's would say, where ``file`` has the optimizer's state."""
    said = optimizer_in(file)
    is_dynamic = said.get("dynamic_loss_scale").value is True
    scaler = dynamic_loss_scaler(said, model.ds_config) if is_dynamic else static_loss_scaler(said)
    states: dict[str, object] = {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic}
    if said.has("clip_grad"):
        states["clip_grad"] = said.get("clip_grad").value
    return {
        "optimizer_state_dict": states,
        "ds_config": model.ds_config,
        "ds_version": model.ds_version,
    }
