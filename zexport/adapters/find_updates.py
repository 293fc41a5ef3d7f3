"""Which weights of a base model an adapter updates, told from its modules' names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from zexport.adapters.find import Adapter
from zexport.adapters.updates import Update
from zexport.checkpoint.contents import StoredTensor
from zexport.errors import UnsupportedError
from zexport.model.fit import ModelNames
from zexport.model.peft_names import read_name
from zexport.weights.base import Base
from zexport.weights.hub_tensors import tensor_in_memory

KEEP_ADAPTER = "Export the adapter with --adapter keep and merge it with peft"

Tensors = Mapping[str, StoredTensor]

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


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that an adapter is merged into.

    Attributes:
        own: its weights that the checkpoint holds, by name.
        folder: the folder that was given, its weights as training had them.
        names: the names and forms of its class, where these are known.
        tied: alias to name, where one weight has two names.
        model_type: of its config; empty where there is none.
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
    found += config.variants()
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
