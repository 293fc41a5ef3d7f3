"""PEFT's parameter names and ``adapter_config.json``.

Source: peft 0.21, ``utils/save_and_load.py`` (``get_peft_model_state_dict``), ``config.py``,
``tuners/*/config.py``, ``tuners/tuners_utils.py`` (``_remove_adapter_name_from_state_dict_key``)
and ``utils/other.py`` (``ModulesToSaveWrapper``, ``TrainableTokensWrapper``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod, sqrt
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from zexport.errors import DamagedCheckpointError
from zexport.export.weights import PEFT_PREFIX
from zexport.storage.json import read_json_object

_COPY = "modules_to_save"
_ORIGINAL = "original_module"
_WRAPPED = "base_layer"
_WRAPPERS = (_WRAPPED, _ORIGINAL, "token_adapter")
_TOKENS = "trainable_tokens_delta"
PROMPT = "prompt_encoder"

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

EMBEDDINGS = ("embed_tokens", "lm_head")
"""Modules that peft also saves in full if they are targets (0.21, ``utils/constants.py``)."""

DECIDING = (
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
    "r",
    "fan_in_fan_out",
    "init_lora_weights",
)
"""Keys that decide the values of an update."""

_VARIANTS = (
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "alora_invocation_tokens",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "layer_replication",
)
"""Keys that make LoRA more than an update that is added to the base weights."""

_CHANGING_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Starts of ``init_lora_weights`` values with which peft changes the base weights."""

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATED = re.compile(r"[*+{]|(?<![(*+?}])\?")


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


def parse_name(name: str) -> PeftName:
    inner, prefix = inner_name(name), PEFT_PREFIX
    parts = inner.split(".")
    if inner == name and PROMPT in parts[:-1] and parts[-2:] == ["embedding", "weight"]:
        adapter = parts[parts.index(PROMPT) + 1]
        return PeftName("", "embedding.weight", PROMPT, adapter, "prompt_embeddings")
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
    _, found, inner = f".{name}".partition(f".{PEFT_PREFIX}")
    return inner if found else name


def _module(path: Iterable[str]) -> str:
    return ".".join(part for part in path if part not in _WRAPPERS)


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


class AdapterConfig(Struct, frozen=True):
    """An ``adapter_config.json``: its path, its content, and the keys that zexport uses."""

    path: Path = Path()
    content: Mapping[str, Any] = {}
    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool | None = None
    prefix_projection: bool | None = None
    r: int | None = None
    lora_alpha: float | None = None
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    bias: str | None = None
    fan_in_fan_out: bool | None = None
    init_lora_weights: Any = None

    @classmethod
    def read(cls, path: Path) -> AdapterConfig:
        content = read_json_object(path)
        try:
            config = msgspec.convert(content, cls)
        except msgspec.ValidationError as error:
            raise DamagedCheckpointError(
                "value of another type than peft writes",
                path=path,
                found=str(error).replace("$.", ""),
                hint="Replace it with the adapter_config.json that the training run wrote",
            ) from error
        return structs.replace(config, path=path, content=content)

    @property
    def saves_embeddings(self) -> bool:
        """Whether peft saves target embeddings in full, next to their update."""
        return self.trainable_token_indices is None and any(
            self._matches("target_modules", name) for name in EMBEDDINGS
        )

    @property
    def changes_base(self) -> str:
        """The ``init_lora_weights`` with which peft changed the base weights; else empty."""
        init = str(self.init_lora_weights).lower()
        return init if init.startswith(_CHANGING_BASE) else ""

    @property
    def variants(self) -> list[str]:
        """The keys that make it more than LoRA, rsLoRA or DoRA."""
        return [key for key in _VARIANTS if self.content.get(key)]

    def may_target(self, module: str) -> bool:
        """Return whether peft would update ``module``; true if only the model shows it.

        Source: peft 0.21, ``tuners/tuners_utils.py`` (``check_target_module_exists``).
        """
        parents = [name.rpartition(".")[0] for name in self.target_parameters or ()]
        if any(not one or _ends_with(module, one) for one in parents) or self.ensure_weight_tying:
            return True
        targets = self.target_modules
        if (targets is None and not parents) or str(targets).lower() == "all-linear":
            return True
        is_excluded = self._matches("exclude_modules", module)
        return self._matches("target_modules", module) and not is_excluded

    def tokens_of(self, module: str) -> list[int]:
        """Return the ids of the tokens trained in an embedding, in the order of their rows."""
        tokens = self.trainable_token_indices or []
        if isinstance(tokens, dict):
            return next((ids for name, ids in tokens.items() if _ends_with(module, name)), [])
        return tokens

    def rank_of(self, key: str) -> int | None:
        rank = self._by_pattern("rank_pattern", key, self.r)
        return rank if isinstance(rank, int) else None

    def scaling(self, key: str, rank: int) -> float:
        alpha: float | None = self._by_pattern("alpha_pattern", key, self.lora_alpha)
        if alpha is None:
            raise DamagedCheckpointError(
                "scale of the adapter is missing",
                path=self.path,
                found="no lora_alpha",
                hint="Replace it with the adapter_config.json that the training run wrote",
            )
        return alpha / sqrt(rank) if self.use_rslora else alpha / rank

    def _by_pattern(self, name: str, key: str, default: Any) -> Any:
        """Return the value of the first pattern that matches an end of ``key``, as peft does."""
        matching = (
            value
            for pattern, value in (getattr(self, name) or {}).items()
            if self._matches(name, key, rf"(?:.*\.)?(?:{pattern})")
        )
        return next(matching, default)

    def _matches(self, key: str, module: str, pattern: str | None = None) -> bool:
        """Return whether ``key``, or ``pattern`` of it, names ``module``."""
        named = pattern or getattr(self, key)
        if not isinstance(named, str):
            return any(_ends_with(module, name) for name in named or ())
        try:
            return _matcher(named)(module) is not None
        except ValueError as error:
            raise DamagedCheckpointError(
                f"invalid pattern in {key}",
                path=self.path,
                found=f"{named!r}: {error}",
                hint="Replace it with the adapter_config.json that the training run wrote",
            ) from error


def _ends_with(module: str, name: str) -> bool:
    return f".{module}".endswith(f".{name}")


@cache
def _matcher(pattern: str) -> Callable[[str], Any]:
    """Return ``re.fullmatch`` for a pattern, in bounded time.

    RE2 never backtracks. Patterns that it does not support (lookaround) are left to Python if they
    are simple.

    Raises:
        ValueError: the pattern is invalid, or its time is unbounded.
    """
    import re2  # noqa: PLC0415 - most checkpoints have no pattern

    options = re2.Options()
    options.max_mem, options.log_errors = 64 << 20, False
    try:
        known = re.compile(pattern)
        matcher: Callable[[str], Any] = re2.compile(pattern, options).fullmatch
    except re2.error:
        choices = prod(1 + group.count("|") for group in pattern.split(")"))
        is_long = len(_REPEATED.findall(pattern)) > 6 or choices > 1000
        if is_long or _REPEATED_GROUP.search(pattern):
            raise ValueError("it may never finish matching") from None
        return known.fullmatch
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return matcher
