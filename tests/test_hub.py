"""Exports of live models' checkpoints, against what their own ``save_pretrained`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live_models import FAMILIES, checkpoint_of, files_of, live_model
from tests.real_cases import facts
from zexport.api import consolidate

pytestmark = pytest.mark.slow


def assert_loads(folder: Path, class_name: str) -> None:
    """transformers loads the folder with nothing missing, unexpected or of another shape."""
    import transformers

    model, info = getattr(transformers, class_name).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == [class_name]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_what_the_live_model_saves(family: str, tmp_path: Path) -> None:
    model = live_model(family)
    model.save_pretrained(tmp_path / "live")
    root = checkpoint_of(model, tmp_path / "run", stage=2 + len(family) % 2)
    consolidate(root, tmp_path / "out")
    assert facts(files_of(tmp_path / "out")) == facts(files_of(tmp_path / "live"))
    assert_loads(tmp_path / "out", FAMILIES[family][0])
