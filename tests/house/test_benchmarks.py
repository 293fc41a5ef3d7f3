from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import accuracy


@pytest.mark.deepspeed
def test_accuracy_distinguishes_right_weights_wrong_weights_and_errors(tmp_path: Path) -> None:
    case = accuracy.FIXTURES / "z2_w2_bf16_groups"
    flipped = accuracy.damaged(case, tmp_path)
    convert = accuracy.CONVERTERS
    ended = {
        name: [accuracy.outcome(convert[name], root, case) for root in (case / "ckpt", flipped)]
        for name in convert
    }
    right, wrong, error = accuracy.Outcome
    assert ended == {"zexport": [right, error], "zero_to_fp32": [right, wrong]}
