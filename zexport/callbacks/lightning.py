"""The callback for Lightning's Trainer with its DeepSpeed strategy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zexport.callbacks.process import Exports

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class LightningExportCallback(Exports, Callback):
    """Export every checkpoint that ``ModelCheckpoint`` saves; see ``ExportCallback``."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self._begin(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        self._begin(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        if stage == "fit" and trainer.is_global_zero:
            self.end(trainer.world_size)

    def _begin(self, trainer: Any) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if folder is not None and trainer.is_global_zero:
            self.begin(Path(folder))
