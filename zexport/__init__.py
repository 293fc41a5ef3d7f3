"""DeepSpeed ZeRO checkpoints to Hugging Face models: offline, bit-exact, in bounded memory.

The whole job in one call::

    import zexport

    report = zexport.consolidate("run/checkpoint-100", "model")

and in its steps, each of which returns a value that can be looked at::

    checkpoint = zexport.open_checkpoint("run/checkpoint-100")  # what is there
    plan = zexport.plan_export(checkpoint, "model")  # where every byte will come from
    report = zexport.run_export(plan)  # what was done
    verdict = zexport.verify_export("model", against="run/checkpoint-100")
    report = zexport.diff_models("model", "base")  # which tensors differ, and by how much

and, for the same training on three ranks::

    report = zexport.reshard("run/checkpoint-100", "on-3", zexport.ReshardOptions(world_size=3))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zexport.api.compare import diff_models, diff_states
    from zexport.api.export import consolidate, plan_export, plan_reshard, reshard, run_export
    from zexport.api.parts import consolidate_part, finish_export, reshard_part
    from zexport.api.verify import verify_export
    from zexport.beside.choices import WatchOptions
    from zexport.beside.events import EventKind, WatchEvent
    from zexport.beside.prune import PruneReport, prune
    from zexport.beside.watch import watch
    from zexport.checkpoint.open import open_checkpoint
    from zexport.checkpoint.state import Role, StoredTensor, TrainingState
    from zexport.compare.diff import DiffReport
    from zexport.compare.tensor import Outcome, TensorDiff
    from zexport.compare.verdict import Cause
    from zexport.errors import ZexportError
    from zexport.export.plan import ExportPlan
    from zexport.options import Engine, ExportDType, ExportOptions, NameLayout, ReshardOptions
    from zexport.run.execute import ExportReport, PartReport, Progress, VerifyMode
    from zexport.run.shares import Share
    from zexport.run.verify import VerifyReport
    from zexport.store.client import use_storage_options

__all__ = [
    "Cause",
    "DiffReport",
    "Engine",
    "EventKind",
    "ExportDType",
    "ExportOptions",
    "ExportPlan",
    "ExportReport",
    "NameLayout",
    "Outcome",
    "PartReport",
    "Progress",
    "PruneReport",
    "ReshardOptions",
    "Role",
    "Share",
    "StoredTensor",
    "TensorDiff",
    "TrainingState",
    "VerifyMode",
    "VerifyReport",
    "WatchEvent",
    "WatchOptions",
    "ZexportError",
    "__version__",
    "consolidate",
    "consolidate_part",
    "diff_models",
    "diff_states",
    "finish_export",
    "open_checkpoint",
    "plan_export",
    "plan_reshard",
    "prune",
    "reshard",
    "reshard_part",
    "run_export",
    "use_storage_options",
    "verify_export",
    "watch",
]

__version__ = "0.1.0"

# Names are imported when first used, so that `zexport --help` pays for none of them.
_HOMES = {
    "api.compare": ("diff_models", "diff_states"),
    "api.export": ("consolidate", "plan_export", "plan_reshard", "reshard", "run_export"),
    "api.parts": ("consolidate_part", "finish_export", "reshard_part"),
    "api.verify": ("verify_export",),
    "beside.choices": ("WatchOptions",),
    "beside.events": ("EventKind", "WatchEvent"),
    "beside.prune": ("PruneReport", "prune"),
    "beside.watch": ("watch",),
    "checkpoint.state": ("Role", "StoredTensor", "TrainingState"),
    "checkpoint.open": ("open_checkpoint",),
    "compare.diff": ("DiffReport",),
    "compare.tensor": ("Outcome", "TensorDiff"),
    "compare.verdict": ("Cause",),
    "errors": ("ZexportError",),
    "run.execute": ("ExportReport", "PartReport", "Progress", "VerifyMode"),
    "export.plan": ("ExportPlan",),
    "run.shares": ("Share",),
    "run.verify": ("VerifyReport",),
    "store.client": ("use_storage_options",),
    "options": (
        "Engine",
        "ExportDType",
        "ExportOptions",
        "NameLayout",
        "ReshardOptions",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
