"""An adapter worked into its base model: which tensor is updated by which factors.

Source: peft 0.21, ``tuners/lora/layer.py`` (``merge`` and ``get_delta_weight`` of each layer),
``tuners/lora/variants.py`` (``DoraLinearVariant``) and ``tuners/tuners_utils.py``
(``_inject_parameters``). What is not named here is refused.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from msgspec import structs

from zexport.adapters.find import Adapter, check_whole
from zexport.adapters.peft_names import inner_name, of_adapter, read_name
from zexport.adapters.saved_beside import SavedBeside
from zexport.adapters.updates import (
    KEEP_ADAPTER,
    BaseModel,
    Orientation,
    Tensors,
    Update,
    check_method,
    elements,
    find_orientation,
    find_updates,
    update_bias,
    update_weight,
)
from zexport.checkpoint.state import StoredTensor, TrainingState
from zexport.errors import FrozenLeftOutError, UnsupportedError, UsageError
from zexport.facts.model import Fact
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.options import Engine, ExportOptions
from zexport.printable import some
from zexport.ranges.computed import Recast
from zexport.ranges.dtypes import DType, Shape
from zexport.weights.base_model import Base, check_plain, under_names_of, under_prefix
from zexport.weights.named import Weights
from zexport.weights.ties import under_tied_sources


def only_adapter(adapters: Sequence[Adapter], options: ExportOptions) -> Adapter:
    """The one adapter that can be merged."""
    if options.engine is Engine.DEEPSPEED:
        raise UsageError(
            "DeepSpeed's converter merges no adapter",
            hint="Leave --engine out, or keep the adapter",
        )
    adapter, *others = adapters
    if others:
        raise UsageError(
            "there are several adapters, and one can be merged",
            found=", ".join(one.name for one in adapters),
            hint="Name it with --adapter-name",
        )
    return adapter


def shapes_of_base(stored: Weights, given: Base) -> dict[str, Shape | None]:
    """Names and shapes of the base model, as far as they are known."""
    parts = ((read_name(name), shape) for name, shape in stored.known_shapes.items())
    return {**given.shapes, **{part.of_base: shape for part, shape in parts if not part.adapter}}


def as_in_training(
    given: Base,
    names: ModelNames | NamesUnknown,
    stored: Weights,
    adapter: Adapter,
    dtype: DType | None,
) -> Base:
    """The base as training had it: under the model's names, floating ones rounded to ``dtype``."""
    given = under_names_of(names, given)
    if isinstance(names, ModelNames) and names.base_prefix:
        given = under_prefix(f"{names.base_prefix}.", _adapted(stored, adapter), given)
    given = under_tied_sources(names, given)
    return given if dtype is None else structs.replace(given, tensors=_recast(given.tensors, dtype))


def _recast(base: Tensors, dtype: DType) -> dict[str, StoredTensor]:
    return {
        name: tensor
        if not tensor.dtype.is_floating or tensor.source is None
        else replace(tensor, dtype=dtype, source=Recast(elements(tensor), dtype))
        for name, tensor in base.items()
    }


def with_saved(
    stored: Weights, saved: SavedBeside | None, given: Tensors, options: ExportOptions
) -> Weights:
    """The stored weights and what peft saved beside them."""
    if saved is None or not saved.lacking:
        return stored
    if saved.is_of_step:
        return structs.replace(stored, tensors={**stored.tensors, **saved.lacking})
    resized = [n for n, t in saved.of_base.items() if n in given and given[n].shape != t.shape]
    if resized and not options.exclude_frozen:
        raise FrozenLeftOutError(
            "has resized weights that the checkpoint lacks, beside an adapter that is not its own",
            path=saved.header.path,
            found=f"{some(tuple(resized))}, of another step or run",
            expected="the file that peft wrote with the checkpoint",
            hint=Fact.RESIZED_EMBEDDING.value.hint,
        )
    return stored


def _adapted(stored: Weights, adapter: Adapter) -> list[str]:
    """The weights of modules that an adapter updates."""
    parts = of_adapter(stored.tensors, adapter.name).values()
    modules = (part.module for part in parts if not part.is_copy)
    return [f"{module}.weight" for module in dict.fromkeys(modules)]


def merge_adapter(
    checkpoint: TrainingState, stored: Weights, adapter: Adapter, folder: BaseModel
) -> Weights:
    """The base model's weights, by its own names, with the adapter worked in."""
    check_method(adapter)
    parts = of_adapter(stored.tensors, adapter.name)
    own = {name: stored.tensors[name] for name in parts}
    check_whole(checkpoint, stored, adapter, {inner_name(n): t for n, t in own.items()})
    copied = {parts[n].of_base: t for n, t in own.items() if parts[n].is_copy}
    copied_ties = _copied_ties(stored, adapter)
    inside = weights_of_base(stored)
    base = _with_own(folder, inside, copied_ties.keys())
    merged = {**base.own, **copied, **_untied(base, {*copied, *copied_ties})}
    updates = list(find_updates(adapter, base, own))
    pairs = [(update, base.find(update.weight)) for update in updates]
    orientation = find_orientation(pairs, adapter.config, base.model_type)
    for update in updates:
        merged |= _applied(update, adapter, base, merged, orientation)
    stored_ties = {n: base.tied[n] for n in inside.shapes if n in base.tied}
    return Weights(
        tensors=merged,
        aliases={
            alias: name
            for alias, name in {**stored_ties, **copied_ties}.items()
            if alias not in merged and name in merged
        },
        left_out=tuple(name for name in inside.left_out if name not in {**merged, **base.given}),
    )


