"""The low-rank updates of an adapter: of which weights they are, and the tensors that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

from msgspec import Struct

from zexport.adapters.find import Adapter
from zexport.adapters.peft_format import AdapterConfig
from zexport.adapters.peft_names import read_name
from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.model.fit import ModelNames
from zexport.ranges.computed import Elements, Factors, LowRankUpdate, ScaledSum
from zexport.ranges.dtypes import DType
from zexport.weights.base_model import Base
from zexport.weights.hub_tensors import tensor_in_memory

Tensors = Mapping[str, StoredTensor]

KEEP_ADAPTER = "Export the adapter with --adapter keep and merge it with peft"

_MATRIX_NDIM = 2
_STACK_NDIM = 3

_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})
"""Model types whose fused experts are stored as (experts, inputs, outputs).

Source: transformers 5.23, ``is_transposed=True`` in ``models/*/modeling_*.py``.
"""


class Update(Struct, frozen=True):
    """A weight of the base model and the adapter's tensors for it, by their short names.

    ``key`` is what patterns of ranks and scales are matched against: the module, or the parameter
    where that was targeted itself.
    """

    weight: str
    tensors: Tensors
    key: str

    @property
    def is_embedding(self) -> bool:
        """Whether the weight is an embedding, whose factors peft lays out the other way."""
        return "lora_embedding_A" in self.tensors

    @property
    def factors(self) -> tuple[StoredTensor, StoredTensor]:
        """Both factors."""
        suffix = "embedding_{}" if self.is_embedding else "{}.weight"
        a, b = (self.tensors[f"lora_{suffix.format(factor)}"] for factor in "AB")
        return a, b

    @property
    def magnitude(self) -> StoredTensor | None:
        """DoRA's; peft before 0.12 had it without a module of its own."""
        plain = self.tensors.get("lora_magnitude_vector")
        return self.tensors.get("lora_magnitude_vector.weight", plain)

    def is_stack(self, weight: StoredTensor) -> bool:
        """Whether ``weight`` is a stack of matrices: fused experts, which have no module each."""
        return len(weight.shape) == _STACK_NDIM and self.key == self.weight

    def factor_shape(self) -> tuple[int, int]:
        """Outputs and inputs of the product of the factors; a convolution's inputs as one."""
        a, b = self.factors
        return b.shape[0], prod(a.shape[1:])


class Orientation(Struct, frozen=True):
    """How square weights, and square experts, are stored, whose shapes do not tell.

    ``is_transposed`` is whether a matrix lies as (inputs, outputs); ``None`` where the
    configuration and other weights contradict each other.
    """

    is_transposed: bool | None
    is_stack_transposed: bool


def find_orientation(
    pairs: Iterable[tuple[Update, StoredTensor | None]], config: AdapterConfig, model_type: str
) -> Orientation:
    """How square weights are stored, by the configuration, if weights that are not agree."""
    seen = set()
    for update, weight in pairs:
        outputs, inputs = update.factor_shape()
        if weight is None or update.is_embedding or outputs == inputs:
            continue
        if len(weight.shape) == _MATRIX_NDIM:
            seen.add(weight.shape == (inputs, outputs))
    said = config.switch("fan_in_fan_out")
    return Orientation(said if seen <= {said} else None, model_type in _TRANSPOSED_EXPERTS)


def update_weight(
    update: Update, weight: StoredTensor, config: AdapterConfig, orientation: Orientation
) -> StoredTensor:
    """The weight with the update worked in, in float32."""
    a, b = update.factors
    outputs, inputs = update.factor_shape()
    is_stack = update.is_stack(weight)
    matrices = weight.shape[0] if is_stack else 1
    rank = _check_ranks(update, matrices, config)
    if not weight.dtype.is_floating:
        raise UnsupportedError(
            f"is of an adapter on the quantized weight {update.weight}",
            path=config.path,
            found=weight.dtype.torch_name,
            expected="a floating-point type",
            hint="Give the model before its quantization with --base and --exclude-frozen, or "
            "export the adapter with --adapter keep",
        )
    # A convolution's kernel is one row for each output.
    stored = weight.shape[1:] if is_stack else (weight.shape[0], prod(weight.shape[1:]))
    is_transposed = _is_transposed(update, weight, stored, orientation)
    wanted = (inputs, outputs) if is_transposed else (outputs, inputs)
    magnitude = update.magnitude
    if stored != wanted:
        raise DamagedCheckpointError(
            f"is of an adapter that does not fit {update.weight}",
            path=config.path,
            found=f"a weight of shape {list(weight.shape)}",
            expected=f"{list(wanted)} to be updated",
            hint="Give the base model that training began from with --base",
        )
    if magnitude is not None and magnitude.numel != outputs:
        raise _unlike(update, config, "the magnitude's length", outputs)
    factors = Factors(elements(a), elements(b), inputs, outputs, rank, matrices)
    merged = LowRankUpdate(
        elements(weight),
        factors,
        config.scaling(update.key, rank),
        is_transposed=is_transposed,
        magnitude=None if magnitude is None else elements(magnitude),
    )
    return replace(weight, dtype=DType.F32, role=Role.TRAINABLE, source=merged)


def update_bias(
    update: Update, before: StoredTensor, addend: StoredTensor, config: AdapterConfig
) -> StoredTensor:
    """The bias with the update's own worked in, in float32."""
    if before.shape != addend.shape:
        raise _unlike(update, config, "the shape of its bias", list(addend.shape))
    scaling = config.scaling(update.key, _check_ranks(update, 1, config))
    total = ScaledSum(elements(before), elements(addend), scaling)
    return replace(before, dtype=DType.F32, role=Role.TRAINABLE, source=total)


def elements(tensor: StoredTensor) -> Elements:
    """A tensor's elements as something to compute with."""
    if tensor.source is None:
        # A checkpoint that lacks rank files is refused before anything is planned.
        raise AssertionError(f"{tensor.name} has no source")
    return Elements(tensor.source, tensor.dtype)


def _is_transposed(
    update: Update, weight: StoredTensor, stored: tuple[int, ...], orientation: Orientation
) -> bool:
    """Whether a matrix is stored as (inputs, outputs): its shape tells, unless it is square."""
    outputs, inputs = update.factor_shape()
    if update.is_embedding or outputs != inputs:
        return update.is_embedding or stored == (inputs, outputs)
    if update.is_stack(weight):
        return orientation.is_stack_transposed
    if update.key == update.weight or len(weight.shape) != _MATRIX_NDIM:
        return False
    if orientation.is_transposed is None:
        raise UnsupportedError(
            f"does not tell how the square weight {update.weight} is stored",
            found="fan_in_fan_out, and other weights stored otherwise",
            expected="all targeted weights stored alike",
            hint=KEEP_ADAPTER,
        )
    return orientation.is_transposed


def _check_ranks(update: Update, matrices: int, config: AdapterConfig) -> int:
    """The rank of the update, which the factors and the configuration must agree about."""
    a, b = update.factors
    rank = a.shape[0] // matrices
    said = config.size_of("r", update.key)
    if b.shape[1] != a.shape[0] or rank * matrices != a.shape[0] or rank != said:
        raise _unlike(update, config, "the rank", said)
    return rank


def _unlike(
    update: Update, config: AdapterConfig, what: str, said: object
) -> DamagedCheckpointError:
    shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in update.tensors.items())
    return DamagedCheckpointError(
        f"does not fit the adapter's tensors for {update.key}: {what} is {said}",
        path=config.path,
        found=shapes,
        hint="Take the adapter_config.json that this run wrote",
    )


_KNOWN = frozenset(
    {
        "lora_A.weight",
        "lora_B.weight",
        "lora_B.bias",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "lora_magnitude_vector.weight",
    }
)
"""Tensors of LoRA and DoRA, without the adapter's name."""


class BaseModel(Struct, frozen=True):
    """The model that an adapter is merged into.

    ``own`` are its weights that the checkpoint holds, ``folder`` those that were given, as training
    had them, and ``tied`` leads from an alias to the name of the one weight.
    """

    own: Tensors
    folder: Base
    names: ModelNames | None
    tied: Mapping[str, str]
    model_type: str

    @property
    def given(self) -> Tensors:
        """The weights of that folder, by name."""
        return self.folder.tensors

    def find(self, name: str) -> StoredTensor | None:
        """The weight of this name, or of the name it is tied to."""
        source = self.tied.get(name, name)
        found = self.own.get(source) or self.given.get(source) or self.given.get(name)
        if found is None and self.names is not None:
            return tensor_in_memory(source, self.names, self.given)
        return found

    def parameters(self, module: str, targets: Sequence[str]) -> list[str]:
        """Names of a module's own parameters that are among ``targets``, as peft matches them."""
        known = () if self.names is None else self.names.shapes
        names = dict.fromkeys([*self.own, *self.given, *known])
        return [
            name
            for name in names
            if name.rpartition(".")[0] == module
            and any(name == target or name.endswith(f".{target}") for target in targets)
        ]


def check_method(adapter: Adapter) -> None:
    """Refuse an adapter of a method whose update is not known."""
    config = adapter.config
    found = [] if config.peft_type == "LORA" else [config.peft_type or "no peft_type"]
    found += config.variants
    if found:
        raise _unknown_method(adapter, ", ".join(found))


def find_updates(adapter: Adapter, base: BaseModel, own: Tensors) -> Iterator[Update]:
    """Every weight that the adapter updates, module by module."""
    wrappers: dict[str, dict[int, dict[str, StoredTensor]]] = {}
    for name, tensor in own.items():
        part = read_name(name)
        if part.is_copy:
            continue
        short = ".".join(filter(None, (part.attribute, part.rest)))
        if short not in _KNOWN:
            raise _unknown_method(adapter, f"{part.attribute} on {part.module}")
        wrappers.setdefault(part.module, {}).setdefault(part.depth, {})[short] = tensor
    for module, by_depth in wrappers.items():
        parts = [by_depth[depth] for depth in sorted(by_depth)]
        yield from _targets(module, parts, adapter, base)


def _targets(
    module: str, parts: Sequence[Tensors], adapter: Adapter, base: BaseModel
) -> Iterator[Update]:
    """The weight that each wrapper of a module updates.

    A module has one wrapper and a ``weight``, or one for each of its targeted parameters. Those are
    nested in the order in which the module registers its parameters, the first inside; only the
    shapes tell which is which, or the order in which fused experts register theirs.
    """
    parameters = base.parameters(module, adapter.config.target_parameters)
    if not parameters and len(parts) == 1:
        yield Update(f"{module}.weight", parts[0], module)
        return
    fitting = [
        order
        for order in permutations(parameters, len(parts))
        if all(_fits(base.find(n), part) for n, part in zip(order, parts, strict=True))
    ]
    usual = [order for order in fitting if _is_usual(order)]
    chosen = usual if len(fitting) > 1 else fitting
    if len(chosen) != 1:
        raise UnsupportedError(
            f"does not tell which parameters of {module} the adapter updates",
            path=adapter.config.path,
            found=f"{len(parts)} updates for {', '.join(parameters) or 'none'}",
            expected="base weights whose shapes fit in one way",
            hint=KEEP_ADAPTER,
        )
    for name, part in zip(chosen[0], parts, strict=True):
        yield Update(name, part, name)


def _is_usual(order: Sequence[str]) -> bool:
    """Whether fused experts are in the order, outermost first, that follows from transformers'."""
    return [name.rpartition(".")[2] for name in order] == ["down_proj", "gate_up_proj"]


def _fits(weight: StoredTensor | None, part: Tensors) -> bool:
    a, b = part.get("lora_A.weight"), part.get("lora_B.weight")
    if weight is None or a is None or b is None:
        return False
    return sorted(weight.shape[-2:]) == sorted((a.shape[1], b.shape[0]))


def _unknown_method(adapter: Adapter, found: str) -> UnsupportedError:
    return UnsupportedError(
        "is of an adapter that zexport cannot merge",
        path=adapter.config.path,
        found=found,
        expected="plain LoRA or DoRA",
        hint=KEEP_ADAPTER,
    )
