"""The callback for transformers' Trainer, and for all that is made of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from zexport.callbacks.exports import Exports

_LOG = logging.getLogger("zexport.callbacks")


class ExportCallback(Exports, TrainerCallback):
    """Exports every checkpoint that a Trainer saves, in a process of its own at low priority.

    ``Trainer(..., callbacks=[ExportCallback("models", dtype="bf16")])``; TRL, Axolotl and
    LLaMA-Factory take callbacks in the same way. Saving waits for nothing, a failure is logged and
    never raised, and the end of rank 0's process waits for the last export; ``collect`` waits where
    it is called. Its arguments are those of ``Exports``.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Start the process that looks for what is saved."""
        if state.is_world_process_zero and _is_spread(args):
            _LOG.warning("nothing is exported: each node keeps its own part of a checkpoint")
        elif state.is_world_process_zero:
            self.begin(Path(args.output_dir))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """See that the process is there, which finds what was saved; start it again if not."""
        if state.is_world_process_zero and not _is_spread(args):
            self.begin(Path(args.output_dir))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Wait for what is left: here, or at the end of one process of several."""
        if state.is_world_process_zero:
            self.end(args.world_size)


def _is_spread(args: Any) -> bool:
    """Whether several nodes each keep a part of every checkpoint, of which this one has its own.

    Source: transformers 5.23, ``training_args.py`` (``save_on_each_node``); DeepSpeed 0.19,
    ``runtime/config.py`` (``use_node_local_storage``).
    """
    plugin = getattr(args, "hf_deepspeed_config", None)
    config = getattr(plugin, "config", None) or {}
    is_local = (config.get("checkpoint") or {}).get("use_node_local_storage")
    world, here = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return bool(is_local or args.save_on_each_node) and world != here
