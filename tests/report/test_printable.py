"""Foreign text made fit to be shown, in messages too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from zexport.errors import DamagedCheckpointError, ZexportError
from zexport.printable import printable, shell_word, shown, some
from zexport.report.failure import Told
from zexport.store.json import values_of

HOSTILE = "a\x1b[2J\r\n\u202e\u200b\udc80ü\x00\x9b"
ESCAPED = "a\\x1b[2J\\r\\n\\u202e\\u200b\\udc80ü\\x00\\x9b"


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable(HOSTILE) == ESCAPED
    assert printable("a plain ü 漢字") == "a plain ü 漢字"


def test_a_fact_that_would_fill_the_screen_is_cut_and_its_length_said() -> None:
    text = shown("x" * 10_000_000)
    assert text == "x" * 1600 + "... (10000000 characters) ..." + "x" * 400
    assert shown(5) == "5"


def test_of_many_names_the_first_are_said_and_how_many_more_there_are() -> None:
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"
    assert some(["a"] * 1_012) == f"{', '.join('a' * 12)} and 1,000 more"


@pytest.mark.parametrize("fact", ["problem", "found", "expected", "hint", "path"])
def test_no_part_of_a_message_holds_what_a_terminal_would_obey(fact: str) -> None:
    facts: dict[str, str] = {"problem": "p", "found": "f", "expected": "e", "hint": "h"}
    facts[fact] = HOSTILE
    path = Path(facts.pop("path", "p"))
    error = DamagedCheckpointError(facts.pop("problem"), path=path, **facts)
    assert ESCAPED in str(error)
    assert str(error).isprintable()
    told = values_of(Told.of(error))
    assert isinstance(told, dict)
    assert str(told["message"]).isprintable()
    assert str(told["hint"]).isprintable()


def test_every_kind_of_error_makes_its_sentence_in_the_one_place() -> None:
    waiting = [ZexportError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        assert kind.sentence is ZexportError.sentence
        assert kind.__init__ is ZexportError.__init__


@pytest.mark.parametrize(
    "name", [b"plain", b"two words", b"it's", b"b\\s", b"\n\x1b[2J", b"m\xe9", b"\xff'\\0017 \""]
)
def test_a_word_of_a_command_is_the_same_word_when_it_is_pasted(name: bytes) -> None:
    word = shell_word(Path(os.fsdecode(name)))
    assert printable(word) == word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout == name
