"""Pages in a real browser (``make test-browser``): Debian's Chromium and its driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.support.checkpoints import Model, Run, save
from zexport.cli.main import cli

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
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "window-size=1200,2000",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield chrome
    chrome.quit()


def shown(browser: Chrome, page: Path, *words: str) -> None:
    """Make a page, open it, and see that the browser had nothing to complain of."""
    assert not CliRunner().invoke(cli, [*words, "--html", str(page), "-q"]).exception
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []


def rows(browser: Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, "#tensors tbody tr")


def text(browser: Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def test_the_filter_leaves_the_rows_that_have_every_word(browser: Chrome, tmp_path: Path) -> None:
    shown(browser, tmp_path / "p.html", "inspect", str(A), "--stats")
    assert len(rows(browser)) == 21
    browser.find_element(By.ID, "filter").send_keys("layers.1 mlp trainable")
    assert [row.text.split()[0] for row in rows(browser)] == [
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    ]
    assert text(browser, "count") == "3 of 21"


def test_a_row_opens_its_tensor_and_tells_where_its_bytes_lie(
    browser: Chrome, tmp_path: Path
) -> None:
    shown(browser, tmp_path / "p.html", "inspect", str(A))
    next(row for row in rows(browser) if row.text.startswith("lm_head")).click()
    told = text(browser, "detail").splitlines()
    assert told[0] == "lm_head.weight"
    assert "Shape: [264, 16]" in told
    places = [line for line in told if "optim_states.pt, byte" in line]
    assert len(places) == 2
    assert all(line.endswith(": 8,448 bytes") for line in places)


def test_a_difference_is_shown_in_the_same_pictures(browser: Chrome, tmp_path: Path) -> None:
    shown(browser, tmp_path / "d.html", "diff", str(A), str(B))
    assert len(browser.find_elements(By.CSS_SELECTOR, "#strips use")) == 4
    assert browser.find_elements(By.CSS_SELECTOR, "#tree g")
    browser.find_element(By.ID, "filter").send_keys("lm_head exp_avg_sq")
    assert len(rows(browser)) == 1


def test_names_that_would_be_markup_run_nothing(browser: Chrome, tmp_path: Path) -> None:
    name = "x</script><script>document.title='taken'</script><img src=x onerror=document.title=1>"
    save(Model([{name: torch.ones(3), "y": torch.ones(5)}]), Run(2, 1), tmp_path / "run")
    shown(browser, tmp_path / "p.html", "inspect", str(tmp_path / "run"))
    row = next(row for row in rows(browser) if "script" in row.text)
    row.click()
    assert text(browser, "detail").startswith(name)
    assert "taken" not in browser.title
    assert not browser.find_elements(By.TAG_NAME, "img")
