"""Merge a LoRA, rsLoRA or DoRA adapter into its base model.

Source: peft 0.21, ``tuners/lora/layer.py`` (``merge`` and ``get_delta_weight`` of each layer),
``tuners/lora/variants.py`` (``DoraLinearVariant``) and ``tuners/tuners_utils.py``
(``_inject_parameters``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import permutations
from math import prod

from msgspec import Struct, structs
from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor, source_of
from zexport.errors import DamagedCheckpointError, FrozenLeftOutError, UnsupportedError, UsageError
from zexport.export.adapters import Adapter
from zexport.export.base_model import Base
from zexport.export.hub_tensors import tensor_in_memory
from zexport.export.peft import AdapterConfig, names_of_adapter, parse_name
from zexport.export.weights import Tensors, Weights
from zexport.model.hub_names import ModelNames, Names
from zexport.options import Engine, ExportOptions
from zexport.ranges.computed import Elements, Factors, LowRankUpdate, Recast, ScaledSum
from zexport.ranges.dtypes import DType
from zexport.ranges.source import Chain, Window
from zexport.text import some

_KNOWN = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "lora_magnitude_vector.weight",
)
"""Tensors of LoRA and DoRA. Before peft 0.12, DoRA's had no ``weight``."""

_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})
"""Model types that store fused experts as (experts, inputs, outputs).

Source: transformers 5.23, ``is_transposed=True`` in ``models/*/modeling_*.py``.
"""

_EXPERTS_ORDER = ["down_proj", "gate_up_proj"]
"""Order in which peft nests the wrappers of fused experts, outermost first."""


class _BaseModel(Struct, frozen=True):
    """The base model: ``own`` weights of the checkpoint, ``given`` ones as training had them."""

    own: Tensors
    given: Base
    names: ModelNames | None
    tied: Mapping[str, str]
    model_type: str
    config: AdapterConfig

    def find(self, name: str) -> StoredTensor | None:
        """Return the weight of this name, or of the name it is tied to."""
        source, given = self.tied.get(name, name), self.given.tensors
        found = self.own.get(source) or given.get(source) or given.get(name)
        if found is None and self.names is not None:
            return tensor_in_memory(source, self.names, given)
        return found

    def target_parameters(self, module: str) -> list[str]:
        """Return the module's own parameters that the adapter targets, as peft matches them."""
        targets = self.config.target_parameters or ()
        known = () if self.names is None else self.names.shapes
        names = dict.fromkeys([*self.own, *self.given.tensors, *known])
        own = (name for name in names if name.rpartition(".")[0] == module)
        return [name for name in own if any(f".{name}".endswith(f".{one}") for one in targets)]


class _Update(Struct, frozen=True):
    """The adapter's tensors for one weight.

    Attributes:
        weight: name in the base model.
        tensors: by their names within the module, such as ``lora_A.weight``.
        key: what ``rank_pattern`` matches: the module, or the parameter if that is the target.
    """

    weight: str
    tensors: Tensors
    key: str

    @property
    def is_embedding(self) -> bool:
        return "lora_embedding_A" in self.tensors

    @property
    def factors(self) -> tuple[StoredTensor, StoredTensor]:
        form = "lora_embedding_{}" if self.is_embedding else "lora_{}.weight"
        return self.tensors[form.format("A")], self.tensors[form.format("B")]

    @property
    def sides(self) -> tuple[int, int]:
        """Output size and input size, which includes a convolution's kernel."""
        a, b = self.factors
        return b.shape[0], prod(a.shape[1:])


def adapter_to_merge(adapters: Sequence[Adapter], options: ExportOptions) -> Adapter:
    """Return the adapter to merge: the only one, which is LoRA, rsLoRA or DoRA."""
    if options.engine is Engine.DEEPSPEED:
        raise UsageError(
            "--engine deepspeed cannot merge adapters",
            hint="Leave out --engine, or pass --adapter keep",
        )
    if len(adapters) > 1:
        raise UsageError(
            "only one adapter can be merged",
            found=", ".join(one.name for one in adapters),
            hint="Choose it with --adapter-name",
        )
    config = adapters[0].config
    if config.peft_type != "LORA" or config.variants:
        found = some([config.peft_type or "no peft_type", *config.variants])
        raise _unsupported(config, found, "LoRA, rsLoRA or DoRA")
    return adapters[0]


