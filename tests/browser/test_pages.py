"""Pages in a real browser (``make test-browser``): Debian's Chromium and its driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
A, B = (FIXTURES / name / "ckpt" for name in ("z3_w2_bf16_frozen", "z3_w2_bf16"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for word in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "window-size=1200,2000",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield chrome
    chrome.quit()


def open_page(browser: Chrome, page: Path, *words: str) -> None:
    """Open the page of a command; the browser must log no error."""
    assert run(*words, "--html", page, "-q").exit_code == 0
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []


def rows(browser: Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, "#tensors tbody tr")


def text(browser: Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def test_filter_keeps_rows_with_all_words(browser: Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "p.html", "inspect", str(A), "--stats")
    assert len(rows(browser)) == 21
    browser.find_element(By.ID, "filter").send_keys("layers.1 mlp trainable")
    assert [row.text.split()[0] for row in rows(browser)] == [
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    ]
    assert text(browser, "count") == "3 of 21"


def test_row_opens_its_tensor_with_byte_ranges(browser: Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "p.html", "inspect", str(A))
    next(row for row in rows(browser) if row.text.startswith("lm_head")).click()
    lines = text(browser, "detail").splitlines()
    assert lines[0] == "lm_head.weight"
    assert "Shape: [264, 16]" in lines
    places = [line for line in lines if "optim_states.pt, byte" in line]
    assert len(places) == 2
    assert all(line.endswith(": 8,448 bytes") for line in places)


def test_diff_page_shows_strips_and_modules(browser: Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "d.html", "diff", str(A), str(B))
    assert len(browser.find_elements(By.CSS_SELECTOR, "#strips use")) == 4
    assert browser.find_elements(By.CSS_SELECTOR, "#tree g")
    browser.find_element(By.ID, "filter").send_keys("lm_head exp_avg_sq")
    assert len(rows(browser)) == 1
