"""Deciding: from made-up facts, and from those of real checkpoints, with nothing to read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec import structs
from rich.console import Console

from tests.support.checkpoints import Model, Run, save, small_model, values
from zexport import plan_export
from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.resolve import Framework, Location, TagChoice
from zexport.checkpoint.state import Cell, Parallelism, Role, StoredTensor, TrainingState
from zexport.collect import collect
from zexport.collected import Collected
from zexport.decide import decide
from zexport.errors import DamagedCheckpointError, FrozenLeftOutError
from zexport.model.config import ConfigFile
from zexport.model.fit import ModelNames, as_it_is, best_fit
from zexport.model.sidecars import Sidecars
from zexport.options import AdapterMode, ExportOptions, NameLayout
from zexport.plan.plan import ExportPlan
from zexport.plan.summary import side_nbytes, summarize
from zexport.ranges.dtypes import DType, Shape
from zexport.ranges.extents import Extent
from zexport.report.export import print_plan
from zexport.run.begin import noted
from zexport.store.boundary import Boundary
from zexport.weights.base_model import Base
from zexport.weights.named import Weights
from zexport.weights.ties import Ties

FIXTURES = Path(__file__).parents[2] / "fixtures"
NOWHERE = Path("/nowhere")
OUT = NOWHERE / "out"
SHAPES: Mapping[str, Shape] = {"emb.weight": (6, 4), "lin.weight": (4, 4), "head.weight": (6, 4)}
TIED = {"head.weight": "emb.weight"}


_FACTORS = (("A", (2, 4)), ("B", (4, 2)))
_INNER = "base_model.model.lin"
_ADAPTED = Model(
    [{f"{_INNER}.lora_{factor}.default.weight": values(shape, 1)} for factor, shape in _FACTORS],
    frozen={f"{_INNER}.base_layer.weight": values((4, 4), 3)},
)


# --- with nothing to read ---

_READING = ("open", "os.", "subprocess.", "shutil.", "socket.", "glob.", "tempfile.", "fcntl.")
_is_forbidden = [False]


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _is_forbidden[0] and event.startswith(_READING):
        raise AssertionError(f"deciding called for {event} {arguments}")


sys.addaudithook(_audit)


@contextmanager
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this lasts, whoever asks for a file, a process or the time of day fails."""

    def forbidden(*arguments: object, **_: object) -> NoReturn:
        raise AssertionError(f"deciding asked for {arguments}")

    with monkeypatch.context() as patched:
        for module, names in ((os, ("stat", "lstat", "readlink", "access")), (time, ("time",))):
            for name in names:
                patched.setattr(module, name, forbidden)
        _is_forbidden[0] = True
        try:
            yield
        finally:
            _is_forbidden[0] = False


def _decided(
    checkpoint: TrainingState, options: ExportOptions, monkeypatch: pytest.MonkeyPatch
) -> ExportPlan:
    collected = collect(checkpoint, options)
    decide(collected, OUT)  # imports what it needs
    with nothing_read(monkeypatch):
        return decide(collected, OUT)


