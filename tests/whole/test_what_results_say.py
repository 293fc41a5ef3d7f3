"""What results say of themselves: of which checkpoint they are, and what is to be known of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from tests.support.checkpoints import Run, save, small_model
from tests.support.forked import typed
from tests.support.pruning import trainers_run
from tests.support.published import check
from zexport import consolidate, verify_export
from zexport.options import ExportDType, ExportOptions
from zexport.store.json import decoded

FIXTURE = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


def run(*words: object, **environment: str) -> tuple[str, str]:
    """Standard output and error of a command that goes well."""
    done = typed(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def manifest_of(out: Path) -> dict[str, Any]:
    return decoded((out / "zexport_manifest.json").read_text(), dict[str, Any])


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    """A checkpoint of Accelerate's, whose tag is always the same, without a config."""
    root = tmp_path / "project" / "checkpoints" / "checkpoint_1"
    return save(small_model(), Run(stage=2), root, tag="pytorch_model")


def test_every_result_says_which_checkpoint_it_is(accelerate: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = f"{accelerate / 'pytorch_model'} (step 2, ZeRO-2, 2 ranks)"
    for words in (("consolidate", "--dry-run"), ("consolidate",)):
        assert told in run(*words, accelerate, out)[0].splitlines()[0]
    assert told in run("verify", out, "--against", accelerate)[0].splitlines()[0]
    assert told in run("inspect", accelerate)[0].splitlines()[0]
    by_manifest = "checkpoints/checkpoint_1 (step 2, ZeRO-2, 2 ranks)"
    assert f"of {by_manifest}" in run("verify", out)[0].splitlines()[0]
    assert manifest_of(out)["checkpoint"]["folder"] == "checkpoints/checkpoint_1"
    card = (out / "README.md").read_text()
    assert "`checkpoints/checkpoint_1` (tag `pytorch_model`)" in card
    assert str(tmp_path) not in card
    report = consolidate(accelerate, tmp_path / "again")
    assert report.to_json()["origin"] == {
        "folder": str(accelerate / "pytorch_model"),
        "step": 2,
        "layout": "ZeRO-2",
        "ranks": 2,
    }


def test_a_checkpoint_elsewhere_gives_the_same_bytes_and_never_a_dotted_path(
    accelerate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consolidate(accelerate, tmp_path / "one")
    moved = tmp_path / "elsewhere" / "checkpoints" / "checkpoint_1"
    moved.parent.mkdir(parents=True)
    accelerate.rename(moved)
    (moved / "below").mkdir()
    monkeypatch.chdir(moved / "below")
    consolidate("..", tmp_path / "two")
    for name in ("README.md", "zexport_manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_weights_without_a_config_are_called_so_in_the_first_line(
    accelerate: Path, tmp_path: Path
) -> None:
    assert "--base MODEL" in run("inspect", accelerate)[0].splitlines()[-1]
    told = run("consolidate", accelerate, tmp_path / "out")[0]
    assert "under names of the module in memory" in told
    first = told.splitlines()[0]
    assert "weights only: from_pretrained will not load this" in first
    first = run("consolidate", FIXTURE, tmp_path / "whole")[0].splitlines()[0]
    assert "weights only" not in first
    assert "--base MODEL" not in run("inspect", FIXTURE)[0]


def test_quiet_silences_notes_and_never_warnings(accelerate: Path, tmp_path: Path) -> None:
    words = ("consolidate", accelerate, tmp_path / "loud", "--exclude-frozen")
    loud = run(*words, "--rename", "^=base_")[0]
    assert "Warnings" in loud
    out, err = run("consolidate", "-q", accelerate, tmp_path / "out")
    assert out == ""
    assert "will not load" in err
    assert "Notes" not in err
    assert run("consolidate", "-q", FIXTURE, tmp_path / "whole") == ("", "")


@pytest.mark.parametrize("has_frozen", [True, False])
def test_what_is_left_out_on_purpose_is_counted(has_frozen: bool, tmp_path: Path) -> None:
    model = small_model()
    if not has_frozen:
        model = replace(model, frozen={})
    root = save(model, Run(stage=2), tmp_path / "ckpt")
    report = consolidate(root, tmp_path / "out", ExportOptions(exclude_frozen=True))
    told = [one for one in report.warnings if "--exclude-frozen" in one]
    assert len(told) == has_frozen
    assert not has_frozen or f"{len(model.frozen)} weight" in told[0]


def test_options_are_read_from_the_environment_and_not_repeated(tmp_path: Path) -> None:
    words = ("consolidate", FIXTURE, tmp_path / "out")
    plain = run(*words, ZEXPORT_CONSOLIDATE_DTYPE="bf16")[0]
    assert "bfloat16 under names of the hub" in plain
    assert "ZEXPORT_" not in plain
    assert run("inspect", FIXTURE, "--json", ZEXPORT_INSPECT_TAG="global_step2") == run(
        "inspect", FIXTURE, "--json", "--tag", "global_step2"
    )


def test_verify_says_what_it_compared_with_what(tmp_path: Path) -> None:
    out = tmp_path / "out"
    consolidate(FIXTURE, out)
    assert "Compared  with the manifest alone" in run("verify", out)[0]
    against = run("verify", out, "--against", FIXTURE)[0]
    assert "Weights      with the manifest and the checkpoint" in against
    (line,) = (line for line in against.splitlines() if "Not weights" in line)
    assert "config.json" in line
    assert "tokenizer.json" in line
    assert "model.safetensors" not in line


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "modeling_mine.py",
        "pytorch_model.bin",
        "preprocessor_config.json",
    ],
)
def test_files_that_were_added_and_change_what_loads_are_told(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    consolidate(FIXTURE, out)
    (out / "notes.txt").write_text("mine")
    assert verify_export(out).warnings == ()
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("{}")
    report = verify_export(out)
    assert report.ok
    (told,) = report.warnings
    assert told.startswith(f"{name} was added to the export")


def test_cards_without_a_known_base_name_none(tmp_path: Path) -> None:
    consolidate(FIXTURE, tmp_path / "out")
    data = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert not {"base_model", "base_model_relation"} & data.keys()


def test_a_base_that_only_gives_files_is_named_and_not_taken_for_the_one_that_was_trained(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(FIXTURE, root)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"_name_or_path": "acme/small"}))
    base = tmp_path / "models--acme--instruct" / "snapshots" / ("c" * 40)
    base.mkdir(parents=True)
    for path in root.glob("tok*"):
        path.rename(base / path.name)
    out = tmp_path / "out"
    options = ExportOptions(base=base, base_dtype=ExportDType.BF16)
    report = consolidate(root, out, options)
    assert any(one.startswith("from --base: tokenizer") for one in report.notes)
    assert any(one.startswith("--base-dtype changes nothing") for one in report.notes)
    card = ModelCard.load(out / "README.md")
    told = f"the base model's (acme/instruct at commit {'c' * 40}): tokenizer"
    assert told in " ".join(card.text.split())


