"""Names of the module's state dict: brought to parameter names; tied weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from zexport.checkpoint.zero.records import ModelStates
from zexport.errors import LayoutError
from zexport.formats.pickle_values import StorageRef, TensorRef

_WRAPPER = "_checkpoint_wrapped_module."


def with_parameter_names(model: ModelStates) -> ModelStates:
    """Return the model states with the names of ``param_shapes`` in the module's state dict.

    TRL's model with a value head overrides ``state_dict`` and removes ``pretrained_model.``
    (``models/modeling_value_head.py``): one removed first part explains all missing parameters.
    torch's activation checkpointing removes its wrapper from state dicts, and around the whole
    model also from ``named_parameters`` (torch 2.13, ``checkpoint_wrapper.py``); DeepSpeed builds
    the names of buffers and tied weights itself (0.19, ``runtime/engine.py``).
    """
    listed = {*model.trained, *(model.frozen_shapes or ())}
    parameters = {name.replace(_WRAPPER, "") for name in listed}
    listed |= {*model.buffers, *model.shared, *model.shared.values()}
    own = {*parameters, *(name.replace(_WRAPPER, "") for name in model.buffers)}
    missing = sorted(parameters - model.module.keys())
    first = f"{missing[0].partition('.')[0]}." if missing else ""
    inner = {name.removeprefix(first) for name in missing if name.startswith(first)}
    if len(inner) < len(missing) or not inner <= model.module.keys() - parameters:
        first = ""
    is_wrapped = any(_WRAPPER in name for name in listed - model.module.keys())
    if not first and not is_wrapped:
        return model
    wrapped: dict[str, str] = {}
    if not any(name.startswith(_WRAPPER) for name in listed):
        for parts in (name.split(_WRAPPER) for name in listed):
            for end in range(1, len(parts)):
                wrapped["".join(parts[:end])] = _WRAPPER.join((*parts[:end], ""))

    def named(name: str) -> str:
        head = name = name.replace(_WRAPPER, "")
        while head and head not in wrapped:
            head = head[: head.rfind(".", 0, -1) + 1]
        return wrapped.get(head, head) + name.removeprefix(head)

    return replace(
        model,
        module={named(n if n in own else first + n): ref for n, ref in model.module.items()},
        buffers=tuple(named(name) for name in model.buffers),
        shared={named(alias): named(name) for alias, name in model.shared.items()},
    )


def check_spelling(model: ModelStates, unlisted: Iterable[str]) -> None:
    """Raise if a weight that no table names may be a missing trained weight under another name.

    With ZeRO-1 it would be exported as a frozen weight, in addition to its own master weights.
    """
    missing = {name: shape for name, shape in model.trained.items() if name not in model.module}
    for other in unlisted if missing else ():
        ref, parts = model.module[other], other.split(".")
        for name, shape in missing.items() if ref.numel and ref.dtype.is_floating else ():
            apart = [pair for pair in zip(name.split("."), parts, strict=False) if len({*pair}) > 1]
            is_alike = shape == ref.shape and name.count(".") + 1 == len(parts)
            if is_alike and len(apart) == 1 and not all(map(str.isdigit, apart[0])):
                raise LayoutError(
                    f"trained weight {name!r} is missing in the module, which has an unlisted "
                    "weight of its shape",
                    other,
                    name,
                )


def is_placeholder(ref: TensorRef) -> bool:
    """Whether ZeRO-3 left only this of a partitioned parameter."""
    return ref.shape == (0,)


def find_aliases(model: ModelStates, stored: Collection[str], *, is_zero3: bool) -> dict[str, str]:
    """Return tied name to stored name: as recorded, and as shown by shared storages.

    Recorded ties are followed through chains. Excluded are names that are stored themselves, and
    names tied to weights that were not saved. DeepSpeed reports weights that begin at one address
    (``_get_shared_params``: ``data_ptr``), which includes a frozen weight and a view of it, and all
    weights without elements; it misses ties within one parent module (``named_children`` returns a
    module once), which the storage of a placeholder shows if exactly one parameter has it.
    """
    module, known, aliases = model.module, set(stored), dict[str, str]()
    whole = {name for name, ref in module.items() if not (is_zero3 and is_placeholder(ref))}
    for alias in model.shared:
        target, seen = model.shared[alias], {alias}
        while target not in known and target in model.shared and target not in seen:
            seen.add(target)
            target = model.shared[target]
        own, other = module.get(alias), module.get(target)
        is_other = own and (not own.numel or (other and other.numel and other.shape != own.shape))
        is_stored = target in known or (target in whole and target not in model.shared)
        if is_stored and alias not in known and (is_zero3 or not is_other):
            aliases[alias] = target
    if is_zero3:
        owners: dict[StorageRef, list[str]] = {}
        for name in known & module.keys() - whole:
            owners.setdefault(module[name].storage, []).append(name)
        for alias in module.keys() - known - whole:
            if len(names := owners.get(module[alias].storage, [])) == 1:
                aliases[alias] = names[0]
    shown = same_views(module, [n for n in (*stored, *module) if n in whole and n not in aliases])
    return aliases | {name: kept for name, kept in shown.items() if name not in known}


def same_views(module: Mapping[str, TensorRef], names: Iterable[str]) -> dict[str, str]:
    """Return names to an earlier name with the same elements of one storage.

    torch saves a storage once. Files of old versions, and ZeRO-0, record no ``shared_params``.
    """
    first: dict[TensorRef, str] = {}
    owners = {n: first.setdefault(module[n], n) for n in names if n in module and module[n].numel}
    return {name: owner for name, owner in owners.items() if owner != name}