@pytest.mark.parametrize("layout", NameLayout)
@pytest.mark.parametrize(
    "name", ["z3_w2_bf16", "z1_w2_bf16_frozen", "z2_w2_bf16_tied", "autoep_z2_w4_ep2", "z0_w2_fp16"]
)
def test_the_plan_of_a_real_checkpoint_is_decided_without_reading(
    name: str, layout: NameLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, options = open_checkpoint(FIXTURES / name / "ckpt"), ExportOptions(layout=layout)
    decided = _decided(checkpoint, options, monkeypatch)
    assert noted(decided, {}) == plan_export(checkpoint, OUT, options)
    assert decided.nbytes_compared == 0


@pytest.mark.parametrize("mode", [AdapterMode.KEEP, AdapterMode.MERGE])
def test_what_becomes_of_an_adapter_is_decided_without_reading(
    mode: AdapterMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["lin"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    root = save(_ADAPTED, Run(stage=3), tmp_path / "run")
    (root / "README.md").write_text("---\nlibrary_name: peft\n---\n[More Information Needed]\n")
    checkpoint = open_checkpoint(root)
    options = ExportOptions(adapter=mode, adapter_config=tmp_path / "adapter_config.json")
    decided = _decided(checkpoint, options, monkeypatch)
    assert noted(decided, {}) == plan_export(checkpoint, OUT, options)
    recorded = decided.provenance["options"]
    assert isinstance(recorded, dict)
    assert recorded["adapter"] == mode.value


def test_a_config_and_a_tokenizer_are_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save(small_model(), Run(stage=3), tmp_path / "run")
    (root / "config.json").write_text(json.dumps({"model_type": "none-such", "vocab_size": 3}))
    (root / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<x>"}]}')
    (root / "vocab.json").write_text("{")
    decided = _decided(open_checkpoint(root), ExportOptions(), monkeypatch)
    told = "\n".join(decided.warnings)
    assert "added tokens up to 7 in tokenizer.json" in told
    assert "vocab.json is copied as it is" in told
    assert {"README.md", "config.json"} <= {file.filename for file in decided.side_files}


def test_a_dry_run_tells_what_it_had_to_compare(tmp_path: Path) -> None:
    model = Model([{"emb.weight": values((6, 4), 1), "head.weight": values((6, 4), 1)}])
    root = save(model, Run(stage=3), tmp_path / "run")
    shapes = {name: [6, 4] for name in ("emb.weight", "head.weight")}
    described = {
        "architecture": "Small",
        "shapes": shapes,
        "buffers": [],
        "tied": TIED,
        "unsaved": [],
        "keep_fp32": {},
        "layouts": [
            {"label": "", "sources": ["emb.weight"], "parts": [], "tensors": {"emb.weight": 0}}
        ],
    }
    (root / "zexport_source.json").write_text(json.dumps({"model": described}))
    plan = plan_export(open_checkpoint(root), OUT)
    assert _names(plan) == ["emb.weight"]
    assert plan.nbytes_compared == summarize(plan).nbytes_compared == 2 * 6 * 4 * 4
    console = Console(record=True, width=200)
    print_plan(console, summarize(plan), side_nbytes(plan))
    assert "read 192 B to compare" in console.export_text()


# --- made up ---


def _checkpoint(**more: Any) -> TrainingState:
    facts: dict[str, Any] = {
        "location": Location(
            NOWHERE, "global_step1", TagChoice.ONLY, Framework.DEEPSPEED, (), Boundary(()), NOWHERE
        ),
        "layout": "ZeRO-3",
        "whole": Cell(
            more.pop("parameters", {}),
            **{k: more.pop(k) for k in ("aliases", "left_out") if k in more},
        ),
        "parallelism": Parallelism(),
        "stage": 3,
        "world_size": 1,
        "module_dtype": DType.BF16,
    }
    return TrainingState(**facts, **more)


def _tensor(name: str, shape: Shape, role: Role = Role.TRAINABLE, at: int = 0) -> StoredTensor:
    numel = 1
    for size in shape:
        numel *= size
    return StoredTensor(name, shape, DType.F32, role, Extent(NOWHERE / "file", at, numel * 4))


def _collected(shapes: Mapping[str, Shape], **more: Any) -> Collected:
    """What is known of a small model, of which these weights are stored."""
    tensors = {n: _tensor(n, s, at=1000 * i) for i, (n, s) in enumerate(shapes.items())}
    weights = Weights(tensors, {})
    saved = {name: shape for name, shape in SHAPES.items() if name not in TIED}
    names = ModelNames("Small", SHAPES, frozenset(), TIED, (as_it_is(saved, TIED),), "a test")
    content = {"architectures": ["Small"], "tie_word_embeddings": True}
    config = ConfigFile(NOWHERE / "config.json", content)
    facts: dict[str, Any] = {
        "checkpoint": _checkpoint(tensors=tuple(tensors.values())),
        "options": ExportOptions(),
        "weights": weights,
        "sidecars": Sidecars(config, None, {}, (), None),
        "fit": best_fit(names, weights.known_shapes),
    }
    return Collected(**{**facts, **more})


def _names(plan: ExportPlan) -> list[str]:
    return sorted(tensor.name for shard in plan.shards for tensor in shard.tensors)


def _config_of(plan: ExportPlan) -> dict[str, Any]:
    (content,) = (one.content for one in plan.side_files if one.filename == "config.json")
    assert content is not None
    found = json.loads(content)
    assert isinstance(found, dict)
    return found


def test_names_that_a_rename_takes_from_the_model_are_told_where_names_stay() -> None:
    renamed = {name.replace("lin.", "line."): shape for name, shape in SHAPES.items()}
    for renames, shapes, is_told in (
        ((("lin", "line"),), renamed, True),
        ((), renamed, False),
        ((("old", "lin"),), SHAPES, False),
    ):
        options = ExportOptions(layout=NameLayout.MEMORY, renames=renames)
        told = " ".join(decide(_collected(shapes, options=options), OUT).warnings)
        assert ("line.weight in --rename but no such names in the model" in told) == is_told


def test_tied_weights_of_equal_bytes_are_written_once() -> None:
    plan = decide(_collected(SHAPES, ties=Ties(equal=frozenset(TIED))), OUT)
    assert _names(plan) == ["emb.weight", "lin.weight"]
    assert (plan.provenance["tied"], plan.provenance["loadable"]) == (TIED, True)
    assert _config_of(plan)["tie_word_embeddings"] is True


def test_tied_weights_that_differ_are_both_written_and_the_config_ties_them_no_more() -> None:
    ties = Ties(differing=frozenset(TIED), nbytes_read=192)
    plan = decide(_collected(SHAPES, ties=ties, nbytes_compared=192), OUT)
    assert _names(plan) == sorted(SHAPES)
    assert plan.provenance["tied"] == {}
    assert _config_of(plan)["tie_word_embeddings"] is False
    assert "differs from emb.weight" in plan.warnings[0]
    assert plan.nbytes_compared == 192


def test_what_was_left_out_comes_from_the_base_or_is_refused() -> None:
    shapes = {name: SHAPES[name] for name in ("emb.weight",)}
    found = _collected(shapes)
    found = structs.replace(found, checkpoint=replace(found.checkpoint, frozen_left_out=True))
    with pytest.raises(FrozenLeftOutError, match=r"lin\.weight") as caught:
        decide(found, OUT)
    assert "no base was given" in str(caught.value)
    base = Base(NOWHERE, {"lin.weight": _tensor("lin.weight", (4, 4), Role.FROZEN, 5000)})
    plan = decide(structs.replace(found, base=base), OUT)
    assert plan.provenance["from_base"] == ["lin.weight"]
    assert _names(plan) == ["emb.weight", "lin.weight"]
    with pytest.raises(FrozenLeftOutError, match="base has a peft adapter"):
        decide(structs.replace(found, base=Base(NOWHERE, {}, "a peft adapter")), OUT)


def test_heads_lie_in_a_file_of_their_own_beside_an_index() -> None:
    found = _collected({"emb.weight": (6, 4), "lin.weight": (4, 4)})
    head = {"v_head.weight": _tensor("v_head.weight", (1, 4), at=9000)}
    plan = decide(structs.replace(found, heads=head), OUT)
    assert [shard.filename for shard in plan.shards] == [
        "model.safetensors",
        "value_head.safetensors",
    ]
    assert "model.safetensors.index.json" in [file.filename for file in plan.side_files]
    assert plan.provenance["heads"] == ["v_head.weight"]


def test_a_shape_that_the_config_does_not_have_is_refused() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"lin\.weight \[4, 5\] for \[4, 4\]"):
        decide(_collected({**SHAPES, "lin.weight": (4, 5)}), OUT)


def test_nothing_makes_no_plan() -> None:
    found = _collected({}, options=ExportOptions(layout=NameLayout.MEMORY))
    with pytest.raises(DamagedCheckpointError, match="holds no weights"):
        decide(found, OUT)


def test_what_was_decided_is_recorded_and_the_options_stay_as_they_were() -> None:
    found = _collected({"emb.weight": (6, 4), "lin.weight": (4, 4)}, mode=AdapterMode.MERGE)
    recorded = decide(found, OUT).provenance["options"]
    assert isinstance(recorded, dict)
    assert (recorded["adapter"], recorded["hub_layout"]) == ("merge", "")
    assert (found.options.adapter, found.options.hub_layout) == (AdapterMode.AUTO, None)


def test_what_was_collected_prints_shortly() -> None:
    assert str(_collected(SHAPES)) == (
        "Collected(/nowhere/global_step1: Weights(3 tensors, 0 aliases, 0 left out), a model)"
    )
