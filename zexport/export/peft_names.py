"""PEFT parameter names.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict``),
``tuners/tuners_utils.py`` (``_remove_adapter_name_from_state_dict_key``) and ``utils/other.py``
(``ModulesToSaveWrapper``, ``TrainableTokensWrapper``).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zexport.export.weights import PEFT_PREFIX

_COPY = "modules_to_save"
_ORIGINAL = "original_module"
_WRAPPED = "base_layer"
_WRAPPERS = (_WRAPPED, _ORIGINAL, "token_adapter")
_TOKENS = "trainable_tokens_delta"
_PROMPT = "prompt_encoder"

_METHODS = {
    "lora_": "LORA",
    "ia3_": "IA3",
    "hada_": "LOHA",
    "lokr_": "LOKR",
    "oft_": "OFT",
    "boft_": "BOFT",
    "hra_": "HRA",
    "hira_": "HIRA",
    "fourierft_": "FOURIERFT",
    "ln_tuning_layers": "LN_TUNING",
    "c3a_": "C3A",
    "miss_": "MISS",
    "road_": "ROAD",
    "delora_": "DELORA",
    "gralora_": "GRALORA",
    "waveft_": "WAVEFT",
    _TOKENS: "TRAINABLE_TOKENS",
}
"""Start of an attribute that a PEFT method adds to a layer: the method.

Source: peft 0.21, ``prefix`` and ``adapter_layer_names`` in ``tuners/*``.
"""

KEPT_BY_NAME = {*_METHODS.values(), "PROMPT_TUNING", "PREFIX_TUNING"}
"""Methods that peft saves as the module's tensors, under their names without the adapter's.

Source: peft 0.21, ``_get_adapter_state_dict`` in ``tuners/*``. Others change or add tensors.
"""


class PeftName(Struct, frozen=True):
    """The parts of a parameter name in a PEFT model.

    Attributes:
        module: module of the base model, without PEFT's prefix and wrappers.
        rest: name of the tensor within ``attribute`` or, for base weights, within ``module``.
        attribute: what the method adds, such as ``lora_A``; ``modules_to_save`` for a trained copy
            of a module; empty for base weights.
        adapter: empty for base weights.
        on_disk: name in ``adapter_model.safetensors``; empty for base weights.
        depth: number of wrappers of ``module`` around the one that contains the tensor.
        is_replaced: whether it is the original of a module that has a trained copy.
    """

    module: str
    rest: str
    attribute: str = ""
    adapter: str = ""
    on_disk: str = ""
    depth: int = 0
    is_replaced: bool = False

    @property
    def of_base(self) -> str:
        """Name in the base model of this weight, or of the weight that a trained copy replaces."""
        return _join(self.module, self.rest)

    @property
    def tensor(self) -> str:
        """Name within the module, without the adapter's, such as ``lora_A.weight``."""
        return _join(self.attribute, self.rest)

    @property
    def is_copy(self) -> bool:
        return self.attribute == _COPY

    @property
    def is_tokens(self) -> bool:
        return self.attribute == _TOKENS

    @property
    def is_prompt(self) -> bool:
        return self.attribute == _PROMPT


def parse_name(name: str) -> PeftName:
    """Return the parts of any parameter name."""
    inner, prefix = inner_name(name), PEFT_PREFIX
    parts = inner.split(".")
    if inner == name and _PROMPT in parts[:-1] and parts[-2:] == ["embedding", "weight"]:
        adapter = parts[parts.index(_PROMPT) + 1]
        return PeftName("", "embedding.weight", _PROMPT, adapter, "prompt_embeddings")
    for at, part in enumerate(parts[:-1]):
        if part == _COPY or part.startswith((*_METHODS, "vera_lambda_")):
            path, adapter, rest = parts[:at], parts[at + 1], ".".join(parts[at + 2 :])
            if part == _COPY and inner == name and "base_model" in path:  # a prompt's
                path, prefix = path[path.index("base_model") + 1 :], "base_model."
            own = ["" if part == _COPY else part, "" if part == "lora_magnitude_vector" else rest]
            depth = next((n for n, one in enumerate(path[::-1]) if one != _WRAPPED), len(path))
            return PeftName(_module(path), rest, part, adapter, prefix + _join(*path, *own), depth)
    return PeftName(_module(parts[:-1]), parts[-1], is_replaced=_ORIGINAL in parts)


def names_of_adapter(names: Iterable[str], adapter: str) -> dict[str, PeftName]:
    """Return the parts of those names that belong to ``adapter``."""
    return {name: parts for name in names if (parts := parse_name(name)).adapter == adapter}


def inner_name(name: str) -> str:
    """Return the name after PEFT's prefix."""
    _, found, inner = f".{name}".partition(f".{PEFT_PREFIX}")
    return inner if found else name


def _module(path: Iterable[str]) -> str:
    return ".".join(part for part in path if part not in _WRAPPERS)


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
