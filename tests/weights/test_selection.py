"""What is written under which name, when the model's own names are known and when they are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.checkpoints import Model, Run, edit, model_file, save, small_model, values
from zexport import consolidate
from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import Role, StoredTensor
from zexport.errors import FrozenLeftOutError, NamesMismatchError, UsageError, ZexportError
from zexport.facts.statements import judge
from zexport.model.fit import ModelNames, NamesUnknown, best_fit
from zexport.options import ExportOptions, NameLayout
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.store.contents import LFS_POINTER
from zexport.weights.base_model import Base
from zexport.weights.hub_names import settle_names
from zexport.weights.named import Selection, Weights
from zexport.weights.select import select_tensors
from zexport.weights.ties import tie_statements

_UNKNOWN = NamesUnknown("there is no config.json")


def _names(
    model: Model, tied: Mapping[str, str] | None = None, **more: tuple[int, ...]
) -> ModelNames:
    """A model class that fits ``model``, with its ties declared and ``more`` weights."""
    stored = {name: tuple(value.shape) for name, value in model.tensors.items()}
    aliases = {alias: stored[name] for alias, name in model.tied.items()}
    return ModelNames(
        architecture="Small",
        shapes=stored | aliases | {name.replace("_", "."): more[name] for name in more},
        buffers=frozenset(model.buffers),
        tied=model.tied if tied is None else tied,
        layouts=(),
        provenance="a test",
    )


def _select(
    root: Path,
    names: ModelNames | NamesUnknown,
    options: ExportOptions | None = None,
    base: Mapping[str, StoredTensor] | None = None,
) -> Selection:
    checkpoint, options = open_checkpoint(root), options or ExportOptions()
    stored = Weights.of(checkpoint).renamed(options.renames)
    given = Base(None, base or {})
    fit = best_fit(names, stored.known_shapes) if isinstance(names, ModelNames) else names
    settled = settle_names(stored, fit, given.shapes, options, root)
    return select_tensors(checkpoint, settled, given, options)


def _base(**shapes: tuple[int, ...]) -> dict[str, StoredTensor]:
    return {
        name.replace("_", "."): StoredTensor(
            name.replace("_", "."), shape, DType.F32, Role.FROZEN, Extent(Path("base"), 0, 0)
        )
        for name, shape in shapes.items()
    }


def test_a_model_that_fits_is_loadable_and_has_its_tie_once(zero3: Path) -> None:
    selection = _select(zero3, _names(small_model()))
    assert selection.weights.tensors.keys() == small_model().tensors.keys()
    assert selection.weights.aliases == {"head.weight": "emb.weight"}
    assert (selection.loadable, selection.warnings + selection.notes) == (True, ())


def test_a_tied_weight_is_written_under_the_source_that_the_model_declares(zero3: Path) -> None:
    selection = _select(zero3, _names(small_model(), {"emb.weight": "head.weight"}))
    assert "emb.weight" not in selection.weights.tensors
    assert selection.weights.tensors["head.weight"].name == "emb.weight"
    assert selection.weights.aliases == {"emb.weight": "head.weight"}
    assert selection.loadable


@pytest.mark.parametrize("source", ["emb.weight", "first", "second"])
def test_of_three_tied_names_the_declared_source_is_written(source: str, tmp_path: Path) -> None:
    model = replace(small_model(), tied={"first": "emb.weight", "second": "emb.weight"})
    others = {"emb.weight", "first", "second"} - {source}
    names = _names(model, dict.fromkeys(others, source))
    selection = _select(save(model, Run(), tmp_path), names)
    assert others.isdisjoint(selection.weights.tensors)
    assert selection.weights.tensors[source].name == "emb.weight"
    assert selection.weights.aliases == dict.fromkeys(others, source)
    assert selection.loadable


def test_a_tie_that_the_model_does_not_declare_is_written_under_each_name(zero3: Path) -> None:
    selection = _select(zero3, _names(small_model(), {}))
    assert selection.weights.tensors["head.weight"] is selection.weights.tensors["emb.weight"]
    assert (selection.weights.aliases, selection.loadable) == ({}, True)


def test_a_tied_name_that_the_model_does_not_have_is_not_written(zero3: Path) -> None:
    names = _names(small_model(), {})
    shapes = {name: shape for name, shape in names.shapes.items() if name != "head.weight"}
    selection = _select(zero3, structs.replace(names, shapes=shapes))
    assert "head.weight" not in selection.weights.tensors
    assert selection.weights.aliases == {"head.weight": "emb.weight"}


@pytest.mark.parametrize("stage", [1, 3])
def test_of_tied_names_that_the_checkpoint_does_not_tie_one_is_enough(
    stage: int, tmp_path: Path
) -> None:
    model = replace(small_model(), tied={})
    names = _names(model, {"emb.weight": "head.weight"}, head_weight=(13, 7))
    selection = _select(save(model, Run(stage=stage), tmp_path), names)
    assert selection.loadable
    assert selection.weights.tensors["head.weight"].name == "emb.weight"
    assert selection.weights.aliases == {"emb.weight": "head.weight"}


def test_layout_memory_keeps_the_stored_names(zero3: Path) -> None:
    names = _names(small_model(), {"emb.weight": "head.weight"})
    selection = _select(zero3, names, ExportOptions(layout=NameLayout.MEMORY))
    assert selection.weights.tensors.keys() == small_model().tensors.keys()
    assert selection.weights.aliases == {"head.weight": "emb.weight"}


def test_without_a_config_names_are_as_stored_and_nothing_is_promised(zero3: Path) -> None:
    selection = _select(zero3, _UNKNOWN)
    assert selection.weights.tensors.keys() == small_model().tensors.keys()
    assert not selection.loadable
    assert "there is no config.json" in selection.warnings[0]


def test_a_weight_that_the_model_has_and_no_save_leaves_out_is_refused(zero3: Path) -> None:
    with pytest.raises(NamesMismatchError, match=r"missing: extra\.weight") as caught:
        _select(zero3, _names(small_model(), extra_weight=(3,)))
    assert caught.value.exit_code == 4
    assert "--layout memory" in caught.value.hint


def test_names_of_another_model_are_refused_with_both_sides(zero3: Path) -> None:
    names = _names(replace(small_model(), frozen={"other.weight": values((3,), 1)}))
    with pytest.raises(NamesMismatchError) as caught:
        _select(zero3, names)
    assert "missing: other.weight" in str(caught.value.found)
    assert "unexpected: norm.weight, norm.bias" in str(caught.value.found)


def test_a_shape_that_transformers_would_not_load_is_said(zero3: Path) -> None:
    selection = _select(zero3, _names(small_model(), lin_bias=(6,)))
    assert not selection.loadable
    assert "[5] for [6]" in selection.warnings[0]


def test_weights_that_the_model_would_be_loaded_without_are_refused(zero3: Path) -> None:
    names = _names(replace(small_model(), frozen={}))
    with pytest.raises(NamesMismatchError, match="would be loaded without") as caught:
        _select(zero3, names)
    assert caught.value.found == "norm.weight, norm.bias"
    assert "--layout memory" in caught.value.hint
    selection = _select(zero3, names, ExportOptions(layout=NameLayout.MEMORY))
    assert selection.weights.tensors.keys() == small_model().tensors.keys()
    assert not selection.loadable


def test_weights_without_values_that_the_model_does_not_have_are_refused_too() -> None:
    model = small_model()
    names = _names(model)
    lost = Weights(_base(emb_weight=(13, 7)), {}, (*model.tensors, *model.tied, "more.bias"))
    with pytest.raises(NamesMismatchError, match=r"more\.bias"):
        settle_names(lost, best_fit(names, lost.known_shapes), {}, ExportOptions(), Path("run"))


def test_frozen_weights_that_the_model_does_not_know_may_be_left_out(zero3: Path) -> None:
    names = _names(replace(small_model(), frozen={}))
    selection = _select(zero3, names, ExportOptions(exclude_frozen=True))
    assert selection.loadable
    assert selection.weights.tensors.keys() == small_model().tensors.keys() - {
        "norm.weight",
        "norm.bias",
    }


def test_buffers_that_the_model_does_not_know_are_written_and_said(zero3: Path) -> None:
    names = _names(replace(small_model(), buffers={}))
    selection = _select(zero3, names)
    assert selection.weights.tensors.keys() == small_model().tensors.keys()
    assert not selection.loadable
    assert f"unexpected: {next(iter(small_model().buffers))}" in selection.warnings[0]


def test_what_transformers_passes_over_is_written_and_loads(zero3: Path) -> None:
    names = structs.replace(_names(replace(small_model(), frozen={})), ignored=(r"^norm\.",))
    selection = _select(zero3, names)
    assert selection.weights.tensors.keys() == small_model().tensors.keys()
    assert selection.loadable


def test_a_second_name_that_the_model_does_not_know_is_no_weight_of_its_own(zero3: Path) -> None:
    alias = next(iter(small_model().tied))
    names = _names(replace(small_model(), tied={}))
    assert alias not in names.shapes
    assert _select(zero3, names).weights.tensors.keys() == small_model().tensors.keys()


def test_a_rename_comes_before_the_comparison_with_the_model(zero3: Path) -> None:
    model = small_model()
    prefixed = replace(
        model,
        groups=[{f"module.{n}": v for n, v in group.items()} for group in model.groups],
        tied={"module.head.weight": "module.emb.weight"},
        frozen={},
        buffers={},
    )
    root = save(prefixed, Run(), zero3.parent / "prefixed")
    options = ExportOptions(renames=((r"^module\.", ""),))
    names = _names(replace(model, frozen={}, buffers={}))
    selection = _select(root, names, options)
    assert (selection.loadable, selection.warnings + selection.notes) == (True, ())
    assert selection.weights.aliases == {"head.weight": "emb.weight"}
    assert selection.weights.tensors["emb.weight"].name == "module.emb.weight"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.model."])
def test_a_prefix_that_wrappers_gave_every_name_is_left_out_and_said(
    prefix: str, tmp_path: Path
) -> None:
    model = small_model()
    wrapped = Model(
        [{prefix + name: value for name, value in group.items()} for group in model.groups],
        frozen={prefix + name: value for name, value in model.frozen.items()},
        buffers={prefix + name: value for name, value in model.buffers.items()},
        tied={prefix + alias: prefix + name for alias, name in model.tied.items()},
    )
    selection = _select(save(wrapped, Run(), tmp_path), _names(model))
    assert selection.weights.tensors.keys() == model.tensors.keys()
    assert selection.weights.aliases == model.tied
    assert selection.loadable
    assert prefix in selection.notes[0]


def test_a_rename_that_spoils_the_names_is_refused(zero3: Path) -> None:
    options = ExportOptions(renames=(("lin", "linear"),))
    with pytest.raises(NamesMismatchError, match=r"unexpected: linear\.weight"):
        _select(zero3, _names(small_model()), options)


@pytest.mark.parametrize(
    "rename", [("^.*$", "x"), ("norm.bias", "norm.weight"), ("(", "x"), ("a", r"\9")]
)
def test_a_rename_that_cannot_be_meant_is_a_usage_error(
    rename: tuple[str, str], zero3: Path
) -> None:
    with pytest.raises(UsageError, match="--rename"):
        _select(zero3, _UNKNOWN, ExportOptions(renames=(rename,)))


def test_frozen_weights_are_left_out_when_that_is_asked_for(zero2: Path) -> None:
    selection = _select(zero2, _UNKNOWN, ExportOptions(exclude_frozen=True))
    assert "norm.weight" not in selection.weights.tensors
    assert selection.weights.aliases == {"head.weight": "emb.weight"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_left_out_of_a_save_are_refused_with_their_names(
    stage: int, tmp_path: Path
) -> None:
    root = save(small_model(), Run(stage=stage, exclude_frozen=True), tmp_path)
    with pytest.raises(FrozenLeftOutError, match="--exclude-frozen") as caught:
        _select(root, _names(small_model()))
    assert caught.value.found == "no values for norm.weight, norm.bias"
    assert caught.value.exit_code == 3
    selection = _select(root, _names(small_model()), ExportOptions(exclude_frozen=True))
    assert "norm.weight" not in selection.weights.tensors
    assert not selection.loadable


@pytest.mark.parametrize("stage", [2, 3])
def test_without_names_a_save_that_may_lack_weights_is_refused(stage: int, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=stage, exclude_frozen=True), tmp_path)
    with pytest.raises(FrozenLeftOutError):
        _select(root, _UNKNOWN)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_base_fills_in_what_was_left_out(stage: int, tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=stage, exclude_frozen=True), tmp_path)
    base = _base(norm_weight=(7,), norm_bias=(7,), emb_weight=(13, 7))
    selection = _select(root, _names(small_model()), base=base)
    assert selection.from_base == ("norm.weight", "norm.bias")
    assert selection.weights.tensors["norm.bias"].role is Role.FROZEN
    assert selection.weights.tensors["emb.weight"].role is Role.TRAINABLE
    assert selection.loadable


def test_a_base_that_lacks_a_weight_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    root = save(small_model(), Run(exclude_frozen=True), tmp_path)
    base = _base(norm_weight=(8,))
    with pytest.raises(FrozenLeftOutError) as caught:
        _select(root, _names(small_model()), base=base)
    assert caught.value.found == "no values for norm.weight, norm.bias"


def test_a_base_without_a_config_fills_in_all_it_has_beside_the_trained(tmp_path: Path) -> None:
    model = Model(
        [{"emb.weight": values((3,), 1)}], {"norm": values((2,), 2)}, tied={"head": "emb.weight"}
    )
    root = save(model, Run(exclude_frozen=True), tmp_path)
    selection = _select(root, _UNKNOWN, base=_base(norm=(2,), emb_weight=(3,)))
    assert selection.from_base == ("norm",)


def test_a_left_out_tie_needs_only_its_source_from_the_base(tmp_path: Path) -> None:
    model = replace(small_model(), tied={"head.weight": "norm.weight"})
    root = save(model, Run(exclude_frozen=True), tmp_path)
    base = _base(norm_weight=(7,), norm_bias=(7,))
    selection = _select(root, _names(model), base=base)
    assert selection.from_base == ("norm.weight", "norm.bias")
    assert selection.loadable


@pytest.mark.parametrize("are_known", [True, False])
@pytest.mark.parametrize("layout", [NameLayout.MEMORY, NameLayout.HUB])
def test_a_base_fills_in_nothing_where_weights_were_trained_under_other_names(
    are_known: bool, layout: NameLayout, tmp_path: Path
) -> None:
    """Wrappers that only the state dict leaves out: its names would get the base's weights."""
    model, run = small_model(), Run(stage=3)
    root = save(model, run, tmp_path)

    def wrap(state: dict[str, Any]) -> None:
        state["param_shapes"] = [
            {f"wrapped_{name}": shape for name, shape in shapes.items()}
            for shapes in state["param_shapes"]
        ]

    for rank in range(run.world_size):
        edit(model_file(root / "global_step2", run, rank), wrap)
    base = _base(**{name.replace(".", "_"): tuple(v.shape) for name, v in model.masters.items()})
    names = _names(model) if are_known else _UNKNOWN
    with pytest.raises((FrozenLeftOutError, NamesMismatchError), match=r"wrapped_emb\.weight"):
        _select(root, names, ExportOptions(layout=layout), base)


