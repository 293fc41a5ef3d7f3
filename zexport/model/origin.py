"""Which model a training began from and under which licence, as far as files say so for certain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zexport.model.sidecars import Sidecars

_CARD = "README.md"
_FRONT_MATTER_NBYTES_MAX = 64 << 10
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_LICENSE_NAME = re.compile(r"\w[\w.-]{0,63}")
_LICENSE_LINK = re.compile(r"(https://[\w./%~-]{1,200}|\w[\w.-]{0,63})")
_LOCAL = re.compile(
    r"(checkpoints?|ckpts?|models?|outputs?|out|runs?|results?|saves?|saved|data|datasets?|weights|"
    r"pretrained(_models?)?|hf_models?|base|exp|experiments?|logs?|tmp|home|mnt|root|work|workspace)"
    r"/.*|.*/(checkpoint|global_step|step|epoch)[-_]?\d+",
    re.IGNORECASE,
)
"""What looks like the hub's ``owner/name`` and is rather a folder."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a model card may say of the model that training began from.

    Attributes:
        base_model: its name on the hub, where that is known.
        license: the licence's identifier, where a card states it.
        license_name: its name, where the identifier is ``other``.
        license_link: where it can be read.
    """

    base_model: str | None
    license: str | None
    license_name: str | None
    license_link: str | None


def find_origin(sidecars: Sidecars) -> Origin:
    """The origin of a model; a path of some machine is never part of it.

    The name is that of the base folder in the hub's cache, else what the config says in
    ``_name_or_path`` if that is a hub's name, else what the base folder's card says its own base
    is. The licence is the one that the base folder's card states.
    """
    card = _front_matter(sidecars.base / _CARD) if sidecars.base is not None else ""
    named = next((name for name in _names(sidecars, card) if _is_hub_id(name)), None)
    license_id = _stated(card, "license", _LICENSE_ID)
    return Origin(
        base_model=named,
        license=license_id,
        license_name=license_id and _stated(card, "license_name", _LICENSE_NAME),
        license_link=license_id and _stated(card, "license_link", _LICENSE_LINK),
    )


def _stated(card: str, key: str, pattern: re.Pattern[str]) -> str | None:
    value = _value(card, key)
    return value if pattern.fullmatch(value) else None


def _names(sidecars: Sidecars, card: str) -> Iterator[str]:
    for part in sidecars.base.resolve().parts if sidecars.base is not None else ():
        if cached := _CACHED.fullmatch(part):
            yield f"{cached[1]}/{cached[2]}"
    if sidecars.config is not None:
        yield str(sidecars.config.content.get("_name_or_path"))
    yield _value(card, "base_model")


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and _LOCAL.fullmatch(name) is None


def _front_matter(path: Path) -> str:
    """The lines between a card's first two ``---``; nothing where it has none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        text = file.read(_FRONT_MATTER_NBYTES_MAX).decode(errors="replace")
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text.lstrip("\ufeff"), re.DOTALL)
    return found[1] if found else ""


def _value(front_matter: str, key: str) -> str:
    """The value of a key at the top level, or the one item of its list; empty if there is none."""
    found = re.search(
        rf"""^{key}:[ \t]*(?:\n[ \t]*-[ \t]+)?["']?([^"'\s#]+)["']?[ \t]*$(?!\n[ \t]*-)""",
        front_matter,
        re.MULTILINE,
    )
    return found[1] if found else ""
