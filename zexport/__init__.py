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
    from zexport.api.export import (
        consolidate,
        consolidate_part,
        plan_export,
        plan_reshard,
        reshard,
        reshard_part,
    )
    from zexport.api.verify import verify_export
    from zexport.checkpoint.open import open_checkpoint
    from zexport.checkpoint.state import Role, StoredTensor, TrainingState
    from zexport.diff.folders import DiffReport, diff_models
    from zexport.diff.states import diff_states
    from zexport.diff.tensors import Outcome, TensorDiff
    from zexport.errors import (
        AmbiguousTagError,
        CheckpointError,
        DamagedCheckpointError,
        FrozenLeftOutError,
        IncompleteCheckpointError,
        MemoryLimitError,
        MissingExtraError,
        NamesMismatchError,
        NoSuchTagError,
        NotACheckpointError,
        OtherTagError,
        OutputError,
        TrainingError,
        UnsafeError,
        UnsupportedError,
        UsageError,
        VerificationError,
        ZexportError,
    )
    from zexport.export.plan import ExportPlan
    from zexport.export.report import ExportReport, PartReport, Progress, VerifyMode
    from zexport.export.run import finish_export, run_export
    from zexport.export.verify import VerifyReport
    from zexport.findings import Finding, FindingKind
    from zexport.monitor.policy import EventKind, WatchEvent, WatchOptions
    from zexport.monitor.prune import PruneReport, prune
    from zexport.monitor.watch import watch
    from zexport.options import (
        AdapterMode,
        CheckMode,
        Engine,
        ExportDType,
        ExportOptions,
        NameLayout,
        ReshardOptions,
        ResumeFormat,
        Share,
    )
    from zexport.storage.client import use_storage_options

__all__ = [
    "AdapterMode",
    "AmbiguousTagError",
    "CheckMode",
    "CheckpointError",
    "DamagedCheckpointError",
    "DiffReport",
    "Engine",
    "EventKind",
    "ExportDType",
    "ExportOptions",
    "ExportPlan",
    "ExportReport",
    "Finding",
    "FindingKind",
    "FrozenLeftOutError",
    "IncompleteCheckpointError",
    "MemoryLimitError",
    "MissingExtraError",
    "NameLayout",
    "NamesMismatchError",
    "NoSuchTagError",
    "NotACheckpointError",
    "OtherTagError",
    "Outcome",
    "OutputError",
    "PartReport",
    "Progress",
    "PruneReport",
    "ReshardOptions",
    "ResumeFormat",
    "Role",
    "Share",
    "StoredTensor",
    "TensorDiff",
    "TrainingError",
    "TrainingState",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
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
    "api.export": ("consolidate consolidate_part plan_export plan_reshard reshard reshard_part"),
    "api.verify": "verify_export",
    "monitor.policy": "EventKind WatchEvent WatchOptions",
    "monitor.prune": "PruneReport prune",
    "monitor.watch": "watch",
    "checkpoint.state": "Role StoredTensor TrainingState",
    "checkpoint.open": "open_checkpoint",
    "diff.folders": "DiffReport diff_models",
    "diff.states": "diff_states",
    "diff.tensors": "Outcome TensorDiff",
    "errors": (
        "AmbiguousTagError CheckpointError DamagedCheckpointError FrozenLeftOutError "
        "IncompleteCheckpointError MemoryLimitError MissingExtraError NamesMismatchError "
        "NoSuchTagError NotACheckpointError OtherTagError OutputError TrainingError "
        "UnsafeError UnsupportedError UsageError VerificationError ZexportError"
    ),
    "export.plan": "ExportPlan",
    "export.report": "ExportReport PartReport Progress VerifyMode",
    "export.run": "finish_export run_export",
    "export.verify": "VerifyReport",
    "findings": "Finding FindingKind",
    "storage.client": "use_storage_options",
    "options": (
        "AdapterMode CheckMode Engine ExportDType ExportOptions NameLayout ReshardOptions "
        "ResumeFormat Share"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
