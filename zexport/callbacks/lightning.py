"""The callback for Lightning's Trainer with its DeepSpeed strategy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from zexport.callbacks.exports import Exports

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class LightningExportCallback(Callback):  # type: ignore[misc]
    """Exports every checkpoint that ``ModelCheckpoint`` saves; else as ``ExportCallback``.

    Args:
        out: the folder for the exports, each under its checkpoint's name.
        dtype: element type of the weights; ``auto`` for the one that the module trains in.
        then: a command for the shell after each export; ``{}`` is its folder, ``{step}`` its step.
        newest_only: leave out what a newer checkpoint has overtaken.
        interval_s: seconds between two looks at the run.
        collect_s: so long, at the most, the end of the training waits.
        more: other fields of ``zexport.WatchOptions`` and ``zexport.options.ExportOptions``.

    Raises:
        UsageError: an option cannot be meant.
    """

    def __init__(
        self,
        out: Path | str,
        dtype: str = "fp32",
        *,
        then: str = "",
        newest_only: bool = True,
        interval_s: float = 2.0,
        collect_s: float = 600.0,
        **more: Any,
    ) -> None:
        own = {"then": then, "newest_only": newest_only, "interval_s": interval_s}
        self._exports = Exports(out, collect_s, {"dtype": dtype, **own, **more})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Start the process that looks for what is saved."""
        self._begin(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        """See that the process is there, which finds what is saved; start it again if not."""
        self._begin(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Wait for what is left, once the last checkpoint is written."""
        if stage == "fit" and trainer.is_global_zero:
            self._exports.collect()

    def _begin(self, trainer: Any) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if folder is not None and trainer.is_global_zero:
            self._exports.begin(Path(folder))
