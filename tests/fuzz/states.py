"""Real checkpoints of every layout with one to three values replaced in one file.

``ZEXPORT_CASES`` names a folder with more of them.

Reading must fail with a path, or return the saved values in every slot. Other values are only
accepted if a replica differs, or if the file now names other bytes of itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path

import torch

import zexport
from tests.fuzz import values
from tests.fuzz.mutations import mutated
from tests.fuzz.runner import Target
from zexport import (
    DamagedCheckpointError,
    ExportOptions,
    NameLayout,
    ZexportError,
    plan_export,
)
from zexport.checkpoint.fsdp.source import holds_fsdp
from zexport.checkpoint.open import open_checkpoint
from zexport.checkpoint.state import TrainingState, raise_problems
from zexport.formats.pickle_reader import load
from zexport.formats.pickle_values import Opaque, TensorRef
from zexport.ranges.compare import CastReplica
from zexport.ranges.reader import SourceReader
from zexport.ranges.source import ByteSource

_FIXTURES = Path(__file__).parents[2] / "fixtures"
_PLAIN = ExportOptions(layout=NameLayout.MEMORY)
_PICKLES = ("*.pt", "*.bin", ".metadata")
_Values = Mapping[tuple[str, str], bytes]


def _homes() -> Iterator[Path]:
    yield _FIXTURES
    if named := os.environ.get("ZEXPORT_CASES"):
        yield from (Path(named), Path(named).parent / "cases_fsdp")


@cache
def _cases(homes: tuple[Path, ...]) -> Sequence[Path]:
    """Return folders of valid checkpoints, each with a ``case.json``."""
    found = [file.parent for home in homes for file in sorted(home.glob("*/case.json"))]
    return [case for case in found if not case.name.startswith("dmg_") and _files(case)]


@cache
def _files(case: Path) -> Sequence[str]:
    """Return the files of a case with pickles or a header, relative to its folder."""
    root = case / "ckpt"
    found = [path for pattern in _PICKLES for path in sorted(root.rglob(pattern))]
    found = [path for path in found if path.name == ".metadata" or zipfile.is_zipfile(path)]
    found += [*root.rglob("*.distcp"), *root.rglob("shard-*.safetensors")]
    return [str(path.relative_to(root)) for path in found]


def folder_of(case: Path, copy: Path) -> Path:
    """Return the folder of a copy that a user names."""
    return copy / json.loads((case / "case.json").read_text()).get("hand_over", "")


def _open(case: Path, copy: Path) -> TrainingState:
    return open_checkpoint(folder_of(case, copy))


def _values(state: TrainingState) -> _Values:
    """Return a digest of every slot of every parameter."""
    raise_problems(state)
    bound = {
        (name, slot): one.source(slot)
        for name, one in state.parameters.items()
        for slot in one.slots
    }
    with SourceReader((*state.torch_files, *state.whole.files)) as reader:
        found = {key: blake2b(_bytes(reader, one)).digest() for key, one in bound.items()}
        reader.finish()
    return found


def _bytes(reader: SourceReader, source: ByteSource) -> bytearray:
    data = bytearray(source.nbytes)
    reader.read_into(source, 0, memoryview(data))
    return data


@cache
def _undamaged(case: Path, copy: Path) -> _Values:
    return _values(_open(case, copy))


def seeds() -> Sequence[bytes]:
    return [bytes([number]) * 8 for number in range(8)]


def read(homes: tuple[Path, ...], data: bytes, folder: Path) -> object:
    """Read a checkpoint with values replaced in one file."""
    draw = random.Random(data)
    case = draw.choice(_cases(homes))
    copy = folder / case.parent.name / case.name
    if not copy.exists():
        named = shutil.ignore_patterns("config.json", "zexport_source.json")
        shutil.copytree(case / "ckpt", copy, ignore=named)  # transformers is not asked
    truth = _undamaged(case, copy)
    path = copy / draw.choice(_files(case))
    with _changed(draw, path) as refs:
        with _refused_with_a_path():
            state = _open(case, copy)
            found = _values(state)
            _check_values(state, truth, found, path, refs)
        top = folder_of(case, copy)
        return holds_fsdp(top) or plan_export(zexport.open_checkpoint(top), folder / "out", _PLAIN)


@contextmanager
def _refused_with_a_path() -> Iterator[None]:
    try:
        yield
    except ZexportError as error:
        if error.path is None:
            raise AssertionError(f"no path: {error}") from error
        raise


def _check_values(
    state: TrainingState, truth: _Values, found: _Values, path: Path, refs: set[str]
) -> None:
    """Raise for wrong values that replicas detect; fail for others."""
    wrong = [key for key in truth.keys() & found.keys() if truth[key] != found[key]]
    if not wrong:
        return
    files = {one.path: one for one in (*state.torch_files, *state.whole.files)}
    with SourceReader(files.values()) as reader:
        for replica in state.replicas:
            kept, other = (_bytes(reader, one) for one in (replica.kept, replica.other))
            if isinstance(replica, CastReplica):
                types = [getattr(torch, one.torch_name) for one in _dtypes(replica)]
                both = zip((kept, other), types, strict=True)
                one, two = (torch.frombuffer(raw, dtype=dtype) for raw, dtype in both if raw)
                narrow = min(types, key=lambda dtype: dtype.itemsize)
                kept, other = (bytes(x.to(narrow).view(torch.uint8).numpy()) for x in (one, two))
            if kept != other:
                raise DamagedCheckpointError("a replica differs", path=path)
    own = [(one.offset, one.nbytes) for one in files[path].records if one.name in refs]
    for name, slot in wrong:
        source = state.parameters[name].source(slot)
        ranges = [one for one in source.extents(0, source.nbytes) if one.path == path]
        # A file whose tensor became empty names no bytes.
        named = not source.nbytes or any(a <= o.offset < a + n for o in ranges for a, n in own)
        assert named, f"wrong values of {slot} of {name!r}"


def _dtypes(replica: CastReplica) -> tuple[object, object]:
    return replica.kept_dtype, replica.other_dtype


@contextmanager
def _changed(draw: random.Random, path: Path) -> Iterator[set[str]]:
    """Change values of a file; yield the records that tensors name only now."""
    whole = path.read_bytes()
    named: set[str] = set()
    if path.suffix == ".distcp":
        other = mutated(draw, [whole])
    elif path.suffix == ".safetensors":
        other = _header_changed(draw, whole)
    elif path.name == ".metadata":
        other = _exchanged(draw, whole)
    else:
        with zipfile.ZipFile(path) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            old = archive.read(name)
            new = _exchanged(draw, old)
            root = name.removesuffix("data.pkl")
            named = {f"{root}data/{one.storage.key}" for one in _named(new) - _named(old)}
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(path.with_suffix(".new"), "w") as out:
            for info in source.infolist():
                out.writestr(info.filename, new if info.filename == name else source.read(info))
        other = path.with_suffix(".new").read_bytes()
        path.with_suffix(".new").unlink()
    path.write_bytes(other)
    try:
        yield named
    finally:
        path.write_bytes(whole)


def _exchanged(draw: random.Random, data: bytes) -> bytes:
    return values.exchanged(draw, _parsed(data))


_parsed = cache(values.parsed)


def _header_changed(draw: random.Random, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    holder = draw.choice([header, info, *header.values(), *info.values()])
    key = draw.choice([*holder])
    others = [None, -1, 0, 7, 2**70, "x", [], [0], [[1]], {}, {"x": 1}, [2**40, 2**40], "I64"]
    if draw.random() < 0.2:
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = draw.choice(others)
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _named(data: bytes) -> Counter[TensorRef]:
    """Return all tensors in a pickle, with their count."""
    try:
        waiting = [load(data, path=Path("x")).value]
    except ZexportError:
        return Counter()
    seen, found = set[int](), Counter[TensorRef]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, TensorRef):
            found[one] += 1
        elif id(one) not in seen and isinstance(one, dict | list | tuple | Opaque):
            seen.add(id(one))
            if isinstance(one, Opaque):
                waiting += [one.args, one.state, one.items]
            else:
                waiting += one.values() if isinstance(one, dict) else one
    return found


def target_of(*homes: Path) -> Target:
    """Return the fuzzer of the checkpoints in these folders."""
    return Target("states", seeds, partial(read, homes))


TARGETS = {"states": target_of(*_homes())}
