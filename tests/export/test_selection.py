"""Which tensors are written, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zexport
from tests.support.checkpoints import Model, Run, Tensors, edit, save, values
from tests.support.exports import edit_json, export, manifest_of, mentions, refused, verify
from tests.support.hf_models import load
from tests.support.live_models import checkpoint_of, files_of, in_training, live_model
from tests.support.real_cases import facts

NORM = "model.norm.weight"


@pytest.fixture
def llama() -> Any:
    return live_model("llama")


def checkpoint(model: Any, root: Path, run: Run | None = None, **changes: Any) -> Path:
    """A checkpoint of a model whose final norm is frozen, with its config."""
    trained = replace(in_training(model, frozen=(NORM,)), **changes)
    model.config.save_pretrained(save(trained, run or Run(), root))
    return root


def renamed(model: Model, rename: Callable[[str], str]) -> Model:
    """The same model with other names for every tensor."""

    def each(tensors: Tensors) -> Tensors:
        return {rename(name): value for name, value in tensors.items()}

    tied = {rename(alias): rename(name) for alias, name in model.tied.items()}
    groups = [each(group) for group in model.groups]
    return replace(
        model, groups=groups, frozen=each(model.frozen), buffers=each(model.buffers), tied=tied
    )


# --- frozen weights ---


@pytest.mark.parametrize(("stage", "has_config"), [(1, True), (3, True), (2, False)])
def test_missing_frozen_weights_are_refused(
    stage: int, has_config: bool, llama: Any, tmp_path: Path
) -> None:
    root = checkpoint(llama, tmp_path / "run", Run(stage=stage, exclude_frozen=True))
    if not has_config:
        (root / "config.json").unlink()
    word = NORM if has_config else "frozen"
    error = refused(root, tmp_path / "out", kind="frozen_left_out", word=word)
    assert "--exclude-frozen" in error.hint
    report = export(root, tmp_path / "out", "--exclude-frozen")
    assert report["loadable"] is False
    assert facts(files_of(tmp_path / "out")) == facts(in_training(llama, (NORM,)).trained)
    saved = checkpoint(llama, tmp_path / "saved", Run(stage=stage))
    assert export(saved, tmp_path / "all")["loadable"]
    export(saved, tmp_path / "excluded", "--exclude-frozen")
    assert NORM not in files_of(tmp_path / "excluded")


@pytest.mark.parametrize(("stage", "layout"), [(1, "hub"), (2, "memory"), (3, "hub")])
def test_base_supplies_missing_frozen_weights(
    stage: int, layout: str, llama: Any, tmp_path: Path
) -> None:
    root = checkpoint(llama, tmp_path / "run", Run(stage=stage, exclude_frozen=True))
    llama.save_pretrained(tmp_path / "base")
    options = ("--layout", layout, "--base", tmp_path / "base")
    report = export(root, tmp_path / "out", *options)
    assert (report["from_base"], report["loadable"]) == ([NORM], True)
    assert facts(files_of(tmp_path / "out")) == facts(llama.state_dict())
    assert verify(tmp_path / "out", "--against", root, "--base", tmp_path / "base")["ok"]


@pytest.mark.parametrize("norm", [None, torch.ones(15)], ids=["missing", "other shape"])
def test_base_without_the_missing_weight_is_refused(
    norm: torch.Tensor | None, llama: Any, tmp_path: Path
) -> None:
    root = checkpoint(llama, tmp_path / "run", Run(exclude_frozen=True))
    llama.save_pretrained(tmp_path / "base")
    tensors = {name: value for name, value in llama.state_dict().items() if name != NORM}
    more = {} if norm is None else {NORM: norm}
    save_file({**tensors, **more}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    options = ("--base", tmp_path / "base")
    refused(root, tmp_path / "out", *options, kind="frozen_left_out", word=NORM)


@pytest.mark.parametrize(("has_config", "layout"), [(True, "hub"), (False, "memory")])
def test_base_does_not_replace_weights_trained_under_other_names(
    has_config: bool, layout: str, llama: Any, tmp_path: Path
) -> None:
    """A wrapper in ``param_shapes`` only: its names would get the base's untrained weights."""
    root = checkpoint(llama, tmp_path / "run")
    if not has_config:
        (root / "config.json").unlink()
    llama.save_pretrained(tmp_path / "base")

    def wrap(state: dict[str, Any]) -> None:
        shapes = state["param_shapes"]
        state["param_shapes"] = [{f"wrapped_{n}": s for n, s in one.items()} for one in shapes]

    for path in root.glob("*/*model_states.pt"):
        edit(path, wrap)
    with pytest.raises(zexport.ZexportError) as caught:
        export(root, tmp_path / "out", "--layout", layout, "--base", tmp_path / "base")
    assert caught.value.kind in {"frozen_left_out", "names_mismatch"}


