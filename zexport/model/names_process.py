"""Asks transformers for models' names: ``python -m zexport.model.names_process FD < CONFIGS``.

A line of JSON is answered by a line of JSON, in the file that is open as number FD: what libraries
print is no answer. Models are built on the meta device, without weights,
and from classes that transformers itself ships: code that a config names is never imported. What
building one may take is bounded, so that a config of a billion layers ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Collection
from copy import deepcopy
from typing import Any, TextIO

import torch
import transformers
from huggingface_hub import errors
from transformers.models.auto import modeling_auto

from zexport.model.config_facts import ROPE, built_of, parts_of
from zexport.model.conversion import describe_model, ignored_names

_BUILDING_SECONDS = 45
_BUILDING_NBYTES = 2 << 30
"""What building may take above what the imports took; the largest models take a tenth of it."""

_GIVEN = {limit: resource.getrlimit(limit) for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS)}
"""The limits that this process began with, soft and hard."""

_UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a class raises that a config is not enough for."""

_INVALID: type[Exception] = getattr(errors, "StrictDataclassError", ValueError)
"""What configs raise that contradict themselves (huggingface_hub 0.35 and later)."""

_PLAIN = (str, int, float, list)

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""Parts of keys that may name a repository of compiled kernels, which would be loaded and run.

Source: transformers 5.23, ``modeling_utils.py``, ``_check_and_adjust_attn_implementation``.
"""


def bound_work() -> None:
    """Let this process go on for so long, and take so much more memory, and no more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + _BUILDING_SECONDS)
    if sys.platform == "linux":  # elsewhere the system does not hold processes to it
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            pages = int(file.read().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _BUILDING_NBYTES)


def _lower(limit: int, value: int) -> None:
    soft, hard = _GIVEN[limit]
    allowed = [bound for bound in (soft, hard, value) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(limit, (min(allowed), hard))


def without_code(content: Any) -> Any:
    """A config less every key by which transformers would choose code that is not its own."""
    if isinstance(content, dict):
        return {
            key: without_code(value)
            for key, value in content.items()
            if key != "auto_map" and not any(part in key for part in _IMPLEMENTATIONS)
        }
    return [without_code(item) for item in content] if isinstance(content, list) else content


def with_floats(content: Any) -> Any:
    """A config with the numbers that JSON has no word for, as ``save_pretrained`` tags them.

    Source: transformers 5.23, ``configuration_utils.py``, ``_encode_special_floats``.
    """
    if isinstance(content, dict):
        tag = content.get("__float__") if len(content) == 1 else None
        if tag in ("Infinity", "-Infinity", "NaN"):
            return float(tag)
        return {key: with_floats(value) for key, value in content.items()}
    return [with_floats(item) for item in content] if isinstance(content, list) else content


def describe(content: dict[str, Any]) -> dict[str, Any]:
    """State dicts that a config may mean: ``{"candidates": [...]}``, or ``{"error": ...}``."""
    model_type = str(content.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        return {
            "error": f"transformers {transformers.__version__} has no model type {model_type!r}"
        }
    config_class = transformers.CONFIG_MAPPING[model_type]
    named = content.get("architectures")
    architectures = named or _architectures_of(model_type, config_class)
    known = [name for name in architectures if hasattr(transformers, name)]
    if not known:
        missing = ", ".join(map(repr, architectures)) or "any architecture for it"
        return {"error": f"transformers {transformers.__version__} does not have {missing}"}
    candidates, reason = [], ""
    defaults = defaults_of(config_class, content)
    for name in known:
        try:
            model = _without_data(name, config_class.from_dict(dict(content)))
        except _UNBUILDABLE as error:
            if named:
                raise
            reason = f"transformers failed: {error}"  # some classes want more of a config
            continue
        described = {**describe_model(model), "ignored": ignored_names(model), "defaults": defaults}
        candidates.append({**described, "other_type": _other_type(type(model), config_class)})
    return {"candidates": candidates} if candidates else {"error": reason}


def defaults_of(config_class: Any, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a class takes for keys that say how a model is built, each where it is left out.

    For the whole config under an empty name, and for those of its parts under theirs; a default may
    follow from what else a config says.
    """

    def taken(part: str, without: Collection[str]) -> dict[str, Any]:
        table = content[part] if part else content
        rest = {key: value for key, value in table.items() if key not in without}
        try:
            given = deepcopy({**content, part: rest} if part else rest)  # classes change it
            full = config_class.from_dict(given).to_dict()
            return built_of(full.get(part) or {} if part else full)
        except (*_UNBUILDABLE, _INVALID):
            return {}

    found = {}
    for part in ("", *parts_of(content)):
        table = content[part] if part else content
        known = {k: v for k, v in taken(part, ()).items() if k not in built_of(table)}
        for key in table:
            if gone := built_of({key: table[key]}).keys():
                without = ROPE if key in ROPE else (key,)
                known |= {k: v for k, v in taken(part, without).items() if k in gone}
        found[part] = {k: v for k, v in known.items() if isinstance(v, _PLAIN)}
    return found


def _other_type(model_class: Any, config_class: Any) -> str:
    """The model type of a class, where it is surely another than that of a config.

    It is not where a table of transformers has the class for both, where one config is made of the
    other, nor for whole models and their parts.
    """
    own = model_class.config_class
    model_type: str = getattr(own, "model_type", "")
    is_one = own is None or issubclass(own, config_class) or issubclass(config_class, own)
    if is_one or model_type in ("", config_class.model_type):
        return ""
    packages = {one.__module__.rpartition(".")[0] for one in (own, config_class)}
    if len(packages) == 1 or own.sub_configs or config_class.sub_configs:
        return ""
    return "" if model_class.__name__ in _in_tables(config_class.model_type) else model_type


def _in_tables(model_type: str) -> list[str]:
    """The classes that transformers' tables have for a model type."""
    tables = [
        table
        for name, table in vars(modeling_auto).items()
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")
    ]
    found: list[str] = []
    for table in tables:
        names = table.get(model_type, ())
        found += [names] if isinstance(names, str) else names
    return found


def _architectures_of(model_type: str, config_class: type) -> list[str]:
    """The classes of a model type: those that transformers' tables have, and those beside them."""
    found = [name for name in _in_tables(model_type) if hasattr(transformers, name)]
    modules = {getattr(transformers, name).__module__ for name in found}
    beside = (name for module in modules for name in getattr(sys.modules[module], "__all__", ()))
    found += sorted(name for name in beside if _is_model_of(config_class, name))
    return list(dict.fromkeys(found))


def _is_model_of(config_class: type, name: str) -> bool:
    """Whether transformers has a whole model of that name for that config."""
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return (
        is_model
        and "pretrained" not in name.lower()
        and getattr(found, "config_class", None) is config_class
    )


def _without_data(architecture: str, config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, architecture)._from_config(config)


def answer_all(answers: TextIO) -> None:
    """Answer every config of the standard input, each within its own bounds.

    The first answer says that what is needed for others was imported.
    """
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        bound_work()
        answer = describe(with_floats(without_code(json.loads(line))))
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


if __name__ == "__main__":
    if not transformers.is_torch_available():
        raise ImportError(f"it does not take torch {torch.__version__}")
    with os.fdopen(int(sys.argv[1]), "w") as to_answer:
        answer_all(to_answer)
