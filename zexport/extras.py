"""The packages of the extras: what this environment lacks of them, and the line to type."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec

_FROM, _WHERE = ".", "in a clone of zexport"
"""What pip installs; its name, and anywhere, once it is published."""

_TRANSFORMERS_MIN = 5
"""The first that says how the weights in its files are made of those in memory."""

HUB_WANTED = f"transformers {_TRANSFORMERS_MIN} or later, and torch"


def to_install(extra: str) -> str:
    """The next step where a package of an extra is missing."""
    return f"Type pip install '{_FROM}[{extra}]' {_WHERE}"


def to_install_apart(extra: str) -> str:
    """The same, in an environment of its own: this one may be pinned to what does not do."""
    return f"Type uv tool install '{_FROM}[{extra}]', or pipx install '{_FROM}[{extra}]', {_WHERE}"


def installed(package: str) -> str | None:
    """The version of an installed package; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lack_for_names() -> str:
    """What keeps this environment from telling a model's names; empty if nothing does."""
    version = installed("transformers")
    if version is None:
        return "no transformers"
    if int(version.partition(".")[0]) < _TRANSFORMERS_MIN:
        return f"transformers {version}"
    return "" if find_spec("torch") else "no torch"
