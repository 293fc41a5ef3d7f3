"""The callback for transformers' Trainer, and for everything built on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from zexport.callbacks.process import LOG, Exports


class ExportCallback(Exports, TrainerCallback):
    """Export every checkpoint that a Trainer saves, in a low-priority process.

    ``Trainer(..., callbacks=[ExportCallback("models", dtype="bf16")])``; TRL, Axolotl and
    LLaMA-Factory accept callbacks, too. Saving does not wait. Failures are logged, never raised.
    The exit of rank 0 waits for the last export; call ``collect`` to wait earlier. Arguments are
    those of ``Exports``.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero and _is_node_local(args):
            LOG.warning("nothing is exported: each node keeps only its part of a checkpoint")
        elif state.is_world_process_zero:
            self.begin(Path(args.output_dir))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero and not _is_node_local(args):
            self.begin(Path(args.output_dir))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            self.end(args.world_size)


def _is_node_local(args: Any) -> bool:
    """Whether each of several nodes keeps only its part of every checkpoint.

    Source: transformers 5.23, ``training_args.py`` (``save_on_each_node``); DeepSpeed 0.19,
    ``runtime/config.py`` (``use_node_local_storage``).
    """
    plugin = getattr(args, "hf_deepspeed_config", None)
    config = getattr(plugin, "config", None) or {}
    is_local = (config.get("checkpoint") or {}).get("use_node_local_storage")
    world, here = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return bool(is_local or args.save_on_each_node) and world != here
