"""--base ORG/NAME is the model that huggingface_hub finds in its cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exports import refused

COMMIT = "0123456789" * 4


def cached(model: Path, *names: str, commit: str = COMMIT) -> Path:
    snapshot = model / "snapshots" / COMMIT
    for path, text in ((model / "refs" / "main", commit), *((snapshot / n, n) for n in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return snapshot


@pytest.mark.parametrize("commit", ["", "../../x", "main", "f" * 40, "\xe9"])
def test_reference_to_a_missing_snapshot_is_rejected(
    commit: str, zero2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path / "models--acme--small", "LICENSE", commit=commit)
    words = ("--base", "acme/small")
    refused(zero2, tmp_path / "out", *words, kind="not_a_checkpoint", word="acme/small")