def test_a_tie_that_the_config_does_not_declare_is_noted(zero3: Path) -> None:
    stored = Weights.of(open_checkpoint(zero3))
    untied, declared = (Selection(stored, _names(small_model(), tied)) for tied in ({}, None))
    (note,) = judge(tie_statements(untied), zero3).notes
    assert "head.weight emb.weight in the checkpoint but head.weight in config.json" in note
    assert not judge(tie_statements(declared), zero3).notes


def test_renames_that_change_no_name_are_told(zero3: Path, tmp_path: Path) -> None:
    renames = (("^base=", "="), ("^emb", "word"), ("^word", "emb"))
    report = consolidate(zero3, tmp_path / "out", ExportOptions(renames=renames))
    (warning,) = (one for one in report.warnings if "--rename" in one)
    assert "'^base=' given in --rename but no such name in the checkpoint" in warning


def test_renames_onto_the_names_of_other_weights_are_told(zero3: Path, tmp_path: Path) -> None:
    swap = (("^norm.weight$", "x"), ("^norm.bias$", "norm.weight"), ("^x$", "norm.bias"))
    report = consolidate(zero3, tmp_path / "out", ExportOptions(renames=swap))
    (warning,) = (one for one in report.warnings if "--rename" in one)
    assert "norm.weight norm.bias in --rename" in warning
    plain = ExportOptions(renames=(("^norm", "other"),))
    assert not any("--rename" in w for w in consolidate(zero3, tmp_path / "b", plain).warnings)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"adapter_config.json": b'{"base_model_name_or_path": "acme/x"}'}, r"adapter.*\(acme/x\)"),
        ({"model-00001-of-00002.safetensors": b""}, "without model.safetensors.index.json"),
        ({"model.safetensors": LFS_POINTER + b"v1\n"}, "git lfs pull"),
    ],
)
def test_a_base_without_weights_is_told_for_what_it_is(
    files: dict[str, bytes], told: str, tmp_path: Path
) -> None:
    (base := tmp_path / "base").mkdir()
    for name, content in files.items():
        (base / name).write_bytes(content)
    root = save(small_model(), Run(exclude_frozen=True), tmp_path / "run")
    options = ExportOptions(base=base, layout=NameLayout.MEMORY)
    with pytest.raises(ZexportError, match=told):
        consolidate(root, tmp_path / "out", options)
