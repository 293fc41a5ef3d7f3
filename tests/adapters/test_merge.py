"""Merged adapters equal what PEFT merges."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.support import peft_models
from tests.support.checkpoints import Model, Run, save, values
from tests.support.exports import edit_json, export, read_json, refused, verify
from tests.support.live_models import files_of
from tests.support.peft_models import FORMS, Form, Trained

ULPS = 4
"""A merged value may differ from peft's by this many units in the last place of the largest of the
base weight, the update and their sum, because libraries round a matrix product differently."""

WITHOUT_BASE, WITH_BASE = Run(stage=2, exclude_frozen=True), Run(stage=3)
PREFIX = "base_model.model"
pytestmark = pytest.mark.filterwarnings("ignore")
MERGE = ("--adapter", "merge")

Tensors = dict[str, torch.Tensor]


def unit(value: torch.Tensor) -> torch.Tensor:
    """One unit in the last place of each element."""
    value = value.abs()
    return torch.nextafter(value, torch.full_like(value, torch.inf)) - value


def merged_by_peft(trained: Trained, folder: Path) -> Tensors:
    """The files that peft's ``merge_and_unload`` gives."""
    copy.deepcopy(trained.model).merge_and_unload().save_pretrained(folder)
    return files_of(folder)


def assert_merged(found: Tensors, wanted: Tensors, trained: Trained) -> None:
    """Equal in fp32 up to the rounding of a product, and bit for bit where there is none."""
    assert found.keys() == wanted.keys()
    base = {n: peft_models.rounded(t) for n, t in files_of(trained.base).items()}
    for name, value in wanted.items():
        before = base.get(name, value)
        before = before if before.shape == value.shape else value
        terms = [term.abs() for term in (before, value, value - before)]
        room = ULPS * unit(functools.reduce(torch.maximum, terms))
        is_product = not torch.equal(before, value)
        assert found[name].dtype is torch.float32
        assert ((found[name] - value).abs() <= room * is_product).all(), name


def assert_rounded(found: Tensors, wanted: Tensors, dtype: torch.dtype) -> None:
    """peft's values rounded to 16 bits, or the neighbor if peft's value is next to a midpoint."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        rounded = value.to(dtype)
        is_other = found[name] != rounded
        middle = (found[name].double() + rounded.double())[is_other] / 2
        away = (value[is_other].double() - middle).abs()
        assert (away <= ULPS * unit(value[is_other]).double()).all(), name


@pytest.mark.parametrize("run", [WITHOUT_BASE, WITH_BASE], ids=["base given", "base saved"])
@pytest.mark.parametrize("form", FORMS)
def test_merge_equals_peft(form: str, run: Run, tmp_path: Path) -> None:
    trained = peft_models.train(FORMS[form], tmp_path, run)
    config = trained.base / "config.json"
    (trained.checkpoint / config.name).write_bytes(config.read_bytes())
    given = ["--base", trained.base] if run is WITHOUT_BASE else []
    wanted = merged_by_peft(trained, tmp_path / "peft")
    for dtype in ("fp32", "fp16"):
        export(trained.checkpoint, tmp_path / dtype, *MERGE, "--dtype", dtype, *given)
    assert_merged(files_of(tmp_path / "fp32"), wanted, trained)
    assert_rounded(files_of(tmp_path / "fp16"), wanted, torch.float16)
    configs = [read_json(tmp_path / name / "config.json") for name in ("fp32", "peft")]
    assert configs[0]["tie_word_embeddings"] == configs[1]["tie_word_embeddings"]


@pytest.mark.parametrize(("is_tied", "run"), [(True, WITHOUT_BASE), (False, WITH_BASE)])
@pytest.mark.parametrize("tokens", [[9, 3, 49], {"embed_tokens": [0, 1]}], ids=str)
def test_merge_with_trained_tokens_equals_peft(
    tokens: object, is_tied: bool, run: Run, tmp_path: Path
) -> None:
    keys = {"target_modules": ["q_proj"], "trainable_token_indices": tokens, "use_dora": is_tied}
    form = Form(lambda: peft_models.llama(tied=is_tied), keys)
    trained = peft_models.train(form, tmp_path, run)
    config = trained.base / "config.json"
    (trained.checkpoint / config.name).write_bytes(config.read_bytes())
    out, given = tmp_path / "out", ["--base", trained.base] if run is WITHOUT_BASE else []
    export(trained.checkpoint, out, *MERGE, *given)
    wanted = merged_by_peft(trained, tmp_path / "peft")
    assert_merged(files_of(out), wanted, trained)


def wide() -> LlamaForCausalLM:
    """Matrices of several blocks of rows and tiles of columns."""
    sizes = {"hidden_size": 512, "intermediate_size": 1500, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=8, **sizes))


def wide_conv1d() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=1, n_head=8, vocab_size=50))


WIDE = {"target_modules": ["q_proj", "down_proj", "gate_proj"], "r": 64}
CONV1D = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "r": 33}
WIDE_FORMS = {
    "rsLoRA": Form(wide, {**WIDE, "use_rslora": True}),
    "DoRA": Form(wide, {**WIDE, "use_dora": True}),
    "DoRA of Conv1D": Form(wide_conv1d, {**CONV1D, "use_dora": True}),
}


@pytest.mark.parametrize("form", WIDE_FORMS)
def test_merge_of_wide_matrices_equals_peft(form: str, tmp_path: Path) -> None:
    trained = peft_models.train(WIDE_FORMS[form], tmp_path, WITHOUT_BASE)
    wanted = merged_by_peft(trained, tmp_path / "peft")
    for dtype in ("fp32", "bf16"):
        export(trained.checkpoint, tmp_path / dtype, "--base", trained.base, "--dtype", dtype)
    assert_merged(files_of(tmp_path / "fp32"), wanted, trained)
    assert_rounded(files_of(tmp_path / "bf16"), wanted, torch.bfloat16)


@pytest.mark.parametrize("prefix", ["transformer.", "bert."])
def test_base_with_the_names_of_the_inner_model_is_merged(prefix: str, tmp_path: Path) -> None:
    """As GPT-2 is on the Hub, and a classifier's base is an encoder."""
    form = FORMS["conv1d"] if prefix == "transformer." else CLASSIFIER
    trained = peft_models.train(form, tmp_path, WITHOUT_BASE)
    config, path = (trained.base / name for name in ("config.json", "model.safetensors"))
    if form is CLASSIFIER:
        edit_json(config, architectures=["BertModel"])
    else:
        (trained.checkpoint / config.name).write_bytes(config.read_bytes())
    weights = load_file(path).items()
    inner = {n.removeprefix(prefix): t for n, t in weights if n.startswith(prefix)}
    save_file(inner, path, metadata={"format": "pt"})
    export(trained.checkpoint, tmp_path / "out", *MERGE, "--base", trained.base)
    found, wanted = files_of(tmp_path / "out"), merged_by_peft(trained, tmp_path / "peft")
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[n], t, rtol=1e-6, atol=1e-7) for n, t in wanted.items())


