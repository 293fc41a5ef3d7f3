"""``--push-to-hub`` to a server that answers like the Hub."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.cli import Result, run
from tests.support.hub import TOKEN, Hub, serving
from tests.support.stopping import files
from zexport import OutputError, UsageError, verify_export

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
    done = run(*line).or_raise()
    assert TOKEN not in done.output
    return done


def test_finished_folder_is_uploaded_to_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    """config.json is last; ``--overwrite`` replaces an existing model."""
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


def test_failed_upload_keeps_the_folder_and_is_continued(hub: Hub, tmp_path: Path) -> None:
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
    ("name", "words", "problem"),
    [
        ("model", [], "expected ORG/NAME"),
        ("org/mo del", [], "is not a repository name"),
        ("org/model", ["--part", "1/2"], "--part writes one part"),
        ("org/model", ["--output", "s3://bucket/model"], "address"),
    ],
)
def test_impossible_upload_is_refused_before_the_export(
    name: str, words: list[str], problem: str, tmp_path: Path
) -> None:
    line = ["consolidate", str(CKPT), "--push-to-hub", name, "--output", f"{tmp_path}/out", *words]
    with pytest.raises(UsageError, match=problem):
        run(*line).or_raise()
    assert not [*tmp_path.iterdir()]


def test_unwritable_hub_is_refused_before_the_export(
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
