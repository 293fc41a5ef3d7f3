"""What the names in a module's state dict are: the parameters', a wrapper's, or further ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from msgspec.structs import replace

from zexport.checkpoint.model_states import ModelStates
from zexport.errors import LayoutError
from zexport.formats.inert import StorageRef, TensorRef
from zexport.ranges.dtypes import Shape

_HIDDEN = "_checkpoint_wrapped_module."


def with_checkpointing_named(model: ModelStates) -> ModelStates:
    """The states with every name as the parameters' are, if activation checkpointing hides its own.

    torch's wrapper leaves ``_checkpoint_wrapped_module`` out of its state dict, and one around the
    whole model also out of ``named_parameters`` (torch 2.13,
    ``distributed/algorithms/_checkpoint/checkpoint_wrapper.py``), while DeepSpeed works out the
    names of buffers and ties itself (0.19, ``runtime/engine.py``). Nothing changes unless the
    parameters' names stay as they are, and the others apart.
    """
    parameters = _parameters(model)
    others = {*model.buffer_names, *model.shared_params, *model.shared_params.values()}
    listed = sorted(parameters | others)
    if not any(_HIDDEN in name for name in listed):
        return model
    is_around_all = any(name.startswith(_HIDDEN) for name in listed)
    wrapped = {} if is_around_all else dict(found for name in listed for found in _wrapped(name))
    named = {name: _inside(wrapped, name) for name in (*model.module, *listed)}
    if (
        any(_HIDDEN in name for name in model.module)
        or any(named[name] != name for name in parameters)
        or len({named[name] for name in model.module}) < len(model.module)
    ):
        return model
    return replace(
        model,
        module={named[name]: tensor for name, tensor in model.module.items()},
        buffer_names=tuple(named[name] for name in model.buffer_names),
        shared_params={named[alias]: named[name] for alias, name in model.shared_params.items()},
    )


def names_in_state_dict(model: ModelStates) -> set[str]:
    """The names that the module's state dict had before ``with_checkpointing_named``."""
    return set(map(_bare, model.module))


def _wrapped(name: str) -> Iterator[tuple[str, str]]:
    """What is before each wrapped module in a name: as the state dict has it, and as it is."""
    end = -1
    while (end := name.find(_HIDDEN, end + 1)) >= 0:
        path = name[: end + len(_HIDDEN)]
        yield _bare(path), path


def _inside(wrapped: Mapping[str, str], name: str) -> str:
    """A name with the wrappers that it lies in, and no others."""
    head = name = _bare(name)
    while head and head not in wrapped:
        head = head[: head.rfind(".", 0, -1) + 1]
    return wrapped.get(head, head) + name.removeprefix(head)


def _bare(name: str) -> str:
    return name.replace(_HIDDEN, "")


def with_parameter_names(model: ModelStates) -> ModelStates:
    """The states with the module's state dict under the names that ``param_shapes`` has.

    TRL's model with a value head overrides ``state_dict`` to leave ``pretrained_model.`` out of the
    names (``models/modeling_value_head.py``), while DeepSpeed names parameters and buffers itself.
    Nothing changes unless every parameter that the state dict lacks is there without its first
    part, and that is the same for all of them.
    """
    if _parameters(model) <= model.module.keys():
        return model
    parameters = {_bare(name) for name in _parameters(model)}
    lacking = sorted(parameters - model.module.keys())
    if not lacking:
        return model
    wrapper = f"{lacking[0].partition('.')[0]}."
    inner = {name.removeprefix(wrapper) for name in lacking if name.startswith(wrapper)}
    if len(inner) < len(lacking) or not inner <= model.module.keys() - parameters:
        return model
    own = {*parameters, *map(_bare, model.buffer_names)}
    module = {
        name if name in own else wrapper + name: tensor for name, tensor in model.module.items()
    }
    return with_checkpointing_named(replace(model, module=module))


def _parameters(model: ModelStates) -> set[str]:
    """Every parameter that DeepSpeed has named."""
    trained = {name for shapes in model.param_shapes for name in shapes}
    return trained | (model.frozen_shapes or {}).keys()


def check_spelling(model: ModelStates, surplus: Iterable[str]) -> None:
    """Refuse the module's copy of a trained weight under a name that is nearly the weight's.

    It would pass for a frozen weight that no table names (ZeRO-1), beside its own master. A hook of
    the module may leave trained names out, or take parts out of them; none is known that spells one
    part otherwise. Numbers tell apart what is alike, and are no misspelling.
    """
    lacking: dict[tuple[Shape, int], list[str]] = {}
    for shapes in model.param_shapes:
        for name, shape in shapes.items():
            if name not in model.module:
                lacking.setdefault((shape, name.count(".")), []).append(name)
    for other in surplus if lacking else ():
        copy = model.module[other]
        is_weight = copy.numel and copy.dtype.is_floating
        for name in lacking.get((copy.shape, other.count(".")), ()) if is_weight else ():
            if _is_misspelt(name, other):
                raise LayoutError(
                    f"the module lacks {name!r}, which was trained, and has a weight of its shape "
                    "that nothing accounts for",
                    other,
                    name,
                )


