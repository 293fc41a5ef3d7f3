"""What peft writes of an adapter in ``adapter_config.json``, read.

Source of the keys: peft 0.21, ``tuners/*/config.py`` and ``config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import sqrt
from pathlib import Path

from msgspec import Struct

from zexport.adapters.patterns import match_whole
from zexport.adapters.peft_names import KEPT_BY_NAME
from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.filenames import ADAPTER_CONFIG
from zexport.store.boundary import Boundary
from zexport.store.contents import read_json_object
from zexport.store.folders import is_file
from zexport.store.json import Json, as_list, as_table, several

DEFAULT_ADAPTER = "default"
"""The name of an adapter that was given none; peft saves it without a folder of its own."""

TRAINED_TOKENS = "trainable_token_indices"
EMBEDDINGS = ("embed_tokens", "lm_head")
"""Modules that peft saves whole when they are targeted (0.21, ``utils/constants.py``)."""

HEADS = frozenset({"classifier", "score", "qa_outputs"})
"""Modules that peft trains whole by the task, named or not (0.21, ``peft_model.py``)."""

SWITCHES = (
    "apply_GS",
    "block_share",
    "coft",
    "decompose_both",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "lora_bias",
    "prefix_projection",
    "proportional_parameters",
    "rank_dropout_scale",
    "use_cayley_neumann",
    "use_dora",
    "use_effective_conv2d",
    "use_idwt",
    "use_qalora",
    "use_rslora",
)
"""Keys that are true or false, whatever the method."""

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
"""Keys that make LoRA something else than an update added to the weights as they were."""

_REWRITING = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""How ``init_lora_weights`` begins where peft changed the base weights before training."""


