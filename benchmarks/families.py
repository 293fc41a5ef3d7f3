"""Compare zexport's Hub layout of every model family with transformers' own conversion.

``python benchmarks/families.py`` builds each family small from its default config, numbers all
elements, and compares. It writes ``benchmarks/families.json``, from which docs/families.md is made.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

from zexport.model.conversion import describe_model
from zexport.model.hub_names import HubLayout, HubTensor, StoredLayout

RESULTS = Path(__file__).with_name("families.json")
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
_SMALL = {
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "depth": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "moe_k": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "num_layers": 4,
    "num_layers_per_stack": 1,
    "expert_ffn_hidden_size": 24,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
}
_LAYERS = ("num_hidden_layers", "depth", "first_k_dense_replace")
_CUTS: tuple[Mapping[str, int], ...] = (
    _SMALL,
    {name: size for name, size in _SMALL.items() if name not in _LAYERS},
    {name: size for name, size in _SMALL.items() if name in _LAYERS},
    {},
)
"""What is tried in turn: some families do not build with every size that is small."""

_ELEMENTS_MAX = 700_000_000
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What a default config raises that does not describe a whole model."""


@dataclass(frozen=True)
class Outcome:
    """How one family came out.

    Attributes:
        model_type: the family.
        architecture: the class that was built.
        memory: tensors in memory.
        hub: tensors in the model's files.
        kind: what happens between the two.
        layouts: how many ways of saving there are.
        verdict: ``equal``, or what is wrong.
    """

    model_type: str
    architecture: str
    memory: int
    hub: int
    kind: str
    layouts: int
    verdict: str

    def json(self) -> dict[str, str | int]:
        """Return the entry of ``families.json``."""
        return {key: value for key, value in asdict(self).items() if key != "model_type"}


def examine(model_type: str) -> Outcome | str:
    """The outcome for a family, or why it cannot be built from a default config."""
    try:
        architecture, model = small_model(model_type)
    except _BUILD_ERRORS as error:
        return type(error).__name__
    described = describe_model(model)
    shapes = {name: tuple(shape) for name, shape in described["shapes"].items()}
    if "refused" in described:
        return Outcome(model_type, architecture, len(shapes), 0, "", 0, described["refused"])
    layouts = [
        msgspec.convert(layout, StoredLayout).unfolded(shapes) for layout in described["layouts"]
    ]
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions
    kept = shapes.keys() - described["tied"].keys() - set(described["unsaved"])
    verdict = compare(model, {n: s for n, s in shapes.items() if n in kept}, layouts[0])
    return Outcome(
        model_type=model_type,
        architecture=architecture,
        memory=len(kept),
        hub=len(layouts[0].tensors),
        kind=kind_of(layouts[0], shapes),
        layouts=len(layouts),
        verdict=verdict,
    )


def small_model(model_type: str) -> tuple[str, Any]:
    """The class and a model without data of a family, with few layers and experts.

    Raises:
        Exception: one of ``_BUILD_ERRORS``.
    """
    found = (getattr(modeling_auto, mapping).get(model_type) for mapping in _MAPPINGS)
    named = next((name for name in found if name), None)
    if named is None:
        raise LookupError("no auto class")
    architecture = named if isinstance(named, str) else named[0]
    for cut in _CUTS:
        try:
            config = transformers.AutoConfig.for_model(model_type)
            cut_down(config, cut)
            with torch.device("meta"):
                return architecture, getattr(transformers, architecture)._from_config(config)
        except _BUILD_ERRORS:
            if not cut:
                raise
    raise AssertionError("unreachable")


def cut_down(config: Any, sizes: Mapping[str, int]) -> None:
    """Make a config's sizes small, and those of the configs within it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            cut_down(value, sizes)
        elif name in sizes and isinstance(value, int) and value > sizes[name]:
            setattr(config, name, sizes[name])
        elif name in sizes and isinstance(value, list):
            setattr(config, name, [min(size, sizes[name]) for size in value])
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(config, name, None), list) and isinstance(layers, int):
            setattr(config, name, kinds[:layers])


def compare(model: Any, shapes: Mapping[str, tuple[int, ...]], layout: HubLayout) -> str:
    """``equal`` if the layout makes of numbered elements what transformers makes of them.

    Tensors that are only renamed need no elements: they are known by being the same object.
    """
    whole = {name: tensor.is_all_of(shapes) for name, tensor in layout.tensors.items()}
    numbered = {s for n, t in layout.tensors.items() if whole[n] is None for s in t.sources}
    if sum(prod(shapes[name]) for name in numbered) > _ELEMENTS_MAX:
        return "too large to compare"
    state: dict[str, torch.Tensor] = {}
    first = 0
    for name, shape in shapes.items():
        state[name] = torch.empty(shape, device="meta")
        if name in numbered:
            state[name] = torch.arange(first, first + prod(shape), dtype=torch.int32).view(shape)
            first += prod(shape)
    expected = revert_weight_conversion(model, dict(state))
    if expected.keys() != layout.tensors.keys():
        return "other names"
    for name, tensor in layout.tensors.items():
        source = whole[name]
        is_equal = (
            torch.equal(laid_out(tensor, state), expected[name])
            if source is None
            else expected[name] is state[source]
        )
        if not is_equal:
            return f"{name} differs"
    return "equal"


def laid_out(tensor: HubTensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A hub tensor, box by box."""
    made = torch.full(tensor.shape, -1, dtype=torch.int32)
    for box in tensor.boxes:
        source = state[box.source] if isinstance(box.source, str) else laid_out(box.source, state)
        place = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        made[place] = source.as_strided(box.shape, box.stride, box.offset)
    return made


def kind_of(layout: HubLayout, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a layout does, in words."""
    words = Counter[str]()
    parts = Counter(source for tensor in layout.tensors.values() for source in tensor.sources)
    for name, tensor in layout.tensors.items():
        same = tensor.is_all_of(shapes)
        if same is not None:
            words["same" if same == name else "renamed"] += 1
        elif len(tensor.sources) > 1:
            words["joined"] += 1
        elif parts[next(iter(tensor.sources))] > 1:
            words["split"] += 1
        else:
            words["rearranged"] += 1
    counts = [f"{words[word]} {word}" for word in ("renamed", "split", "joined", "rearranged")]
    return ", ".join(text for text in counts if not text.startswith("0")) or "same"


def results(outcomes: Mapping[str, Outcome | str]) -> str:
    """Return the contents of ``families.json``, one family per line."""
    built = [outcome for outcome in outcomes.values() if isinstance(outcome, Outcome)]
    changed = [o for o in built if o.kind != "same" or o.layouts > 1 or o.verdict != "equal"]
    same = json.dumps([one.model_type for one in built if one not in changed])
    entries = [f"  {json.dumps(one.model_type)}: {json.dumps(one.json())}" for one in changed]
    head = f' "transformers": "{transformers.__version__}",\n "model_types": {len(outcomes)},\n'
    return f'{{\n{head} "changed": {{\n' + ",\n".join(entries) + f'\n }},\n "same": {same}\n}}\n'


def main() -> None:
    """Examine every family, or those that are named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "families", nargs="*", help="model types; default: all, and write families.json"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    outcomes: dict[str, Outcome | str] = {}
    for model_type in arguments.families or sorted(transformers.CONFIG_MAPPING):
        outcomes[model_type] = examine(model_type)
        print(model_type, outcomes[model_type], file=sys.stderr)
    if not arguments.families:
        RESULTS.write_text(results(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
