"""Every error that zexport can make has a golden example, and every page on errors names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.error_goldens import (
    REPOSITORY,
    Golden,
    departures,
    error_classes,
    normalised,
    noted,
    read_goldens,
    sites,
)
from zexport.errors import UsageError
from zexport.formats.safetensors_file import read_header
from zexport.ranges.extents import Extent

NOT_CAUSED_HERE: dict[str, str] = {}
"""Places whose error no test of this process can cause, and why not."""

_SENTENCE = re.compile(r"\S.*[.]", re.DOTALL)


def test_every_error_has_a_golden_example_or_a_reason_to_have_none() -> None:
    there = set(sites().values())
    golden = read_goldens().keys()
    assert len(there) > 150
    assert sorted(there - golden - NOT_CAUSED_HERE.keys()) == [], "cause it with --update-goldens"
    assert sorted(golden - there) == [], "the place is gone: --update-goldens"
    assert sorted(NOT_CAUSED_HERE.keys() - there) == []
    assert sorted(NOT_CAUSED_HERE.keys() & golden) == []


def test_every_golden_example_is_of_a_test_that_is_there(request: pytest.FixtureRequest) -> None:
    cases = {item.nodeid for item in request.session.items}  # of the tests that run
    tests = {case.partition("[")[0] for case in cases}
    gone = [
        site
        for site, golden in read_goldens().items()
        if not golden.has_test
        or (golden.test.partition("[")[0] in tests and golden.test not in cases)
    ]
    assert gone == [], "take it out and cause it with --update-goldens"


def test_every_golden_example_is_a_sentence_of_its_kind() -> None:
    kinds = {kind.kind for kind in error_classes()}
    for site, golden in read_goldens().items():
        assert golden.kind in kinds
        assert _SENTENCE.fullmatch(golden.message), site
        assert not re.search(r"(?<!\.)\.\.(?![./])", golden.message), f"{site}: two full stops"
        assert "\n" not in golden.message, site
        assert "0x7f" not in golden.message, f"{site}: the address of an object"


def test_errors_of_a_kind_that_is_handed_over_are_found_too(tmp_path: Path) -> None:
    with noted() as seen, pytest.raises(UsageError):
        read_header(tmp_path / "gone", error=UsageError)
    assert seen == {
        "store/files.py reading 1": (
            "usage",
            f"{tmp_path}/gone: cannot be read: No such file or directory.",
        )
    }
    with noted() as seen:
        UsageError("made elsewhere")
        Extent(tmp_path, 0, 1)
    assert seen == {}


def test_a_message_is_the_same_on_every_machine(tmp_path: Path) -> None:
    text = f"{tmp_path}/run: was changed (found modified at 12 ns, in {REPOSITORY}/x)."
    told = normalised(text, tmp_path.parent)
    assert told == "<tmp>/run: was changed (found modified at <time> ns, in <repository>/x)."


def test_a_change_of_wording_is_told_to_the_test_that_causes_the_error() -> None:
    goldens = {"a.py f 1": Golden("usage", "t.py::one", "x: is wrong.")}
    told = {"a.py f 1": ("usage", "x: is wrong.")}
    assert list(departures("t.py::one", told, goldens)) == []
    for other in (
        {},
        {"a.py f 1": ("usage", "x: is bad.")},
        {"a.py f 1": ("output", "x: is wrong.")},
    ):
        assert len(list(departures("t.py::one", other, goldens))) == 1
        assert list(departures("t.py::two", other, goldens)) == []
