"""``zexport reshard`` as users type it, and what other commands make of its result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import typed
from tests.support.published import check
from tests.support.real_cases import FIXTURES
from zexport import (
    ExportOptions,
    OutputError,
    ReshardOptions,
    consolidate,
    open_checkpoint,
    reshard,
)

SOURCE = FIXTURES / "z3_w2_bf16" / "ckpt"
WORLD_3 = ("--world-size", 3)


def zexport(command: str, *words: object) -> Any:
    """A command that ends well; the JSON that it prints."""
    done = typed(command, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_resharded_checkpoint_has_the_same_model_and_states(
    tmp_path: Path,
) -> None:
    out = tmp_path / "on-3"
    planned = zexport("reshard", SOURCE, out, *WORLD_3, "--stage", 2, "--dry-run")
    assert not out.exists()
    done = zexport("reshard", SOURCE, out, *WORLD_3, "--stage", 2)
    assert planned["settings"] == done["settings"]
    assert (done["settings"]["world_size"], done["settings"]["stage"]) == (3, 2)
    assert [*done["files"]] == sorted([*done["files"]])
    check("reshard_manifest", json.loads((out / "zexport_manifest.json").read_text()))
    assert zexport("verify", out)["ok"]
    assert zexport("verify", out, "--against", SOURCE)["ok"]
    opened = open_checkpoint(out)
    assert (opened.world_size, opened.stage, opened.problems) == (3, 2, ())
    diff = zexport("diff", SOURCE, out, "--states", "--all")
    assert diff["counts"]["equal"] == len(diff["tensors"]) == 21 + 42
    models = [tmp_path / "a", tmp_path / "b"]
    for checkpoint, model in zip((SOURCE, out), models, strict=True):
        zexport("consolidate", checkpoint, model, "--layout", "memory")
    one, other = (json.loads((it / "zexport_manifest.json").read_text()) for it in models)
    assert one["tensors"] == other["tensors"]
    assert one["files"]["model.safetensors"] == other["files"]["model.safetensors"]


def test_copied_weights_are_verified_against_the_manifest(
    tmp_path: Path,
) -> None:
    """As the adapter that a peft run saves beside its checkpoint."""
    source, out = FIXTURES / "z2_w2_bf16_lora" / "ckpt", tmp_path / "on-1"
    zexport("reshard", source, out, "--world-size", 1)
    copied = out / "adapter_model.safetensors"
    assert copied.read_bytes() == (source / copied.name).read_bytes()
    report = zexport("verify", out, "--against", source)
    assert report["ok"]
    assert copied.name in report["by_manifest_alone"]
    content = bytearray(copied.read_bytes())
    content[-1] ^= 1
    copied.write_bytes(content)
    done = typed("verify", out, "--json")
    assert [one["file"] for one in json.loads(done.stdout)["problems"]] == [copied.name]


def test_changed_state_is_found_by_verify_and_diff(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "on-1"
    shutil.copytree(SOURCE, source)
    zexport("reshard", source, out, "--world-size", 1)
    shutil.rmtree(source)
    shutil.copytree(FIXTURES / "z3_w2_bf16_offload" / "ckpt", source)
    assert typed("verify", out, "--against", source).returncode == 7
    assert typed("diff", source, out, "--fail-on", "different").returncode == 7


def test_overwrite_replaces_a_resharding_but_no_resumed_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "on"
    reshard(SOURCE, out, ReshardOptions(world_size=3))
    with pytest.raises(OutputError, match=r"is not empty\. .* or pass --overwrite"):
        reshard(SOURCE, out, ReshardOptions(world_size=2))
    reshard(SOURCE, out, ReshardOptions(world_size=2, overwrite=True))
    assert open_checkpoint(out).world_size == 2
    with pytest.raises(OutputError, match="contains a checkpoint"):
        consolidate(SOURCE, out, ExportOptions(overwrite=True))
    path = next(out.rglob("*_optim_states.pt"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")  # as a save under the same tag does
    with pytest.raises(OutputError, match=r"_optim_states\.pt "):
        reshard(SOURCE, out, ReshardOptions(world_size=3, overwrite=True))
    (out / "global_step2" / "new.pt").touch()
    with pytest.raises(OutputError, match=r"found global_step2/new\.pt was added"):
        reshard(SOURCE, out, ReshardOptions(world_size=3, overwrite=True))


def test_output_inside_the_input_is_rejected() -> None:
    done = typed("reshard", SOURCE, SOURCE / "global_step2" / "out", *WORLD_3)
    assert done.returncode == 6
    assert "would be mixed with the input files" in done.stderr
    assert not (SOURCE / "global_step2" / "out").exists()
