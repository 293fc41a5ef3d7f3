"""Checkpoints written by DeepSpeed, compared with the weights of the live engine.

Cases are in ``fixtures/`` and in the folder that ``ZEXPORT_CASES`` names.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.oracles import Tensors, differences
from zexport import (
    AmbiguousTagError,
    DamagedCheckpointError,
    ExportOptions,
    FrozenLeftOutError,
    IncompleteCheckpointError,
    NameLayout,
    UnsafeError,
    UnsupportedError,
    ZexportError,
)

_MEMORY = ExportOptions(layout=NameLayout.MEMORY)


@dataclass(frozen=True)
class Case:
    folder: Path

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / "case.json").read_text())
        return facts

    @property
    def handed_over(self) -> Path:
        return self.folder / "ckpt" / self.facts.get("hand_over", "")

    @property
    def left_out(self) -> set[str]:
        return set(self.facts.get("not_in_checkpoint") or ())

    def truth(self, name: str = "truth.safetensors") -> Tensors:
        """Return the live weights with the dtypes of an fp32 export."""
        floating_buffers = set(self.facts.get("buffers") or ())
        return {
            key: value
            if key in floating_buffers or not value.is_floating_point()
            else value.to(torch.float32)
            for key, value in load_file(self.folder / name).items()
            if key not in self.left_out | set(_LOST.get(self.folder.name, ()))
        }


def _marks(folder: Path) -> list[pytest.MarkDecorator]:
    """Mark cases with a config.json as slow: their Hub names come from transformers."""
    return [pytest.mark.slow] if any(folder.glob("ckpt/**/config.json")) else []


def _cases(*groups: str) -> list[Any]:
    homes = [Path(__file__).parents[2] / "fixtures"]
    if named := os.environ.get("ZEXPORT_CASES"):
        homes.append(Path(named))
    folders = [path.parent for home in homes for path in sorted(home.glob("*/case.json"))]
    return [
        pytest.param(Case(folder), id=folder.name, marks=_marks(folder))
        for folder in folders
        if folder.name.startswith(groups)
    ]


_LOST = {"uni_pp2_z1_w4_bf16opt": ("1.cnt", "2.cnt", "3.cnt")}
"""Tensors that DeepSpeed's conversion to universal drops."""

_ALL = _cases("")
_WHOLE = [param for param in _ALL if not param.values[0].folder.name.startswith("dmg_")]
_DAMAGED = _cases("dmg_")


def _exported(out: Path, case: Case) -> Tensors:
    """Return the tensors of an export, tied weights under all names."""
    found = load_file(out / "model.safetensors")
    for alias, name in (case.facts.get("tied") or {}).items():
        found.setdefault(alias, found[name])
    return found


@pytest.mark.parametrize("case", _WHOLE)
def test_export_equals_live_weights_bit_for_bit(case: Case, tmp_path: Path) -> None:
    options = ExportOptions(layout=NameLayout.MEMORY, exclude_frozen=bool(case.left_out))
    zexport.consolidate(case.handed_over, tmp_path / "out", options)
    assert differences(_exported(tmp_path / "out", case), case.truth()) == []
    assert zexport.verify_export(tmp_path / "out", against=case.handed_over).ok


def _saved(case: Case, truth: Tensors) -> Tensors:
    """Return the live weights under the names that ``save_pretrained`` writes."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.from_pretrained(case.folder / "hf_config")
    if "score.weight" in truth:
        config.num_labels = len(truth["score.weight"])
        kind = AutoModelForSequenceClassification
    elif hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    else:
        kind = AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    tied = model.all_tied_weights_keys
    kept = {name: value for name, value in truth.items() if name not in tied}
    saved: Tensors = revert_weight_conversion(model, kept)
    return saved


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [p for p in _WHOLE if (p.values[0].folder / "hf_config").is_dir() and not p.values[0].left_out],
)
def test_export_equals_save_pretrained_of_the_live_model(case: Case, tmp_path: Path) -> None:
    options = ExportOptions(base=case.folder / "hf_config")
    zexport.consolidate(case.handed_over, tmp_path / "out", options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    own = case.folder / "truth.hf.safetensors"
    truth = case.truth(own.name if own.is_file() else "truth.safetensors")
    assert differences(found, _saved(case, truth)) == []


@pytest.mark.parametrize("case", [p for p in _WHOLE if p.values[0].left_out])
def test_frozen_weights_missing_from_checkpoint_require_base(case: Case, tmp_path: Path) -> None:
    with pytest.raises(FrozenLeftOutError) as caught:
        zexport.consolidate(case.handed_over, tmp_path / "out", _MEMORY)
    assert caught.value.exit_code == 3
    assert "--base" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", [p for p in _ALL if p.id in _LOST])
def test_tensors_dropped_by_universal_conversion_are_named(case: Case, tmp_path: Path) -> None:
    report = zexport.consolidate(case.handed_over, tmp_path / "out", _MEMORY)
    (warned,) = (warning for warning in report.warnings if "dropped" in warning)
    assert ", ".join(_LOST[case.folder.name]) in warned


_REFUSED: dict[str, tuple[type[ZexportError], str]] = {
    "dmg_latest_missing_two": (AmbiguousTagError, "--tag global_step4"),
    "dmg_latest_traversal": (UnsafeError, "outside"),
    "dmg_z2_missing_model0": (IncompleteCheckpointError, "mp_rank_00_model_states.pt"),
    "dmg_z2_mixed_steps_optim": (DamagedCheckpointError, "optimizer step differs"),
    "dmg_z2_other_world": (DamagedCheckpointError, "renamed"),
    "dmg_z3_deflated": (UnsupportedError, "compressed"),
    "dmg_z3_flip_weight": (DamagedCheckpointError, "CRC-32"),
    "dmg_z3_missing_optim": (IncompleteCheckpointError, "optimizer states files of rank 1"),
    "dmg_z3_param_shapes_huge": (DamagedCheckpointError, "do not add up"),
    "dmg_z3_swapped_ranks": (DamagedCheckpointError, "renamed"),
    "dmg_z3_tensor_oob": (DamagedCheckpointError, "exceeds its storage"),
    "dmg_z3_trunc_optim": (DamagedCheckpointError, "optim_states.pt"),
}
"""Expected error of each damaged case; all others are exported."""


@pytest.mark.parametrize("case", _DAMAGED)
def test_damaged_checkpoint_is_refused_or_exported_exactly(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)  # a pickle that runs would leave a file named PWNED
    out = tmp_path / "out"
    if case.folder.name in _REFUSED:
        kind, words = _REFUSED[case.folder.name]
        with pytest.raises(kind, match=words):
            zexport.consolidate(case.handed_over, out, _MEMORY)
        assert not out.exists()
    else:
        report = zexport.consolidate(case.handed_over, out, _MEMORY)
        found = _exported(out, case)
        undamaged = (case.folder / "truth.safetensors").exists()
        truth = case.truth("truth.safetensors" if undamaged else "undamaged.truth.safetensors")
        reported = {finding.tensor for finding in report.findings}
        assert set(differences(found, truth)) == reported
    assert list(here.iterdir()) == []
