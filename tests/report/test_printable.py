"""Untrusted text in messages and commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zexport import DamagedCheckpointError
from zexport.text import shell_word

HOSTILE = "a\x1b[2J\r\n\u202e\u200b\udc80ü\x00\x9b"
ESCAPED = "a\\x1b[2J\\r\\n\\u202e\\u200b\\udc80ü\\x00\\x9b"


def test_messages_contain_no_control_characters() -> None:
    error = DamagedCheckpointError(
        HOSTILE, path=Path(HOSTILE), found=HOSTILE, expected=HOSTILE, hint=HOSTILE
    )
    assert str(error).count(ESCAPED) == 5
    assert str(error).isprintable()


@pytest.mark.parametrize("name", [b"two words", b"it's", b"\n\x1b[2J", b"\xff'\\0017 \""])
def test_pasted_word_of_a_command_is_the_same(name: bytes) -> None:
    word = shell_word(Path(os.fsdecode(name)))
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout == name
