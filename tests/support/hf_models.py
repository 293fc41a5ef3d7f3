"""Tiny models of transformers' own families, their checkpoints, and how an export of them loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.checkpoints import Model, Run, save

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(family: str = "Llama", **more: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**_SIZES, **more})


def tiny_model(architecture: str, config: Any) -> Any:
    """A model with random weights that are no multiples of 16-bit numbers."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


def write_checkpoint(
    model: torch.nn.Module, root: Path, run: Run | None = None, *, wrap: str = ""
) -> Path:
    """A ZeRO checkpoint of a live model, in training in bf16; ``wrap`` comes before every name."""
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters_fp32: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied[wrap + name] = names[id(parameter)]
        else:
            names[id(parameter)] = wrap + name
            parameters_fp32[wrap + name] = parameter.detach()
    parameters = {*parameters_fp32, *tied}
    buffers = {wrap + n: t for n, t in model.state_dict().items() if wrap + n not in parameters}
    return save(Model([parameters_fp32], buffers=buffers, tied=tied), run or Run(), root)


def write_config(folder: Path, config: Any, **changes: Any) -> Path:
    """The config as ``save_pretrained`` writes it; ``None`` takes a key away."""
    config.save_pretrained(folder)
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2) + "\n")
    return path


def write_run(
    model: torch.nn.Module,
    root: Path,
    architecture: str,
    config: Any = None,
    run: Run | None = None,
    *,
    wrap: str = "",
    **changes: Any,
) -> Path:
    """A checkpoint and the config of ``model`` or another, which names this class."""
    write_checkpoint(model, root, run, wrap=wrap)
    write_config(root, config or model.config, architectures=[architecture], **changes)
    return root


def load(folder: Path, architecture: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The export as transformers loads it, and what was missing, unexpected or of another shape."""
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, architecture or config["architectures"][0])
    model, info = cls.from_pretrained(
        folder, output_loading_info=True, dtype="auto", ignore_mismatched_sizes=True
    )
    return model, {key: value for key, value in info.items() if value}


def differing(model: torch.nn.Module, truth: torch.nn.Module) -> list[str]:
    """The names that one of two models lacks or has with other values."""
    left: Mapping[str, torch.Tensor] = model.state_dict()
    right: Mapping[str, torch.Tensor] = truth.state_dict()
    both = left.keys() & right.keys()
    return [*(left.keys() ^ right.keys()), *(n for n in both if not left[n].equal(right[n]))]