class AdapterConfig(Struct, frozen=True):
    """An ``adapter_config.json``."""

    path: Path
    content: Mapping[str, Json]

    def text(self, key: str) -> str:
        """What the file says under a key; empty where it says nothing."""
        return str(self.content.get(key) or "")

    def switch(self, key: str) -> bool:
        """Whether a key is on; refused where a program wrote neither true, false nor null.

        peft goes by Python's truth, by which "false" is true.
        """
        value = self.content.get(key)
        if value is None or isinstance(value, bool):
            return value is True
        raise DamagedCheckpointError(
            f"has no true or false in {key}",
            path=self.path,
            found=repr(value),
            expected="true, false or null",
            hint="Write which of them the run was trained with",
        )

    @property
    def peft_type(self) -> str:
        """The method, such as ``LORA``."""
        return self.text("peft_type")

    @property
    def is_kept_by_name(self) -> bool:
        """Whether what the method saves can be told by the names of the module's tensors."""
        return self.peft_type in KEPT_BY_NAME and not self.switch("prefix_projection")

    @property
    def target_parameters(self) -> tuple[str, ...]:
        """Parameters that are targeted by name, without a module of their own."""
        return _strings(self.content.get("target_parameters"))

    @property
    def targets(self) -> tuple[str, ...]:
        """Modules and parameters that are targeted, as the file says it."""
        return (*_strings(self.content.get("target_modules")), *self.target_parameters)

    @property
    def saved_modules(self) -> tuple[str, ...]:
        """Modules that were trained whole, as copies."""
        return _strings(self.content.get("modules_to_save"))

    @property
    def rank(self) -> int | None:
        """The rank of most updates."""
        return r if isinstance(r := self.content.get("r"), int) else None

    @property
    def keeps_ties(self) -> bool:
        """Whether what shares a weight with what is trained is trained with it."""
        return self.switch("ensure_weight_tying")

    @property
    def is_embedding_targeted(self) -> bool:
        """Whether peft saves targeted embeddings whole, beside their update."""
        if self.content.get(TRAINED_TOKENS) is not None:
            return False
        modules = self.content.get("target_modules")
        if isinstance(modules, str):
            return any(self._match("target_modules", modules, name) for name in EMBEDDINGS)
        return any(name in _strings(modules) for name in EMBEDDINGS)

    def targeted_parameters(self, module: str) -> list[str]:
        """Parameters of a module that may be targeted by name."""
        pairs = (name.rpartition(".")[::2] for name in self.target_parameters)
        return [
            f"{module}.{leaf}"
            for parent, leaf in pairs
            if not parent or module == parent or module.endswith(f".{parent}")
        ]

    def does_target(self, module: str) -> bool | None:
        """Whether peft updates a module; ``None`` where the file leaves that to peft.

        A parameter that is targeted by its last name alone (``down_proj``) may be of any module.
        Source: peft 0.21, ``tuners/tuners_utils.py`` (``check_target_module_exists``). What shares
        the weight of a target is updated too where ties are kept.
        """
        targets = self.content.get("target_modules")
        is_all = isinstance(targets, str) and targets.lower() == "all-linear"
        is_tied = self.keeps_ties and not re.search(r"\.\d+\.", module)
        if (targets is None and not self.target_parameters) or is_all or is_tied:
            return None
        parents = [name.rpartition(".")[0] for name in self.target_parameters]
        if any(f".{module}".endswith(f".{parent}") for parent in parents if parent):
            return True
        return self._is_named(module) or (None if "" in parents else False)

    def _is_named(self, module: str) -> bool:
        """Whether a module is targeted itself, and none of its parameters by name."""
        targets, excluded = (self.content.get(k) for k in ("target_modules", "exclude_modules"))
        if self._names("exclude_modules", excluded, module) or any(
            self._match("modules_to_save", rf"(?:.*\.)?{name}(?:\..*)?", module)
            for name in self.saved_modules
        ):
            return False
        if not self._names("target_modules", targets, module):
            return False
        is_exact = isinstance(targets, str) or module in _strings(targets)
        return is_exact or not self.layers or self.layer_of(module) in self.layers

    def trained_rows(self, module: str) -> list[Json] | None:
        """The rows of an embedding that were trained; ``None`` for one tied to a named one."""
        said = self.content.get(
            "token_indices" if self.peft_type == "TRAINABLE_TOKENS" else TRAINED_TOKENS
        )
        if isinstance(said, dict) and said:
            found = (v for k, v in said.items() if self._names(TRAINED_TOKENS, [k], module))
            said = next(found, None)
            return said if isinstance(said, list) else None
        return as_list(said)

    def is_feedforward(self, module: str) -> bool | None:
        """Whether IA3 scales what goes into a module, and not what comes out of it.

        ``None`` where the file leaves that to peft (0.21, ``tuners/ia3/model.py``).
        """
        named = self.content.get("feedforward_modules")
        if isinstance(named, str):
            return self._match("feedforward_modules", named, module) is not None
        return None if named is None else module.endswith(_strings(named))

    def entries(self, key: str) -> tuple[str, ...]:
        """What a list names, or the patterns of a table, one by one."""
        value = self.content.get(key)
        return _strings([*value]) if isinstance(value, dict | list) else ()

    def means(self, key: str, entry: str, module: str) -> bool:
        """Whether an entry of a key is about a module, or a parameter."""
        if key.endswith("_pattern"):
            return self._match(key, rf"(?:.*\.)?(?:{entry})", module) is not None
        return self._names(key, [entry], module)

    def _names(self, key: str, named: Json, module: str) -> bool:
        """Whether a list has the module or an ending of it, or a text is a pattern of it."""
        if isinstance(named, str):
            return self._match(key, named, module) is not None
        return any(f".{module}".endswith(f".{name}") for name in _strings(named))

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are to be updated; none where all are."""
        layers = several(self.content.get("layers_to_transform"))
        return tuple(one for one in layers if isinstance(one, int))

    def layer_of(self, module: str) -> int | None:
        """The number of the layer that a module is of."""
        named = _strings(self.content.get("layers_pattern"))
        before = [rf"(?:.*?\.)?{name}" for name in named] or [r".*?\.[^.]*"]
        found = (
            self._match("layers_pattern", rf"{one}\.(\d{{1,9}})\..*", module) for one in before
        )
        return next((int(one[1]) for one in found if one), None)

    def _match(self, key: str, pattern: str, text: str) -> re.Match[str] | None:
        """The whole text as matched by a pattern under a key of the file."""
        try:
            return match_whole(pattern, text)
        except ValueError as error:
            raise DamagedCheckpointError(
                f"has a pattern in {key} that is none", path=self.path, found=error
            ) from error

    @property
    def rewrites_base(self) -> str:
        """The initialization that changed the base weights, if it is such a one; else empty."""
        init = str(self.content.get("init_lora_weights")).lower()
        return init if init.startswith(_REWRITING) else ""

    @property
    def variants(self) -> list[str]:
        """The keys that make it something else than plain LoRA or DoRA."""
        return [key for key in _VARIANTS if self.content.get(key)]

    def size_of(self, size: str, key: str) -> int | None:
        """A size, such as ``r``, of the update of one module or parameter."""
        pattern = "rank_pattern" if size == "r" else f"{size}_pattern"
        said = self._by_pattern(pattern, key, self.content.get(size))
        return said if isinstance(said, int) else None

    def scaling(self, key: str, rank: int) -> float:
        """What the product of the factors of one module or parameter is multiplied by."""
        alpha = self._by_pattern("alpha_pattern", key, self.content.get("lora_alpha"))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            raise DamagedCheckpointError(
                "does not say the scale of the adapter",
                path=self.path,
                found=f"lora_alpha {alpha!r}",
                expected="a number",
                hint="Take the file that the run wrote",
            )
        return alpha / sqrt(rank) if self.switch("use_rslora") else alpha / rank

    def _by_pattern(self, name: str, key: str, default: Json) -> Json:
        """The value of the first pattern that ``key`` ends with, as peft matches them."""
        for pattern, value in as_table(self.content.get(name)).items():
            if self.means(name, pattern, key):
                return value
        return default


def find_adapter_config(
    adapter: str, places: Iterable[Path], boundary: Boundary
) -> AdapterConfig | None:
    """The configuration of the adapter of this name, from the first place that has it.

    A place is a folder, or the file itself. An adapter that is not the default one has its own
    folder within.
    """
    for place in places:
        own = place if adapter == DEFAULT_ADAPTER else place / adapter
        named = (own / ADAPTER_CONFIG, place / ADAPTER_CONFIG)
        for path in (place,) if is_file(place) else named:
            boundary.including(place).check(path)
            if is_file(path):
                return AdapterConfig(path, read_json_object(path))
    return None


def other_adapter_configs(
    taken: AdapterConfig, adapter: str, places: Iterable[Path], boundary: Boundary
) -> Iterator[AdapterConfig]:
    """The configurations of the adapter of this name beside the one that was taken.

    One that cannot be read is none: it only might tell that the other is wrong.
    """
    for place in dict.fromkeys(places):
        path = (place if adapter == DEFAULT_ADAPTER else place / adapter) / ADAPTER_CONFIG
        with suppress(ZexportError, OSError):
            if path != taken.path and is_file(path) and boundary.including(place).holds(path):
                yield AdapterConfig(path, read_json_object(path))


def _strings(value: Json) -> tuple[str, ...]:
    return tuple(one for one in several(value) if isinstance(one, str))
