"""From saved state dicts to parameters: which tensors are weights, which their optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.boxes import As
from zexport.checkpoint.fsdp.tree import Keys, Tree
from zexport.checkpoint.state import MASTER, MODULE, Cell, Copy, Held, Parameter, Role, by_role
from zexport.checkpoint.zero.stage0 import match_in_order
from zexport.errors import IncompleteCheckpointError, LayoutError, UnsupportedError
from zexport.printable import some
from zexport.ranges.dtypes import Shape

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP1 and activation checkpointing insert."""


class States(Struct, frozen=True):
    """An optimizer's state dict.

    Attributes:
        of: tensors by the optimizer's name (or number) of a parameter, and by key.
        groups: names or numbers of the parameters in each parameter group, if recorded.
        prefix: path of the state dict.
    """

    of: Mapping[str, Mapping[str, Keys]]
    groups: Sequence[Sequence[str]]
    prefix: Keys


def cell_of(model: Tree, optimizer: Tree, path: Path) -> Cell:
    """Return the parameters of a model's state dict with the states of an optimizer's.

    The two may be one tree. ``path`` is the folder, for messages.
    """
    states = _states(optimizer)
    top, trees = _model_tree(model, states.prefix if optimizer is model else None, path)
    names = _names(trees[top])
    path_of = {name: keys for keys, name in names.items()}
    weights = {name: model.tensors[keys] for name, keys in path_of.items()}
    aliases = {names[k]: names[o] for k, o in model.aliases.items() if k in names and o in names}
    notes = [*model.notes]
    if others := [".".join(keys) or "the top level" for keys in trees if keys != top]:
        notes.append(f"Not part of the model: tensors in {some(others)}.")
    owners = None
    if optimizer.is_sharded or not model.is_sharded or not states.of:  # else FSDP1 flattened them
        owners = _owners(states, weights, aliases, optimizer)
    if owners is None:
        note = "Optimizer states are left out: FSDP1 flattened them, or their numbers are ambiguous"
        owners, notes = {}, [*notes, f"{note}."]
    copies: list[Copy] = []
    parameters = []
    for name, weight in weights.items():
        if name in aliases:
            continue
        copies += model.copies.get(path_of[name], ())
        is_floating = weight.dtype.is_floating
        is_trainable = name in owners or (not owners and is_floating)
        role = Role.TRAINABLE if is_trainable else Role.FROZEN if is_floating else Role.BUFFER
        held: list[Held] = [As(MASTER if is_trainable else MODULE, weight.held[0])]
        for slot, keys in states.of[owners[name]].items() if name in owners else ():
            tensor = optimizer.tensors[keys]
            if slot == "step":  # 0-dim for every parameter
                continue
            if tensor.shape != weight.shape or slot in (MASTER, MODULE):
                raise LayoutError(
                    f"optimizer state {slot!r} does not have the shape of {name!r}",
                    list(tensor.shape),
                    list(weight.shape),
                )
            held.append(As(slot, tensor.held[0]))
            for copy in optimizer.copies.get(keys, ()):
                pair = (copy.kept, copy.other)
                copies.append(
                    Copy(*(replace(p, name=name, held=(As(slot, p.held[0]),)) for p in pair))
                )
        parameters.append(Parameter(name, weight.shape, role, tuple(held)))
    return Cell(by_role(parameters), aliases=aliases, copies=tuple(copies), notes=tuple(notes))


def _states(tree: Tree) -> States:
    """Return the optimizer's state dict in a tree: the part with ``param_groups``.

    torchtitan's is flat: ``state.<name>.<key>`` is one key (torch 2.13,
    ``checkpoint/state_dict.py``, ``flatten_optimizer_state_dict``).
    """
    everything = [*tree.tensors, *tree.others]
    prefixes = [
        keys[:depth]
        for keys in everything
        for depth, key in enumerate(keys)
        if key.partition(".")[0] == "param_groups"
    ]
    prefix = min(prefixes, key=len, default=("no optimizer",))
    found: dict[str, dict[str, Keys]] = {}
    groups: dict[str, list[str]] = {}
    for keys in everything:
        match keys[len(prefix) :] if keys[: len(prefix)] == prefix else ():
            case ("state", name, slot) if keys in tree.tensors:
                found.setdefault(name, {})[slot] = keys
            case (flat,) if flat.startswith("state.") and keys in tree.tensors:
                name, _, slot = flat.removeprefix("state.").rpartition(".")
                found.setdefault(name, {})[slot] = keys
            case ("param_groups", number, *setting):
                group, one = groups.setdefault(number, []), tree.others.get(keys)
                if setting[:1] == ["params"] and isinstance(one, int | str):
                    group.append(str(one))
    return States(found, [*groups.values()], prefix)


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
        raise IncompleteCheckpointError(
            "no weights", path=path, hint="Pass the folder that contains the model"
        )
    if len(chosen) > 1:
        raise UnsupportedError(
            "several state dicts could be the model",
            path=path,
            found=some([".".join(keys) for keys in chosen]),
            expected="one, or one named model",
            hint="Save the model's state dict as model",
        )
    return chosen[0], trees


def _names(paths: Iterable[Keys]) -> dict[Keys, str]:
    """Return the names of weights without the parts that wrappers insert."""
    names = {keys: _unwrapped(keys[-1]) for keys in paths}
    if all(name.startswith("module.") for name in names.values()):  # DDP
        names = {keys: name.removeprefix("module.") for keys, name in names.items()}
    if (distinct := len({*names.values()})) < len(names):
        raise LayoutError("weights have the same name without wrappers", distinct, len(names))
    return names


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _plain(name: str) -> str:
    """Return a name without wrappers and PEFT's ``.default``."""
    return _unwrapped(name).removeprefix("module.").replace(".default.", ".")


def _owners(
    states: States, weights: Mapping[str, Parameter], aliases: Mapping[str, str], tree: Tree
) -> dict[str, str] | None:
    """Return the optimizer's name for each weight that it has states of; ``None`` if ambiguous.

    These are names, with or without wrappers, or numbers in the order of the module's parameters.
    """
    if states.of and all(map(str.isdecimal, states.of)):
        return _numbered(states, weights, aliases, tree)
    plain = {_plain(name): name for name in weights if name not in aliases}
    found: dict[str, str] = {}
    for own in states.of:
        name = own if own in weights else plain.get(_plain(own))
        name = aliases.get(name, name) if name is not None else None
        if name is None or name in found:
            raise LayoutError(
                "optimizer has states of an unknown weight, or twice", own, "a weight"
            )
        found[name] = own
    return found


def _numbered(
    states: States, weights: Mapping[str, Parameter], aliases: Mapping[str, str], tree: Tree
) -> dict[str, str] | None:
    """Return the number for each weight by the order and shapes of those in each group."""
    groups = states.groups
    if sorted(number for own in groups for number in own) != sorted(states.of):
        if len(groups) > 1:
            return None
        groups = [sorted(states.of, key=lambda number: (len(number), number))]
    numbers = {(g, at): one for g, own in enumerate(groups) for at, one in enumerate(own)}
    shapes: dict[tuple[int, int], Shape] = {}
    for place, number in numbers.items():
        own = [
            tree.tensors[keys].shape for slot, keys in states.of[number].items() if slot != "step"
        ]
        shapes[place] = own[0] if own else ()
    floating = [n for n, one in weights.items() if one.dtype.is_floating and n not in aliases]
    spans = match_in_order([weights[name].shape for name in floating], shapes)
    if not spans or any(first != last for first, last in spans.values()):
        return None
    return {floating[first]: numbers[place] for place, (first, _) in spans.items()}