def _is_misspelt(name: str, other: str) -> bool:
    """Whether the names, of as many parts, differ in one that is no number."""
    pairs = zip(name.split("."), other.split("."), strict=True)
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    return len(apart) == 1 and not all(part.isdigit() for part in apart[0])


def find_aliases(model: ModelStates, stored: Sequence[str], *, is_zero3: bool) -> dict[str, str]:
    """Tied name to stored name: what is recorded, and what the module's tensors themselves show."""
    known = set(stored)
    aliases = _recorded(model, known, is_zero3=is_zero3)
    if is_zero3:
        shown = _same_placeholders(model, known)
        _check_placeholders(aliases, shown, model)
        aliases |= shown
    else:
        aliases = _of_one_shape(aliases, model)
    names = [name for name in (*stored, *model.module) if name not in aliases]
    whole = {n for n, one in model.module.items() if has_value(one, is_zero3=is_zero3)}
    shown = same_views(model.module, [name for name in names if name in whole])
    return aliases | {name: kept for name, kept in shown.items() if name not in known}


def _check_placeholders(
    aliases: Mapping[str, str], shown: Mapping[str, str], model: ModelStates
) -> None:
    """Refuse a recorded tie to one weight where the placeholder is another weight's."""
    for alias, name in aliases.items():
        other = shown.get(alias, name)
        if other != name and not model.has_experts:
            raise LayoutError(
                f"shared_params ties {alias!r} to another weight than the module does", name, other
            )


def _of_one_shape(aliases: Mapping[str, str], model: ModelStates) -> dict[str, str]:
    """The recorded ties of weights that the module does not hold in two shapes.

    DeepSpeed takes weights for tied that begin at one address (``data_ptr``), which a frozen one
    and a view of it do as well. A trained weight has a place of its own in a flat buffer, where no
    other begins (``runtime/zero/stage_1_and_2.py``, ``_update_model_bit16_weights``).
    """
    trained = {name for shapes in model.param_shapes for name in shapes}
    kept = {}
    for alias, name in aliases.items():
        own, other = model.module.get(alias), model.module.get(name)
        if own is None or other is None or not other.numel or own.shape == other.shape:
            kept[alias] = name
        elif name in trained:
            raise LayoutError(
                f"shared_params ties {alias!r} to {name!r}, which has another shape",
                list(own.shape),
                list(other.shape),
            )
    return kept


def has_value(tensor: TensorRef, *, is_zero3: bool) -> bool:
    """Whether the module holds the value itself, not ZeRO-3's placeholder of shape ``(0,)``."""
    return not is_zero3 or not _is_placeholder(tensor)


def _recorded(model: ModelStates, known: Set[str], *, is_zero3: bool) -> dict[str, str]:
    """Tied name to stored name, through chains of aliases.

    Names that are stored themselves are no aliases, nor are those that the module holds without an
    element: DeepSpeed reports all such parameters as tied to one another, whatever their shapes
    (``runtime/engine.py``, ``_get_shared_params``: ``data_ptr``). Nor are names tied to what was
    left out of the save, such as frozen embeddings under an adapter.
    """
    aliases: dict[str, str] = {}
    for alias in model.shared_params:
        own = model.module.get(alias)
        is_empty = own is not None and not own.numel and not is_zero3
        if alias in known or is_empty:
            continue
        target, seen = model.shared_params[alias], {alias}
        while target not in known and target in model.shared_params and target not in seen:
            seen.add(target)
            target = model.shared_params[target]
        is_whole = target in model.module and has_value(model.module[target], is_zero3=is_zero3)
        if target in known or (is_whole and target not in model.shared_params):
            aliases[alias] = target
    return aliases


def same_views(module: Mapping[str, TensorRef], names: Iterable[str]) -> dict[str, str]:
    """Further names in the module of what an earlier name is: the same elements of one storage.

    So ties show without ``shared_params``, which old files lack: torch saves a storage once.
    """
    first: dict[TensorRef, str] = {}
    held = ((name, module[name]) for name in names if name in module and module[name].numel)
    owners = {name: first.setdefault(tensor, name) for name, tensor in held}
    return {name: owner for name, owner in owners.items() if owner != name}


def _same_placeholders(model: ModelStates, known: Set[str]) -> dict[str, str]:
    """Names in the module whose placeholder has the storage of one stored parameter's.

    ZeRO-3 gives every parameter a placeholder of its own, and torch saves a storage once. So ties
    show that ``shared_params`` lacks: of a module that has two names within one parent (DeepSpeed
    0.10 to 0.19, ``runtime/engine.py``, ``_get_shared_params``: ``named_children`` gives it once).
    A storage that several stored parameters have says nothing.
    """
    owners: dict[StorageRef, list[str]] = {}
    for name in known:
        if name in model.module and _is_placeholder(model.module[name]):
            owners.setdefault(model.module[name].storage, []).append(name)
    return {
        name: owners[tensor.storage][0]
        for name, tensor in model.module.items()
        if name not in known
        and _is_placeholder(tensor)
        and len(owners.get(tensor.storage, ())) == 1
    }


def _is_placeholder(tensor: TensorRef) -> bool:
    return tensor.shape == (0,)
