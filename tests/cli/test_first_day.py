"""What a stranger mixes up on the first day: levels, orders, names; each is told what to type."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import zexport
from zexport.cli.main import cli
from zexport.errors import MissingExtraError, OutputError, ZexportError
from zexport.inspect import inspect
from zexport.store import address

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3, ZERO2 = (FIXTURES / case / "ckpt" for case in ("z3_w2_bf16", "z2_w2_fp16"))


def refusal(*words: object) -> tuple[str, int]:
    """What a command ends with, and its code."""
    with pytest.raises(ZexportError) as raised:
        CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
    return raised.value.sentence(), raised.value.exit_code


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two checkpoints each, and an export."""
    above = tmp_path_factory.mktemp("runs")
    for number in (1, 2):
        for run in ("run-a", "run-b"):
            shutil.copytree(ZERO3, above / run / f"checkpoint-{number}")
    zexport.consolidate(above / "run-a" / "checkpoint-1", above / "model")
    return above


def test_a_folder_that_is_no_single_checkpoint_is_told_what_to_type(runs: Path) -> None:
    a, b, model = runs / "run-a", runs / "run-b", runs / "model"
    said, code = refusal("inspect", a, b)
    assert "contains several checkpoints, and is one of 2 folders that were given" in said
    assert code == 2
    assert "--tag newest" in refusal("consolidate", a, runs / "new")[0]
    assert f"Did you mean {a}?" in refusal("inspect", runs / "runa")[0]
    assert f"Give one of its checkpoints, for example {a}/checkpoint-2" in refusal("diff", a, b)[0]
    one = a / "checkpoint-1"
    assert f"zexport verify model --against {one}" in refusal("verify", one)[0]
    assert f"comes first: {one} {runs}/new" in refusal("consolidate", runs / "new", one)[0]
    assert f"zexport verify MODEL --against {one}" in refusal("diff", model, one)[0]
    assert f"verify {model} --against {one}" in refusal("verify", model, one)[0]
    assert f"prune {one} --export {model}" in refusal("prune", one, model)[0]
    new = runs / "new"
    for typed, meant in (
        ("2", "checkpoint-2"),
        ("newst", "newest"),
        ("checkpiont-1", "checkpoint-1"),
    ):
        assert f"Did you mean --tag {meant}?" in refusal("consolidate", a, new, "--tag", typed)[0]
    assert f"Did you mean {one}?" in refusal("inspect", runs / "rum-a" / "checkpoint-1")[0]


def test_no_single_look_waits_for_a_run(tmp_path: Path) -> None:
    said, code = refusal("watch", tmp_path / "nope", tmp_path / "outs", "--once")
    assert (code, "does not exist" in said) == (3, True)
    assert not any(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(cli, ["watch", f"{tmp_path}/empty", f"{tmp_path}/outs", "--once"])
    assert (done.exit_code, done.stderr) == (0, f"No ZeRO checkpoint in {tmp_path}/empty.\n")


def test_one_checkpoint_of_a_run_is_not_watched_for_more(tmp_path: Path) -> None:
    run, outs = tmp_path / "my run", tmp_path / "outs"
    one = shutil.copytree(ZERO3, run / "checkpoint-2")
    (one / "zexport_source.json").unlink()
    (one / "trainer_state.json").write_text("{}")
    for given in (one, one / "global_step2"):
        said, code = refusal("watch", given, outs, "--once")
        assert (code, f"{given}: is one checkpoint of a run" in said) == (2, True)
        assert f"Watch the run: zexport watch '{run}' {outs} --once;" in said
        assert f"zexport consolidate '{given}' OUT." in said
    assert not outs.exists()
    plain = shutil.copytree(ZERO3, tmp_path / "run-1")
    said, _ = refusal("watch", plain / "global_step2", outs, "--once")
    assert f"zexport watch {plain} {outs} --once;" in said
    done = CliRunner().invoke(cli, ["watch", str(plain), str(outs), "--once"])
    assert done.exit_code == 0, done.output


def test_tensors_of_a_damaged_file_do_not_count_as_compared(runs: Path, tmp_path: Path) -> None:
    model = shutil.copytree(runs / "model", tmp_path / "model")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[8] = ord("!")
    (model / "model.safetensors").write_bytes(weights)
    found = zexport.verify_export(model)
    assert found.tensors == 0
    told = [one.problem for one in found.problems if one.file == "model.safetensors"]
    assert told[-1] == "does not hold the bytes that were written"
    assert len(told) == 2


def test_no_model_is_made_inside_of_a_checkpoint(tmp_path: Path) -> None:
    run = shutil.copytree(ZERO3, tmp_path / "run")
    (run / "zexport_source.json").rename(run / "trainer_state.json")  # as a Trainer's
    with pytest.raises(OutputError, match="mixed with the files that are read"):
        zexport.consolidate(run, run / "model")


def test_what_is_missing_or_not_known_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "lack_for_names", lambda: "no transformers")
    verdict = inspect.inspect_checkpoint(ZERO3).verdict
    assert "no transformers" in verdict.sentence
    assert "--layout memory" in verdict.next_step
    monkeypatch.setattr(address, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"'.\[cloud\]'"):
        CliRunner().invoke(cli, ["inspect", "s3://b/c"], catch_exceptions=False)
