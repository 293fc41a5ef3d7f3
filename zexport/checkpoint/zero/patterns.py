r"""Name patterns from a checkpoint, matched as Python's ``re.match`` does but in bounded time.

Anyone may have written them, so RE2 compiles them, which never backtracks. DeepSpeed writes names
with escaped special characters. Megatron-DeepSpeed's are written by hand, with ``\d+``, ``[0-9]``,
``.*`` and ``(a|b)``. What RE2 and Python may read differently is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from zexport.errors import DamagedCheckpointError, UnsupportedError
from zexport.formats.pickle_view import PickleView

_LENGTH_MAX, _WILD_MAX, _NBYTES = 1024, 256, 256 << 10
_NAME = re.compile(r"\^?((?:\\[\W_]|[^.*+?{}\[\]()|^$\\])*+)\$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ALIKE = re.compile(r"(?:\\[\W_d]|\[(?!:)|\((?!\?[^:])|[^\\{}\[(])*+")


_Match = Callable[[bytes], object]


class Patterns(Struct, frozen=True):
    """Values by name pattern."""

    path: Path
    names: Mapping[str, PickleView]
    wild: Sequence[tuple[_Match, PickleView]]

    @classmethod
    def read(cls, items: Iterable[tuple[str, PickleView]], path: Path) -> Patterns:
        """Compile patterns; ``path`` is the file that contains them."""
        names: dict[str, PickleView] = {}
        wild: list[tuple[_Match, PickleView]] = []
        for text, value in dict(items).items():
            if (name := _NAME.fullmatch(text)) is not None:
                names[_ESCAPE.sub(r"\1", name[1])] = value
            else:
                wild.append((_compile(text, path), value))
        if len(wild) > _WILD_MAX:
            raise UnsupportedError("too many name patterns", path=path, found=len(wild))
        return cls(path, names, wild)

    def get(self, name: str) -> PickleView | None:
        """Return the value whose pattern matches a name."""
        encoded = name.encode(errors="surrogatepass")
        found = [value for match, value in self.wild if match(encoded) is not None]
        found += [self.names[name]] if name in self.names else []
        if len(found) > 1:
            raise DamagedCheckpointError(
                f"{len(found)} patterns describe how {name!r} is split",
                path=self.path,
                hint="Copy this file again",
            )
        return found[0] if found else None


def _compile(pattern: str, path: Path) -> _Match:
    import re2  # noqa: PLC0415 - most checkpoints have no pattern that needs it

    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = _NBYTES, True, False
    with suppress(re2.error):
        if len(pattern) <= _LENGTH_MAX and _ALIKE.fullmatch(pattern):
            encoded = pattern.encode(errors="surrogatepass")
            match: _Match = re2.compile(encoded, options).match
            return match
    raise UnsupportedError(
        "unsupported name pattern",
        path=path,
        found=repr(pattern[:80]),
        expected=r"names with \d+, [0-9], .* and (a|b)",
    )
