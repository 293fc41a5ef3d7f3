"""A folder that lacks nothing but its name: its last worker died just before it gave it that.

Its manifest, which is written when all else is proved, says so; every byte is read again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from zexport.errors import OutputError
from zexport.export.plan import ExportPlan, Form, Origin
from zexport.filenames import CONFIG, MANIFEST_NAME
from zexport.model.hub_cache import GivenBase
from zexport.options import AdapterMode, NameLayout, RecordedOptions
from zexport.run.against_checkpoint import looks_made
from zexport.run.execute import ExportReport
from zexport.run.manifest import Manifest, is_as_written, read_manifest
from zexport.run.progress import Progress
from zexport.run.readback import VerifyMode
from zexport.run.receipts import clear_receipts
from zexport.run.staging import check_content
from zexport.run.verify import verify_export
from zexport.store.address import Address
from zexport.store.files import version, writing
from zexport.store.folders import exists, is_file
from zexport.store.publish import publish, workplaces


def publish_made(
    target: Path,
    plan: ExportPlan | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ExportReport | None:
    """Give such a folder its name: what was made; ``None`` where there is none, or not of the plan.

    Without a plan it is as its manifest says. In object storage it has its name already.

    Raises:
        OutputError: something lies where the folder is to lie.
    """
    began = time.monotonic()
    partial, _ = workplaces(target)
    is_far = isinstance(target, Address)
    is_made = _is_as_it_says(partial) if plan is None else looks_made(plan, partial)
    if not is_made or not (is_far or verify_export(partial, progress=progress).ok):
        return None
    manifest = read_manifest(partial)
    files = {name: entry.nbytes for name, entry in manifest.files.items()}
    if not is_far:
        _check_free(target, plan)
    with writing(partial):
        files[MANIFEST_NAME] = version(partial / MANIFEST_NAME).nbytes
        clear_receipts(partial, lambda _: None)
        overwrite = plan is not None and plan.overwrite
        publish(partial, target, overwrite=overwrite, warn=lambda _: None)
    return _report(target, manifest, plan, files, time.monotonic() - began)


def _is_as_it_says(folder: Path) -> bool:
    return is_file(folder / MANIFEST_NAME) and is_as_written(folder)


def _check_free(target: Path, plan: ExportPlan | None) -> None:
    if plan is not None:
        check_content(target, overwrite=plan.overwrite, is_checkpoint=plan.form.is_checkpoint)
    elif exists(target):
        raise OutputError(
            "is there, and the folder that is finished beside it would take its place",
            path=target,
            hint="Run the line of any of the parts again, or remove what is there",
        )


def _report(
    target: Path,
    manifest: Manifest,
    plan: ExportPlan | None,
    files: Mapping[str, int],
    seconds: float,
) -> ExportReport:
    told = manifest.provenance
    origin = Origin.recorded(told.get("checkpoint")) or Origin("", None, "", None)
    return ExportReport(
        out_dir=target,
        origin=origin if plan is None else plan.origin,
        form=_form(manifest) if plan is None else plan.form,
        files=tuple(sorted(files)),
        tensors=len(manifest.tensors),
        nbytes_read=0,
        nbytes_written=sum(files.values()),
        seconds=seconds,
        findings=manifest.findings,
        warnings=_texts(told.get("warnings")) if plan is None else plan.warnings,
        notes=() if plan is None else plan.notes,
        left_out=() if plan is None else plan.left_out,
        verified=VerifyMode.READBACK,
        base=GivenBase.recorded(told.get("base")),
    )


def _texts(recorded: object) -> tuple[str, ...]:
    return msgspec.convert(recorded or (), tuple[str, ...])


def _form(manifest: Manifest) -> Form:
    """What it was made as: of an export its options tell, as far as there was a model to go by."""
    if (options := manifest.provenance.get("options")) is None:
        return Form((), "checkpoint", weights_only=False)
    recorded = msgspec.convert(options, RecordedOptions)
    is_kept = recorded.adapter is AdapterMode.KEEP
    weights_only = not is_kept and CONFIG not in manifest.files
    names = NameLayout.MEMORY.value if weights_only else recorded.layout.value
    dtypes = Counter(one.dtype for one in manifest.tensors.values() if one.dtype.is_floating)
    common = (dtype.torch_name for dtype, _ in dtypes.most_common())
    return Form(tuple(common), "peft" if is_kept else names, weights_only=weights_only)
