"""Models whose modules are wrapped one by one: for activation checkpointing, or compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zexport
from tests.support import peft_models
from tests.support.checkpoints import Model, Run, edit, save
from tests.support.hf_models import differing, load, tiny_config, tiny_model, write_config
from zexport import AdapterMode, ExportOptions, NameLayout
from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import Role, raise_problems

_STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)


class _Net(nn.Module):
    """Two layers, the second with a frozen norm, between an embedding and a head that are tied."""

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
    """As TRL's, with a state dict that has the inner model's names."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = _layers_wrapped()
        self.v_head = nn.Linear(6, 1)

    def state_dict(self, *_: Any, **more: Any) -> Any:
        inner = self.pretrained_model.state_dict(**more)
        return {**inner, **self.v_head.state_dict(**more, prefix="v_head.")}


def _save(module: nn.Module, run: Run, root: Path) -> Path:
    """A checkpoint with the names that DeepSpeed finds, beside the module's own state dict."""
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


@_STAGES
@pytest.mark.parametrize("wrapped", [_layers_wrapped, _tied_wrapped, _all_wrapped, _WithValueHead])
def test_every_tensor_has_the_name_of_the_parameters_once(
    stage: int, wrapped: Any, tmp_path: Path
) -> None:
    module = wrapped()
    checkpoint = open_checkpoint(_save(module, Run(stage=stage), tmp_path))
    raise_problems(checkpoint)
    roles: dict[Role, set[str]] = {role: set() for role in Role}
    for tensor in checkpoint.tensors:
        roles[tensor.role].add(tensor.name)
    parameters = dict(module.named_parameters())
    assert roles[Role.TRAINABLE] == {n for n, p in parameters.items() if p.requires_grad}
    assert roles[Role.FROZEN] == {n for n, p in parameters.items() if not p.requires_grad}
    assert len(roles[Role.BUFFER]) == len(list(module.buffers()))
    assert len(checkpoint.tensors) == sum(map(len, roles.values()))
    assert checkpoint.aliases.keys() == (
        dict(module.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    )
    assert checkpoint.left_out == ()


@_STAGES
def test_layout_memory_writes_the_live_weights_once_under_the_wrapped_names(
    stage: int, tmp_path: Path
) -> None:
    module = _layers_wrapped()
    out = tmp_path / "out"
    options = ExportOptions(layout=NameLayout.MEMORY)
    zexport.consolidate(_save(module, Run(stage=stage), tmp_path / "run"), out, options)
    written = load_file(out / "model.safetensors")
    buffers = dict(module.named_buffers())
    parameters = dict(module.named_parameters())
    assert written.keys() == parameters.keys() | buffers.keys()
    for name, value in written.items():
        truth = {**parameters, **buffers}[name].detach()
        is_frozen = name in parameters and not parameters[name].requires_grad
        assert value.equal(truth.bfloat16().to(value.dtype) if is_frozen else truth)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _wrap_layers(model: Any, *wrappers: Callable[[nn.Module], Any]) -> None:
    for wrap in wrappers:
        for number, layer in enumerate(model.layers):
            model.layers[number] = wrap(layer)


@pytest.mark.slow
@_STAGES
@pytest.mark.parametrize(
    ("wrappers", "around"),
    [
        ([checkpoint_wrapper], None),
        ([_compiled], None),
        ([_compiled, checkpoint_wrapper], None),
        ([checkpoint_wrapper, _compiled], _compiled),
    ],
)
def test_a_model_of_wrapped_layers_loads_as_the_live_one(
    stage: int, wrappers: Any, around: Any, tmp_path: Path
) -> None:
    config = tiny_config(tie_word_embeddings=True)
    model = tiny_model("LlamaForCausalLM", config)
    truth = tiny_model("LlamaForCausalLM", config)
    model.model.layers[1].mlp.requires_grad_(requires_grad=False)
    truth.model.layers[1].mlp.bfloat16().float()
    _wrap_layers(model.model, *wrappers)
    root = _save(around(model) if around else model, Run(stage=stage), tmp_path / "run")
    write_config(root, config, architectures=["LlamaForCausalLM"])
    zexport.consolidate(root, tmp_path / "out")
    loaded, problems = load(tmp_path / "out")
    assert problems == {}
    assert differing(loaded, truth) == []
    assert zexport.verify_export(tmp_path / "out", against=root).ok


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, _compiled])
@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
def test_an_adapter_on_wrapped_layers_has_pefts_names(
    wrap: Any, mode: AdapterMode, tmp_path: Path
) -> None:
    trained = peft_models.train(peft_models.FORMS["plain"], tmp_path, Run(stage=2))
    options = ExportOptions(adapter=mode, base=trained.base if mode is AdapterMode.MERGE else None)
    zexport.consolidate(trained.checkpoint, tmp_path / "plain", options)
    _wrap_layers(trained.model.base_model.model.model, wrap)
    _save(trained.model, Run(stage=2), trained.checkpoint)
    zexport.consolidate(trained.checkpoint, tmp_path / "wrapped", options)
    file = "adapter_model" if mode is AdapterMode.KEEP else "model"
    one, other = (load_file(tmp_path / o / f"{file}.safetensors") for o in ("plain", "wrapped"))
    assert one.keys() == other.keys()
    assert all(value.equal(other[name]) for name, value in one.items())