# --- names against the model ---

EXTRA = {"model.extra.weight": values((3,), 1)}


@pytest.mark.parametrize(
    ("config", "more", "word"),
    [
        ({"num_hidden_layers": 3}, {}, "model.layers.2"),
        ({}, EXTRA, "model.extra.weight"),
    ],
    ids=["too few layers", "extra"],
)
def test_weights_that_do_not_fit_the_config_are_refused(
    config: dict[str, int], more: Tensors, word: str, llama: Any, tmp_path: Path
) -> None:
    weights = {**in_training(llama).trained, **more}
    root = checkpoint(llama, tmp_path / "run", groups=[weights], frozen={})
    edit_json(root / "config.json", **config)
    error = refused(root, tmp_path / "out", kind="names_mismatch", word=word)
    assert "--layout memory" in error.hint
    report = export(root, tmp_path / "out", "--layout", "memory")
    assert report["loadable"] is False
    assert files_of(tmp_path / "out").keys() == weights.keys()


def test_other_model_or_other_shapes_are_refused(llama: Any, tmp_path: Path) -> None:
    root = checkpoint_of(llama, tmp_path / "gpt2", trained=in_training(live_model("gpt2")))
    refused(root, tmp_path / "out", kind="names_mismatch", word="transformer.wpe.weight")
    root = checkpoint(llama, tmp_path / "run")
    edit_json(root / "config.json", intermediate_size=20)
    refused(root, tmp_path / "out", kind="damaged", word="mlp", finding="shape-mismatch")


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_prefix_of_a_wrapper_is_removed(prefix: str, llama: Any, tmp_path: Path) -> None:
    wrapped = renamed(in_training(llama), lambda name: prefix + name)
    root = checkpoint_of(llama, tmp_path / "run", trained=wrapped)
    report = export(root, tmp_path / "out")
    assert report["loadable"]
    assert facts(files_of(tmp_path / "out")) == facts(llama.state_dict())


# --- --rename ---


def test_rename_comes_before_the_comparison_with_the_model(tmp_path: Path) -> None:
    model = live_model("llama-tied")
    inner = renamed(in_training(model), lambda name: f"net.{name}")
    root = checkpoint_of(model, tmp_path / "run", trained=inner)
    report = export(root, tmp_path / "out", "--rename", r"^net\.=")
    assert report["loadable"]
    assert manifest_of(tmp_path / "out")["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert load(tmp_path / "out")[1] == {}
    spoilt = ("--rename", r"^net\.=", "--rename", "mlp=ffn")
    refused(root, tmp_path / "new", *spoilt, kind="names_mismatch", word="ffn")


@pytest.mark.parametrize("rename", ["^.*$=x", "(=x"])
def test_impossible_rename_is_refused(rename: str, zero3: Path, tmp_path: Path) -> None:
    refused(zero3, tmp_path / "out", "--rename", rename, kind="usage", word="--rename")


@pytest.mark.parametrize(("rename", "is_idle"), [("^base=", True), ("^norm=o", False)])
def test_rename_that_changes_no_name_is_warned(rename: str, is_idle: bool, zero3: Path) -> None:
    report = export(zero3, zero3.parent / "out", "--rename", rename)
    assert mentions(report, "--rename") == is_idle


# --- --only ---

LIVE = {"emb.weight": values((13, 7), 1), "out.weight": values((5, 7), 2)}
EMA = {"emb.weight": values((13, 7), 3), "out.weight": values((5, 7), 4)}


@pytest.mark.parametrize(
    ("part", "trains_ema", "stage"),
    [("model", True, 1), ("model.", False, 2), ("ema_model", True, 3), ("ema_model", False, 3)],
)
def test_only_exports_one_part_under_its_own_names(
    part: str, trains_ema: bool, stage: int, tmp_path: Path
) -> None:
    live = {f"model.{name}": value for name, value in LIVE.items()}
    ema = {f"ema_model.{name}": value for name, value in EMA.items()}
    model = Model([live, ema]) if trains_ema else Model([live], frozen=ema)
    root, out = save(model, Run(stage=stage), tmp_path / "run"), tmp_path / "out"
    export(root, out, "--only", part)
    assert facts(files_of(out)) == facts(EMA if part == "ema_model" else LIVE)
    left_out = 126 if trains_ema or part == "ema_model" else 0
    assert manifest_of(out)["accounting"]["left_out"] == left_out
    assert verify(out, "--against", root)["ok"]
    error = refused(root, tmp_path / "new", "--only", "ema", kind="usage", word="--only")
    assert error.found == "ema_model, model"
