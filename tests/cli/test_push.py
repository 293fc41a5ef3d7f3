"""A finished folder uploaded to a server that stands in for the hub, by the command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from tests.support.hub import TOKEN, Hub, serving
from tests.support.stopping import files
from zexport import OutputError, UsageError, verify_export
from zexport.cli.main import cli

CKPT = Path(__file__).parents[2] / "fixtures" / "z3_w2_bf16" / "ckpt"
LIMIT_S = 120


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


def _export(out: Path | str, *words: str, name: str = "org/model") -> Result:
    line = ("consolidate", CKPT, out, "--push-to-hub", name, *words)
    done = CliRunner().invoke(cli, [*map(str, line)], catch_exceptions=False)
    assert TOKEN not in done.output
    return done


def test_the_finished_folder_is_uploaded_to_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    """What it is loaded by comes last; a model that is there is replaced when that is asked for."""
    out, again = tmp_path / "model", tmp_path / "again"
    _export(out, "--dry-run")
    assert hub.private is None
    assert f"Uploaded to {hub.url}/org/model" in _export(out).stderr
    assert hub.private
    assert hub.files == files(out)
    first, last = hub.commits
    assert "model.safetensors" in first
    assert last == {"config.json", "zexport_manifest.json"}

    hub.files |= {"results.json": b"{}", "model-00001-of-00002.safetensors": b"older"}
    with pytest.raises(OutputError, match=r"org/model already has a model \(found config\.json"):
        _export(again)
    assert not again.exists()
    assert not _export(again, "--overwrite", "--quiet").output
    assert hub.files == files(again) | {"results.json": b"{}"}


def test_a_failed_upload_leaves_the_folder_whole_and_says_how_to_go_on(
    hub: Hub, tmp_path: Path
) -> None:
    hub.failing, out = "/commit/", tmp_path / "model"
    with pytest.raises(OutputError, match="was not uploaded to org/model") as caught:
        _export(out, "--quiet", "--overwrite")
    assert TOKEN not in str(caught.value)
    assert verify_export(out).ok
    assert hub.objects
    assert not hub.files
    hub.failing = "/put/"  # what was uploaded is not uploaded again
    program, *words = shlex.split(str(caught.value).partition("To continue, type ")[2])
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *words[:-1], words[-1].removesuffix(".")],
        env=os.environ | hub.environment | {"HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hub.files == files(out)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("model", [], "expected ORG/NAME"),
        ("org/mo del", [], "is not a repository name"),
        ("org/model", ["--part", "1/2"], "and --part writes a share of it"),
        ("org/model", ["--output", "s3://bucket/model"], "address"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_export(
    name: str, words: list[str], told: str, tmp_path: Path
) -> None:
    line = ["consolidate", str(CKPT), "--push-to-hub", name, "--output", f"{tmp_path}/out", *words]
    with pytest.raises(UsageError, match=told):
        CliRunner().invoke(cli, line, catch_exceptions=False)
    assert not [*tmp_path.iterdir()]


def test_a_hub_that_cannot_be_written_to_is_told_before_the_export(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UsageError, match="Unset HF_HUB_OFFLINE"):
            _export(tmp_path / "model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OutputError, match=r"cannot upload to org/model .* token") as caught:
        _export(tmp_path / "model")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="Type hf auth login"):
        _export(tmp_path / "model")
    assert hub.private is None
    assert not [*tmp_path.iterdir()]
