"""From saved state dicts to parameters: which tensors are weights, which their optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from zexport.checkpoint.boxes import As
from zexport.checkpoint.fsdp.tree import Joined, Keys, Tree
from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, Parameter, Role, by_role
from zexport.checkpoint.zero.stage0 import match_in_order
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.text import some

States = Mapping[str, Mapping[str, Joined]]
"""Tensors of an optimizer, without ``step``, by its name (or number) of a parameter, and by key."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP1 and activation checkpointing insert."""


def cell_of(model: Tree, optimizer: Tree, path: Path) -> Cell:
    """Return the parameters of a model's state dict with the states of an optimizer's.

    The two may be one tree. ``path`` is the folder, for messages.
    """
    states, groups, prefix = _states(optimizer)
    top, trees = _model_tree(model, prefix if optimizer is model else None, path)
    names = _names(trees[top])
    aliases = {names[k]: names[o] for k, o in model.aliases.items() if k in names and o in names}
    path_of = {name: keys for keys, name in names.items() if name not in aliases}
    weights = {name: model.tensors[keys][0] for name, keys in path_of.items()}
    notes, owners = [*model.notes], None
    if others := [".".join(keys) or "the top level" for keys in trees if keys != top]:
        notes.append(f"Not part of the model: tensors in {some(others)}.")
    if optimizer.is_sharded or not model.is_sharded or not states:  # else FSDP1 flattened them
        owners = _owners(states, groups, weights, aliases)
    if owners is None:
        notes.append(
            "Optimizer states are left out: FSDP1 flattened them, or their numbers are ambiguous."
        )
    copies: list[Copy] = []
    parameters = []
    for name, weight in weights.items():
        copies += model.tensors[path_of[name]][1]
        is_floating = weight.dtype.is_floating
        is_trainable = name in owners if owners else is_floating
        role = Role.TRAINABLE if is_trainable else Role.FROZEN if is_floating else Role.BUFFER
        held = [As(MASTER if is_trainable else MODULE, weight.held[0])]
        for slot, (one, more) in states[owners[name]].items() if owners and is_trainable else ():
            if one.shape != weight.shape or slot in (MASTER, MODULE):
                problem = f"optimizer state {slot!r} does not have the shape of {name!r}"
                raise LayoutError(problem, list(one.shape), list(weight.shape))
            held.append(As(slot, one.held[0]))
            for copy in more:
                pair = (As(slot, copy.kept.held[0]),), (As(slot, copy.other.held[0]),)
                copies.append(Copy(*(replace(copy.kept, name=name, held=own) for own in pair)))
        parameters.append(Parameter(name, weight.shape, role, tuple(held)))
    return Cell(by_role(parameters), aliases=aliases, copies=tuple(copies), notes=tuple(notes))


def _states(tree: Tree) -> tuple[States, list[list[str]], Keys]:
    """Return the states of the optimizer in a tree, the names in each group, and their path.

    That is the part with ``param_groups``. torchtitan's is flat: ``state.<name>.<key>`` is one key
    (torch 2.13, ``checkpoint/state_dict.py``, ``flatten_optimizer_state_dict``).
    """
    everything = {**tree.others, **tree.tensors}
    prefixes = [
        keys[:depth]
        for keys in everything
        for depth, key in enumerate(keys)
        if key.partition(".")[0] == "param_groups"
    ]
    prefix = min(prefixes, key=len, default=("no optimizer",))
    found: dict[str, dict[str, Joined]] = {}
    groups: dict[str, list[str]] = {}
    for keys in everything:
        below = keys[len(prefix) :] if keys[: len(prefix)] == prefix else ()
        if len(below) == 1 and below[0].startswith("state."):
            below = ("state", *below[0].removeprefix("state.").rpartition(".")[::2])
        match below:
            case ("state", name, slot) if keys in tree.tensors:
                found.setdefault(name, {})[slot] = tree.tensors[keys]
            case ("param_groups", number, *setting):
                group, one = groups.setdefault(number, []), tree.others.get(keys)
                if setting[:1] == ["params"] and isinstance(one, int | str):
                    group.append(str(one))
    for own in found.values():
        own.pop("step", None)  # 0-dim for every parameter
    return found, [*groups.values()], prefix


def _model_tree(
    tree: Tree, optimizer: Keys | None, path: Path
) -> tuple[Keys, dict[Keys, list[Keys]]]:
    """Return the path of the model's state dict, and all state dicts with their tensors."""
    trees: dict[Keys, list[Keys]] = {}
    for keys in tree.tensors:
        if optimizer is None or keys[: len(optimizer)] != optimizer:
            trees.setdefault(keys[:-1], []).append(keys)
    named = [keys for keys in trees if keys and keys[-1] == "model"]
    chosen = named or [keys for keys in trees if not keys] or [*trees]
    if not chosen:
        hint = "Pass the folder that contains the model"
        raise IncompleteCheckpointError("contains no weights", path=path, hint=hint)
    if len(chosen) > 1:
        raise UnsupportedError(
            "several state dicts could be the model",
            path=path,
            found=some([".".join(keys) for keys in chosen]),
            hint="Save the model's state dict as model",
        )
    return chosen[0], trees


def _names(paths: Iterable[Keys]) -> dict[Keys, str]:
    """Return the names of weights without the parts that wrappers insert."""
    names = {keys: _unwrapped(keys[-1]) for keys in paths}
    if all(name.startswith("module.") for name in names.values()):  # DDP
        names = {keys: name.removeprefix("module.") for keys, name in names.items()}
    if (distinct := len({*names.values()})) < len(names):
        raise LayoutError(
            "weights have the same name once wrappers such as module. are removed",
            distinct,
            len(names),
        )
    return names


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain(name: str) -> str:
    """Return a name without wrappers and PEFT's ``.default``."""
    return _unwrapped(name).removeprefix("module.").replace(".default.", ".")


def _owners(
    states: States,
    groups: Sequence[Sequence[str]],
    weights: Mapping[str, Parameter],
    aliases: dict[str, str],
) -> dict[str, str] | None:
    """Return the optimizer's name for each weight that it has states of; ``None`` if ambiguous.

    These are names, with or without wrappers, or numbers in the order of the module's parameters.
    """
    if states and all(map(str.isdecimal, states)):
        return _numbered(states, groups, weights)
    exact, plain = {one: one for one in weights} | aliases, {_plain(one): one for one in weights}
    found: dict[str, str] = {}
    for own in states:
        name = exact.get(own) or plain.get(_plain(own))
        if name is None or name in found:
            raise LayoutError("optimizer has states of no weight, or twice", own, "a weight")
        found[name] = own
    return found


def _numbered(
    states: States, groups: Sequence[Sequence[str]], weights: Mapping[str, Parameter]
) -> dict[str, str] | None:
    """Return the number for each weight by the order and shapes of those in each group."""
    if sorted(number for own in groups for number in own) != sorted(states):
        if len(groups) > 1:
            return None
        groups = [sorted(states, key=lambda number: (len(number), number))]
    numbers = {(g, at): one for g, own in enumerate(groups) for at, one in enumerate(own)}
    shapes = {at: next((o.shape for o, _ in states[n].values()), ()) for at, n in numbers.items()}
    floating = [name for name, one in weights.items() if one.dtype.is_floating]
    spans = match_in_order([weights[name].shape for name in floating], shapes)
    if not spans or any(first != last for first, last in spans.values()):
        return None
    return {floating[first]: numbers[place] for place, (first, _) in spans.items()}
