"""The command line as users meet it: processes, pipes, exit codes, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.checkpoints import edit
from tests.support.forked import typed
from tests.support.sparse_checkpoint import write_sparse_zero3
from zexport.cli.main import cli

_ROOT = click.Context(cli)
COMMANDS = {name: cli.get_command(_ROOT, name) for name in cli.list_commands(_ROOT)}

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "z3_w2_bf16" / "ckpt"
TAG = "global_step2"
COMMAND = (sys.executable, "-m", "zexport")
LIMIT_S = 60
HEAVY = ("torch", "transformers", "deepspeed")


class Unpickled:
    """Runs a command when it is unpickled by anything that runs what it reads."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def run(
    *words: object, interpreter: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """``zexport``, run to its end; ``interpreter`` are options of Python's."""
    if not interpreter and "PYTHONPATH" not in environment:
        return typed(*words, **environment)
    return subprocess.run(
        [sys.executable, *interpreter, "-m", "zexport", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | environment,
        check=False,
    )


def result(*words: object, **environment: str) -> Any:
    """The one JSON object that a command prints."""
    done = run(*words, "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def failure(done: subprocess.CompletedProcess[str]) -> Any:
    """What a failed ``--json`` command says to programs, which must be all there is on stdout."""
    content = json.loads(done.stdout)
    assert set(content) == {"schema", "error"}
    assert set(content["error"]) == {"code", "kind", "path", "message", "hint"}
    assert content["error"]["code"] == done.returncode
    message = content["error"]["message"].replace(f"{Path.cwd()}/", "")  # people read it from here
    assert done.stderr == f"Error: {message}\n"
    return content["error"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A ZeRO-3 checkpoint that DeepSpeed wrote, free to be damaged."""
    return shutil.copytree(ZERO3, tmp_path / "checkpoint")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An export of it."""
    out = tmp_path / "model"
    assert run("consolidate", ZERO3, out).returncode == 0
    return out


def optimizer_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


# --- a good end ---


def test_an_export_holds_the_live_weights_and_says_so_on_stdout(tmp_path: Path) -> None:
    done = run("consolidate", ZERO3, tmp_path / "model")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Exported to {tmp_path / 'model'}" in done.stdout
    truth = load_file(FIXTURES / "z3_w2_bf16" / "truth.safetensors")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == truth.keys()
    assert all(torch.equal(exported[name], truth[name]) for name in truth)


def test_json_progress_is_lines_on_stderr_that_end_at_the_total(tmp_path: Path) -> None:
    done = run("consolidate", ZERO3, tmp_path / "model", "--progress", "json", "--json")
    assert json.loads(done.stdout)["tensors"] == 21
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    keys = {"phase", "nbytes_done", "nbytes_total", "nbytes_resumed"}
    keys |= {"bytes_per_second", "seconds_left"}
    assert lines
    assert all(set(line) == keys for line in lines)
    assert lines[-1]["phase"] == "verify"
    assert lines[-1]["nbytes_done"] == lines[-1]["nbytes_total"]


def test_a_dry_run_tells_the_bytes_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "model"
    plan = result("consolidate", ZERO3, out, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    done = result("consolidate", ZERO3, out)
    weights = [name for name in done["files"] if name.endswith(".safetensors")]
    assert plan["nbytes_to_read"] == done["nbytes_read"]
    assert plan["nbytes_to_write"] == sum((out / name).stat().st_size for name in weights)
    assert {*plan["side_files"], *weights, "zexport_manifest.json"} == set(done["files"])


def test_overwrite_replaces_the_folder_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "pytorch_model.bin").write_text("old")
    assert run("consolidate", ZERO3, out, "--overwrite").returncode == 0
    assert not (out / "pytorch_model.bin").exists()
    assert (out / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


# --- settings ---


def test_the_environment_sets_options(tmp_path: Path) -> None:
    settings = {
        "ZEXPORT_CONSOLIDATE_DTYPE": "bf16",
        "ZEXPORT_CONSOLIDATE_VERIFY": "none",
        "ZEXPORT_CONSOLIDATE_RENAME": "^model=net",
        "ZEXPORT_CONSOLIDATE_LAYOUT": "memory",
        "ZEXPORT_CONSOLIDATE_MAX_SHARD_SIZE": "1MB",
        "ZEXPORT_CONSOLIDATE_JSON": "1",
    }
    done = run("consolidate", ZERO3, tmp_path / "model", **settings)
    report = json.loads(done.stdout)
    assert report["verified"] == "none"
    assert report["options"]["dtype"] == "bf16"
    assert report["options"]["max_shard_nbytes"] == 10**6
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as shard:
        names = list(shard.keys())
        assert all(name.startswith(("net.", "lm_head.")) for name in names)
        assert shard.get_tensor(names[0]).dtype is torch.bfloat16


def test_an_option_on_the_command_line_wins_over_the_environment(tmp_path: Path) -> None:
    words = ("consolidate", ZERO3, tmp_path / "model", "--dtype", "fp16", "--dry-run")
    assert result(*words, ZEXPORT_CONSOLIDATE_DTYPE="bf16")["options"]["dtype"] == "fp16"


def test_a_failure_is_json_too_where_the_environment_asks_for_json(tmp_path: Path) -> None:
    assert failure(run("inspect", tmp_path, ZEXPORT_INSPECT_JSON="yes"))["code"] == 3
    assert run("inspect", tmp_path, ZEXPORT_VERIFY_JSON="yes").stdout == ""


def test_every_option_reads_the_variable_that_its_name_says() -> None:
    for command in COMMANDS.values():
        for option in command.params:
            long = [name for name in option.opts if name.startswith("--")]
            assert not long or option.name in {n[2:].replace("-", "_") for n in long}, option.opts


# --- exit codes ---


def refused(code: int, kind: str, *words: object, **environment: str) -> Any:
    """The error of a command that must end so, told alike to people and to programs."""
    done = run(*words, **environment)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    error = failure(run(*words, "--json", **environment))
    assert error["kind"] == kind, error
    path = (error["path"] or "").removeprefix(f"{Path.cwd()}/")
    assert done.stderr.startswith(f"Error: {path}")
    assert done.stderr.endswith(f"{error['hint']}{'.' * bool(error['hint'])}\n")
    assert "Traceback" not in done.stderr
    return error


def test_several_tags_without_latest_end_with_2_and_are_listed(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint / TAG, checkpoint / "global_step10")
    (checkpoint / "latest").unlink()
    error = refused(2, "ambiguous_tag", "consolidate", checkpoint, tmp_path / "model")
    assert f"{TAG}, global_step10" in error["message"]
    chosen = ("--tag", "global_step10")
    assert run("consolidate", checkpoint, tmp_path / "model", *chosen).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("consolidate",),
        ("consolidate", "a", "b", "--dtype", "fp8"),
        ("consolidate", "a", "b", "--max-shard-size", "many"),
        ("consolidate", "a", "b", "--rename", "no-equals-sign"),
        ("inspect", "a", "--nonsense"),
        ("sing",),
    ],
)
def test_words_that_mean_nothing_end_with_2_and_the_way_to_help(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--help" in done.stderr or "-h" in done.stderr
    assert failure(run(*words, "--json"))["kind"] == "usage"


def test_no_checkpoint_ends_with_3(tmp_path: Path) -> None:
    refused(3, "not_a_checkpoint", "consolidate", tmp_path / "nowhere", tmp_path / "model")
    refused(3, "not_a_checkpoint", "inspect", tmp_path)


def test_a_missing_rank_ends_with_3_and_names_the_file_to_fetch(
    checkpoint: Path, tmp_path: Path
) -> None:
    lost = optimizer_file(checkpoint, 1)
    lost.unlink()
    refused(3, "incomplete", "consolidate", checkpoint, tmp_path / "model")
    missing = result("inspect", checkpoint)["checkpoint"]["missing"]
    assert missing["optimizer_ranks"] == [1]
    assert missing["files"] == [lost.name]


def test_code_in_place_of_a_weight_ends_with_5_and_does_not_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "ran"

    def hide(state: dict[str, Any]) -> None:
        state["optimizer_state_dict"]["fp32_flat_groups"] = Unpickled(f"touch {trace}")

    edit(optimizer_file(checkpoint, 0), hide)
    refused(5, "unsafe", "consolidate", checkpoint, tmp_path / "model")
    assert not trace.exists()


def test_a_folder_that_exists_ends_with_6_and_stays(model: Path) -> None:
    before = {path: path.read_bytes() for path in model.iterdir()}
    refused(6, "output", "consolidate", ZERO3, model)
    assert {path: path.read_bytes() for path in model.iterdir()} == before


def test_a_damaged_export_ends_with_7_and_every_problem_is_listed(model: Path) -> None:
    shard = model / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (model / "config.json").unlink()
    done = run("verify", model)
    assert (done.returncode, done.stderr) == (7, "")
    told = run("verify", model, "--json")
    found = json.loads(told.stdout)
    assert (told.returncode, found["ok"]) == (7, False)
    assert {"model.safetensors", "config.json"} == {p["file"] for p in found["problems"]}
    for problem in found["problems"]:
        assert problem["file"] in done.stdout
        assert problem["problem"] in done.stdout


def test_another_checkpoint_ends_with_7_and_names_the_tensors_that_differ(model: Path) -> None:
    other = FIXTURES / "z3_w2_fp32"
    mine = load_file(ZERO3.parent / "truth.safetensors")
    theirs = load_file(other / "truth.safetensors")
    differing = {name for name in mine if not torch.equal(mine[name], theirs[name])}
    done = run("verify", model, "--against", other / "ckpt", "--json")
    assert done.returncode == 7
    assert differing
    assert {problem["tensor"] for problem in json.loads(done.stdout)["problems"]} == differing


# --- interruptions ---


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint of 2 GB that takes no room: long enough to be interrupted."""
    root = tmp_path / "large"
    write_sparse_zero3(root, {f"w{index}": (8192, 8192) for index in range(8)}, 2)
    return root


@contextmanager
def writing(checkpoint: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """An export under way: it has written its first bytes when the context begins."""
    words = ("consolidate", str(checkpoint), str(out), "--progress", "json", "--jobs", "1")
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["phase"] == "write"
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_export_ends_with_130_in_one_line_and_leaves_nothing(
    large: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    before = sorted(tmp_path.iterdir())
    with writing(large, tmp_path / "a" / "model") as process:
        process.send_signal(sent)
        out, err = process.communicate(timeout=LIMIT_S)
    said = [line for line in err.split("\n") if not line.startswith("{")]
    assert (process.returncode, out, said) == (130, "", ["Interrupted.", ""])
    assert sorted(tmp_path.iterdir()) == before


def test_a_reader_that_leaves_early_ends_it_quietly(tmp_path: Path) -> None:
    root = tmp_path / "many"
    write_sparse_zero3(root, {f"layer.{index}.weight": (2, 3) for index in range(4000)}, 2)
    for extra in ((), ("--json",)):
        process = subprocess.Popen(
            [*COMMAND, "inspect", str(root), "--tensors", *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        process.wait(LIMIT_S)


# --- help ---


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_every_help_has_an_example_that_the_command_understands(command: str | None) -> None:
    words = [command] if command else []
    for option in ("-h", "--help"):
        done = CliRunner().invoke(cli, [*words, option], prog_name="zexport")
        assert done.exit_code == 0
        example = re.search(r"Example: zexport (.+)", done.output)
        assert example
        name, *arguments = example[1].split()
        assert command in (None, name)
        root = cli.make_context("zexport", [], resilient_parsing=True)
        parsed = COMMANDS[name].make_context(name, arguments, root, resilient_parsing=True)
        assert parsed.args == []
        assert parsed.params


# --- what is imported ---


def imported(*words: object, **environment: str) -> set[str]:
    """Top-level packages that a command which must succeed imports, as Python itself tells."""
    done = run(*words, interpreter=("-X", "importtime"), **environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "click" in packages
    return packages


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    assert not imported(*command, "--help") & {*HEAVY, "numpy", "rich"}


def test_inspecting_and_verifying_import_no_framework(model: Path) -> None:
    assert not imported("inspect", ZERO3) & {*HEAVY, "numpy"}
    assert not imported("verify", model, "--against", ZERO3) & {*HEAVY}


@pytest.mark.parametrize("extra", [(), ("--layout", "memory")])
def test_a_plain_export_imports_no_framework_and_asks_no_other_process(
    checkpoint: Path, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    if extra:
        for name in ("zexport_source.json", "config.json"):
            (checkpoint / name).unlink()
    cache = tmp_path / "cache"
    words = ("consolidate", checkpoint, tmp_path / "model", *extra)
    assert not imported(*words, XDG_CACHE_HOME=str(cache)) & {*HEAVY}
    assert not cache.exists()
