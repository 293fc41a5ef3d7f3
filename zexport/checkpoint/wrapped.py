"""State dicts whose names are not those of the parameters, because a wrapper leaves its own out."""

from __future__ import annotations

from dataclasses import replace

from zexport.checkpoint.states import ModelStates


def with_parameter_names(model: ModelStates) -> ModelStates:
    """The states with the module's state dict under the names that ``param_shapes`` has.

    TRL's model with a value head overrides ``state_dict`` to leave ``pretrained_model.`` out of the
    names (``models/modeling_value_head.py``), while DeepSpeed names parameters and buffers itself.
    Nothing changes unless every parameter that the state dict lacks is there without its first
    part, and that is the same for all of them.
    """
    parameters = {name for shapes in model.param_shapes for name in shapes}
    parameters |= (model.frozen_shapes or {}).keys()
    lacking = sorted(parameters - model.module.keys())
    if not lacking:
        return model
    wrapper = f"{lacking[0].partition('.')[0]}."
    inner = {name.removeprefix(wrapper) for name in lacking if name.startswith(wrapper)}
    if len(inner) < len(lacking) or not inner <= model.module.keys() - parameters:
        return model
    own = {*parameters, *model.buffer_names}
    module = {
        name if name in own else wrapper + name: tensor for name, tensor in model.module.items()
    }
    return replace(model, module=module)
