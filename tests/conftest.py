"""Fixtures only: what many tests start from."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fsdp_checkpoints
from tests.support.checkpoints import Run, save, small_model
from tests.support.published import check_all_printed
from tests.support.warm_names import WarmNames
from zexport.api import export


def pytest_configure() -> None:
    """Check what commands print, and undo what a shell made this process ignore (``nohup``)."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    check_all_printed()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no process is left with one when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep names that are learnt from transformers for this session, not in the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="session")
def warm_names() -> Iterator[WarmNames]:
    """Starts names processes as forks of one that has imported transformers."""
    warm = WarmNames()
    yield warm
    warm.end()


@pytest.fixture(autouse=True)
def _warm_names(warm_names: WarmNames, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers without importing it for every question."""
    monkeypatch.setattr(subprocess, "Popen", warm_names.Popen)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a few kilobytes have several files, too."""
    monkeypatch.setattr(export, "SHARD_NBYTES_MIN", 1)


@pytest.fixture
def zero2(tmp_path: Path) -> Path:
    """A run of two ranks under ZeRO-2."""
    return save(small_model(), Run(stage=2), tmp_path / "zero2")


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    """A run of three ranks under ZeRO-3, so that nearly every parameter is padded."""
    return save(small_model(), Run(stage=3, world_size=3), tmp_path / "zero3")


@pytest.fixture(scope="session")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FSDP checkpoints in every form, made once for all test processes."""
    return fsdp_checkpoints.shared(tmp_path_factory)
