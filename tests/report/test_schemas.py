"""The published JSON Schemas; every test's JSON output is also compared with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

from tests.support.cli import COMMANDS, run
from tests.support.published import SCHEMAS, check, schema
from zexport import Outcome

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


def test_every_schema_belongs_to_a_command_error_or_manifest() -> None:
    assert set(PRINTED) == set(COMMANDS)
    printed = {name for names in PRINTED.values() for name in names}
    assert printed | {"error", "manifest", "reshard_manifest"} == {
        path.stem for path in SCHEMAS.glob("*.json")
    }


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
