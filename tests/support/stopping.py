"""An export of several shards, and ways to stop it half-way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.plans import Wanted, export_plan, save, saved
from zexport.export.plan import ExportPlan, SideFile
from zexport.ranges.dtypes import DType
from zexport.ranges.extents import Extent
from zexport.run.execute import run_plan
from zexport.run.receipts import Receipt, Receipts, finished_files
from zexport.run.shares import Stretch

SHARDS = tuple(f"model-0000{n}-of-00004.safetensors" for n in range(1, 5))


def four_shards(folder: Path, out_dir: Path, target: DType = DType.F32) -> ExportPlan:
    """Four shards out of two records that all of them share."""
    if not (folder / "rank_0.pt").exists():
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(4000, generator=generator) for _ in range(2)]
        save(folder / "rank_0.pt", [*values, torch.arange(7)])
    file, (one, two, ids) = saved(folder / "rank_0.pt")
    wanted = {
        name: [
            Wanted(f"{key}{n}", (1000,), DType.F32, target, _quarter(extent, n))
            for key, extent in (("a", one), ("b", two))
        ]
        for n, name in enumerate(SHARDS)
    }
    wanted[SHARDS[0]].append(Wanted("ids", (7,), DType.I64, DType.I64, ids))
    places = {one.name: shard for shard, tensors in wanted.items() for one in tensors}
    nbytes = 8000 * target.itemsize + 56
    index = {"metadata": {"total_size": nbytes}, "weight_map": places}
    sides = (
        SideFile("config.json", content=b"{}\n"),
        SideFile("model.safetensors.index.json", content=json.dumps(index).encode()),
    )
    return export_plan(out_dir, wanted, [file], side_files=sides, chunk_nbytes=1200)


def _quarter(extent: Extent, n: int) -> Extent:
    count = extent.nbytes // 4
    return Extent(extent.path, extent.offset + n * count, count)


@contextmanager
def stopped_after(count: int, error: BaseException) -> Iterator[None]:
    """A block in which an export ends with ``error`` once ``count`` shards are noted."""
    whole = Receipts.add

    def add(self: Receipts, stretch: Stretch, receipt: Receipt) -> None:
        if len(finished_files(self._folder.parent)) == count:
            raise error
        whole(self, stretch, receipt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receipts, "add", add)
        yield


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def files_of(plan: ExportPlan) -> dict[str, bytes]:
    """What an export of the plan makes, which is removed again."""
    run_plan(plan)
    found = files(plan.out_dir)
    shutil.rmtree(plan.out_dir)
    return found