def weights_of_base(stored: Weights) -> Weights:
    """The weights of the base model among a peft model's, by its own names."""
    parts = {name: read_name(name) for name in (*stored.known_shapes, *stored.aliases.values())}
    return Weights(
        tensors={parts[n].of_base: t for n, t in stored.tensors.items() if not parts[n].adapter},
        aliases={
            parts[a].of_base: parts[n].of_base
            for a, n in stored.aliases.items()
            if not parts[a].adapter and not parts[n].adapter
        },
        left_out=tuple(parts[n].of_base for n in stored.left_out if not parts[n].adapter),
    )


def _with_own(folder: BaseModel, inside: Weights, replaced: Set[str]) -> BaseModel:
    """The base model with the checkpoint's weights, each under the source of its tie."""
    declared = {} if folder.names is None else folder.names.tied
    stored = {alias: declared.get(name, name) for alias, name in inside.aliases.items()}
    tied = {**declared, **{alias: name for alias, name in stored.items() if alias != name}}
    own = {
        tied.get(name, name): tensor
        for name, tensor in inside.tensors.items()
        if not {name, tied.get(name, name)} & replaced
    }
    return structs.replace(folder, own=own, tied=tied)


def _copied_ties(stored: Weights, adapter: Adapter) -> dict[str, str]:
    """Ties between copies of modules that were trained as one, by the base model's names."""
    pairs = ((read_name(alias), read_name(name)) for alias, name in stored.aliases.items())
    return {
        a.of_base: n.of_base
        for a, n in pairs
        if a.is_copy and n.is_copy and a.adapter == n.adapter == adapter.name
    }


def _untied(base: BaseModel, copied: Set[str]) -> dict[str, StoredTensor]:
    """Weights that were one with a module's that was copied and trained: they stay as they were.

    Of a tied pair of which only one was copied, the other keeps the weight that both had.
    """
    untied: dict[str, StoredTensor] = {}
    for alias, name in base.tied.items():
        original = base.find(name) or base.given.get(alias)
        if (alias in copied) != (name in copied) and original is not None:
            untied[alias if name in copied else name] = original
    return untied


def _applied(
    update: Update, adapter: Adapter, base: BaseModel, merged: Tensors, orientation: Orientation
) -> Tensors:
    """The weight, and the bias where it has one of its own, with one update worked in."""
    name = base.tied.get(update.weight, update.weight)
    weight = merged.get(name) or base.find(update.weight)
    if weight is None:
        names = base.names or NamesUnknown("there is no config")
        check_plain((), base.folder, names, absent=(update.weight,))
        raise _no_base(adapter, update.weight, base)
    if name not in base.own and adapter.config.rewrites_base:
        raise UnsupportedError(
            "is of an adapter whose base weights peft changed before training",
            path=adapter.config.path,
            found=f"init_lora_weights {adapter.config.rewrites_base}",
            expected="the changed weights, in the checkpoint",
            hint="Export the adapter with --adapter keep, and convert it with peft",
        )
    applied = {name: update_weight(update, weight, adapter.config, orientation)}
    bias = update.tensors.get("lora_B.bias")
    if bias is not None:
        bias_name = f"{update.weight.rpartition('.')[0]}.bias"
        before = merged.get(bias_name) or base.find(bias_name)
        if before is None:
            raise _no_bias(adapter, bias_name, base)
        applied[bias_name] = update_bias(update, before, bias, adapter.config)
    return applied


def _no_base(adapter: Adapter, name: str, base: BaseModel) -> FrozenLeftOutError:
    called = adapter.config.text("base_model_name_or_path")
    folder = base.folder
    nowhere = f", and in {folder.path} {folder.instead}" if folder.instead else ""
    return FrozenLeftOutError(
        f"the adapter {adapter.name!r} cannot be merged without the weights it was trained on",
        path=adapter.config.path,
        found=f"no values for {name}{nowhere}",
        expected="the base model's weights, in the checkpoint or in --base",
        hint=f"Give the base model with --base{called and f' ({called})'}, or export the adapter "
        "itself with --adapter keep",
    )


def _no_bias(adapter: Adapter, name: str, base: BaseModel) -> FrozenLeftOutError | UnsupportedError:
    known = base.given if base.names is None else base.names.shapes
    if not known or name in known:
        return _no_base(adapter, name, base)
    return UnsupportedError(
        f"is of an adapter with a bias that the base model has no place for: {name}",
        path=adapter.config.path,
        found="lora_bias",
        expected="a base model whose layers have biases",
        hint=KEEP_ADAPTER,
    )
