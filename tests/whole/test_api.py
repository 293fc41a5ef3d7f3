"""The public functions: a checkpoint in, a folder that loads out, or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zexport
from tests.support.checkpoints import Model, Run, save, small_model
from tests.support.hf_models import tiny_config, tiny_model, write_checkpoint, write_config
from tests.support.oracles import differences
from zexport.errors import CheckpointError, DamagedCheckpointError, UsageError, VerificationError
from zexport.options import ExportDType, ExportOptions, NameLayout

_FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_every_public_name_is_there() -> None:
    for name in zexport.__all__:
        assert getattr(zexport, name) is not None
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = zexport.nothing_such


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys, zexport; zexport.open_checkpoint; zexport.plan_export;"
        "print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_whole_job_and_its_steps_make_the_same_folder(zero2: Path, tmp_path: Path) -> None:
    report = zexport.consolidate(zero2, tmp_path / "whole")
    plan = zexport.plan_export(zexport.open_checkpoint(zero2), tmp_path / "steps")
    zexport.run_export(plan)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("whole", "steps")
    )
    assert one == two
    assert (
        set(one)
        == set(report.files)
        == {
            "README.md",
            "model.safetensors",
            "zexport_manifest.json",
        }
    )


@pytest.mark.slow
def test_config_and_tokenizer_come_along_with_only_the_type_edited(
    zero2: Path, tmp_path: Path
) -> None:
    config = {"model_type": "no_such_model", "hidden_size": 7, "dtype": "float32", "eps": 1e-06}
    (zero2 / "config.json").write_text(json.dumps(config))
    (zero2 / "tokenizer.json").write_bytes(b'{"kept": "as it is" }')
    out = tmp_path / "out"
    zexport.consolidate(zero2, out, ExportOptions(dtype=ExportDType.BF16))
    assert json.loads((out / "config.json").read_text()) == {**config, "dtype": "bfloat16"}
    assert (out / "tokenizer.json").read_bytes() == b'{"kept": "as it is" }'


def test_without_a_config_the_weights_are_written_with_a_warning(
    zero2: Path, tmp_path: Path
) -> None:
    report = zexport.consolidate(zero2, tmp_path / "out")
    assert any("config.json" in warning for warning in report.warnings)
    assert not (tmp_path / "out" / "config.json").exists()
    manifest = json.loads((tmp_path / "out" / "zexport_manifest.json").read_text())
    assert manifest["loadable"] is False
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == small_model().tensors.keys()


def test_an_export_is_verified_against_its_checkpoint(zero3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ExportOptions(
        dtype=ExportDType.BF16,
        layout=NameLayout.MEMORY,
        exclude_frozen=True,
        max_shard_nbytes=100,
        renames=(("emb", "embedding"),),
    )
    zexport.consolidate(zero3, out, options)
    assert zexport.verify_export(out)
    assert zexport.verify_export(out, against=zero3).ok


def test_an_export_of_other_weights_does_not_verify(zero3: Path, tmp_path: Path) -> None:
    zexport.consolidate(zero3, tmp_path / "out")
    model = small_model()
    other = Model(
        [{name: value + 1 for name, value in group.items()} for group in model.groups],
        model.frozen,
        model.buffers,
        model.tied,
    )
    root = save(other, Run(stage=3, world_size=3), tmp_path / "other")
    verdict = zexport.verify_export(tmp_path / "out", against=root)
    assert not verdict
    assert not verdict.ok
    assert any("emb.weight" in str(problem) for problem in verdict.problems)


def test_the_tag_of_an_export_is_found_again(tmp_path: Path) -> None:
    for step in (2, 4):
        root = save(small_model(), Run(steps=step), tmp_path / "ckpt", f"global_step{step}")
    zexport.consolidate(root, tmp_path / "out", tag="global_step2")
    (root / "latest").unlink()
    assert zexport.verify_export(tmp_path / "out", against=root).ok


def test_a_checkpoint_without_the_tag_of_an_export_is_none_it_was_made_from(tmp_path: Path) -> None:
    for step in (2, 4):
        save(small_model(), Run(steps=step), tmp_path / f"run{step}", f"global_step{step}")
    zexport.consolidate(tmp_path / "run2", tmp_path / "out")
    for other in (tmp_path / "run4", tmp_path / "run4" / "global_step4"):
        with pytest.raises(
            CheckpointError,
            match=r"is not the checkpoint that the export .*expected the tag global_step2",
        ):
            zexport.verify_export(tmp_path / "out", against=other)


def test_names_that_came_from_a_base_are_not_compared_without_it(tmp_path: Path) -> None:
    """As after Lightning: the module has a name of its own before all, and no config beside it."""
    config = tiny_config()
    root = write_checkpoint(tiny_model("LlamaForCausalLM", config), tmp_path / "run", wrap="model.")
    write_config(tmp_path / "base", config, architectures=["LlamaForCausalLM"])
    options = ExportOptions(base=tmp_path / "base")
    zexport.consolidate(root, tmp_path / "out", options)
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="--base MODEL"):
        zexport.verify_export(tmp_path / "out", against=root)
    assert zexport.verify_export(tmp_path / "out", against=root, base=moved).ok


@pytest.mark.parametrize(
    "spoil",
    [
        {"dtype": "fp64"},
        {"layout": 3},
        {"max_shard_nbytes": "many"},
        {"renames": [["a"]]},
        {"renames": 3},
    ],
)
def test_a_manifest_with_impossible_options_is_refused(
    spoil: dict[str, object], zero3: Path, tmp_path: Path
) -> None:
    zexport.consolidate(zero3, tmp_path / "out")
    path = tmp_path / "out" / "zexport_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["options"] |= spoil
    path.write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="options"):
        zexport.verify_export(tmp_path / "out", against=zero3)


def test_a_checkpoint_that_changes_under_the_plan_leaves_nothing(
    zero3: Path, tmp_path: Path
) -> None:
    plan = zexport.plan_export(zexport.open_checkpoint(zero3), tmp_path / "out")
    path = next(zero3.glob("*/*_optim_states.pt"))
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DamagedCheckpointError, match="was changed"):
        zexport.run_export(plan)
    assert not (tmp_path / "out").exists()


def test_small_files_that_change_under_the_plan_leave_nothing(tmp_path: Path) -> None:
    """Else there would be the old config beside the new tokenizer."""
    root = tmp_path / "ckpt"
    shutil.copytree(_FIXTURES / "z3_w2_bf16" / "ckpt", root)
    opened = zexport.open_checkpoint(root)
    to_reshard = zexport.ReshardOptions(world_size=3)
    plans = [
        zexport.plan_export(opened, tmp_path / "out"),
        zexport.plan_reshard(opened, tmp_path / "out", to_reshard),
    ]
    for name in ("config.json", "tokenizer_config.json"):
        (root / name).write_text((root / name).read_text() + "\n")
    for plan in plans:
        with pytest.raises(CheckpointError, match="was changed since the export was planned"):
            zexport.run_export(plan)
        assert not (tmp_path / "out").exists()


def test_small_files_that_change_once_they_were_judged_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would pass unseen, had their versions been noted at the end of planning."""
    from zexport.api import export

    root = tmp_path / "ckpt"
    shutil.copytree(_FIXTURES / "z3_w2_bf16" / "ckpt", root)
    judged = export.decide

    def decide_late(*given: Any) -> Any:
        path = root / "tokenizer_config.json"
        path.write_text(path.read_text() + "\n")
        return judged(*given)

    monkeypatch.setattr(export, "decide", decide_late)
    plan = zexport.plan_export(zexport.open_checkpoint(root), tmp_path / "out")
    with pytest.raises(CheckpointError, match="was changed since the export was planned"):
        zexport.run_export(plan)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["z3_w2_bf16", "z2_w2_bf16_tied", "z3_w3_bf16_tied"])
def test_an_export_loads_in_transformers_with_no_key_missing_or_unexpected(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    case = _FIXTURES / name
    root = shutil.copytree(case / "ckpt", tmp_path / "ckpt")
    if (case / "hf_config").is_dir():
        shutil.copytree(case / "hf_config", root, dirs_exist_ok=True)
    report = zexport.consolidate(root, tmp_path / "out", ExportOptions(max_shard_nbytes=20_000))
    assert not any("will not load" in warning for warning in report.warnings)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    truth = {n: t.float() for n, t in load_file(case / "truth.safetensors").items()}
    assert differences(dict(model.state_dict()), truth) == []