CLASSIFIER = Form(
    peft_models.bert_classifier, {"target_modules": ["query"], "task_type": "SEQ_CLS"}
)


def test_merged_model_loads_and_verifies_with_its_base(tmp_path: Path) -> None:
    """With a base and no other choice, adapters are merged."""
    trained = peft_models.train(FORMS["plain"], tmp_path, WITHOUT_BASE)
    out, tokens = tmp_path / "out", torch.arange(8)[None] + 3
    export(trained.checkpoint, out, "--base", trained.base)
    assert not list(out.glob("adapter*"))
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out).eval()(tokens).logits
        torch.testing.assert_close(found, trained.model.eval()(tokens).logits)
    assert verify(out, "--against", trained.checkpoint)["ok"]
    moved = trained.base.rename(tmp_path / "moved")
    assert verify(out, "--against", trained.checkpoint, "--base", moved)["ok"]


def test_weights_trained_outside_the_adapter_are_merged(tmp_path: Path) -> None:
    form = Form(peft_models.llama, {"target_modules": ["q_proj"]}, by_hand="norm")
    trained = peft_models.train(form, tmp_path, WITHOUT_BASE)
    export(trained.checkpoint, tmp_path / "out", "--base", trained.base)
    found = files_of(tmp_path / "out")
    live = {n.removeprefix(f"{PREFIX}."): p for n, p in trained.model.named_parameters()}
    norms = [name for name in found if "norm" in name]
    assert norms
    assert all(torch.equal(found[name], live[name]) for name in norms)


def test_one_of_several_adapters_is_merged_by_name(tmp_path: Path) -> None:
    form = Form(peft_models.llama, {"target_modules": ["q_proj"]})
    trained = peft_models.train(form, tmp_path, WITH_BASE, adapters=("default", "second"))
    out, named = tmp_path / "out", (*MERGE, "--adapter-name")
    refused(trained.checkpoint, out, *MERGE, kind="usage", word="second")
    refused(trained.checkpoint, out, *named, "third", kind="usage", word="third")
    export(trained.checkpoint, out, *named, "second")
    trained.model.set_adapter("second")
    assert_merged(files_of(out), merged_by_peft(trained, tmp_path / "peft"), trained)


