"""Commands as users type them: options, exit codes, messages, signals and imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zexport
from tests.support.cli import COMMANDS, Result, run
from tests.support.forked import typed
from tests.support.sparse_checkpoint import write_sparse_zero3

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZERO3 = FIXTURES / "z3_w2_bf16" / "ckpt"
TAG = "global_step2"
HEAVY = ("torch", "transformers", "deepspeed")
LIMIT_S = 60


def result(*words: object) -> Any:
    """Return the JSON object that a command prints."""
    done = run(*words, "--json").or_raise()
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def usage_error(*words: object) -> str:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    return " ".join(done.stderr.split())


def failure(done: Result) -> Any:
    """Return the error of a failed ``--json`` command; nothing else is on stdout."""
    content = json.loads(done.stdout)
    error = content["error"]
    assert content.keys() == {"schema", "error"}
    assert error.keys() == {"code", "kind", "path", "message", "hint"}
    assert error["code"] == done.exit_code
    assert done.stderr == f"Error: {error['message']}\n".replace(f"{Path.cwd()}/", "")
    return error


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(ZERO3, tmp_path / "checkpoint")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    zexport.consolidate(ZERO3, tmp_path / "model")
    return tmp_path / "model"


def optimizer_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


# --- results ---


def test_export_has_the_live_weights_and_says_so_on_stdout(tmp_path: Path) -> None:
    done = run("consolidate", ZERO3, tmp_path / "model")
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"Exported to {tmp_path / 'model'}" in done.stdout
    truth = load_file(FIXTURES / "z3_w2_bf16" / "truth.safetensors")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == truth.keys()
    assert all(torch.equal(exported[name], truth[name]) for name in truth)


def test_json_progress_ends_at_the_total(tmp_path: Path) -> None:
    done = run("consolidate", ZERO3, tmp_path / "model", "--progress", "json", "--json")
    assert json.loads(done.stdout)["tensors"] == 21
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    keys = {"phase", "nbytes_done", "nbytes_total", "nbytes_resumed"}
    keys |= {"bytes_per_second", "seconds_left"}
    assert all(line.keys() == keys for line in lines)
    assert lines[-1]["phase"] == "verify"
    assert lines[-1]["nbytes_done"] == lines[-1]["nbytes_total"]


# --- options ---


def test_environment_sets_options(tmp_path: Path) -> None:
    settings = {
        "DTYPE": "bf16",
        "VERIFY": "none",
        "RENAME": "^model=net",
        "LAYOUT": "memory",
        "MAX_SHARD_SIZE": "1MB",
        "JSON": "1",
    }
    variables = {f"ZEXPORT_CONSOLIDATE_{name}": value for name, value in settings.items()}
    done = typed("consolidate", ZERO3, tmp_path / "model", **variables)
    report = json.loads(done.stdout)
    assert report["verified"] == "none"
    assert report["options"]["dtype"] == "bf16"
    assert report["options"]["max_shard_nbytes"] == 10**6
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as shard:
        names = list(shard.keys())
        assert all(name.startswith(("net.", "lm_head.")) for name in names)
        assert shard.get_tensor(names[0]).dtype is torch.bfloat16
    words = ("consolidate", ZERO3, tmp_path / "other", "--dtype", "fp16", "--dry-run")
    assert json.loads(typed(*words, **variables).stdout)["options"]["dtype"] == "fp16"
    assert '"code": 3' in typed("inspect", tmp_path, ZEXPORT_INSPECT_JSON="yes").stdout
    assert typed("inspect", tmp_path, ZEXPORT_VERIFY_JSON="yes").stdout == ""


def test_choices_ignore_case(tmp_path: Path) -> None:
    words = ("--layout", "Memory", "--verify", "NONE", "--allow", "NaN", "--dtype", "BF16")
    options = result("consolidate", ZERO3, tmp_path / "model", *words)["options"]
    assert (options["layout"], options["allow"]) == ("memory", ["nan"])
    assert result("reshard", ZERO3, tmp_path / "on-1", "-n", "1", "--format", "Native", "--dry-run")


def test_output_may_be_an_option_but_not_given_twice(tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert not any(tmp_path.iterdir())
    assert result("consolidate", "--output", out, ZERO3)["out_dir"] == str(out)


def test_quiet_prints_only_warnings(tmp_path: Path) -> None:
    done = run("consolidate", "-q", ZERO3, tmp_path / "whole")
    assert (done.stdout, done.stderr) == ("", "")
    (shutil.copytree(ZERO3, tmp_path / "bare") / "config.json").unlink()
    words = ("consolidate", tmp_path / "bare", tmp_path / "out", "--layout", "memory")
    done = run(*words, "-q")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "will not load" in done.stderr
    assert "Notes" not in done.stderr
    assert "Warnings" in run(*words, "--overwrite").stdout


# --- usage errors ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("consolidate",), "Missing argument 'CKPT'"),
        (("reshard", "a", "b"), "Missing option '-n'"),
        (("consolidate", "a", "b", "--dtype", "int8"), "'bf16'"),
        (("consolidate", "a", "b", "--max-shard-size", "many"), "such as 5GB"),
        (("consolidate", "a", "b", "--rename", "no-equals-sign"), "REGEX=REPL"),
        (("consolidate", "a", "", "--overwrite"), "a path may not be empty"),
        (("inspect", "a", "--tensor"), "--tensors"),
        (("export", "a", "b"), "No such command 'export'. Did you mean 'consolidate'?"),
    ],
)
def test_usage_error_exits_with_2_and_shows_the_way(words: tuple[str, ...], message: str) -> None:
    error = usage_error(*words)
    assert message in error
    assert "--help" in error
    assert failure(run(*words, "--json"))["kind"] == "usage"


# --- exit codes ---


def refused(code: int, kind: str, *words: object) -> Any:
    """Return the error of a command, which people and programs read alike."""
    done = run(*words)
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    error = failure(run(*words, "--json"))
    assert error["kind"] == kind, error
    assert done.stderr.startswith(f"Error: {error['path']}".replace(f"{Path.cwd()}/", ""))
    assert error["hint"] in done.stderr
    return error


def test_ambiguous_tag_exits_with_2_and_lists_them(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint / TAG, checkpoint / "global_step10")
    (checkpoint / "latest").unlink()
    error = refused(2, "ambiguous_tag", "consolidate", checkpoint, tmp_path / "model")
    assert f"{TAG}, global_step10" in error["message"]
    assert result("consolidate", checkpoint, tmp_path / "model", "--tag", "global_step10")


def test_missing_checkpoint_or_rank_exits_with_3(checkpoint: Path, tmp_path: Path) -> None:
    refused(3, "not_a_checkpoint", "consolidate", tmp_path / "nowhere", tmp_path / "model")
    refused(3, "not_a_checkpoint", "inspect", tmp_path / "checkpoint" / "nowhere")
    optimizer_file(checkpoint, 1).unlink()
    refused(3, "incomplete", "consolidate", checkpoint, tmp_path / "model")


def test_damaged_export_exits_with_7_and_lists_every_problem(model: Path) -> None:
    shard = model / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (model / "config.json").unlink()
    done, printed = run("verify", model), run("verify", model, "--json")
    found = json.loads(printed.stdout)
    assert (done.exit_code, printed.exit_code, done.stderr, found["ok"]) == (7, 7, "", False)
    assert {"model.safetensors", "config.json"} == {p["file"] for p in found["problems"]}
    for problem in found["problems"]:
        assert problem["file"] in done.stdout
        assert problem["problem"] in done.stdout


# --- processes ---


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_export_exits_with_130_and_leaves_nothing(
    tmp_path: Path, sent: signal.Signals
) -> None:
    root = tmp_path / "large"  # 2 GB of holes
    write_sparse_zero3(root, {f"w{index}": (8192, 8192) for index in range(8)}, 2)
    words = ("consolidate", root, tmp_path / "a" / "model", "--progress", "json", "--jobs", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "zexport", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert json.loads(process.stderr.readline())["phase"] == "write"
    process.send_signal(sent)
    out, err = process.communicate(timeout=LIMIT_S)
    messages = [line for line in err.split("\n") if not line.startswith("{")]
    assert (process.returncode, out, messages) == (130, "", ["Interrupted.", ""])
    assert [*tmp_path.iterdir()] == [root]


def imported(*lines: tuple[object, ...], **variables: str) -> set[str]:
    """Return the top-level packages that commands import in a new process."""
    code = (
        "import sys; from zexport.cli.main import run\n"
        f"codes = [run(words) for words in {[[*map(str, line)] for line in lines]}]\n"
        "print('codes', codes, *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    codes, packages = re.findall(r"^codes (\[.*\]) (.*)$", done.stdout, re.MULTILINE)[-1]
    assert json.loads(codes) == [0] * len(lines), done.stderr
    return {*packages.split()}


def test_nothing_heavy_is_imported(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    """Not even by another process: names of known models are recorded in the checkpoint."""
    words = [(), *((name,) for name in COMMANDS)]
    assert not imported(*((*one, "--help") for one in words)) & {*HEAVY, "numpy", "rich"}
    assert not imported(("inspect", ZERO3)) & {*HEAVY, "numpy", "rich"}
    for name in ("zexport_source.json", "config.json"):
        (checkpoint / name).unlink()
    lines = (
        ("verify", model, "--against", ZERO3),
        ("diff", model, model),
        ("consolidate", ZERO3, tmp_path / "known"),
        ("consolidate", checkpoint, tmp_path / "plain", "--layout", "memory"),
    )
    cache = tmp_path / "cache"
    assert not imported(*lines, XDG_CACHE_HOME=str(cache)) & {*HEAVY}
    assert not cache.exists()
