"""What differs between two models, or between the trainings in two checkpoints."""

from __future__ import annotations

from pathlib import Path

from zexport.api.export import OnProgress
from zexport.checkpoint.open import open_checkpoint
from zexport.compare import states
from zexport.compare.diff import DiffReport, diff_weights
from zexport.errors import UsageError
from zexport.model.hub_cache import model_folder
from zexport.options import ExportOptions
from zexport.store.address import place


def diff_models(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: OnProgress | None = None,
) -> DiffReport:
    """How the weights of two model folders differ, tensor by tensor.

    Tied weights that one side holds under one name and the other under another are compared with
    each other. Memory does not grow with the models; neither folder is changed.

    Args:
        a: a model folder or safetensors file, such as an export.
        b: what to compare it with, such as the model that training began from. Either may be the
            hub's name of a model in its cache on this machine.
        jobs: worker threads; by default one a core, up to 4.
        progress: told of every step.

    Raises:
        CheckpointError: a side has no safetensors weights, or they cannot be read.
        UnsafeError: an index leads outside its folder.
        UnsupportedError: an element type that zexport does not know.
    """
    jobs = ExportOptions().jobs if jobs is None else jobs
    if jobs < 1:
        raise UsageError("jobs are too few", found=jobs, expected="1 or more")
    one, other = (model_folder(place(side)) for side in (a, b))
    return diff_weights(one, other, jobs=jobs, progress=progress)


def diff_states(
    a: Path | str,
    b: Path | str,
    *,
    jobs: int | None = None,
    progress: OnProgress | None = None,
) -> DiffReport:
    """How the trainings in two checkpoints differ: masters, every optimizer state, and the rest.

    Stage, number of ranks and layout do not matter. Memory does not grow with the model. Where one
    was pruned, the weights of both are compared alone.

    Args:
        a: a checkpoint, at any level of its folders.
        b: another one, such as what ``reshard`` has made of it.
        jobs: worker threads; by default one a core, up to 4.
        progress: told of every step.

    Raises:
        CheckpointError: a side is no checkpoint, has problems, or lacks states.
        UnsupportedError: a state cannot be told apart by name.
    """
    jobs = ExportOptions().jobs if jobs is None else jobs
    one, other = place(a), place(b)
    opened = open_checkpoint(one), open_checkpoint(other)
    return states.diff_states((one, other), opened, jobs=jobs, progress=progress)
