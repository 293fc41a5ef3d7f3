"""The sidecar ``zexport_source.json``: what a checkpoint's weights will be called on the hub."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from zexport import __version__
from zexport.model.conversion import describe_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEMA = 2


def describe_source(
    model: torch.nn.Module, dtype: torch.dtype, twin: PreTrainedModel, *, adapter: bool
) -> str:
    """The sidecar's JSON for ``model`` as DeepSpeed has it, cast to ``dtype`` and partitioned.

    ``tensors`` is what an export writes, a tied weight once; ``stored_name`` its name in the
    checkpoint; ``model`` how each is made, so that an export needs no transformers.
    """
    in_memory = _whole_tensors(model)
    tied = _tied(model, twin)
    memory = {name: tensor for name, tensor in in_memory.items() if name not in tied}
    hub = memory if adapter else _hub_tensors(twin, memory)
    stored_names = {id(tensor): name for name, tensor in memory.items()}
    description: dict[str, Any] = {
        "schema": SCHEMA,
        "created_by": f"zexport train {__version__}",
        **{name: version(name) for name in ("transformers", "torch", "deepspeed")},
        "model_type": twin.config.model_type,
        "architecture": type(twin).__name__,
        "dtype": _name(dtype),
        "tensors": {name: _entry(hub[name], stored_names) for name in sorted(hub)},
        "tied": tied,
        "buffers": sorted(in_memory.keys() - dict(_parameters(model))),
        "frozen": sorted(n for n, p in model.named_parameters() if not p.requires_grad),
        "names_match_memory": _shapes(hub) == _shapes(memory),
    }
    if adapter:
        description["adapter"] = True
    else:
        description["model"] = describe_model(twin, as_loaded=True)
    return json.dumps(description, indent=2) + "\n"


def _parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _whole_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer at its whole shape, without data.

    ZeRO-3 leaves an empty tensor in the parameter and its shape in ``ds_shape`` (deepspeed 0.19.8,
    ``runtime/zero/partition_parameters.py``).
    """
    parameters = dict(_parameters(model))
    whole = {}
    for name, tensor in model.state_dict().items():
        shape = getattr(parameters.get(name), "ds_shape", tensor.shape)
        whole[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return whole


def _tied(model: torch.nn.Module, twin: PreTrainedModel) -> dict[str, str]:
    """Alias to kept name of every parameter that has several names."""
    aliases = set(twin.all_tied_weights_keys)
    names: dict[int, list[str]] = {}
    for name, parameter in _parameters(model):
        names.setdefault(id(parameter), []).append(name)
    tied = {}
    for same in (group for group in names.values() if len(group) > 1):
        kept = next((name for name in same if name not in aliases), same[0])
        tied.update({name: kept for name in same if name != kept})
    return tied


def _hub_tensors(twin: PreTrainedModel, memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    left_out = set(twin._keys_to_ignore_on_save or ())
    saved = {name: tensor for name, tensor in memory.items() if name not in left_out}
    hub: dict[str, torch.Tensor] = revert_weight_conversion(twin, saved)
    return hub


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _entry(tensor: torch.Tensor, stored_names: dict[int, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {"shape": list(tensor.shape), "dtype": _name(tensor.dtype)}
    if id(tensor) in stored_names:
        entry["stored_name"] = stored_names[id(tensor)]
    return entry


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
