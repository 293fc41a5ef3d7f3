"""Exports that the training itself starts: callbacks for transformers' Trainer and Lightning's."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zexport.callbacks.lightning import LightningExportCallback
    from zexport.callbacks.trainer import ExportCallback

__all__ = ["ExportCallback", "LightningExportCallback"]

# A framework is imported when its own callback is asked for, and no other.
_HOMES = {"ExportCallback": "trainer", "LightningExportCallback": "lightning"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
