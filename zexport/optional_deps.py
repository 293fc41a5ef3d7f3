"""Optional dependencies: what is missing in this environment, and the command to install it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from zexport.storage.files import matching

_TRANSFORMERS_MIN = 5
"""The first with conversions between names in memory and names in files."""

_NO_TRANSFORMERS, _NO_TORCH = "no transformers", "no torch"

HUB_WANTED = f"transformers {_TRANSFORMERS_MIN} or later, and torch"


def to_install(extra: str) -> str:
    """Return the hint for a missing package of an extra."""
    return f"Run pip install '.[{extra}]' in a clone of zexport"


def to_have_names() -> str:
    """Return the hint for missing or too old transformers.

    A training environment may pin an old one, so zexport then needs its own environment.
    """
    if lack_for_names() in {_NO_TRANSFORMERS, _NO_TORCH}:
        return to_install("hub")
    return "Run uv tool install '.[hub]', or pipx install '.[hub]', in a clone of zexport"


@cache
def installed(package: str) -> str | None:
    """Return the version of an installed package without importing it.

    The name of its metadata folder has the version. ``importlib.metadata``, which takes a tenth of
    an export, is needed only for packages that run from source.

    Source: packaging.python.org, "Recording installed projects" (``{name}-{version}.dist-info``).
    """
    found = find_spec(package)
    for place in (found and found.submodule_search_locations) or ():
        metadata = matching(Path(place).parent, f"{package}-*.dist-info")
        if len(metadata) == 1:
            return metadata[0].stem.removeprefix(f"{package}-")
    import importlib.metadata  # noqa: PLC0415 - see above

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lack_for_names() -> str:
    """Return what Hub names need and this environment lacks; empty if nothing."""
    version = installed("transformers")
    if version is None:
        return _NO_TRANSFORMERS
    if int(version.partition(".")[0]) < _TRANSFORMERS_MIN:
        return f"transformers {version}"
    return "" if find_spec("torch") else _NO_TORCH
