"""Which checkpoints of a run its framework calls the best, and may go back to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zexport.checkpoint.zero.file_names import MODEL_FILES, rank_files
from zexport.formats.pickle_view import PickleView
from zexport.formats.torch_file import read_torch_file
from zexport.monitor.sightings import TRAINER_STATE, Sighting
from zexport.storage.contents import read_json_object
from zexport.storage.files import is_file


def best_names(run: Path, newest: list[Sighting]) -> set[str]:
    """The names of the checkpoints that are the best, as the newest of the run say.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    folders = (run, *(one.folder for one in newest))
    told = [*filter(None, map(_of_trainer, folders))]
    told += (path for one in newest for path in _of_lightning(one.tag_dir))
    return {Path(one).name for one in told}


def _of_trainer(folder: Path) -> str | None:
    """Source: transformers 5.23, ``trainer.py`` (``_save_checkpoint``)."""
    path = folder / TRAINER_STATE
    told = read_json_object(path).get("best_model_checkpoint") if is_file(path) else None
    return told if isinstance(told, str) else None


def _of_lightning(tag_dir: Path) -> Iterator[str]:
    """What each ``ModelCheckpoint`` tells, whose state is in every rank's model file.

    Source: Lightning 2.6, ``callbacks/model_checkpoint.py`` (``state_dict``) and
    ``strategies/deepspeed.py`` (``save_checkpoint``).
    """
    models = (file.path for file in rank_files(tag_dir) if file.kind in MODEL_FILES)
    if (path := next(models, None)) is None:
        return
    states = PickleView(path, "model states", read_torch_file(path).value).table()
    callbacks = PickleView(path, "callbacks", states.get("callbacks"))
    for key, state in callbacks.table().items():
        found = PickleView(path, f"callback {key!r}", state).table().get("best_model_path")
        if isinstance(found, str):
            yield found
