"""--base ORG/NAME is the model that huggingface_hub finds in its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.exports import export, refused

COMMIT = "0123456789" * 4
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
ASK = "import huggingface_hub as h; print(h.snapshot_download('acme/small', local_files_only=True))"


def cached(model: Path, *names: str, commit: str = COMMIT) -> Path:
    snapshot = model / "snapshots" / COMMIT
    for path, text in ((model / "refs" / "main", commit), *((snapshot / n, n) for n in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return snapshot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a"),
        ({"HF_HOME": "$HOME/b", "HOME": "{}"}, "b/hub"),
        ({"XDG_CACHE_HOME": "{}/c"}, "c/huggingface/hub"),
    ],
    ids=str,
)
def test_cache_is_the_one_of_huggingface_hub(
    variables: dict[str, str],
    folder: str,
    zero2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    snapshot = cached(tmp_path / folder / "models--acme--small", "LICENSE")
    asked = [sys.executable, "-c", ASK]
    theirs = subprocess.run(asked, capture_output=True, text=True, check=True, env=os.environ)
    assert snapshot.samefile(theirs.stdout.strip())
    export(zero2, tmp_path / "out", "--base", "acme/small")
    assert (tmp_path / "out" / "LICENSE").read_text() == "LICENSE"


@pytest.mark.parametrize("commit", ["", "../../x", "main", "f" * 40, "\xe9"])
def test_reference_to_a_missing_snapshot_is_rejected(
    commit: str, zero2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path / "models--acme--small", "LICENSE", commit=commit)
    words = ("--base", "acme/small")
    refused(zero2, tmp_path / "out", *words, kind="not_a_checkpoint", word="acme/small")
