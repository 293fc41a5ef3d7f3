"""Start exports from the training script: callbacks for transformers and Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zexport.callbacks.lightning import LightningExportCallback
    from zexport.callbacks.trainer import ExportCallback

__all__ = ["ExportCallback", "LightningExportCallback"]

_MODULES = {"ExportCallback": "trainer", "LightningExportCallback": "lightning"}


def __getattr__(name: str) -> object:
    """Import only the framework whose callback is used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
