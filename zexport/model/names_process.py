"""Describe the model of a config: ``python -m zexport.model.names_process < config.json``.

Models are built on the meta device from classes that transformers ships: code that a config names
is never imported. Time and memory are bounded, because a config may describe a billion layers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import errors
from transformers.models.auto import modeling_auto

from zexport.model.conversion import REFUSALS, describe_model, ignored_names
from zexport.model.names_client import ANSWER, FAILED

_BUILDING_SECONDS = 45
_BUILDING_NBYTES = 2 << 30
"""Bounds for building a model, without the imports; the largest models need a tenth."""

_STAND_INS = {"vocab_size": 10_000_019, "num_labels": 4099}
"""Sizes that training may change, with a value that no dimension of a real model has."""

_INVALID: type[Exception] = getattr(errors, "StrictDataclassError", ValueError)
_UNBUILDABLE = (*REFUSALS, _INVALID, AssertionError, ImportError, MemoryError, OSError)
"""What transformers raises for a config that contradicts itself or is not enough for a class."""

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Parts of keys that may name a repository of compiled kernels, which would be loaded and run.

Source: transformers 5.23, ``modeling_utils.py`` (``_check_and_adjust_attn_implementation``).
"""


def bound_work() -> None:
    """Limit the CPU time and memory that this process may still use."""
    bounds = {resource.RLIMIT_CPU: int(time.process_time()) + _BUILDING_SECONDS}
    if sys.platform == "linux":  # other systems ignore the limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        bounds[resource.RLIMIT_AS] = pages * resource.getpagesize() + _BUILDING_NBYTES
    for limit, bound in bounds.items():
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (min({soft, hard, bound} - {resource.RLIM_INFINITY}), hard))


def plain_config(content: Any) -> Any:
    """Return a config without keys that name other code, and with its special floats decoded.

    Source: transformers 5.23, ``configuration_utils.py`` (``_encode_special_floats``).
    """
    if isinstance(content, list):
        return [plain_config(item) for item in content]
    if not isinstance(content, dict):
        return content
    tag = content.get("__float__") if len(content) == 1 else None
    if tag in ("Infinity", "-Infinity", "NaN"):
        return float(tag)
    return {
        key: plain_config(value)
        for key, value in content.items()
        if key != "auto_map" and not any(part in key for part in _IMPLEMENTATIONS)
    }


def describe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config may mean: ``{"candidates": [...]}`` or ``{"error": ...}``."""
    model_type, version = str(content.get("model_type")), transformers.__version__
    if model_type not in transformers.CONFIG_MAPPING:
        return {"error": f"transformers {version} has no model type {model_type!r}"}
    config_class = transformers.CONFIG_MAPPING[model_type]
    named = content.get("architectures")
    every = named or _architectures_of(model_type, config_class)
    known = [name for name in every if hasattr(transformers, name)]
    if not known:
        return {"error": f"transformers {version} has no class {named or f'of type {model_type}'}"}
    candidates, reason = [], ""
    for name in known:
        try:
            candidates.append(_describe(getattr(transformers, name), config_class, content))
        except _UNBUILDABLE as error:
            if named:
                raise
            reason = f"transformers failed: {error}"  # some classes need more than the config
    return {"candidates": candidates} if candidates else {"error": reason}


def _describe(model_class: Any, config_class: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of one class, with the axes of its vocabulary and labels.

    A config from ZeRO-3's placeholders states size 0. If the class cannot be built with the stated
    sizes, it is built with the stand-ins, and the weights give the sizes.
    """
    models = []
    for is_sized in (True, False):
        try:
            models.append(_build(model_class, config_class.from_dict(dict(content)), is_sized))
        except _UNBUILDABLE:
            if not (is_sized or models):
                raise
    state = models[0].state_dict()
    sizes = {
        size: {n: [*t.shape].index(value) for n, t in state.items() if value in t.shape}
        for size, value in _STAND_INS.items()
    }
    return {
        **describe_model(models[-1]),
        "ignored": ignored_names(models[-1]),
        "other_type": _other_type(model_class, config_class),
        "sizes": sizes,
    }


def _build(model_class: Any, config: Any, is_sized: bool) -> Any:
    if is_sized:
        config.num_labels = _STAND_INS["num_labels"]
        for table in (config, config.get_text_config()):
            if hasattr(table, "vocab_size"):
                table.vocab_size = _STAND_INS["vocab_size"]
    with torch.device("meta"):
        return model_class._from_config(config)


def _other_type(model_class: Any, config_class: Any) -> str:
    """Return the model type of a class if it is surely not that of a config, else an empty string.

    It is not sure if transformers lists the class for both, if one config is derived from the
    other, or for a whole model and its part.
    """
    own = model_class.config_class
    if own is None or issubclass(own, config_class) or issubclass(config_class, own):
        return ""
    is_same_package = (
        own.__module__.rpartition(".")[0] == config_class.__module__.rpartition(".")[0]
    )
    is_composite = own.sub_configs or config_class.sub_configs
    is_listed = model_class.__name__ in _in_tables(config_class.model_type)
    is_same_type = own.model_type in ("", config_class.model_type)
    return "" if is_same_package or is_composite or is_listed or is_same_type else own.model_type


def _in_tables(model_type: str) -> list[str]:
    listed = [
        table.get(model_type, ())
        for name, table in vars(modeling_auto).items()
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")
    ]
    return [name for one in listed for name in ([one] if isinstance(one, str) else one)]


def _architectures_of(model_type: str, config_class: type) -> list[str]:
    """Return the classes of a model type: the listed ones, then others in their modules."""
    found = [name for name in _in_tables(model_type) if hasattr(transformers, name)]
    modules = {getattr(transformers, name).__module__ for name in found}
    others = {name for module in modules for name in getattr(sys.modules[module], "__all__", ())}
    found += [
        name
        for name in sorted(others)
        if isinstance(one := getattr(transformers, name, None), type)
        and issubclass(one, transformers.PreTrainedModel)
        and getattr(one, "config_class", None) is config_class
        and "pretrained" not in name.lower()
    ]
    return list(dict.fromkeys(found))


def main() -> int:
    """Answer the config on stdin; what libraries print to stdout goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        bound_work()
        try:
            answer = describe(plain_config(json.load(sys.stdin.buffer)))
        except _UNBUILDABLE as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return FAILED
        answers.write(ANSWER + json.dumps(answer, separators=(",", ":")).encode())
        return 0


if __name__ == "__main__":
    if not transformers.is_torch_available():
        raise ImportError(f"transformers does not support torch {torch.__version__}")
    sys.exit(main())