def weights_of_base(stored: Weights) -> Weights:
    """Return the weights of the base model in a PEFT model, by their names in the base model."""
    base = {name for name in stored.names if not parse_name(name).adapter}
    return Weights(
        tensors={name: tensor for name, tensor in stored.tensors.items() if name in base},
        aliases={alias: name for alias, name in stored.aliases.items() if {alias, name} <= base},
        left_out=tuple(name for name in stored.left_out if name in base),
    ).named(lambda name: parse_name(name).of_base)


def base_as_trained(
    given: Base,
    names: Names,
    stored: Weights,
    adapter: Adapter,
    dtype: DType | None,
) -> Base:
    """Return the base with floating-point weights rounded to ``dtype``.

    The base may be the encoder within the model that the adapter was trained on.
    """
    prefix = f"{names.base_prefix}." if isinstance(names, ModelNames) and names.base_prefix else ""
    parts = names_of_adapter(stored.tensors, adapter.name).values()
    wanted = {f"{one.module}.weight" for one in parts if not one.is_copy} - given.tensors.keys()
    inner = {n.removeprefix(prefix) for n in wanted if n.startswith(prefix)}
    if prefix and wanted and len(inner) == len(wanted) and inner <= given.tensors.keys():
        moved = {prefix + n: replace(t, name=prefix + n) for n, t in given.tensors.items()}
        given = structs.replace(given, tensors=moved)
    if dtype is None:
        return given
    rounded = {
        name: replace(tensor, dtype=dtype, source=Recast(_elements(tensor), dtype))
        if tensor.dtype.is_floating
        else tensor
        for name, tensor in given.tensors.items()
    }
    return structs.replace(given, tensors=rounded)


def merge_adapter(
    stored: Weights,
    adapter: Adapter,
    given: Base,
    names: ModelNames | None,
    model_type: str,
) -> Weights:
    """Return the weights of the base model with the adapter merged, by their names in it."""
    parts = names_of_adapter(stored.tensors, adapter.name)
    copied = {one.of_base: stored.tensors[name] for name, one in parts.items() if one.is_copy}
    pairs = ((parse_name(alias), parse_name(name)) for alias, name in stored.aliases.items())
    copied_ties = {
        a.of_base: n.of_base
        for a, n in pairs
        if a.is_copy and n.is_copy and a.adapter == n.adapter == adapter.name
    }
    inside = weights_of_base(stored)
    declared = {} if names is None else names.tied
    sources = {alias: declared.get(name, name) for alias, name in inside.aliases.items()}
    tied = {**declared, **{alias: name for alias, name in sources.items() if alias != name}}
    own = {
        tied.get(name, name): tensor
        for name, tensor in inside.tensors.items()
        if not {name, tied.get(name, name)} & copied_ties.keys()
    }
    base = _BaseModel(own, given, names, tied, model_type, adapter.config)
    merged = {**own, **copied, **_untied(base, {*copied, *copied_ties})}
    updates = [*_find_updates(adapter, base, stored)]
    is_transposed = _is_transposed(updates, base)
    for update in updates:
        merged |= _merge(update, base, merged, is_transposed)
    for name, one in parts.items():
        if one.is_tokens:
            merged |= _with_tokens(one.module, stored.tensors[name], base, merged)
    ties = {**{n: tied[n] for n in inside.shapes if n in tied}, **copied_ties}
    known = merged.keys() | given.tensors.keys()
    return Weights(
        tensors=merged,
        aliases={a: n for a, n in ties.items() if a not in merged and n in merged},
        left_out=tuple(name for name in inside.left_out if name not in known),
    )


def _untied(base: _BaseModel, copied: Set[str]) -> Tensors:
    """Return weights that were tied to a trained copy: they keep the value that both had."""
    untied: dict[str, StoredTensor] = {}
    for alias, name in base.tied.items():
        original = base.find(name) or base.given.tensors.get(alias)
        if (alias in copied) != (name in copied) and original is not None:
            untied[alias if name in copied else name] = original
    return untied


