"""What people type on their first day: other names, forgotten words, sizes without a unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zexport import ExportDType, ExportOptions, UsageError
from zexport.cli.main import cli

ZERO3 = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"


def result(*words: object) -> Any:
    """The JSON object that a command prints."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refusal(*words: object) -> str:
    """What a command says that is ended with 2."""
    done = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == UsageError.exit_code
    return done.output


@pytest.mark.parametrize(
    ("word", "recorded"),
    [("torch.bfloat16", "bf16"), ("Float32", "fp32"), ("half", "fp16")],
)
def test_element_types_go_by_torchs_names_too(word: str, recorded: str, tmp_path: Path) -> None:
    words = ("--dtype", word, "--base-dtype", word, "--dry-run")
    options = result("consolidate", ZERO3, tmp_path / "model", *words)["options"]
    assert (options["dtype"], options["base_dtype"]) == (recorded, recorded)
    assert ExportOptions(dtype=word, base_dtype=word).dtype is ExportDType(recorded)  # type: ignore[arg-type]
    assert recorded in refusal("consolidate", ZERO3, tmp_path / "model", "--dtype", "int8")


def test_choices_ignore_case(tmp_path: Path) -> None:
    words = ("--layout", "Memory", "--verify", "NONE", "--allow", "NaN", "--progress", "JSON")
    options = result("consolidate", ZERO3, tmp_path / "model", *words)["options"]
    assert (options["layout"], options["allow"]) == ("memory", ["nan"])
    words = ("-n", "1", "--format", "Native", "--dry-run")
    assert result("reshard", ZERO3, tmp_path / "on-1", *words)
    model = tmp_path / "model"
    assert result("diff", model, model, "--fail-on", "Different")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("export", "consolidate"), ("consolidat", "consolidate"), ("compare", "diff")],
)
def test_the_command_that_was_meant_is_suggested(word: str, meant: str) -> None:
    assert f"No such command {word!r}. Did you mean {meant!r}?" in refusal(word, "a", "b")


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_the_folder_to_make_may_be_an_option(option: str, tmp_path: Path) -> None:
    done = result("consolidate", option, tmp_path / "model", ZERO3)
    assert done["out_dir"] == str(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_folder_to_make_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    said = refusal("consolidate", ZERO3, tmp_path / "model", "-o", tmp_path / "other")
    assert "OUT is given twice" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "meant"),
    [("5", "5GB"), ("10kB", "10MB"), ("0.5MB", "0.5GB")],
)
def test_a_shard_size_that_cannot_be_meant_is_refused(
    size: str, meant: str, tmp_path: Path
) -> None:
    said = refusal("consolidate", ZERO3, tmp_path / "model", "--max-shard-size", size)
    assert f"Did you mean {meant}?" in " ".join(said.split())
    assert not any(tmp_path.iterdir())


def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("consolidate", ZERO3, "", "--overwrite"), ("verify", "")):
        assert "a path may not be empty" in refusal(*words)


def test_a_part_without_a_name_is_not_all_of_the_model(tmp_path: Path) -> None:
    """As of a variable of the shell that is not set."""
    assert "it is empty" in refusal("consolidate", ZERO3, tmp_path / "model", "--only", "")
    assert not any(tmp_path.iterdir())
