"""Which names of a module are further names of another of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from zexport.checkpoint.states import ModelStates
from zexport.errors import LayoutError
from zexport.formats.pickles import StorageRef, TensorRef


def find_aliases(model: ModelStates, stored: Sequence[str], *, is_zero3: bool) -> dict[str, str]:
    """Tied name to stored name: what is recorded, and what the module's tensors themselves show.

    Args:
        model: the model states that record ties.
        stored: the names that have values of their own, in order.
        is_zero3: whether the module holds placeholders for its parameters.

    Raises:
        LayoutError: the module contradicts a tie that is recorded.
    """
    aliases = _recorded(model, set(stored), is_zero3=is_zero3)
    if is_zero3:
        shown = _same_placeholders(model, set(stored))
        _check_placeholders(aliases, shown, model)
        return aliases | shown
    aliases = _of_one_shape(aliases, model)
    return aliases | _same_views(model, stored, aliases)


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

    Raises:
        LayoutError: the tie is to a trained weight.
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


def _same_views(
    model: ModelStates, stored: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Further names in the module of what an earlier name is: the same elements of one storage.

    So ties show without ``shared_params``, which old files lack: torch saves a storage once.
    """
    first: dict[TensorRef, str] = {}
    found: dict[str, str] = {}
    for name in (*stored, *model.module):
        tensor = model.module.get(name)
        if tensor is None or not tensor.numel or name in aliases:
            continue
        kept = first.setdefault(tensor, name)
        if kept != name:
            found[name] = kept
    return {name: kept for name, kept in found.items() if name not in set(stored)}


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