def _find_updates(adapter: Adapter, base: _BaseModel, stored: Weights) -> Iterator[_Update]:
    modules: dict[str, dict[int, dict[str, StoredTensor]]] = {}
    for name, one in names_of_adapter(stored.tensors, adapter.name).items():
        if one.is_copy or one.is_tokens:
            continue
        if one.tensor not in _KNOWN:
            raise _unsupported(base.config, name, "tensors of LoRA, rsLoRA or DoRA")
        wrapper = modules.setdefault(one.module, {}).setdefault(one.depth, {})
        wrapper[one.tensor] = stored.tensors[name]
    for module, wrappers in modules.items():
        outermost_first = [wrappers[depth] for depth in sorted(wrappers)]
        parameters = base.target_parameters(module)
        if not parameters and len(wrappers) == 1:
            yield _Update(f"{module}.weight", outermost_first[0], module)
            continue
        for name, tensors in _match_parameters(parameters, outermost_first, base).items():
            yield _Update(name, tensors, name)


def _match_parameters(
    parameters: Sequence[str], wrappers: Sequence[Tensors], base: _BaseModel
) -> dict[str, Tensors]:
    """Return the wrapper of each of a module's parameters; wrappers are given outermost first.

    Names do not show it: only shapes do, or the known order of fused experts.
    """

    def fits(name: str, wrapper: Tensors) -> bool:
        weight, update = base.find(name), _Update(name, wrapper, name)
        return weight is not None and sorted(weight.shape[-2:]) == sorted(update.sides)

    orders = [
        order
        for order in permutations(parameters, len(wrappers))
        if all(fits(name, wrapper) for name, wrapper in zip(order, wrappers, strict=True))
    ]
    if len(orders) > 1:
        orders = [o for o in orders if [n.rpartition(".")[2] for n in o] == _EXPERTS_ORDER]
    if len(orders) != 1:
        found = f"{len(wrappers)} updates for {some(parameters) or 'no parameter'}"
        raise _unsupported(base.config, found, "base weights whose shapes fit in one way")
    return dict(zip(orders[0], wrappers, strict=True))


def _merge(
    update: _Update, base: _BaseModel, merged: Tensors, is_transposed: bool | None
) -> Tensors:
    """Return the merged weight and, if it has an update of its own, the merged bias."""
    config = base.config
    name = base.tied.get(update.weight, update.weight)
    weight = _weight_of_base(update.weight, base, merged)
    if name not in base.own and config.changes_base:
        found = f"init_lora_weights {config.changes_base}, which changed the base weights"
        raise _unsupported(config, found, "the changed weights, in the checkpoint")
    merges = {name: _merged_weight(update, weight, base, is_transposed)}
    addend = update.tensors.get("lora_B.bias")
    if addend is not None:
        bias_name = f"{update.weight.rpartition('.')[0]}.bias"
        bias = merged.get(bias_name) or base.find(bias_name)
        if bias is None:
            raise _unsupported(config, f"lora_bias, but no {bias_name}", "base layers with biases")
        _check_fits(update, config, bias.shape == addend.shape, f"bias {list(bias.shape)}")
        scaling = config.scaling(update.key, update.factors[1].shape[1])
        total = ScaledSum(_elements(bias), _elements(addend), scaling)
        merges[bias_name] = replace(bias, dtype=DType.F32, role=Role.TRAINABLE, source=total)
    return merges


def _weight_of_base(name: str, base: _BaseModel, merged: Tensors) -> StoredTensor:
    weight = merged.get(base.tied.get(name, name)) or base.find(name)
    is_packed = base.given.is_quantized and name not in base.own
    if weight is None and not is_packed:
        instead = f", and --base has {base.given.instead}" if base.given.instead else ""
        original = base.config.base_model_name_or_path or "the base model"
        raise FrozenLeftOutError(
            "base weights of the adapter are missing",
            path=base.config.path,
            found=f"no values for {name}{instead}",
            expected="the base model's weights, in the checkpoint or in --base",
            hint=f"Pass {original} with --base, or keep the adapter with --adapter keep",
        )
    if weight is None or is_packed or not weight.dtype.is_floating:
        raise UnsupportedError(
            "cannot merge into quantized weights",
            path=base.config.path,
            found=name,
            expected="a floating-point dtype, without scales",
            hint="Pass the model before its quantization with --base and --exclude-frozen, or "
            "export the adapter with --adapter keep",
        )
    return weight


