"""The digest of a plan, by which parts and reruns know that they belong together.

No other test of exports imports an internal module.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import zexport
from tests.support.real_cases import FIXTURES
from zexport.export.plan_digest import PlanDigest

Plan = zexport.ExportPlan
FIXED = "af51222af2580f1341cd9a86341107d4a83827258194a7d633406de1028c86e8"


def plan(folder: Path) -> Plan:
    """The plan for a fixture whose files have a fixed time."""
    memory = zexport.ExportOptions(layout=zexport.NameLayout.MEMORY)
    root = shutil.copytree(FIXTURES / "z3_w2_bf16" / "ckpt", folder / "run", dirs_exist_ok=True)
    for path in root.rglob("*"):
        os.utime(path, ns=(0, 10**18))
    return zexport.plan_export(zexport.open_checkpoint(root), folder / "out", memory)


def digests(made: Plan) -> list[str]:
    """The digest of a plan, and that of its first file."""
    return [PlanDigest(made).whole, PlanDigest(made).of_file(made.shards[0])]


def test_digest_is_the_same_in_every_process_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constant may change with the form of plans, but never between two runs."""
    here, there = (plan(tmp_path / name) for name in ("here", "there"))
    there = replace(there, jobs=7, chunk_nbytes=4096, overwrite=True)
    assert digests(there) == digests(here)
    assert digests(here)[1] != FIXED
    monkeypatch.setattr(sys.modules[PlanDigest.__module__], "__version__", "1")
    assert digests(here)[1] == FIXED


def with_tensors(made: Plan, *tensors: object) -> Plan:
    return replace(made, shards=(structs.replace(made.shards[0], tensors=tensors),))


def with_tensor(made: Plan, **changes: object) -> Plan:
    first, *others = made.shards[0].tensors
    return with_tensors(made, structs.replace(first, **changes), *others)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: with_tensors(made, *made.shards[0].tensors[1:]),
        lambda made: with_tensors(made, *made.shards[0].tensors[::-1]),
        lambda made: with_tensor(made, name="z"),
        lambda made: with_tensor(made, shape=(1,)),
        lambda made: with_tensor(made, offset=0),
        lambda made: with_tensor(made, source=made.shards[0].tensors[1].source),
        lambda made: replace(made, sources=made.sources[::-1]),
    ],
)
def test_digest_changes_with_the_plan(change: Callable[[Plan], Plan], tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert not {*digests(change(made))} & {*digests(made)}
    bare = replace(made, side_files=())
    assert [a == b for a, b in zip(digests(bare), digests(made), strict=True)] == [False, True]
