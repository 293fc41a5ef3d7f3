"""Files and folders in every storage, and a store's answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.storage.conftest import Bucket, Local, Place
from tests.support.buckets import EMULATORS, REFUSED, Answer
from zexport import OutputError
from zexport.storage import files
from zexport.storage.location import place as path_of
from zexport.storage.storage import Kind, OutputFile

ODD = ["a b", "ü+x", "100%.pt", "a&b=c", "é", "x.y"]
stores = pytest.mark.parametrize("place", [*EMULATORS, "gs"], indirect=True)


def _content(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 - not secret


def _read(path: Path, nbytes: int) -> bytes:
    part = bytearray(nbytes)
    with files.open_input(path) as file:
        done = 0
        while done < nbytes and (count := file.read(done, memoryview(part)[done:])):
            done += count
    return bytes(part[:done])


# --- listing ---


def test_stat_of_files_folders_and_nothing(place: Place) -> None:
    top = path_of(place.at("top"))
    files.write_durably(top / "x" / "file", b"1234")
    storage = files.storage_of(top)
    found = storage.stat(top / "x" / "file")
    assert found is not None
    assert (found.kind, found.version and found.version.nbytes) == (Kind.FILE, 4)
    folder = storage.stat(top / "x")
    assert (folder and folder.kind, storage.stat(top / "y")) == (Kind.FOLDER, None)
    assert storage.stat(top / "x" / "file" / "z") is None
    assert storage.stat(top / "x" / "fil") is None  # only the start of a name


def test_listing_has_every_name_once(place: Place) -> None:
    top = path_of(place.at("top"))
    for name in ODD:
        files.write_durably(top / "of" / name, name.encode())
        files.write_durably(top / "of" / f"{name}.d" / "deep" / "er", b"")
    files.write_durably(top / "off", b"")
    assert [one.name for one in files.children(top)] == ["of", "off"]
    found = files.storage_of(top).entries(top / "of")
    assert {one.name: one.kind for one in found} == {
        **dict.fromkeys(ODD, Kind.FILE),
        **{f"{name}.d": Kind.FOLDER for name in ODD},
    }
    assert len(found) == 2 * len(ODD)
    below = {str(one.relative_to(top)) for one in files.leaves(top)}
    deep = {f"of/{name}.d/deep/er" for name in ODD}
    assert below == {"off", *deep, *(f"of/{name}" for name in ODD)}
    assert [one.name for one in files.matching(top, "of/*.y")] == ["x.y"]
    assert {_read(top / "of" / name, 9) for name in ODD} == {name.encode() for name in ODD}
    files.remove(*(top / "of" / name for name in ODD))
    assert {str(one.relative_to(top)) for one in files.leaves(top)} == {"off", *deep}
    files.remove(top)
    assert files.storage_of(top).stat(top) is None


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_listing_of_many_pages_is_whole(place: Bucket) -> None:
    top = path_of(place.at("top"))
    names = [f"{number:02d}" for number in range(20)]
    for name in names:
        place.write(f"top/{name}/x", b"")
    place.server.plan.page = 9
    assert [one.name for one in files.children(top)] == names
    assert sum(one.is_list for one in place.server.requests) == 3


def test_changes_of_another_process_are_seen(place: Place) -> None:
    top = path_of(place.at("top"))
    files.write_durably(top / "one", b"1")
    assert [one.name for one in files.children(top)] == ["one"]
    place.write("top/two", b"2")
    files.refresh(top)
    assert [one.name for one in files.children(top)] == ["one", "two"]
    place.remove("top/one")
    files.refresh(top, below=True)
    assert [one.name for one in files.children(top)] == ["two"]


# --- reading ---


def test_ranges_in_any_order_are_read(place: Place) -> None:
    content = _content(20 << 20)
    place.write("file", content)
    ranges = [(at, min(at + (3 << 20), len(content))) for at in range(0, len(content), 3 << 20)]
    random.Random(1).shuffle(ranges)  # noqa: S311 - not secret
    with files.open_input(path_of(place.at("file"))) as file:
        file.expect(ranges)
        for start, stop in ranges:
            part = bytearray(stop - start)
            done = 0
            while done < len(part):
                count = file.read(start + done, memoryview(part)[done:])
                assert count > 0
                done += count
            assert part == content[start:stop]
        assert file.read(len(content), memoryview(bytearray(9))) == 0
        assert file.version() == files.version(path_of(place.at("file")))


@pytest.mark.parametrize("place", ["local", *EMULATORS, "gs"], indirect=True)
def test_changed_content_is_no_longer_read_as_the_known_version(place: Place) -> None:
    path = path_of(place.at("file"))
    place.write("file", _content(1 << 20))
    known = files.version(path)
    place.write("file", _content(1 << 20, seed=2))
    if isinstance(place, Local):
        with files.open_input(path, known) as file:
            assert file.version() != known
        return
    with files.open_input(path, known) as file, pytest.raises(OSError, match="replaced"):
        file.read(0, memoryview(bytearray(1000)))
    assert files.version(path) != known


# --- writing ---


@stores
def test_new_object_is_not_written_over(place: Bucket) -> None:
    path = path_of(place.at("file"))
    files.write_durably(path, b"first", is_new=True)
    with pytest.raises(FileExistsError):
        files.write_durably(path, b"second", is_new=True)
    assert _read(path, 9) == b"first"
    files.write_durably(path, b"fourth")
    assert _read(path, 9) == b"fourth"


def test_pieces_in_any_order_become_a_file(place: Place) -> None:
    content, path = _content(20 << 20), path_of(place.at("top/file"))
    pieces = [*range(0, len(content), 1 << 20)]
    random.Random(2).shuffle(pieces)  # noqa: S311 - not secret
    files.make_folder(path.parent)
    with files.open_output(path, is_new=False, nbytes=len(content)) as file:
        file.reserve(len(content))
        for at in pieces:
            file.write(memoryview(content)[at : at + (1 << 20)], at)
        file.sync()
        file.complete()
    assert place.files("top") == {"file": content}


@stores
def test_incomplete_object_never_appears(place: Bucket) -> None:
    path = path_of(place.at("top/file"))
    with files.open_output(path, is_new=False, nbytes=20 << 20) as file:
        file.write(_content(17 << 20), 0)
    assert place.files("top") == {}
    place.server.fault = lambda one: REFUSED if one.is_part else None
    with files.open_output(path, is_new=False, nbytes=40 << 20) as file:
        file.write(_content(7 << 20), 0)
        with pytest.raises((OSError, OutputError), match="refuses access"):
            _finish(file, _content(33 << 20), 7 << 20)
    assert place.files("top") == {}


def _finish(file: OutputFile, content: bytes, offset: int) -> None:
    file.write(content, offset)
    file.complete()


# --- answers of a store ---


@pytest.mark.parametrize("place", EMULATORS, indirect=True)
@pytest.mark.parametrize("answer", [REFUSED, Answer("500 Internal Server Error", "InternalError")])
def test_refused_request_does_not_look_like_a_missing_file(place: Bucket, answer: Answer) -> None:
    top = path_of(place.at("top"))
    place.write("top/x/file", b"1")
    files.refresh(top)
    place.server.fault = lambda _: answer
    for ask in (files.children, files.exists, files.is_folder, files.version, files.remove):
        with pytest.raises(OSError, match="the store"):
            ask(top / "x")
    place.server.fault = lambda _: None
    assert place.files("top") == {"x/file": b"1"}


@pytest.mark.parametrize("place", EMULATORS, indirect=True)
@pytest.mark.parametrize("is_short", [True, False])
def test_listing_that_is_cut_off_is_repeated(place: Bucket, is_short: bool) -> None:
    files.write_durably((top := path_of(place.at("top"))) / "a" / "x", b"")
    files.write_durably(top / "b" / "x", b"")
    cuts = [Answer(cut=300, is_short=is_short)]
    place.server.fault = lambda one: cuts.pop() if one.is_list and cuts else None
    assert [one.name for one in files.children(top)] == ["a", "b"]
    assert not cuts
    place.server.fault = lambda one: Answer(cut=300, is_short=is_short) if one.is_list else None
    files.refresh(top)
    with pytest.raises(OSError, match="cut off"):
        files.children(top)
