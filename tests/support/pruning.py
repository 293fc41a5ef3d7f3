"""A run with checkpoints of which the older one may be pruned, and what it must still give."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.support.checkpoints import Run, save, small_model
from tests.support.exports import manifest_of
from zexport import ExportOptions, NameLayout, consolidate

AS_STORED = ExportOptions(layout=NameLayout.MEMORY)


def trainers_run(
    run: Path, checkpoint: Path | None = None, steps: tuple[int, ...] = (2, 4)
) -> Path:
    """Copies of a checkpoint, or of a made-up one, as a Trainer has them; the oldest of them."""
    for step in steps:
        folder = run / f"checkpoint-{step}"
        if checkpoint is None:
            made = Run(steps=step, optimizer_step=float(step))
            save(small_model(), made, folder, f"global_step{step}")
        else:
            shutil.copytree(checkpoint, folder)
            for name in ("zexport_source.json", "zexport_train.json", "training_log.jsonl"):
                (folder / name).unlink(missing_ok=True)
            for path in folder.rglob("*.pt"):
                os.utime(path)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for rank in range(2):
            (folder / f"rng_state_{rank}.pth").write_bytes(b"random")
    return run / f"checkpoint-{steps[0]}"


def tensors_of(checkpoint: Path, scratch: Path) -> dict[str, str]:
    """The digest of every tensor of an export of a checkpoint as fp32."""
    consolidate(checkpoint, scratch, AS_STORED)
    found = {name: one["blake3"] for name, one in manifest_of(scratch)["tensors"].items()}
    shutil.rmtree(scratch)
    return found


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Times and contents of all files of a folder, by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}
