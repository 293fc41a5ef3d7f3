"""Foreign text made fit to be shown, in messages too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zexport import DamagedCheckpointError
from zexport.text import printable, shell_word

HOSTILE = "a\x1b[2J\r\n\u202e\u200b\udc80ü\x00\x9b"
ESCAPED = "a\\x1b[2J\\r\\n\\u202e\\u200b\\udc80ü\\x00\\x9b"


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable(HOSTILE) == ESCAPED
    assert printable("a plain ü 漢字") == "a plain ü 漢字"


@pytest.mark.parametrize("fact", ["problem", "found", "expected", "hint", "path"])
def test_no_part_of_a_message_holds_what_a_terminal_would_obey(fact: str) -> None:
    facts: dict[str, str] = {"problem": "p", "found": "f", "expected": "e", "hint": "h"}
    facts[fact] = HOSTILE
    path = Path(facts.pop("path", "p"))
    error = DamagedCheckpointError(facts.pop("problem"), path=path, **facts)
    assert ESCAPED in str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    "name", [b"plain", b"two words", b"it's", b"b\\s", b"\n\x1b[2J", b"m\xe9", b"\xff'\\0017 \""]
)
def test_a_word_of_a_command_is_the_same_word_when_it_is_pasted(name: bytes) -> None:
    word = shell_word(Path(os.fsdecode(name)))
    assert printable(word) == word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout == name
