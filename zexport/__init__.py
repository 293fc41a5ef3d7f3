"""DeepSpeed ZeRO and FSDP checkpoints to Hugging Face models: offline, bit-exact.

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
    from zexport.api.export import consolidate as consolidate
    from zexport.api.export import consolidate_part as consolidate_part
    from zexport.api.export import plan_export as plan_export
    from zexport.api.export import plan_reshard as plan_reshard
    from zexport.api.export import reshard as reshard
    from zexport.api.export import reshard_part as reshard_part
    from zexport.api.verify import verify_export as verify_export
    from zexport.checkpoint.open import open_checkpoint as open_checkpoint
    from zexport.checkpoint.state import Role as Role
    from zexport.checkpoint.state import StoredTensor as StoredTensor
    from zexport.checkpoint.state import TrainingState as TrainingState
    from zexport.diff.folders import DiffReport as DiffReport
    from zexport.diff.folders import diff_models as diff_models
    from zexport.diff.states import diff_states as diff_states
    from zexport.diff.tensors import Outcome as Outcome
    from zexport.diff.tensors import TensorDiff as TensorDiff
    from zexport.errors import AmbiguousTagError as AmbiguousTagError
    from zexport.errors import CheckpointError as CheckpointError
    from zexport.errors import DamagedCheckpointError as DamagedCheckpointError
    from zexport.errors import FrozenLeftOutError as FrozenLeftOutError
    from zexport.errors import IncompleteCheckpointError as IncompleteCheckpointError
    from zexport.errors import MemoryLimitError as MemoryLimitError
    from zexport.errors import MissingExtraError as MissingExtraError
    from zexport.errors import NamesMismatchError as NamesMismatchError
    from zexport.errors import NoSuchTagError as NoSuchTagError
    from zexport.errors import NotACheckpointError as NotACheckpointError
    from zexport.errors import OtherTagError as OtherTagError
    from zexport.errors import OutputError as OutputError
    from zexport.errors import TrainingError as TrainingError
    from zexport.errors import UnsafeError as UnsafeError
    from zexport.errors import UnsupportedError as UnsupportedError
    from zexport.errors import UsageError as UsageError
    from zexport.errors import VerificationError as VerificationError
    from zexport.errors import ZexportError as ZexportError
    from zexport.export.plan import ExportPlan as ExportPlan
    from zexport.export.report import ExportReport as ExportReport
    from zexport.export.report import PartReport as PartReport
    from zexport.export.report import Progress as Progress
    from zexport.export.report import VerifyMode as VerifyMode
    from zexport.export.run import finish_export as finish_export
    from zexport.export.run import run_export as run_export
    from zexport.export.verify import VerifyReport as VerifyReport
    from zexport.findings import Finding as Finding
    from zexport.findings import FindingKind as FindingKind
    from zexport.monitor.policy import EventKind as EventKind
    from zexport.monitor.policy import WatchEvent as WatchEvent
    from zexport.monitor.policy import WatchOptions as WatchOptions
    from zexport.monitor.prune import PruneReport as PruneReport
    from zexport.monitor.prune import prune as prune
    from zexport.monitor.watch import watch as watch
    from zexport.options import AdapterMode as AdapterMode
    from zexport.options import CheckMode as CheckMode
    from zexport.options import Engine as Engine
    from zexport.options import ExportDType as ExportDType
    from zexport.options import ExportOptions as ExportOptions
    from zexport.options import NameLayout as NameLayout
    from zexport.options import ReshardOptions as ReshardOptions
    from zexport.options import ResumeFormat as ResumeFormat
    from zexport.options import Share as Share
    from zexport.storage.client import use_storage_options as use_storage_options

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
_HOME_OF = dict(sorted((name, home) for home, names in _HOMES.items() for name in names.split()))

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return ["__version__", *__all__]
