"""What an adapter's configuration and its tensors say: method, targets, rank, parts and effect.

peft loads an adapter by its configuration alone: what that does not tell of is left out of the
model without a word, and updates of another rank are not taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from msgspec.structs import replace

from zexport.adapters.find import Adapter
from zexport.adapters.named_modules import TENSORS, Modules, claimed_statements, row_statements
from zexport.adapters.peft_format import HEADS, SWITCHES, AdapterConfig
from zexport.adapters.peft_names import PeftName, methods_of, of_adapter
from zexport.checkpoint.state import StoredTensor
from zexport.facts.adapters import AdapterFact
from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import ADAPTER_CONFIG, CONFIG
from zexport.model.config import ConfigFile, settings_of
from zexport.ranges.computed import Zeros
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.ranges.replicas import are_equal
from zexport.store.json import as_table
from zexport.weights.named import Weights

_SIZES = {
    "lora_A.weight": ("r", 0),
    "lora_B.weight": ("r", 1),
    "lora_embedding_A": ("r", 0),
    "lora_embedding_B": ("r", 1),
    "hada_w1_a": ("r", 1),
    "hada_w1_b": ("r", 0),
    "hada_w2_a": ("r", 1),
    "hada_w2_b": ("r", 0),
    "lokr_w1_a": ("r", 1),
    "lokr_w1_b": ("r", 0),
    "lokr_w2_a": ("r", 1),
    "lokr_w2_b": ("r", 0),
    "hra_u": ("r", 1),
    "hira_A": ("r", 0),
    "hira_B": ("r", 1),
    "delora_A": ("r", 0),
    "delora_B": ("r", 1),
    "fourierft_spectrum": ("n_frequency", 0),
    "c3a_kernel": ("block_size", 2),
}
"""The key that says how long an axis of a tensor is (peft 0.21, ``tuners/*/layer.py``)."""

_REPLICATED = "layer_replication"
_CONVOLVED = frozenset({"hada_t1", "hada_t2", "lokr_t2"})
"""Where a module has these, LoHa and LoKr lay its factors out the other way."""

SCALING = (
    "lora_alpha",
    "use_rslora",
    "alpha_pattern",
    "rank_pattern",
    "r",
    "fan_in_fan_out",
    "init_lora_weights",
)
"""Keys by which the values of an update are made of its tensors."""

_DECIDING = (
    "base_model_name_or_path",
    "revision",
    "task_type",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "trainable_token_indices",
    "bias",
    *SCALING,
)
"""Keys by which an update is made of its tensors, and of what."""

_SETS = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
"""Keys whose names peft writes in any order."""

_OF_TASK = {
    "lm_head": ["CAUSAL_LM", "SEQ_2_SEQ_LM"],
    "score": ["SEQ_CLS", "TOKEN_CLS"],
    "classifier": ["SEQ_CLS", "TOKEN_CLS"],
    "qa_outputs": ["QUESTION_ANS"],
}
"""What a head that was trained is for."""


_SECOND = ("lora_B.weight", "lora_embedding_B")
"""What peft begins with zeros (0.19, ``tuners/lora/layer.py``, ``reset_lora_parameters``)."""


def adapter_statements(
    adapter: Adapter, stored: Weights, base: Iterable[str] = (), layers: int = 0
) -> Iterator[Statement]:
    """What is said of one adapter, by its file and by the names and shapes of its tensors.

    Each of several adapters has its own rank and targets, so what is said is said of its modules.
    ``base`` are the names of the base model that was given, and ``layers`` how many its config
    tells of.
    """
    for one in _statements(adapter, stored, base, layers):
        yield replace(one, about=f"{adapter.folder}{one.about}")


def kept_statements(adapter: Adapter) -> Iterator[Statement]:
    """What is said of the base of an adapter that is kept: where it is, and what peft changed.

    Layers that peft replicates it replicates again whenever it loads the adapter.
    """
    by = f"{adapter.folder}{ADAPTER_CONFIG}"
    if change := adapter.config.rewrites_base:
        yield Statement(AdapterFact.KEPT_CHANGES, f"init_lora_weights {change}", by)
        yield Statement(AdapterFact.KEPT_CHANGES, "unchanged weights", "the base model")
    if adapter.config.content.get("target_modules") is None and adapter.config.peft_type == "LORA":
        said = None if adapter.config.target_parameters else "those usual for the model type"
        yield Statement(AdapterFact.KEPT_TARGETS, said, f"{by}, without target_modules")
        yield Statement(AdapterFact.KEPT_TARGETS, said and "those with tensors", "the adapter")
    name = adapter.config.text("base_model_name_or_path")
    if not name or name.startswith(("/", "~", ".")):
        yield Statement(AdapterFact.KEPT_BASE, name or "no name", by)
        yield Statement(AdapterFact.KEPT_BASE, "a hub id", "a file for others")


def effect_statements(
    adapter: str, stored: Weights, files: Iterable[ReadableFile]
) -> Iterator[Statement]:
    """Whether all second factors are zero, as before the first step; else hardly one is read."""
    every, ends = stored.every_tensor, _ends(adapter)
    factors = [every[n] for n in of_adapter(every, adapter) if every[n].name.endswith(ends)]
    with SourceReader(files) as reader:
        if factors and all(_is_zero(reader, one) for one in factors):
            yield Statement(AdapterFact.ADAPTER_EFFECT, "zero", f"every lora_B of {adapter!r}")
            yield Statement(
                AdapterFact.ADAPTER_EFFECT, "other values", "an adapter that was trained"
            )


def base_form_statements(
    taken: DType | None, cast: DType | None, config: ConfigFile | None
) -> Iterator[Statement]:
    """The element type that a base is taken in and that of the training, and any quantization."""
    for by, dtype in {"--base-dtype": taken, "DeepSpeed's configuration": cast}.items():
        yield Statement(Fact.BASE_DTYPE, dtype and dtype.torch_name, by)
    told = settings_of(config).get("quantization_config")
    if isinstance(told, dict):
        yield Statement(Fact.BASE_QUANTIZED, told.get("quant_method") or "some", CONFIG)
        yield Statement(Fact.BASE_QUANTIZED, "plain", "--base")


def class_statements(adapter: Adapter, config: ConfigFile | None) -> Iterator[Statement]:
    """The class of the model that an adapter was trained on, and of the one it is merged into."""
    trained = as_table(adapter.config.content.get("auto_mapping")).get("base_model_class")
    named = None if config is None else next(iter(config.architectures), None)
    if isinstance(trained, str) and named and _family(trained) != _family(named):
        yield Statement(AdapterFact.ADAPTER_CLASS, trained, f"{adapter.folder}{ADAPTER_CONFIG}")
        yield Statement(AdapterFact.ADAPTER_CLASS, named, CONFIG)


def _family(model_class: str) -> str:
    """What classes of one model begin with, whatever their head."""
    return re.split("For[A-Z]|Model|LMHead|PreTrained", model_class)[0]


def _statements(
    adapter: Adapter, stored: Weights, base: Iterable[str], layers: int
) -> Iterator[Statement]:
    config, by, shapes = adapter.config, f"{adapter.folder}{ADAPTER_CONFIG}", stored.shapes
    for key in SWITCHES:
        config.switch(key)
    parts = of_adapter(shapes, adapter.name)
    yield from _of_files(adapter)
    for other in adapter.shares[:1]:
        yield Statement(AdapterFact.ADAPTER_OWN, f"the adapter {adapter.name!r}", "the export")
        yield Statement(AdapterFact.ADAPTER_OWN, f"the adapter {other!r}", config.path.name)
    if config.content.get("lora_alpha") == 0 and not config.content.get("alpha_pattern"):
        yield Statement(AdapterFact.ADAPTER_EFFECT, "lora_alpha 0", by)
        yield Statement(AdapterFact.ADAPTER_EFFECT, "another number", "an adapter that was trained")
    copies = dict.fromkeys(part.module for part in parts.values() if part.is_copy)
    for module in copies:
        yield Statement(AdapterFact.ADAPTER_COPIES, "trained whole", TENSORS, module)
        yield Statement(AdapterFact.ADAPTER_COPIES, _copied(config, module), by, module)
    methods = {m for part in parts.values() for m in methods_of(part.attribute)}
    if methods and config.peft_type not in methods:
        yield Statement(AdapterFact.ADAPTER_METHOD, " or ".join(sorted(methods)), TENSORS)
        yield Statement(AdapterFact.ADAPTER_METHOD, config.peft_type or "none", by)
        return
    yield from _of_task(config, by, (part.module for part in parts.values()))
    if {*config.variants} - {_REPLICATED}:
        return
    yield from _of_tensors(config, by, {n: p for n, p in parts.items() if not p.is_copy}, shapes)
    if config.variants:  # what a base has is not what was trained
        return
    own = parts | of_adapter(stored.left_out, adapter.name)
    modules = Modules.of(own, stored.known_shapes, base, layers)
    yield from claimed_statements(config, by, modules)
    yield from row_statements(config, by, {n: p for n, p in parts.items() if p.has_rows}, shapes)


def _of_files(adapter: Adapter) -> Iterator[Statement]:
    """What several files of one adapter say of what decides."""
    for fact, more in (
        (AdapterFact.ADAPTER_CONFIGS, adapter.others),
        (AdapterFact.ADAPTER_NODES, adapter.nodes),
    ):
        for key, one in product(_DECIDING, (adapter.config, *more) if more else ()):
            said = one.content.get(key)
            if key in _SETS and isinstance(said, list):
                said = sorted(said, key=str)
            yield Statement(fact, said, str(one.path), key)


def _of_task(config: AdapterConfig, by: str, modules: Iterable[str]) -> Iterator[Statement]:
    """The task that the file tells of, and those that a trained head is for."""
    for head in dict.fromkeys(module.rpartition(".")[2] for module in modules):
        if head in _OF_TASK:
            yield Statement(AdapterFact.ADAPTER_TASK, _OF_TASK[head], f"{TENSORS}, of a {head}")
            yield Statement(AdapterFact.ADAPTER_TASK, config.text("task_type") or None, by)


def _of_tensors(
    config: AdapterConfig, by: str, parts: Mapping[str, PeftName], shapes: Mapping[str, Shape]
) -> Iterator[Statement]:
    by_module: dict[str, dict[str, Shape]] = {}
    for name, part in parts.items():
        if part.is_prompt:
            yield from _of_prompt(config, by, shapes[name])
        elif not part.has_rows:
            short = ".".join(filter(None, (part.attribute, part.rest)))
            by_module.setdefault(part.module, {})[short] = shapes[name]
    for module, held in by_module.items():
        yield from _of_update(config, by, module, held)


def _of_update(
    config: AdapterConfig, by: str, module: str, held: Mapping[str, Shape]
) -> Iterator[Statement]:
    """What is said of the update of one module."""
    is_target = config.does_target(module)
    said = {None: None, True: "updated", False: "no target"}[is_target]
    yield Statement(AdapterFact.ADAPTER_TARGETS, "updated", TENSORS, module)
    yield Statement(AdapterFact.ADAPTER_TARGETS, said, by, module)
    for short, shape in held.items() if held.keys().isdisjoint(_CONVOLVED) else ():
        size, axis = _SIZES.get(short, ("", len(shape)))
        if axis < len(shape):
            stated = _size(config, size, module, shape[axis])
            yield Statement(AdapterFact.ADAPTER_RANK, shape[axis], TENSORS, module)
            yield Statement(AdapterFact.ADAPTER_RANK, stated, by, module)
    scaled = held.get("ia3_l", ())
    if len(scaled) == 2 and max(scaled) > 1:
        yield Statement(AdapterFact.ADAPTER_FEEDFORWARD, scaled[0] == 1, TENSORS, module)
        yield Statement(AdapterFact.ADAPTER_FEEDFORWARD, config.is_feedforward(module), by, module)
    for fact, key, attribute in (
        (AdapterFact.ADAPTER_DORA, "use_dora", "lora_magnitude_vector"),
        (AdapterFact.ADAPTER_BIAS, "lora_bias", "lora_B.bias"),
    ):
        has_it = any(name.startswith(attribute) for name in held)
        yield Statement(fact, has_it, TENSORS, module)
        yield Statement(fact, config.switch(key), by, module)


def _of_prompt(config: AdapterConfig, by: str, shape: Shape) -> Iterator[Statement]:
    """The length of a prompt that was learnt, and of its embeddings."""
    keys = ("num_virtual_tokens", "token_dim", "num_transformer_submodules", "num_layers")
    tokens, width, submodules, layers = (
        n if isinstance(n := config.content.get(key), int) else None for key in keys
    )
    if config.peft_type == "PREFIX_TUNING":  # keys and values of each layer
        width = width and layers and 2 * width * layers
    else:
        tokens = tokens and submodules and tokens * submodules
    for what, held, said in zip(keys, shape, (tokens, width), strict=False):
        yield Statement(AdapterFact.ADAPTER_PROMPT, held, TENSORS, what)
        yield Statement(AdapterFact.ADAPTER_PROMPT, said, by, what)


def _size(config: AdapterConfig, size: str, module: str, held: int) -> int | None:
    """What the file says of a size of a module's update, such as its rank, as its tensors have it.

    Those of fused experts, which are targeted as parameters, have it as often as there are experts.
    """
    parameters = config.targeted_parameters(module)
    sizes = [config.size_of(size, key) for key in parameters or [module]]
    if parameters and any(one and held % one == 0 for one in sizes):
        return held
    return sizes[0]


def _copied(config: AdapterConfig, module: str) -> str:
    named = any(module.endswith(name) for name in config.saved_modules)
    by_task = config.text("task_type") and module.rpartition(".")[2] in HEADS
    return "trained whole" if named or config.keeps_ties or by_task else "not in modules_to_save"


def _ends(adapter: str) -> tuple[str, ...]:
    """How the names of second factors end in memory."""
    parts = (one.partition(".") for one in _SECOND)
    return tuple(".".join(filter(None, (name, adapter, rest))) for name, _, rest in parts)


def _is_zero(reader: SourceReader, tensor: StoredTensor) -> bool:
    source = tensor.source
    return source is not None and are_equal(reader.read_into, source, Zeros(source.nbytes))
