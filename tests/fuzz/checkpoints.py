"""Real checkpoints with a changed pickle in one file, in a valid zip."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.fuzz.readers import FIXTURES
from tests.fuzz.runner import Target
from zexport import ExportOptions, NameLayout, open_checkpoint, plan_export
from zexport.inspect.summary import inspect_checkpoint
from zexport.report.json import inspection_json

_CASES = (
    "z3_w2_bf16_frozen",
    "z2_w2_bf16_tied",
    "z1_w2_bf16opt",
    "moe_z2_w2_ep2_frozen",
    "z0_w2_bf16",
    "uni_z3_w2_bf16_frozen",
    "tp2_z1_w2_bf16_fused",
    "pp2_z1_w4_bf16_tied",
)
_OPTIONS = ExportOptions(layout=NameLayout.MEMORY)
_HEAD = 2  # the first bytes of an input choose the checkpoint and the file


@cache
def _files() -> Sequence[tuple[Path, Path]]:
    roots = [FIXTURES / case / "ckpt" for case in _CASES]
    return [(root, file) for root in roots for file in sorted(root.glob("*/*.pt"))]


@cache
def seeds() -> Sequence[bytes]:
    """Return the number of a file and its pickle."""
    return [
        number.to_bytes(_HEAD, "little") + _pickle_of(file)
        for number, (_, file) in enumerate(_files())
    ]


def _pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(_name(archive))


def _name(archive: zipfile.ZipFile) -> str:
    return next(name for name in archive.namelist() if name.endswith("/data.pkl"))


def read(data: bytes, folder: Path) -> object:
    """Open, inspect and plan an export."""
    number = int.from_bytes(data[:_HEAD], "little") % len(_files())
    root, file = _files()[number]
    copy = folder / root.parent.name
    if not copy.exists():
        shutil.copytree(root, copy)
        for config in copy.glob("*.json"):
            config.unlink()  # transformers is not asked
    changed = copy / file.relative_to(root)
    changed.write_bytes(with_pickle(file, data[_HEAD:]))
    try:
        inspection_json(inspect_checkpoint(copy), tensors=True)
        return plan_export(open_checkpoint(copy), folder / "out", _OPTIONS)
    finally:
        shutil.copyfile(file, changed)


def with_pickle(path: Path, data: bytes) -> bytes:
    """Return a torch file with another pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(stream, "w") as new:
        name = _name(old)
        for info in old.infolist():
            new.writestr(info.filename, data if info.filename == name else old.read(info))
    return stream.getvalue()


TARGETS = {"checkpoints": Target("checkpoints", seeds, read)}
