"""JSON files that go along with a model, and are none: cut short, or something else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from zexport.store.files import open_regular

_PARSED_NBYTES_MAX = 1 << 20
_BRACKETS = {b"{": b"}", b"[": b"]"}


def spoilt_files(copied: Mapping[str, Path]) -> Iterator[str]:
    """Names of those that no program will read, by what they hold.

    Of large ones, such as a vocabulary of tens of megabytes, only the two ends are looked at: they
    tell a file that was cut short.
    """
    for name, path in sorted(copied.items()):
        if path.suffix == ".json" and not _is_json(path):
            yield name


def _is_json(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            head = file.read(_PARSED_NBYTES_MAX)
            if len(head) < _PARSED_NBYTES_MAX:
                json.loads(head)
                return True
            file.seek(-_PARSED_NBYTES_MAX, 2)
            tail = file.read().rstrip()
    except (OSError, ValueError, RecursionError):
        return False
    return _BRACKETS.get(head.lstrip()[:1]) == tail[-1:]
