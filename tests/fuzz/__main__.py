"""Every fuzzer in turn: ``python -m tests.fuzz --seconds 60``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.runner import NAMES, run_all

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run every fuzzer in turn, and say what it found.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--seconds", type=float, default=60, help="for each")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--keep", type=Path, help="folder for inputs that go wrong")
    chosen = parser.parse_args()
    names = chosen.names or NAMES
    sys.exit(bool(run_all(names, chosen.seconds, plain=chosen.plain, keep=chosen.keep)))
