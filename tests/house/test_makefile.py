"""Which torch `make` installs, with a pip that only writes down what it is asked for."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
echo "$*" >> "$(dirname "$0")/log"
case "$*" in *whl/cpu*) exit {status};; esac
"""


def installed(folder: Path, *words: str, status: int = 0, stamp: str = ".for-demo") -> list[str]:
    """What pip is asked for after its own upgrade; the CPU index answers with ``status``."""
    python = folder / "python"
    python.write_text(PYTHON.format(status=status))
    python.chmod(0o755)
    venv = folder / "venv"
    command = ("make", "-s", "-C", str(REPOSITORY), f"VENV={venv}", f"PYTHON={python}", *words)
    # `make test TORCH=...` hands its own variables to every make below it.
    outer = ("CPU_INDEX", "DRIVER", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "TORCH")
    done = subprocess.run(
        [*command, f"{venv}/{stamp}"],
        check=True,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in outer},
    )
    assert ("pip takes its default" in done.stdout) == bool(status)
    lines = (venv / "bin" / "log").read_text().splitlines()
    return [line.removeprefix("-m pip install --quiet ") for line in lines][1:]


CPU = "--timeout 10 --retries 1 --no-deps --index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("torch", ["torch", "torch==2.13.0"])
def test_torch_for_the_cpu_is_tried_first_without_a_driver(
    torch: str, status: int, tmp_path: Path
) -> None:
    words = [] if torch == "torch" else [f"TORCH={torch}"]
    asked = installed(tmp_path, "DRIVER=", *words, status=status)
    assert asked == [f"{CPU} {torch}", torch, "--editable .[deepspeed]"]


@pytest.mark.parametrize("words", [["DRIVER=/usr/bin/nvidia-smi"], ["DRIVER=", "CPU_INDEX="]])
def test_pips_default_torch_is_installed_for_a_driver(words: list[str], tmp_path: Path) -> None:
    asked = installed(tmp_path, *words, stamp=".installed")
    assert asked == ["torch", "--editable .[deepspeed]", "--editable .[dev]"]


def test_lint_does_not_depend_on_installed_versions() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    tools = project["project"]["optional-dependencies"]["dev"]
    for tool in ("import-linter", "mypy", "ruff"):
        assert any(line.startswith(f"{tool}==") for line in tools)
    (skipped,) = project["tool"]["mypy"]["overrides"]
    assert "torch.*" in skipped["module"]
    assert skipped["follow_imports"] == "skip"
