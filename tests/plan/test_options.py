"""What an option may be given as, and what is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zexport
from tests.support.checkpoints import Run, save, small_model
from zexport.api import export
from zexport.errors import UsageError
from zexport.findings import FindingKind
from zexport.options import (
    SHARD_NBYTES_MIN,
    AdapterMode,
    CheckMode,
    Engine,
    ExportDType,
    ExportOptions,
    NameLayout,
)


def test_enumerations_and_paths_may_be_text() -> None:
    given: dict[str, Any] = {
        "dtype": "bf16",
        "layout": "memory",
        "engine": "deepspeed",
        "check": "full",
        "adapter": "keep",
        "base_dtype": "fp16",
        "base": "llama",
        "adapter_config": "run/adapter_config.json",
        "allow": ["cast-mismatch"],
        "renames": [["a", "b"]],
    }
    assert ExportOptions(**given) == ExportOptions(
        dtype=ExportDType.BF16,
        layout=NameLayout.MEMORY,
        engine=Engine.DEEPSPEED,
        check=CheckMode.FULL,
        adapter=AdapterMode.KEEP,
        base_dtype=ExportDType.FP16,
        base=Path("llama"),
        adapter_config=Path("run/adapter_config.json"),
        allow=frozenset({FindingKind.CAST_MISMATCH}),
        renames=(("a", "b"),),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "b16"),
        ("dtype", NameLayout.HUB),
        ("layout", None),
        ("base", 3),
        ("allow", "cast-mismatch"),
        ("allow", ["cast"]),
        ("renames", "a=b"),
        ("max_shard_nbytes", "5GB"),
        ("jobs", "4"),
        ("exclude_frozen", "false"),
        ("only", ["model"]),
    ],
)
def test_what_no_option_can_be_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name} cannot be"):
        ExportOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("even_newest", lambda at: zexport.prune(at / "ckpt", at / "out", even_newest="no")),
        ("dry_run", lambda at: zexport.prune(at / "ckpt", at / "out", dry_run="false")),
        ("check", lambda at: zexport.verify_export(at / "out", check="none")),
        ("follow_symlinks", lambda at: zexport.open_checkpoint(at, follow_symlinks="no")),
        ("tag", lambda at: zexport.consolidate(at / "ckpt", at / "out", tag=4)),
        ("follow_symlinks", lambda at: zexport.watch(at, at / "out", follow_symlinks=0)),
    ],
)
def test_what_no_argument_can_be_is_refused_by_its_name(
    name: str, call: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"^{name} cannot be"):
        call(tmp_path)


def test_what_a_text_may_be_is_told() -> None:
    with pytest.raises(UsageError, match="expected fp32, bf16, fp16, auto"):
        ExportOptions(dtype="b16")  # type: ignore[arg-type]


def test_a_file_of_a_few_bytes_is_taken_for_a_slip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the command line; what was made so before is still verified."""
    root = save(small_model(), Run(), tmp_path / "ckpt")
    zexport.consolidate(root, tmp_path / "out", max_shard_nbytes=500)
    monkeypatch.setattr(export, "SHARD_NBYTES_MIN", SHARD_NBYTES_MIN)
    for few, meant in ((5, "5_000_000_000"), (5000, "5_000_000_000")):
        with pytest.raises(UsageError, match=rf"found {few}, .* such as {meant}"):
            zexport.consolidate(root, tmp_path / "new", max_shard_nbytes=few)
    assert zexport.verify_export(tmp_path / "out", against=root).ok


def test_how_an_export_is_read_again_may_be_text(tmp_path: Path) -> None:
    root = save(small_model(), Run(), tmp_path / "ckpt")
    with pytest.raises(UsageError, match=r"^verify cannot be 'never'"):
        zexport.consolidate(root, tmp_path / "out", verify="never")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    done = zexport.consolidate(root, tmp_path / "out", verify="disk")  # type: ignore[arg-type]
    assert done.verified.value == "disk"
    with pytest.raises(UsageError, match=r"^check cannot be 'all'"):
        zexport.verify_export(tmp_path / "out", against=root, check="all")  # type: ignore[arg-type]
