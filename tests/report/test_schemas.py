"""Real output against the published JSON Schemas, none of whose keys may be missing from them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator

from tests.support.checkpoints import Model, Run, save, small_model
from tests.support.forked import typed
from tests.support.published import SCHEMAS, check, schema
from zexport import diff_models, plan_export, run_export, verify_export
from zexport.checkpoint.open import open_checkpoint
from zexport.cli.main import cli
from zexport.compare.tensor import Outcome
from zexport.errors import UsageError, ZexportError
from zexport.export.summary import summarize
from zexport.inspect.inspect import inspect_checkpoint
from zexport.inspect.statistics import measure
from zexport.options import ExportDType, ExportOptions
from zexport.report.diff import diff_json
from zexport.report.failure import Failure, Told
from zexport.report.inspect_json import inspection_json
from zexport.store.json import form_of
from zexport.train.options import TrainSummary

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = sorted(path.parent for path in FIXTURES.glob("*/case.json"))
PLAIN = FIXTURES / "z3_w2_bf16" / "ckpt"

each_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


_SOMETIMES = ("nbytes_compared", "base")
"""Keys that stand only where there is something to tell."""


@pytest.mark.parametrize("name", sorted(path.stem for path in SCHEMAS.glob("*.json")))
def test_a_schema_is_one_and_requires_what_is_always_there(name: str) -> None:
    content = schema(name)
    Draft202012Validator.check_schema(content)
    sometimes = (*_SOMETIMES, "warnings") if "manifest" in name else _SOMETIMES
    assert content["required"] == [key for key in content["properties"] if key not in sometimes]
    assert not Draft202012Validator(content).is_valid({"schema": 1})


def test_what_schemas_share_is_the_same_in_all_of_them() -> None:
    shared: dict[str, Any] = {}
    for path in SCHEMAS.glob("*.json"):
        for name, definition in schema(path.stem).get("$defs", {}).items():
            assert shared.setdefault(name, definition) == definition


@each_case
def test_plan_export_manifest_and_verification_of_every_case_or_why_there_is_none(
    case: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(case / "ckpt")
    if checkpoint.problems:
        for problem in checkpoint.problems:
            check("error", form_of(Failure(Told.of(problem))))
        return
    plan = plan_export(checkpoint, tmp_path / "model", ExportOptions())
    check("plan", form_of(summarize(plan), plan.provenance))
    done = run_export(plan)
    check("export", form_of(done, plan.provenance))
    check("manifest", json.loads((tmp_path / "model" / "zexport_manifest.json").read_bytes()))
    check("verify", verify_export(tmp_path / "model").to_json())


@each_case
def test_inspection_of_every_case_with_all_there_is_to_say(case: Path) -> None:
    found = inspect_checkpoint(case / "ckpt")
    check("inspect", inspection_json(found))
    check("inspect", inspection_json(found, tensors=True))
    assert found.checkpoint is not None
    told = check("inspect", inspection_json(found, statistics=measure(found.checkpoint).tensors))
    assert all(tensor["statistics"]["nan"] == 0 for tensor in told["checkpoint"]["tensors"])


def test_inspection_where_a_tag_has_to_be_chosen(tmp_path: Path) -> None:
    root = shutil.copytree(PLAIN, tmp_path / "run")
    shutil.copytree(root / "global_step2", root / "global_step4")
    (root / "latest").unlink()
    told = check("inspect", inspection_json(inspect_checkpoint(root)))
    assert (told["checkpoint"], told["verdict"]["outcome"]) == (None, "choose_tag")


@pytest.mark.parametrize(
    ("root", "tag", "framework"),
    [
        ("epoch=1-step=20.ckpt", "checkpoint", "lightning"),
        ("_actor", "global_step20", "openrlhf"),
    ],
)
def test_inspection_of_every_frameworks_folders(
    tmp_path: Path, root: str, tag: str, framework: str
) -> None:
    shutil.copytree(PLAIN / "global_step2", tmp_path / root / tag)
    code, told = printed("inspect", tmp_path / root)
    assert (code, told["checkpoint"]["framework"]) == (0, framework)


def test_inspection_of_damage(tmp_path: Path) -> None:
    root = shutil.copytree(PLAIN, tmp_path / "run")
    files = sorted((root / "global_step2").glob("*.pt"))
    files[0].unlink()
    os.truncate(files[2], 100)
    (root / "model.safetensors").write_bytes(b"nothing")
    told = check("inspect", inspection_json(inspect_checkpoint(root)))
    assert told["problems"]
    assert told["checkpoint"]["weight_files"][0]["problem"]


def test_an_export_of_remarkable_values(tmp_path: Path) -> None:
    import torch

    tensors = {
        "a": torch.tensor([float("nan"), 1e30]),
        "b": torch.tensor([float("inf"), -1.0]),
        "z": torch.zeros(3),
    }
    root = save(Model([tensors]), Run(stage=2), tmp_path / "checkpoint")
    options = ExportOptions(dtype=ExportDType.FP16)
    plan = plan_export(open_checkpoint(root), tmp_path / "model", options)
    told = check("export", form_of(run_export(plan), plan.provenance))
    kinds = {finding["kind"] for finding in told["findings"]}
    assert kinds == {"nan", "inf", "fp16-overflow", "all-zero"}
    manifest = json.loads((tmp_path / "model" / "zexport_manifest.json").read_bytes())
    assert check("manifest", manifest)["findings"] == told["findings"]


def test_an_export_with_renames_and_ties(tmp_path: Path) -> None:
    root = save(small_model(), Run(stage=3), tmp_path / "checkpoint")
    options = replace(ExportOptions(), renames=(("^emb", "embed"),))
    plan = plan_export(open_checkpoint(root), tmp_path / "model", options)
    told = check("plan", form_of(summarize(plan), plan.provenance))
    assert told["tied"] == {"head.weight": "embed.weight"}
    assert told["options"]["renames"] == [["^emb", "embed"]]


def test_a_verification_that_found_something(tmp_path: Path) -> None:
    plan = plan_export(open_checkpoint(PLAIN), tmp_path / "model")
    run_export(plan)
    (tmp_path / "model" / "config.json").unlink()
    os.truncate(tmp_path / "model" / "model.safetensors", 1000)
    told = check("verify", verify_export(tmp_path / "model", against=PLAIN).to_json())
    assert (told["ok"], told["against_checkpoint"]) == (False, True)


def test_a_comparison_with_every_outcome_there_is(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

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
    report = diff_models(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    told = check("diff", diff_json(report, every=True))
    assert {tensor["outcome"] for tensor in told["tensors"]} == {o.value for o in Outcome}
    assert len(check("diff", diff_json(report))["tensors"]) == len(told["tensors"]) - 2


def test_every_error(tmp_path: Path) -> None:
    kinds = list(_kinds(ZexportError))
    assert UsageError in kinds
    for kind in kinds:
        for error in (kind("is wrong"), kind("is wrong", path=tmp_path, found=1, hint="Mend it")):
            assert check("error", form_of(Failure(Told.of(error))))["error"]["kind"] == kind.kind


def _kinds(root: type[ZexportError]) -> list[type[ZexportError]]:
    return [root, *(found for child in root.__subclasses__() for found in _kinds(child))]


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
"""The schemas of what each command prints with ``--json``."""


def test_every_schema_is_of_a_command_of_a_failure_or_of_the_manifest() -> None:
    commands = click.Context(cli)
    assert set(PRINTED) == set(cli.list_commands(commands))
    printed = {name for names in PRINTED.values() for name in names}
    assert printed | {"error", "manifest", "reshard_manifest"} == {
        path.stem for path in SCHEMAS.glob("*.json")
    }


def printed(*words: object) -> tuple[int, Any]:
    """Exit code and object of a command as programs run it."""
    done = typed(*words, "--json")
    return done.returncode, json.loads(done.stdout)


def test_what_commands_print_fits_their_schemas(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for code, name, words in (
        (0, "plan", ("consolidate", PLAIN, model, "--dry-run")),
        (0, "export", ("consolidate", PLAIN, model)),
        (0, "export", ("consolidate", PLAIN, other, "--dtype", "bf16")),
        (0, "inspect", ("inspect", PLAIN, "--stats", "--tensors")),
        (0, "verify", ("verify", model, "--against", PLAIN)),
        (0, "diff", ("diff", model, other)),
        (7, "diff", ("diff", model, other, "--fail-on", "different")),
        (0, "watch", ("watch", PLAIN, tmp_path / "outs", "--once")),
    ):
        found, told = printed(*words)
        assert found == code
        check(name, told)
    (model / "config.json").unlink()
    code, told = printed("verify", model)
    assert (code, check("verify", told)["ok"]) == (7, False)


def test_a_failure_of_every_command_fits_its_schema(tmp_path: Path) -> None:
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
            found, told = printed(command, *words)
            assert (found, check("error", told)["error"]["code"]) == (code, code), (command, words)


def test_a_training_run() -> None:
    summary = TrainSummary(
        out=Path("run"),
        tag="global_step4",
        steps=4,
        first_loss=5.5,
        last_loss=5.25,
        checkpoints=("global_step2", "global_step4"),
        world_size=2,
        stage=3,
    )
    told = check("train", json.loads(summary.to_json()))
    assert told["checkpoints"] == ["global_step2", "global_step4"]
