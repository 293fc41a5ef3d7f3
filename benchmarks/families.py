"""Every model family of the installed transformers: is its hub layout traced rightly?

``python benchmarks/families.py`` builds each from its default config, cut small, fills it with
numbers that no two elements share, and holds what zexport's layout makes of them against what
transformers' own conversion does. The outcome is kept in ``docs/families.md``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from zexport.model.hub_layout import HubLayout, HubTensor, StoredLayout

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
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

    @property
    def row(self) -> str:
        """A line of the table."""
        cells = (
            f"`{self.model_type}`", self.architecture, self.memory, self.hub, self.kind,
            self.layouts, self.verdict,
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


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
    told = [f"{words[word]} {word}" for word in ("renamed", "split", "joined", "rearranged")]
    return ", ".join(text for text in told if not text.startswith("0")) or "same"


def page(outcomes: Mapping[str, Outcome | str]) -> str:
    """The page of documentation."""
    built = [outcome for outcome in outcomes.values() if isinstance(outcome, Outcome)]
    verdicts = Counter(
        outcome.verdict if outcome.verdict in ("equal", "too large to compare") else "not equal"
        for outcome in built
    )
    changed = [o for o in built if o.kind != "same" or o.layouts > 1 or o.verdict != "equal"]
    same = [f"`{o.model_type}`" for o in built if o not in changed]
    return "\n".join(_lines(outcomes, built, verdicts, changed, same)) + "\n"


def _lines(
    outcomes: Mapping[str, Outcome | str],
    built: list[Outcome],
    verdicts: Counter[str],
    changed: list[Outcome],
    same: list[str],
) -> Iterator[str]:
    yield "# Model families"
    yield ""
    yield (
        f"Made by `python benchmarks/families.py` with transformers {transformers.__version__}. Of "
        f"{len(outcomes)} model types, {len(built)} build from their default config. Each was cut "
        "small and filled with numbers"
    )
    yield (
        "that no two elements share; zexport's ranges give what transformers' own conversion gives "
        f"for {verdicts['equal']} of them, and something else for {verdicts['not equal']}."
        + (
            f" {verdicts['too large to compare']} stay too large to compare."
            if verdicts["too large to compare"]
            else ""
        )
    )
    yield "A family that is not here works too: its layout is asked of the installed transformers."
    yield ""
    yield "## Families whose files differ from what they have in memory"
    yield ""
    yield "| model type | class | tensors in memory | in files | what is done | layouts | outcome |"
    yield "|---|---|--:|--:|---|--:|---|"
    yield from (outcome.row for outcome in changed)
    yield ""
    yield f"## The same in both ({len(same)})"
    yield ""
    yield ", ".join(same)


def main() -> None:
    """Examine every family, or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all, and the page, if none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    outcomes: dict[str, Outcome | str] = {}
    for model_type in arguments.families or sorted(transformers.CONFIG_MAPPING):
        outcomes[model_type] = examine(model_type)
        print(model_type, outcomes[model_type], file=sys.stderr)
    if not arguments.families:
        PAGE.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