def test_base_dtype_is_that_of_training_or_the_option(tmp_path: Path) -> None:
    trained = peft_models.train(FORMS["plain"], tmp_path, WITHOUT_BASE)
    name = "model.norm.weight"
    given = files_of(trained.base)[name]
    for dtype, wanted in (("auto", peft_models.rounded(given)), ("fp32", given)):
        words = ("--base", trained.base, "--base-dtype", dtype)
        export(trained.checkpoint, tmp_path / dtype, *words)
        assert torch.equal(files_of(tmp_path / dtype)[name], wanted)


# --- adapters that cannot be merged ---


def factors(module: str, inputs: int, outputs: int, rank: int = 2) -> Tensors:
    return {
        f"{PREFIX}.{module}.lora_A.default.weight": values((rank, inputs), 1),
        f"{PREFIX}.{module}.lora_B.default.weight": values((outputs, rank), 2),
    }


def by_hand(folder: Path, trained: Tensors, base: Tensors, **config: object) -> Path:
    """A checkpoint of an adapter and of the base weights given."""
    frozen = {f"{PREFIX}.{name}": value for name, value in base.items()}
    run = Run(stage=2, exclude_frozen=not base)
    root = save(Model([trained], frozen), run, folder / "run")
    keys = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}
    (root / "adapter_config.json").write_text(json.dumps(keys))
    return root


X, WEIGHT = factors("x", inputs=4, outputs=6), "x.base_layer.weight"
BASE = {WEIGHT: values((6, 4), 3)}
SQUARE = {WEIGHT: values((4, 4), 3), "y.base_layer.weight": values((4, 6), 4)}
STACKS = {f"x.base_layer.base_layer.{name}": values((3, 6, 4), 3) for name in ("one", "two")}
UNMERGEABLE: dict[str, tuple[Tensors, Tensors, dict[str, object], str, str]] = {
    "base of another shape": (X, {WEIGHT: values((5, 4), 3)}, {}, "damaged", "x.weight"),
    "quantized base": (X, {WEIGHT: torch.zeros(6, 4).byte()}, {}, "unsupported", "x.weight"),
    "square weight stored either way": (
        {**factors("x", 4, 4), **factors("y", 4, 6)},
        SQUARE,
        {"fan_in_fan_out": False},
        "unsupported",
        "x.weight",
    ),
    "two parameters of one shape": (
        {**factors("x.base_layer", 4, 6, 6), **factors("x", 4, 6, 6)},
        STACKS,
        {"target_parameters": ["x.one", "x.two"]},
        "unsupported",
        "x.one",
    ),
    "no base": (X, {}, {}, "frozen_left_out", "x.weight"),
    "one factor": (dict([*X.items()][1:]), BASE, {}, "frozen_left_out", "lora_A"),
    "variant": (X, BASE, {"alora_invocation_tokens": [1]}, "unsupported", "alora"),
    "no scale": (X, BASE, {"lora_alpha": None}, "damaged", "lora_alpha"),
    "rank of another run": (X, BASE, {"r": 3}, "damaged", "rank"),
    "pattern of scales": (X, BASE, {"alpha_pattern": {"(": 2}}, "damaged", ":("),
}


@pytest.mark.parametrize("case", UNMERGEABLE)
def test_merge_that_could_be_wrong_is_rejected(case: str, tmp_path: Path) -> None:
    trained, base, config, kind, word = UNMERGEABLE[case]
    root = by_hand(tmp_path, trained, base, **config)
    refused(root, tmp_path / "out", *MERGE, kind=kind, word=word)


@pytest.mark.parametrize(
    ("keys", "word"),
    [({"init_lora_weights": "pissa"}, "pissa"), ({"lora_bias": True}, "q_proj.bias")],
)
def test_merge_with_an_unsuitable_base_is_rejected(
    keys: dict[str, object], word: str, tmp_path: Path
) -> None:
    form = Form(peft_models.llama, {"target_modules": ["q_proj"], **keys})
    trained = peft_models.train(form, tmp_path, WITHOUT_BASE)
    words = (*MERGE, "--base", trained.base)
    refused(trained.checkpoint, tmp_path / "out", *words, kind="unsupported", word=word)


@pytest.mark.parametrize(("scale", "is_lost"), [(1e-5, True), (1.0, False)])
def test_update_lost_by_rounding_is_found(scale: float, is_lost: bool, tmp_path: Path) -> None:
    base = {WEIGHT: values((24, 40), 3).bfloat16()}
    root = by_hand(tmp_path, factors("x", 40, 24), base, target_modules=["x"], lora_alpha=2 * scale)
    for dtype, wanted in (("fp32", []), ("bf16", ["update-lost"] * is_lost)):
        found = export(root, tmp_path / dtype, *MERGE, "--dtype", dtype)["findings"]
        assert [one["kind"] for one in found] == wanted
