"""What an export or one of its parts did."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from zexport.export.plan import Form, Origin
from zexport.export.write import VerifyMode
from zexport.findings import Finding
from zexport.model.hub_cache import GivenBase
from zexport.storage.json import JsonReport, Natural


class ExportReport(JsonReport, Struct, frozen=True):
    """What an export did.

    Attributes:
        out_dir: the output folder, now complete.
        origin: the checkpoint.
        form: dtypes and names of the output.
        files: its files, sorted, the manifest included.
        tensors: number of tensors written.
        nbytes_read: bytes read from the checkpoint's tensors.
        nbytes_written: bytes of all its files.
        seconds: duration.
        findings: anomalies, accepted or harmless.
        warnings: what the user should act on.
        notes: what the user may want to know.
        verified: how the files were read back before publishing.
        left_out: entries of the module's state dict without tensors or values.
        resumed: shards that an interrupted run had finished, read back and reused.
        base: the base model, if given.
    """

    out_dir: Path
    origin: Origin
    form: Form
    files: tuple[str, ...]
    tensors: Natural
    nbytes_read: Natural
    nbytes_written: Natural
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    verified: VerifyMode
    left_out: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    base: GivenBase | None = None


class PartReport(JsonReport, Struct, frozen=True):
    """What one part did while others are missing.

    Attributes:
        out_dir: the output folder, once all parts are written.
        part: its number, from 1.
        parts: the number of parts.
        missing: the parts that are not written; none if the output is complete.
        origin: the checkpoint.
        nbytes_read: bytes read from the checkpoint's tensors.
        nbytes_written: bytes of tensors written.
        seconds: duration.
        findings: anomalies found by comparing replicas.
        warnings: what the user should act on.
    """

    out_dir: Path
    part: Natural
    parts: Natural
    missing: tuple[Natural, ...]
    origin: Origin
    nbytes_read: Natural
    nbytes_written: Natural
    seconds: float
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
