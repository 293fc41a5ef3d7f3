"""How often zexport and DeepSpeed's script reach the live weights, and whether they see damage.

``python -m benchmarks.accuracy`` exports every checkpoint of ``fixtures/`` in both ways: as it is,
and with one bit of every stored tensor flipped. It prints how many ended how.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import load_file

import zexport
from zexport.errors import ZexportError

FIXTURES = Path(__file__).parents[1] / "fixtures"
Tensors = Mapping[str, torch.Tensor]
Convert = Callable[[Path, Path], Tensors]


class Outcome(Enum):
    """What a conversion came to."""

    RIGHT = "equal to the live weights, bit for bit"
    WRONG = "without an error, and other weights than the live ones"
    REFUSED = "ended with an error"


def by_zexport(checkpoint: Path, out: Path) -> Tensors:
    """The weights of an export, under the names that the module has in memory."""
    zexport.consolidate(checkpoint, out, zexport.ExportOptions(layout=zexport.NameLayout.MEMORY))
    return load_file(out / "model.safetensors")


def by_deepspeed(checkpoint: Path, _out: Path) -> Tensors:
    """What DeepSpeed's own function makes of a checkpoint."""
    from deepspeed.utils import zero_to_fp32

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    return dict(found)


CONVERTERS: Mapping[str, Convert] = {"zexport": by_zexport, "zero_to_fp32": by_deepspeed}


def outcome(convert: Convert, checkpoint: Path, case: Path) -> Outcome:
    """Return how a conversion of ``checkpoint`` ends, compared with the truth of ``case``."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = dict(convert(checkpoint, Path(folder) / "out"))
        except (ZexportError, *_DEEPSPEED_RAISES):
            return Outcome.REFUSED
        tied = json.loads((case / "case.json").read_text())["tied"]
        found |= {alias: found[name] for alias, name in tied.items() if name in found}
        truth = load_file(case / "truth.safetensors")
        same = all(name in found and _equal(found[name], truth[name]) for name in truth)
        return Outcome.RIGHT if same else Outcome.WRONG


_DEEPSPEED_RAISES = (
    AttributeError, IndexError, KeyError, NotImplementedError, OSError, RuntimeError,
    TypeError, ValueError
)  # fmt: skip
"""zero_to_fp32 has no errors of its own: these are how it ends with what it does not know."""


def _equal(found: torch.Tensor, truth: torch.Tensor) -> bool:
    """Return whether shapes and values are equal; dtypes may differ, NaN may not occur."""
    return bool(found.shape == truth.shape and torch.equal(found.double(), truth.double()))


def damaged(case: Path, folder: Path) -> Path:
    """A copy of a case's checkpoint in which one bit of every stored tensor is another."""
    copy = shutil.copytree(case / "ckpt", folder / case.name)
    for path in copy.rglob("*.pt"):
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            storages = [record for record in archive.infolist() if "/data/" in record.filename]
        for record in storages:
            content[_middle(record, content)] ^= 0x40
        path.write_bytes(content)
    return copy


def _middle(record: zipfile.ZipInfo, content: bytearray) -> int:
    """The offset of a byte in the middle of a record, which its local header stands before."""
    name, extra = struct.unpack_from("<HH", content, record.header_offset + 26)
    return int(record.header_offset + 30 + name + extra + record.file_size // 2)


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One conversion: of which layout, in which state, by what."""

    layout: str
    flipped: bool
    converter: str


LAYOUTS = {
    "z0": "no ZeRO",
    "z1": "ZeRO-1, 2 and 3",
    "z2": "ZeRO-1, 2 and 3",
    "z3": "ZeRO-1, 2 and 3",
    "tp2": "tensor and pipeline parallelism",
    "pp2": "tensor and pipeline parallelism",
    "moe": "experts",
    "autoep": "experts",
    "stages": "experts",
    "uni": "universal",
}
"""What the names of fixtures begin with."""


def rows() -> Iterator[tuple[Row, Outcome]]:
    """Each conversion and how it ended; four of each fixture."""
    with tempfile.TemporaryDirectory() as folder:
        for case in sorted(path.parent for path in FIXTURES.glob("*/case.json")):
            layout = LAYOUTS[case.name.partition("_")[0]]
            flipped = damaged(case, Path(folder))
            for name, convert in CONVERTERS.items():
                yield Row(layout, False, name), outcome(convert, case / "ckpt", case)
                yield Row(layout, True, name), outcome(convert, flipped, case)


def main() -> None:
    """Print how many ended how."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    counts: dict[Row, Counter[Outcome]] = defaultdict(Counter)
    for row, ended in rows():
        counts[row][ended] += 1
        counts[Row("together", row.flipped, row.converter)][ended] += 1
    print("| layout | one bit flipped in each tensor | converter | right | wrong | error |")
    print("|---|---|---|---:|---:|---:|")
    for row, of in sorted(counts.items()):
        cells = " | ".join(str(of[ended]) for ended in Outcome)
        print(f"| {row.layout} | {'yes' if row.flipped else ''} | `{row.converter}` | {cells} |")


if __name__ == "__main__":
    main()
