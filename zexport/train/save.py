"""Save a checkpoint on all ranks, or leave everything unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import save_file

from zexport.filenames import ADAPTER_CONFIG, ADAPTER_FILE
from zexport.storage.files import make_folder, sync_path, write_durably
from zexport.storage.local import append_durably, copy_mode, remove_if_possible, rename
from zexport.storage.os_errors import steadily
from zexport.train.options import TrainOptions

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from zexport.train.worker import Ranks


def gathered_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor] | None:
    """Return every weight and persistent buffer in 16 bits by in-memory name, on rank 0.

    Returns ``None`` on other ranks. Collective.
    """
    if engine.zero_optimization_partition_weights():
        weights = engine._zero3_consolidated_16bit_state_dict()
    else:
        weights = engine.module_state_dict()
    if engine.global_rank != 0:
        return None
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        return dict(weights)
    return {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


class ModelWriter(Struct, frozen=True):
    """Writes a model folder as ``save_pretrained`` does, with tokenizer."""

    twin: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self.twin.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        open_like_config(folder)


class AdapterWriter(Struct, frozen=True):
    """Writes an adapter folder as peft's ``save_pretrained`` does, with tokenizer."""

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase

    def write(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        make_folder(folder)
        self.write_config(folder)
        self.write_weights(folder / ADAPTER_FILE, weights)
        self.tokenizer.save_pretrained(folder)

    def write_config(self, folder: Path) -> None:
        """Write only ``adapter_config.json``."""
        self.model.peft_config["default"].save_pretrained(folder, inference_mode=True)

    def write_weights(self, path: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write the adapter's part of ``weights`` under the names that peft gives them."""
        from peft import get_peft_model_state_dict  # noqa: PLC0415 - of the extra

        adapter: dict[str, Any] = get_peft_model_state_dict(
            self.model, state_dict=weights, save_embedding_layers=False
        )
        tensors = {name: tensor.contiguous() for name, tensor in adapter.items()}
        save_file(tensors, path, metadata={"format": "pt"})
        copy_mode(path, path.parent / ADAPTER_CONFIG)


GATHERED = "gathered"
"""Folder in OUT with the gathered models, one folder per tag."""

_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""Errors of torch's zip writer and safetensors' file writer if a write fails."""

_TAG = re.compile(r"global_step(\d+)")


def tag_of(step: int) -> str:
    """Return DeepSpeed's own tag for a step."""
    return f"global_step{step}"


def tags_in(folder: Path) -> tuple[str, ...]:
    """Return the tags in a folder, oldest step first."""
    children = folder.iterdir() if folder.is_dir() else ()
    found = [child.name for child in children if child.is_dir() and _TAG.fullmatch(child.name)]
    return tuple(sorted(found, key=lambda tag: int(tag.removeprefix("global_step"))))


class Saver(Struct, frozen=True):
    """Saves checkpoints of an engine.

    Every rank writes and syncs its files; once all have succeeded, rank 0 moves ``latest``.
    """

    engine: DeepSpeedEngine
    ranks: Ranks
    options: TrainOptions
    writer: ModelWriter | AdapterWriter

    def save(self, tag: str, client_state: dict[str, Any]) -> str:
        """Save, and return the first failing rank's cause; empty on success. Collective.

        A failed save removes its tag and leaves earlier checkpoints unchanged.
        """
        failure = self._agree(self._on_first(lambda: self._discard(tag)))
        if not failure and self.options.partitioned:
            failure = self._agree(self._write_partitions(tag, client_state))
        if not failure:
            failure = self._agree(self._write_gathered(tag))
        if not failure:
            failure = self._agree(self._on_first(lambda: self._publish(tag)))
        if failure:
            self._on_first(lambda: self._discard(tag))
        self.ranks.gather(None)  # wait until rank 0 has cleaned up
        return failure

    def _agree(self, cause: str) -> str:
        """Return the first failing rank's cause on every rank. Collective."""
        causes = enumerate(self.ranks.gather(cause))
        return next((f"rank {rank}: {cause}" for rank, cause in causes if cause), "")

    def _on_first(self, act: Callable[[], None]) -> str:
        """Return why ``act`` failed on rank 0; other ranks do nothing."""
        try:
            if self.ranks.is_first:
                act()
        except _WRITE_ERRORS as error:
            return cause_of(error, self.options.out)
        return ""

    def _write_partitions(self, tag: str, client_state: dict[str, Any]) -> str:
        out = self.options.out
        with recorded_failures(self.engine) as causes:
            self.engine.save_checkpoint(str(out), tag, client_state, save_latest=False)
        return causes[0] if causes else self._on_first(lambda: sync_path(out / tag))

    def _write_gathered(self, tag: str) -> str:
        """Write the model folder of ``--save gathered``, and the adapter next to rank files."""
        adapter = self.writer if isinstance(self.writer, AdapterWriter) else None
        if not self.options.gathered and adapter is None:
            return ""
        weights = gathered_weights(self.engine) or {}

        def write() -> None:
            if self.options.gathered:
                fresh = self._fresh_model(tag)
                self.writer.write(fresh, weights)
                for file in (*fresh.iterdir(), fresh):
                    sync_path(file)
            if self.options.partitioned and adapter is not None:
                adapter.write_weights(self.options.out / f".{ADAPTER_FILE}.new", weights)

        return self._on_first(write)

    def _publish(self, tag: str) -> None:
        """Point ``latest`` to the tag, and remove all but the newest ``--keep`` tags."""
        out, keep = self.options.out, self.options.keep
        fresh_adapter = out / f".{ADAPTER_FILE}.new"
        if fresh_adapter.exists():
            rename(fresh_adapter, out / ADAPTER_FILE)
        if self.options.gathered:
            rename(self._fresh_model(tag), out / GATHERED / tag)
        if self.options.partitioned:
            steadily(lambda: write_durably(out / "latest", tag.encode()))
        for folder in (out, out / GATHERED):
            for old in tags_in(folder)[:-keep] if keep else ():
                if old != tag:
                    remove_if_possible(folder / old)

    def _discard(self, tag: str) -> None:
        """Remove everything of a tag that was not published."""
        gathered = self.options.out / GATHERED / tag
        for folder in (self.options.out / tag, gathered, self._fresh_model(tag)):
            if folder.is_dir():  # a file of that name is not ours
                remove_if_possible(folder)
        remove_if_possible(self.options.out / f".{ADAPTER_FILE}.new")

    def _fresh_model(self, tag: str) -> Path:
        """Return the staging folder of a gathered model."""
        return self.options.out / GATHERED / f".{tag}.new"


@contextmanager
def recorded_failures(engine: DeepSpeedEngine) -> Iterator[list[str]]:
    """Collect this rank's write errors while the engine saves, instead of raising them.

    ``save_checkpoint`` has barriers (deepspeed 0.19.8, ``runtime/engine.py``) at which the other
    ranks would wait for one that raised.
    """
    causes: list[str] = []
    files, engine_copy = engine.checkpoint_engine, engine._copy_recovery_script
    save, makedirs = files.save, files.makedirs

    def noted(write: Callable[[], None], path: Path) -> None:
        try:
            write()
        except _WRITE_ERRORS as error:
            causes.append(cause_of(error, path))

    def noted_save(state_dict: object, path: str) -> None:
        def write() -> None:
            save(state_dict, path)
            sync_path(Path(path))

        noted(lambda: steadily(write), Path(path))

    files.save = noted_save
    files.makedirs = lambda path, **how: noted(lambda: makedirs(path, **how), Path(path))
    engine._copy_recovery_script = lambda path: noted(lambda: engine_copy(path), Path(path))
    try:
        yield causes
    finally:
        del files.save, files.makedirs, engine._copy_recovery_script


def open_like_config(folder: Path) -> None:
    """Give weights the mode of the config; safetensors 0.8 lets only the owner read them."""
    config = next(folder.glob("*config.json"))
    for weights in folder.glob("*.safetensors"):
        copy_mode(weights, config)


def cause_of(error: Exception, path: Path) -> str:
    """Return why a write to ``path`` failed.

    torch's zip writer reports a full disk as a wrong position; writing some more bytes gets the
    system's reason.
    """
    if not isinstance(error, OSError):
        try:
            append_durably(path, bytes(4096))
        except OSError as reason:
            error = reason
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return f"{path}: {str(error).splitlines()[0]}"
