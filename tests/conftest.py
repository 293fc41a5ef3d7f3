"""Fixtures only: what many tests start from."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import Run, save, small_model
from tests.support.error_goldens import Update, departures, normalised, noted, read_goldens
from tests.support.published import check_all_printed
from tests.support.warm_names import WarmSubprocess
from zexport.api import export
from zexport.checkpoint import reading
from zexport.model import names_client

_UPDATE = pytest.StashKey[Update]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-goldens``: take the messages of the tests that run for the golden ones."""
    parser.addoption("--update-goldens", action="store_true", help="Write tests/golden/errors.")


def pytest_configure(config: pytest.Config) -> None:
    """Check what commands print, and begin to gather, where the goldens are to be written.

    What a shell has made this process ignore (``nohup``, ``&``), the commands under test would too.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    check_all_printed()
    if config.getoption("--update-goldens"):
        config.stash[_UPDATE] = Update()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was gathered."""
    update = session.config.stash.get(_UPDATE, None)
    if update is not None:
        update.write()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no process is left with one when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """Remember which tests failed: what they cause is no example."""
    report = yield
    item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def _golden_messages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Hold the errors that a test causes against the golden messages that it stands for."""
    with noted() as seen:
        yield
    test = request.node.nodeid
    base = tmp_path_factory.getbasetemp()
    told = {site: (kind, normalised(text, base)) for site, (kind, text) in seen.items()}
    update = request.config.stash.get(_UPDATE, None)
    if update is not None:
        if request.node.stash.get(_PASSED, False) and _is_repeatable(request, told):
            update.add(test, told)
        return
    assert not list(departures(test, told, _GOLDENS)), "or run it with --update-goldens"


_GOLDENS = read_goldens()


def _is_repeatable(request: pytest.FixtureRequest, told: dict[str, tuple[str, str]]) -> bool:
    """Whether a test causes the same every time and everywhere."""
    cases = os.environ.get("ZEXPORT_CASES", "")
    return not hasattr(request.function, "hypothesis") and not any(
        cases and cases in message for _, message in told.values()
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep names that are learnt from transformers for this session, not in the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="session")
def warm_subprocess() -> WarmSubprocess:
    """Starts names processes by forks of one that has imported transformers."""
    return WarmSubprocess()


@pytest.fixture(autouse=True)
def _warm_names(warm_subprocess: WarmSubprocess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers without importing it anew for every question."""
    monkeypatch.setattr(names_client, "subprocess", warm_subprocess)


@pytest.fixture(autouse=True)
def _an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test makes is a checkpoint that may still be being written."""
    monkeypatch.setattr(reading, "now", lambda: time.time() + 3600)


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
