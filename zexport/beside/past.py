"""What a Trainer had logged by a checkpoint: a training that goes on from there has that past."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from blake3 import blake3
from msgspec import Struct

from zexport.beside.sightings import TRAINER_STATE
from zexport.errors import ZexportError
from zexport.store.contents import read_json_object
from zexport.store.json import Json, tables_in


class Past(Struct, frozen=True):
    """A training's past.

    Attributes:
        logged: each step that something was logged of, with the digest of all that was by then.
    """

    logged: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Past:
        """What the Trainer's state in a checkpoint's folder says; nothing where there is none."""
        with suppress(ZexportError, OSError):
            history = read_json_object(folder / TRAINER_STATE).get("log_history")
            return cls(tuple(_digests(history)))
        return cls()

    def by(self, step: int) -> str:
        """The digest of what was logged up to a step; empty where nothing was."""
        at = bisect_right(self.logged, step, key=lambda one: one[0])
        return self.logged[at - 1][1] if at else ""


def _digests(history: Json) -> Iterator[tuple[int, str]]:
    """Source: transformers 5.23, ``trainer_callback.py`` (``TrainerState``)."""
    digest = blake3()
    for entry in tables_in(history):
        step = entry.get("step")
        if isinstance(step, int):
            digest.update(json.dumps(entry, sort_keys=True).encode())
            yield step, digest.hexdigest()
