"""Output of every command and outcome against the published JSON Schemas."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from tests.support.checkpoints import Model, Run, save, small_model
from tests.support.cli import COMMANDS, run
from tests.support.published import SCHEMAS, check, schema
from zexport import Outcome

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = ("z2_w2_bf16_tied", "pp2_tp2_z1_w8_bf16_tied", "moe_z2_w4_ep2", "uni_z2_w2_bf16_odd")
PLAIN = FIXTURES / "z3_w2_bf16" / "ckpt"

_SOMETIMES = ("nbytes_compared", "base")
"""Optional keys."""

PRINTED = {
    "consolidate": ["export", "part", "plan"],
    "finish": ["finish"],
    "reshard": ["reshard", "reshard_plan"],
    "inspect": ["inspect"],
    "verify": ["verify"],
    "diff": ["diff"],
    "watch": ["watch"],
    "prune": ["prune"],
    "train": ["train"],
}
"""Schemas of each command's ``--json``."""


def printed(name: str, *words: object, code: int = 0) -> Any:
    """Return the JSON that a command prints, checked against the schema ``name``."""
    done = run(*words, "--json")
    assert done.exit_code == code, (words, done.stderr)
    return check(name, json.loads(done.stdout))


@pytest.mark.parametrize("name", sorted(path.stem for path in SCHEMAS.glob("*.json")))
def test_schema_is_valid_and_requires_every_key(name: str) -> None:
    content = schema(name)
    Draft202012Validator.check_schema(content)
    sometimes = (*_SOMETIMES, "warnings") if "manifest" in name else _SOMETIMES
    assert content["required"] == [key for key in content["properties"] if key not in sometimes]
    assert not Draft202012Validator(content).is_valid({"schema": 1})


def test_shared_definitions_are_equal() -> None:
    shared: dict[str, Any] = {}
    for path in SCHEMAS.glob("*.json"):
        for name, definition in schema(path.stem).get("$defs", {}).items():
            assert shared.setdefault(name, definition) == definition


def test_every_schema_belongs_to_a_command_error_or_manifest() -> None:
    assert set(PRINTED) == set(COMMANDS)
    printed = {name for names in PRINTED.values() for name in names}
    assert printed | {"error", "manifest", "reshard_manifest"} == {
        path.stem for path in SCHEMAS.glob("*.json")
    }


@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str, tmp_path: Path) -> None:
    root, out = FIXTURES / case / "ckpt", tmp_path / "model"
    inspected = printed("inspect", "inspect", root, "--tensors", "--stats")
    assert all(one["statistics"]["nan"] == 0 for one in inspected["checkpoint"]["tensors"])
    printed("export", "consolidate", root, out)
    check("manifest", json.loads((out / "zexport_manifest.json").read_bytes()))
    printed("verify", "verify", out)


def test_damaged_and_ambiguous_checkpoint(tmp_path: Path) -> None:
    root = shutil.copytree(PLAIN, tmp_path / "run")
    files = sorted((root / "global_step2").glob("*.pt"))
    files[0].unlink()
    os.truncate(files[2], 100)
    (root / "model.safetensors").write_bytes(b"nothing")
    content = printed("inspect", "inspect", root)
    assert content["problems"]
    assert content["checkpoint"]["weight_files"][0]["problem"]
    shutil.copytree(PLAIN / "global_step2", root / "global_step4")
    (root / "latest").unlink()
    content = printed("inspect", "inspect", root)
    assert (content["checkpoint"], content["verdict"]["outcome"]) == (None, "choose_tag")


def test_findings(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([float("nan"), 1e30]),
        "b": torch.tensor([float("inf"), -1.0]),
        "z": torch.zeros(3),
    }
    root = save(Model([tensors]), Run(stage=2), tmp_path / "checkpoint")
    content = printed("export", "consolidate", root, tmp_path / "model", "--dtype", "fp16")
    kinds = {finding["kind"] for finding in content["findings"]}
    assert kinds == {"nan", "inf", "fp16-overflow", "all-zero"}
    manifest = json.loads((tmp_path / "model" / "zexport_manifest.json").read_bytes())
    assert check("manifest", manifest)["findings"] == content["findings"]


def test_plan_with_renames_and_tied_weights(tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=3), tmp_path / "checkpoint")
    words = (root, tmp_path / "model", "--rename", "^emb=embed", "--dry-run")
    content = printed("plan", "consolidate", *words)
    assert content["tied"] == {"head.weight": "embed.weight"}
    assert content["options"]["renames"] == [["^emb", "embed"]]


def test_a_comparison_with_every_outcome_there_is(tmp_path: Path) -> None:
    one = {
        "equal": torch.ones(2),
        "rounded": torch.full((2,), 0.1),
        "other": torch.tensor([1.0, float("nan"), float("inf")]),
        "empty": torch.ones(2, 0),
        "huge": torch.tensor([1e308], dtype=torch.float64),
        "long": torch.ones(3),
        "mine": torch.ones(()),
    }
    two = one | {
        "rounded": one["rounded"].bfloat16(),
        "other": torch.tensor([float("-inf"), 1.0, 2.0]),
        "huge": -one["huge"],
        "long": torch.ones(4),
        "yours": torch.ones((), dtype=torch.int64),
    }
    del two["mine"]
    save_file(one, tmp_path / "a.safetensors")
    save_file(two, tmp_path / "b.safetensors")
    words = ("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    content = printed("diff", *words, "--all")
    assert {tensor["outcome"] for tensor in content["tensors"]} == {o.value for o in Outcome}
    assert len(printed("diff", *words)["tensors"]) == len(content["tensors"]) - 2
    printed("diff", *words, "--fail-on", "different", code=7)


def test_a_damaged_export_and_a_watch_fit_their_schemas(tmp_path: Path) -> None:
    model = tmp_path / "model"
    printed("export", "consolidate", PLAIN, model)
    os.truncate(model / "model.safetensors", 1000)
    (model / "config.json").unlink()
    content = printed("verify", "verify", model, "--against", PLAIN, code=7)
    assert (content["ok"], content["against_checkpoint"]) == (False, True)
    printed("watch", "watch", PLAIN, tmp_path / "outs", "--once")


def test_error_of_every_command(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    nothing, full = tmp_path / "nothing", tmp_path / "full"
    failures: dict[str, list[tuple[int, tuple[object, ...]]]] = {
        "consolidate": [(3, (nothing, tmp_path / "out")), (6, (PLAIN, full)), (2, ())],
        "finish": [(6, (nothing,)), (2, ())],
        "reshard": [(3, (nothing, tmp_path / "out", "-n", 2)), (2, (PLAIN, tmp_path / "out"))],
        "inspect": [(3, (nothing,)), (2, ("--unknown",))],
        "verify": [(7, (nothing, "--against", PLAIN)), (2, ())],
        "diff": [(3, (nothing, PLAIN)), (2, (nothing,))],
        "watch": [(2, (PLAIN, PLAIN, "--once")), (2, ())],
        "prune": [(3, (nothing, "--export", full)), (2, (nothing,))],
        "train": [(6, (full,)), (2, (nothing, "--stage", 4))],
    }
    assert list(failures) == list(PRINTED)
    for command, ways in failures.items():
        for code, words in ways:
            content = printed("error", command, *words, code=code)
            assert content["error"]["code"] == code