def _with_tokens(module: str, rows: StoredTensor, base: _BaseModel, merged: Tensors) -> Tensors:
    """Return the embedding with its trained rows, in float32.

    Source: peft 0.21, ``tuners/trainable_tokens/layer.py`` (``merge``).
    """
    name = f"{module}.weight"
    weight, ids = _weight_of_base(name, base, merged), base.config.tokens_of(module)
    if weight.shape[1:] != rows.shape[1:] or not all(0 <= one < weight.shape[0] for one in ids):
        raise _unsupported(base.config, f"tokens {ids[:8]} of {name}", "rows of the base weight")
    old, new = (Recast(_elements(one), DType.F32) for one in (weight, rows))
    nbytes, parts, end = rows.shape[1] * DType.F32.itemsize, [], 0
    for token, row in sorted(zip(ids, range(rows.shape[0]), strict=True)):
        parts += [
            Window(old, end * nbytes, (token - end) * nbytes),
            Window(new, row * nbytes, nbytes),
        ]
        end = token + 1
    parts.append(Window(old, end * nbytes, old.nbytes - end * nbytes))
    source = Chain(tuple(part for part in parts if part.nbytes))
    found = replace(weight, dtype=DType.F32, role=Role.TRAINABLE, source=source)
    return {base.tied.get(name, name): found}


def _merged_weight(
    update: _Update,
    weight: StoredTensor,
    base: _BaseModel,
    is_transposed: bool | None,
) -> StoredTensor:
    config = base.config
    a, b = update.factors
    outputs, inputs = update.sides
    is_parameter = update.key == update.weight
    is_stack = is_parameter and len(weight.shape) == 3  # fused experts
    matrices = weight.shape[0] if is_stack else 1
    rank = config.rank_of(update.key) or 0
    # A convolution's kernel is one row for each output.
    shape = weight.shape[1:] if is_stack else (weight.shape[0], prod(weight.shape[1:]))
    if update.is_embedding or outputs != inputs:
        is_turned: bool | None = update.is_embedding or shape == (inputs, outputs)
    elif is_stack:
        is_turned = base.model_type in _TRANSPOSED_EXPERTS if base.model_type else None
    else:
        is_turned = is_transposed if len(weight.shape) == 2 and not is_parameter else False
    if is_turned is None:
        expected = "config.json, and a fan_in_fan_out that is right for all matrices"
        raise _unsupported(config, f"square {update.weight}, which may be transposed", expected)
    wanted = (inputs, outputs) if is_turned else (outputs, inputs)
    magnitude = next((t for n, t in update.tensors.items() if n.startswith("lora_magnitude")), None)
    is_right = shape == wanted and rank > 0 and a.shape[0] == b.shape[1] == rank * matrices
    is_right &= magnitude is None or magnitude.numel == outputs
    _check_fits(update, config, is_right, f"rank {rank} and weight {list(weight.shape)}")
    source = LowRankUpdate(
        _elements(weight),
        Factors(_elements(a), _elements(b), inputs, outputs, rank, matrices),
        config.scaling(update.key, rank),
        is_transposed=is_turned,
        magnitude=None if magnitude is None else _elements(magnitude),
    )
    return replace(weight, dtype=DType.F32, role=Role.TRAINABLE, source=source)


def _is_transposed(updates: Sequence[_Update], base: _BaseModel) -> bool | None:
    """Return whether square matrices are stored as (inputs, outputs), as ``fan_in_fan_out`` states.

    ``None`` if it is wrong for matrices that are not square.
    """
    is_transposed = bool(base.config.fan_in_fan_out)
    for update in updates:
        stored = update.sides[::-1] if is_transposed else update.sides
        weight = None if update.is_embedding else base.find(update.weight)
        if weight is not None and len(weight.shape) == 2 and weight.shape == stored[::-1] != stored:
            return None
    return is_transposed


def _elements(tensor: StoredTensor) -> Elements:
    return Elements(source_of(tensor), tensor.dtype)


def _check_fits(update: _Update, config: AdapterConfig, is_right: bool, expected: str) -> None:
    if not is_right:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in update.tensors.items())
        raise DamagedCheckpointError(
            f"adapter tensors do not fit {update.weight}",
            path=config.path,
            found=shapes,
            expected=f"shapes for {expected}",
            hint="Pass the base model of this run with --base, and the adapter_config.json that "
            "the training run wrote",
        )


def _unsupported(config: AdapterConfig, found: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        "cannot merge this adapter",
        path=config.path,
        found=found,
        expected=expected,
        hint="Export the adapter with --adapter keep and load or merge it with peft",
    )
