"""Models with wrapped modules: activation checkpointing, a value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zexport
from tests.support.checkpoints import Model, Run, edit, save
from zexport import ExportOptions, NameLayout, Role


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)


class _Net(nn.Module):
    """Tied embedding and head; the norm of the second layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.layers: Any = nn.ModuleList([_Layer(), _Layer()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.layers[1].norm.requires_grad_(requires_grad=False)


def _layers_wrapped() -> nn.Module:
    model: Any = _Net()
    model.layers[0].lin = checkpoint_wrapper(model.layers[0].lin)
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return model


def _tied_wrapped() -> nn.Module:
    model: Any = _Net()
    model.emb, model.head = checkpoint_wrapper(model.emb), checkpoint_wrapper(model.head)
    return model


def _all_wrapped() -> nn.Module:
    return checkpoint_wrapper(_layers_wrapped())


class _WithValueHead(nn.Module):
    """TRL's: its state dict has the inner model's names."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = _layers_wrapped()
        self.v_head = nn.Linear(6, 1)

    def state_dict(self, *_: Any, **more: Any) -> Any:
        inner = self.pretrained_model.state_dict(**more)
        return {**inner, **self.v_head.state_dict(**more, prefix="v_head.")}


def _save(module: nn.Module, run: Run, root: Path) -> Path:
    """A checkpoint with the names that DeepSpeed finds, and the module's own state dict."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    buffers = {
        f"{path}.{name}": buffer
        for path, inner in module.named_modules()
        for name, buffer in inner.named_buffers(recurse=False)
        if name not in inner._non_persistent_buffers_set
    }
    paths = {
        f"{path}.{name}": parameter
        for path, inner in module.named_modules(remove_duplicate=False)
        for name, parameter in inner.named_parameters(recurse=False)
    }
    first: dict[int, str] = {}
    found = {path: first.setdefault(id(p), path) for path, p in paths.items()}
    named = {names[id(p)]: p for p in paths.values()}
    model = Model(
        [{name: p.detach() for name, p in named.items() if p.requires_grad}],
        frozen={n: p.detach().bfloat16() for n, p in named.items() if not p.requires_grad},
        buffers=buffers,
        tied={path: name for path, name in found.items() if path != name},
    )
    own = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    values = {id(b): name for name, b in buffers.items()} | names

    def rename(state: dict[str, Any]) -> None:
        state["module"] = {name: state["module"][values[tensor]] for name, tensor in own.items()}

    save(model, run, root)
    for path in root.glob("*/*model_states.pt"):
        edit(path, rename)
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("wrapped", [_layers_wrapped, _tied_wrapped, _all_wrapped, _WithValueHead])
def test_every_tensor_is_exported_once_under_its_parameter_name(
    stage: int, wrapped: Any, tmp_path: Path
) -> None:
    module, out = wrapped(), tmp_path / "out"
    root = _save(module, Run(stage=stage), tmp_path / "run")
    checkpoint = zexport.open_checkpoint(root)
    parameters, buffers = dict(module.named_parameters()), list(module.buffers())
    frozen = {name for name, value in parameters.items() if not value.requires_grad}
    roles = {one.name: one.role for one in checkpoint.tensors}
    assert {name for name, role in roles.items() if role is Role.FROZEN} == frozen
    tied = dict(module.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    assert (checkpoint.aliases.keys(), checkpoint.left_out) == (tied, ())
    zexport.consolidate(root, out, ExportOptions(layout=NameLayout.MEMORY))
    written = load_file(out / "model.safetensors")
    assert written.keys() >= parameters.keys()
    assert len(written) == len(parameters) + len(buffers)
    for name, parameter in parameters.items():
        truth = parameter.bfloat16().float() if name in frozen else parameter
        assert written[name].float().equal(truth)
