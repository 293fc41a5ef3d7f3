"""Fixtures only: what many tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import Run, save, small_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep names that are learnt from transformers for this session, not in the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def zero2(tmp_path: Path) -> Path:
    """A run of two ranks under ZeRO-2."""
    return save(small_model(), Run(stage=2), tmp_path / "zero2")


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    """A run of three ranks under ZeRO-3, so that nearly every parameter is padded."""
    return save(small_model(), Run(stage=3, world_size=3), tmp_path / "zero3")
