"""The names of a model's tensors under peft, taken apart.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict``),
``tuners/tuners_utils.py`` (``_remove_adapter_name_from_state_dict_key``) and ``utils/other.py``
(``ModulesToSaveWrapper``, ``TrainableTokensWrapper``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from msgspec import Struct

from zexport.weights.named import PEFT_PREFIX

_SAVED = "modules_to_save"
_ORIGINAL = "original_module"
_WRAPPED = "base_layer"
_TOKENS = "trainable_tokens_delta"
_AROUND_TOKENS = "token_adapter"
_MAGNITUDE = "lora_magnitude_vector"
_PROMPT = "prompt_encoder"
_HELD = "base_model"
"""What peft's model calls the one within it: a tuner's, or, of a prompt, the base itself."""

_PROMPT_METHODS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")

_TUNER_PREFIXES = {
    "lora_": ("LORA", "ADALORA"),
    "ia3_": ("IA3",),
    "hada_": ("LOHA",),
    "lokr_": ("LOKR",),
    "oft_": ("OFT",),
    "boft_": ("BOFT",),
    "hra_": ("HRA",),
    "hira_": ("HIRA",),
    "fourierft_": ("FOURIERFT",),
    "ln_tuning_layers": ("LN_TUNING",),
    "c3a_": ("C3A",),
    "miss_": ("MISS",),
    "road_": ("ROAD",),
    "vera_lambda_": ("VERA",),
    "delora_": ("DELORA",),
    "gralora_": ("GRALORA",),
    "waveft_": ("WAVEFT",),
    _TOKENS: (),
}
"""How the attributes begin that a tuner hangs on a layer, each keyed by the adapter's name, and the
methods that they are of, where one tells (peft 0.21, ``prefix`` and ``adapter_layer_names`` in
``tuners/*``)."""

KEPT_BY_NAME = frozenset(chain(*_TUNER_PREFIXES.values())) - {"ADALORA", "VERA"} | {
    "TRAINABLE_TOKENS",
    "PROMPT_TUNING",
    "PREFIX_TUNING",
}
"""Methods whose saved state is that of the module with the adapter's name left out.

Source: peft 0.21, ``_get_adapter_state_dict`` in ``tuners/*``; the others change tensors or add
some.
"""


def methods_of(attribute: str) -> tuple[str, ...]:
    """The methods that an attribute of a layer may be of; none where that is not told."""
    if attribute == _PROMPT:
        return _PROMPT_METHODS
    found = (methods for start, methods in _TUNER_PREFIXES.items() if attribute.startswith(start))
    return next(found, ())


class PeftName(Struct, frozen=True):
    """A name of a peft model, taken apart.

    ``module`` is the one in the base model, with neither peft's prefix nor the names of its
    wrappers; ``path`` has these. ``attribute`` is what the tuner calls it, such as ``lora_A``, or
    ``modules_to_save`` for a trained copy; it, ``adapter`` and ``path`` are empty for a weight of
    the base model. ``is_replaced`` marks the untrained original of a module that was copied.
    ``prefix`` is peft's own: where a prompt is learnt, nothing stands between it and the base.
    """

    module: str
    attribute: str
    adapter: str
    rest: str
    path: str = ""
    is_replaced: bool = False
    prefix: str = PEFT_PREFIX

    @property
    def of_base(self) -> str:
        """The name in the base model of the weight itself, or of the one that a copy replaces."""
        return ".".join(part for part in (self.module, self.rest) if part)

    @property
    def depth(self) -> int:
        """How many wrappers of the module lie outside the one that the tensor hangs on."""
        wrappers = [*reversed(self.path.split("."))]
        return next((n for n, part in enumerate(wrappers) if part != _WRAPPED), len(wrappers))

    @property
    def is_copy(self) -> bool:
        """Whether it is of a module that was copied and trained whole."""
        return self.attribute == _SAVED

    @property
    def has_rows(self) -> bool:
        """Whether it is of rows of an embedding, and of no whole module."""
        return self.attribute == _TOKENS

    @property
    def is_prompt(self) -> bool:
        """Whether it is of a prompt that was learnt, and of no layer."""
        return self.attribute == _PROMPT

    @property
    def on_disk(self) -> str:
        """The name in ``adapter_model.safetensors``; meaningless for a weight of the base model."""
        if self.is_prompt:
            return "prompt_embeddings"
        own = [] if self.is_copy else [self.attribute]
        rest = "" if self.attribute == _MAGNITUDE else self.rest
        parts = (self.path, *own, rest)
        return self.prefix + ".".join(part for part in parts if part)


def read_name(name: str) -> PeftName:
    """A name of a peft model, taken apart; every name has a meaning, if only in the base model."""
    inner = inner_name(name)
    parts = inner.split(".")
    if _PROMPT in parts and len(parts) > (at := parts.index(_PROMPT)) + 1:
        return PeftName("", _PROMPT, parts[at + 1], ".".join(parts[at + 2 :]))
    for at, part in enumerate(parts[:-1]):
        if part == _SAVED or part.startswith(tuple(_TUNER_PREFIXES)):
            adapter, rest = parts[at + 1], ".".join(parts[at + 2 :])
            path, prefix = parts[:at], PEFT_PREFIX
            if part == _SAVED and inner == name and _HELD in path:
                path, prefix = path[path.index(_HELD) + 1 :], f"{_HELD}."
            module = _without_wrappers(path)
            return PeftName(module, part, adapter, rest, ".".join(path), prefix=prefix)
    is_replaced = _ORIGINAL in parts
    module = _without_wrappers(part for part in parts[:-1] if part != _ORIGINAL)
    return PeftName(module, "", "", parts[-1], is_replaced=is_replaced)


def adapters_of(names: Iterable[str]) -> tuple[str, ...]:
    """The names of the adapters whose tensors are among ``names``, in their order."""
    return tuple(dict.fromkeys(adapter for name in names if (adapter := read_name(name).adapter)))


def of_adapter(names: Iterable[str], adapter: str) -> dict[str, PeftName]:
    """Those of the names that are of one adapter's tensors, taken apart."""
    return {name: part for name in names if (part := read_name(name)).adapter == adapter}


def inner_name(name: str) -> str:
    """The name within the base model: after peft's prefix, and after any wrapper's around peft."""
    _, found, inner = f".{name}".partition(f".{PEFT_PREFIX}")
    return inner if found else name


def _without_wrappers(parts: Iterable[str]) -> str:
    return ".".join(part for part in parts if part not in (_WRAPPED, _AROUND_TOKENS))
