r"""Name patterns out of a checkpoint, matched as Python's ``re.match`` would but in bounded time.

They come from whoever wrote the checkpoint, so RE2 compiles them, which never goes back in a name.
DeepSpeed writes names with their special characters escaped; Megatron-DeepSpeed and others, who
write them by hand, also write digits as ``\d+`` or ``[0-9]``, anything as ``.*``, and choices as
``(weight|bias)``. All of that is read, and what goes beyond is refused: repeated groups, counts,
looks around, references. In what is left, RE2 and Python mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsupportedError

T = TypeVar("T")

MAX_LENGTH = 1024
MAX_WILD = 256
"""Patterns of one list that are more than a name written out: each is tried on every name."""
_WILD_NBYTES = 64 << 20
"""Memory for those of one list, in equal shares."""

_LETTER = r"\\[\W_]|[^.*+?{}\[\]()|^$\\]"
"""A character that stands for itself, be it because it is escaped."""
_MEMBER = r"(?:\\[\W_]|[^\]\\])"
"""The same in a set."""
_SET = rf"\[\^?+(?:\\d|(?!\[|&&|\|\||~~|--){_MEMBER}(?:-{_MEMBER}|(?!-[^\]])))++\]"
"""Python keeps what may not begin a member of it for sets of sets."""
_TOKEN = re.compile(rf"(?:{_LETTER}|\\d|\.|{_SET})(?:[*+?]\??)?|\((?:\?:)?|\||\)\??")
_NAME = re.compile(rf"\^?((?:{_LETTER})*+)\$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def _name(text: str) -> str | None:
    """The one name that a pattern matches, if it is a name written out."""
    written = _NAME.fullmatch(text)
    return _ESCAPE.sub(r"\1", written[1]) if written else None


def _is_readable(text: str) -> bool:
    """Whether it is made of what is read, with choices in groups alone; RE2 checks the rest."""
    at, end = int(text.startswith("^")), len(text) - text.endswith("$")
    depth = 0
    while at < end and (token := _TOKEN.match(text, at)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if text[at] == "|" and depth == 0:
            return False
        at = token.end()
    return at >= end


def _matcher(pattern: str, path: Path, nbytes: int) -> Callable[[bytes], object]:
    r"""What matches names with a pattern, in ``nbytes`` of memory.

    RE2 has ``\d`` for ASCII digits and escapes for ASCII alone.
    """
    import re2  # noqa: PLC0415 - most checkpoints have none

    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = nbytes, True, False
    text = _ESCAPE.sub(lambda m: r"\p{Nd}" if m[1] == "d" else rf"\x{{{ord(m[1]):x}}}", pattern)
    try:
        match: Callable[[bytes], object] = re2.compile(_encoded(text), options).match
    except re2.error as error:
        raise _beyond(pattern, path) from error
    return match


def _encoded(text: str) -> bytes:
    """Names in Python may have what is not valid Unicode."""
    return text.encode(errors="surrogatepass")


def _beyond(text: str, path: Path) -> UnsupportedError:
    return UnsupportedError(
        "describes its tensors with a name pattern beyond what is read",
        path=path,
        found=repr(text[:80]),
        expected=r"names with \d+, [0-9], .* and (a|b) for what varies",
    )


_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATED = re.compile(r"[*+{]|(?<![(*+?}])\?")
_READ_OTHERWISE = re.compile(r"\{,|\[:")  # a{,2} and [[:alpha:]]
_REPEATED_MAX = 6
_CHOICES_MAX = 1000


def match_whole(pattern: str, text: str) -> re.Match[str] | None:
    r"""``re.fullmatch``, in a time that no pattern makes long.

    RE2 never goes back; of what it does not know, such as looking around, or reads in another way,
    Python matches what is simple. RE2 has ``\w`` and ``\d`` for ASCII alone.

    Raises:
        ValueError: it is no pattern, or one that may take for ever.
    """
    match = _whole_matcher(pattern, is_ascii=text.isascii())
    found: re.Match[str] | None = match(text)
    return found


@cache
def _whole_matcher(pattern: str, *, is_ascii: bool) -> Callable[[str], Any]:
    import re2  # noqa: PLC0415 - most checkpoints have none

    options = re2.Options()
    options.max_mem, options.log_errors = _WILD_NBYTES, False
    try:
        known = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if is_ascii and not _READ_OTHERWISE.search(pattern):
        with suppress(re2.error):
            match: Callable[[str], Any] = re2.compile(pattern, options).fullmatch
            return match
    choices = prod(1 + group.count("|") for group in pattern.split(")"))
    repeated = len(_REPEATED.findall(pattern))
    if _REPEATED_GROUP.search(pattern) or repeated > _REPEATED_MAX or choices > _CHOICES_MAX:
        raise ValueError("it may take for ever to match")
    return known.fullmatch


class PatternTable(Struct, Generic[T], frozen=True):
    """Values by pattern, asked for by name."""

    path: Path
    _names: Mapping[str, T]
    _wild: Sequence[tuple[Callable[[bytes], object], T]]

    @classmethod
    def read(cls, items: Iterable[tuple[str, T]], path: Path) -> PatternTable[T]:
        """The table of ``items``; ``path`` is the file they come from."""
        names: dict[str, T] = {}
        wild: list[tuple[str, T]] = []
        for text, value in items:
            name = _name(text)
            if len(text) > MAX_LENGTH or (name is None and not _is_readable(text)):
                raise _beyond(text, path)
            if name is None:
                wild.append((text, value))
            else:
                names[name] = value
        if len(wild) > MAX_WILD:
            raise UnsupportedError(
                "has too many name patterns that are not names written out",
                path=path,
                found=len(wild),
                expected=f"{MAX_WILD} or fewer in a list",
            )
        nbytes = _WILD_NBYTES // max(len(wild), 1)
        return cls(path, names, [(_matcher(text, path, nbytes), value) for text, value in wild])

    def get(self, name: str) -> T | None:
        """The value whose pattern matches ``name``; ``None`` if none does."""
        encoded = _encoded(name)
        found = [value for match, value in self._wild if match(encoded) is not None]
        found += [self._names[name]] if name in self._names else []
        if len(found) > 1:
            raise DamagedCheckpointError(
                f"says in {len(found)} ways how {name!r} is split over the tensor ranks",
                path=self.path,
                found=f"{len(found)} patterns that match it",
                expected="one",
                hint="Copy the file again from where it was written",
            )
        return found[0] if found else None