def test_a_variable_that_sets_nothing_is_told_with_the_one_that_was_meant() -> None:
    meant = "ZEXPORT_INSPECT_FILES"
    for wrong in ("ZEXPORT_INSPECT_FIELS", "ZEXPORT_FILES"):
        told = f"Warning: {wrong} sets nothing; did you mean {meant}?"
        assert told in run("inspect", FIXTURE, **{wrong: "1"})[1]
    others = {"ZEXPORT_VERIFY_CHECK": "full", "ZEXPORT_ELSEWHERE": "1", meant: "1"}
    assert run("inspect", FIXTURE, **others)[1] == ""


def test_what_an_export_would_warn_of_and_what_changes_nothing_is_told(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(FIXTURE, root)
    (root / "generation_config.json").write_text('{"eos_token_id": 99999}')
    assert "99999" not in run("inspect", root)[0]
    assert "99999" in run("inspect", root, "--fail")[1]
    consolidate(FIXTURE, tmp_path / "out")
    told = run("verify", tmp_path / "out", "--check", "full", "--base", FIXTURE)[0]
    assert "--base changes nothing without --against" in told
    assert "--check changes nothing without --against" in told
    assert "the same files" in run("diff", tmp_path / "out", tmp_path / "out")[0]


def test_an_export_says_whose_place_it_takes(tmp_path: Path) -> None:
    older = trainers_run(tmp_path / "run")
    out, over = tmp_path / "out", ExportOptions(overwrite=True)
    consolidate(older, out)
    told = f"this replaces {out}, which held "
    of_a_run = f"{told}what was made from run/checkpoint-2 (step 2, ZeRO-3, 2 ranks)"
    assert of_a_run in consolidate(older, out, over).warnings
    (out / "zexport_manifest.json").unlink()
    assert f"{told}a model" in consolidate(older, out, over).warnings


def test_entries_that_are_no_weights_are_counted_and_named_by_the_report(tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURE, tmp_path / "ckpt")
    for path in root.glob("*/zero_pp_rank_*_model_states.pt"):
        states = torch.load(path, weights_only=False)
        states["module"] |= {"model.norm._extra_state": BytesIO(b"x"), "seen": torch.zeros(0)}
        torch.save(states, path)
    by_memory = ("--layout", "memory")
    told, _ = run("consolidate", root, tmp_path / "json", *by_memory, "--json")
    report = decoded(told, dict[str, Any])
    check("export", report)
    assert report["left_out"] == ["seen", "model.norm._extra_state"]
    assert not any("seen" in told for told in (*report["notes"], *report["warnings"]))
    told, _ = run("consolidate", root, tmp_path / "text", *by_memory)
    assert "Left out 2: seen, model.norm._extra_state" in " ".join(told.split())
    assert "Left out" not in run("consolidate", FIXTURE, tmp_path / "whole")[0]
