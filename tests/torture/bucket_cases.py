"""Every real checkpoint from a bucket, into one, from one into another, and in three parts.

``python -m tests.torture.bucket_cases`` tells of each that differs from a plain export of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import zexport
from tests.support.buckets import BUCKET, Server, serving
from zexport.errors import ZexportError
from zexport.filenames import MANIFEST_NAME
from zexport.options import ExportOptions
from zexport.store.objects import forget_listings

Outcome: TypeAlias = "dict[str, bytes] | str"
"""The files that were made, or what was said instead."""

_FIXTURES = Path(__file__).parents[2] / "fixtures"
_PARTS = 3


def every_case(folder: Path) -> str:
    """Export all of them in every way.

    Raises:
        AssertionError: some differ from what a plain export gives or says.
    """
    found: Counter[str] = Counter()
    differing: list[str] = []
    with serving() as server:
        os.environ |= server.environment
        for case in _cases():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            plain, others = _outcomes(case, folder, server)
            found["refused" if isinstance(plain, str) else "made"] += 1
            differing += [f"{case.name}: {way}" for way, one in others.items() if one != plain]
            forget_listings()
    assert not differing, "\n".join(differing)
    return ", ".join(f"{count} {word}" for word, count in found.items()) + ", in 5 ways each"


def _cases() -> list[Path]:
    homes = [_FIXTURES, *map(Path, filter(None, [os.environ.get("ZEXPORT_CASES")]))]
    return sorted(path.parent for home in homes for path in home.glob("*/case.json"))


def _outcomes(case: Path, folder: Path, server: Server) -> tuple[Outcome, dict[str, Outcome]]:
    """What a plain export gives, and what the other ways do."""
    facts = json.loads((case / "case.json").read_text())
    options = ExportOptions(exclude_frozen=bool(facts.get("not_in_checkpoint")))
    home = f"{case.parent.name}/{case.name}"
    top, below = case / "ckpt", facts.get("hand_over", "")
    near, far = str(top / below), f"{server.put(top, f'{home}/ckpt')}/{below}".rstrip("/")

    def one(source: str, out: str) -> Callable[[], object]:
        return lambda: zexport.consolidate(source, out, options)

    def parts(source: str, out: str) -> None:
        for number in range(1, _PARTS + 1):
            zexport.consolidate_part(source, out, zexport.Share(number, _PARTS), options)

    def told(act: Callable[[], object], out: str) -> Outcome:
        try:
            act()
        except ZexportError as error:
            text = f"{error.kind}: {error}"
            for place in (out, far, near):
                text = text.replace(place, "PLACE")
            return re.sub(r"mtime \S+|s3://\S+?/ckpt|/\S+?/ckpt", "", text)
        return dict(_content(out, server))

    local, bucket = str(folder), f"s3://{BUCKET}/{home}"
    ways = {
        "from a bucket": (far, f"{local}/far", one),
        "into a bucket": (near, f"{bucket}/into", one),
        "from a bucket into one": (far, f"{bucket}/through", one),
        "in parts": (near, f"{local}/parts", lambda *places: lambda: parts(*places)),
        "in parts from a bucket": (far, f"{local}/far-parts", lambda *p: lambda: parts(*p)),
    }
    plain = told(one(near, f"{local}/plain"), f"{local}/plain")
    return plain, {name: told(way(a, b), b) for name, (a, b, way) in ways.items()}


def _content(out: str, server: Server) -> Iterator[tuple[str, bytes]]:
    """All files; of a manifest what does not tell when the sources were put where they are."""
    if out.startswith("s3:"):
        found = server.get(out.removeprefix(f"s3://{BUCKET}/"))
    else:
        paths = (path for path in Path(out).rglob("*") if path.is_file())
        found = {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}
    for name, content in found.items():
        unfixed = rb'"mtime_ns": \d+|  "blake3": "\w+",\n'
        yield name, re.sub(unfixed, b"", content) if name == MANIFEST_NAME else content


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="zexport-cases-") as scratch:
        sys.stdout.write(every_case(Path(scratch) / "work") + "\n")
