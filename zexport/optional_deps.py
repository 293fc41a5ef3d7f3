"""The packages of the extras: what this environment lacks of them, and the line to type."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from zexport.storage.files import matching

_FROM, _WHERE = ".", "in a clone of zexport"
"""What pip installs; its name, and anywhere, once it is published."""

_TRANSFORMERS_MIN = 5
"""The first that says how the weights in its files are made of those in memory."""

_NO_TRANSFORMERS, _NO_TORCH = "no transformers", "no torch"

HUB_WANTED = f"transformers {_TRANSFORMERS_MIN} or later, and torch"


def to_install(extra: str) -> str:
    """The next step where a package of an extra is missing."""
    return f"Type pip install '{_FROM}[{extra}]' {_WHERE}"


def to_have_names() -> str:
    """The next step where transformers cannot be asked.

    One that is installed and does not do may be what a training is pinned to: then it stays, and
    zexport gets an environment of its own.
    """
    if lack_for_names() in {_NO_TRANSFORMERS, _NO_TORCH}:
        return to_install("hub")
    line = f"'{_FROM}[hub]'"
    return f"Type uv tool install {line}, or pipx install {line}, {_WHERE}"


@cache
def installed(package: str) -> str | None:
    """The version of an installed package; nothing of it is imported.

    The name of the folder with its metadata tells it, which lies beside the package. Else, as where
    a package runs from its sources, Python's own module is asked, which takes a tenth of an export.

    Source: packaging.python.org, "Recording installed projects" (``{name}-{version}.dist-info``).
    """
    found = find_spec(package)
    for place in (found and found.submodule_search_locations) or ():
        beside = matching(Path(place).parent, f"{package}-*.dist-info")
        if len(beside) == 1:
            return beside[0].stem.removeprefix(f"{package}-")
    import importlib.metadata  # noqa: PLC0415 - see above

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lack_for_names() -> str:
    """What keeps this environment from telling a model's names; empty if nothing does."""
    version = installed("transformers")
    if version is None:
        return _NO_TRANSFORMERS
    if int(version.partition(".")[0]) < _TRANSFORMERS_MIN:
        return f"transformers {version}"
    return "" if find_spec("torch") else _NO_TORCH
