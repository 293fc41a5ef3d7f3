"""What a stranger mixes up on the first day: levels, orders, names; each is told what to type."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import zexport
from tests.support.pruning import trainers_run
from zexport.cli import main
from zexport.cli.main import cli
from zexport.cli.options import allow_option
from zexport.cli.progress import progress_printer
from zexport.errors import MissingExtraError, OutputError, ZexportError
from zexport.findings import FindingKind
from zexport.inspect import inspect
from zexport.report.export import print_export, print_verify
from zexport.report.text import near
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


def test_missing_model_states_file_is_named_for_each_stage(tmp_path: Path) -> None:
    half = shutil.copytree(ZERO3, tmp_path / "half")
    for path in (half / "global_step2").glob("zero_pp_rank_*_model_states.pt"):
        path.unlink()
    zero3, plain = "zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"
    said, _ = refusal("consolidate", half, tmp_path / "model")
    assert f"expected {zero3})" in said
    for path in (half / "global_step2").iterdir():
        path.write_bytes(path.read_bytes()[:3000])
    said, _ = refusal("consolidate", half, tmp_path / "model")
    assert f"expected {zero3} (ZeRO-3) or {plain} (other stages)" in said


@pytest.mark.parametrize("edit", [{"num_hidden_layers": n} for n in (1, 3)] + [{"hidden_size": 32}])
def test_a_config_that_does_not_fit_is_traced_to_the_base(
    edit: dict[str, int], tmp_path: Path
) -> None:
    run, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(ZERO3 / "global_step2", run / "global_step2")
    zexport.consolidate(ZERO3, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | edit))
    said, _ = refusal("consolidate", run, tmp_path / "model", "--base", base)
    assert f"config.json came from --base {base} and is probably another model's" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["diff", "a"], "Missing argument 'B'. As in: zexport diff model base"),
        (["diff", "a", "b", "--fail"], "No such option '--fail'. Did you mean '--fail-on'?"),
        (["help"], "No such command 'help'. Did you mean --help?"),
    ],
)
def test_a_refused_line_is_told_the_next_one(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zexport", *words])
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert told in capsys.readouterr().err


def test_a_failure_has_the_form_of_a_result_and_its_hint_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    for words, hint in (
        (["diff", "a"], "As in: zexport diff model base"),
        (["diff", "a", "b", "--jobs", "x"], "See --help"),
        (["consolidate", "a", "b", "--max-shard-size", "5"], "Did you mean 5GB?"),
    ):
        monkeypatch.setattr(sys, "argv", ["zexport", *words, "--json"])
        with pytest.raises(SystemExit, match="2"):
            main.main()
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line)["error"]["hint"] == hint
    done = CliRunner().invoke(cli, ["inspect", str(ZERO3), "--json"])
    assert len(done.stdout.splitlines()) == 1


def test_no_single_look_waits_for_a_run(tmp_path: Path) -> None:
    said, code = refusal("watch", tmp_path / "nope", tmp_path / "outs", "--once")
    assert (code, "does not exist" in said) == (3, True)
    assert not any(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(cli, ["watch", f"{tmp_path}/empty", f"{tmp_path}/outs", "--once"])
    assert (done.exit_code, done.stderr) == (0, f"No ZeRO checkpoint in {tmp_path}/empty.\n")


def test_warnings_that_every_export_of_a_run_has_are_told_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainers_run(run, steps=(2, 4, 6))
    told = CliRunner().invoke(cli, ["watch", str(run), f"{tmp_path}/outs", "--once"])
    assert told.exit_code == 0, told.output
    assert told.stdout.count("exported to") == 3
    assert told.stdout.count("Warning: weights only") == 1
    assert told.stdout.count("Warnings: the same as of the export before") == 2


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


def test_a_verification_says_which_checkpoint_is_which(runs: Path) -> None:
    other = zexport.verify_export(runs / "model", against=ZERO2)
    assert (other.origin and other.origin.layout) == "ZeRO-3"
    assert (other.compared_with and other.compared_with.layout) == "ZeRO-2"
    out = io.StringIO()
    print_verify(Console(file=out, width=500), other)
    assert "; made from checkpoint-1/global_step2 (step 2, ZeRO-3" in out.getvalue()
    assert f", compared with {near(ZERO2 / 'global_step2')} (step 2, ZeRO-2" in out.getvalue()
    first, conclusion, *_ = out.getvalue().splitlines()
    assert "compared and made again" not in first
    assert "this is another checkpoint than the one that the export was made from" in conclusion
    assert "tensors compared and made again from the checkpoint" in out.getvalue()


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


def test_options_read_alike_in_every_command(tmp_path: Path) -> None:
    words = ["reshard", str(ZERO3), "-o", f"{tmp_path}/on-3", "-n", "3", "--dry-run"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    said = CliRunner().invoke(cli, ["reshard", "nope", "x", "-n", "0"]).output
    assert "0 is not in the range x>=1" in said
    refused = {kind.value for kind in FindingKind if kind.is_refused}
    option = allow_option(lambda: None).__click_params__[0]  # type: ignore[attr-defined]
    assert set(option.type.choices) == refused
    report = zexport.consolidate(ZERO3, tmp_path / "model", dtype="bf16", verify="none")
    assert report.form.dtypes == ("bfloat16",)
    assert zexport.EventKind.EXPORTED == "exported"


def test_a_report_fits_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ZERO3, "run")
    options = zexport.ReshardOptions(world_size=3)
    report = zexport.reshard(Path("run"), tmp_path / "on-3", options)
    out = io.StringIO()
    print_export(Console(file=out, width=80, force_terminal=True, color_system=None), report)
    lines = out.getvalue().splitlines()
    assert lines[0] == "Resharded to on-3 from run/global_step2 (step 2, ZeRO-3, 2 ranks)"
    assert max(map(len, lines)) <= 80


def test_a_wait_for_transformers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_printer("auto"):
        logging.getLogger("zexport.model.names_client").info("Asking")
        logging.getLogger("zexport.model.names_client").warning("Not kept")
    logging.getLogger("zexport.model.names_client").info("Asking again")
    assert capsys.readouterr().err == "Asking ...\nWarning: Not kept\n"
