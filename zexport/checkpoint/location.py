"""One tag folder, chosen: what lies around it, the file ``latest``, and who arranged them so."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from msgspec import Struct

from zexport.checkpoint.candidates import list_tags, models_of_accelerate
from zexport.errors import DamagedCheckpointError, UnsafeError, UsageError
from zexport.filenames import SOURCE_SIDECAR
from zexport.store.address import last_names
from zexport.store.boundary import Boundary
from zexport.store.contents import read_regular
from zexport.store.folders import is_file, real

NEWEST = "newest"
"""The value of ``--tag`` that asks for the newest complete tag."""

LATEST = ("latest", "latest_universal")
"""Files that name a tag; the second is that of a converted checkpoint."""

_LATEST_NBYTES_MAX = 4096


class Framework(Enum):
    """Who arranged the folders around DeepSpeed's own."""

    HF_TRAINER = "Hugging Face Trainer"
    ACCELERATE = "Accelerate"
    LIGHTNING = "PyTorch Lightning"
    OPENRLHF = "OpenRLHF"
    ZEXPORT = "zexport train"
    DEEPSPEED = "DeepSpeed"

    @property
    def keeps_runs(self) -> bool:
        """Whether the folder around a tag is a run's; others make one for each checkpoint."""
        return self in (Framework.DEEPSPEED, Framework.ZEXPORT)


class TagChoice(Enum):
    """How the tag was chosen."""

    OPTION = "given by --tag"
    HANDED_OVER = "the folder given"
    LATEST = "named by latest"
    ONLY = "the only tag"
    NEWEST = "the newest complete one"


class Location(Struct, frozen=True):
    """One tag folder in ``root``, and what lies around it: the other tags, by their numbers.

    Its files, and those of the other tags, may lie within ``boundary``.
    """

    root: Path
    tag: str
    chosen: TagChoice
    framework: Framework
    tags: tuple[str, ...]
    boundary: Boundary
    real_root: Path

    @property
    def tag_dir(self) -> Path:
        """The folder with the rank files."""
        return self.root / self.tag

    @property
    def name(self) -> str:
        """The last two names of the folder that is this checkpoint alone, wherever it lies.

        DeepSpeed's own is the tag's; others make one around it, whose tag may always be the same.
        """
        folder = self.real_root / self.tag if self.framework.keeps_runs else self.real_root
        return last_names(folder)


def read_latest(root: Path, name: str = "latest") -> str | None:
    """The tag that ``root/latest`` names, or ``None`` without that file.

    A converted checkpoint's is called ``latest_universal`` (DeepSpeed, ``ds_to_universal.py``).
    """
    path = root / name
    if not is_file(path):
        return None
    raw = read_regular(path, _LATEST_NBYTES_MAX)
    try:
        tag = (raw or b"").decode().strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or "\n" in tag:
        raise DamagedCheckpointError(
            "does not name a tag",
            path=path,
            found="a large file" if raw is None else f"{len(raw)} bytes",
            expected="one line such as global_step100",
            hint="Name the tag with --tag",
        )
    check_child_name(tag, path, UnsafeError)
    return tag


def check_child_name(tag: str, path: Path, error: type[UnsafeError] | type[UsageError]) -> None:
    """Refuse a tag that is no name of a child of its folder."""
    if tag in (".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise error(
            "leads outside the checkpoint's folder",
            path=path,
            found=repr(tag),
            expected="the name of a folder beside `latest`",
            hint="Name the tag with --tag",
        )


def location_of(root: Path, tag: str, chosen: TagChoice, boundary: Boundary) -> Location:
    """The tag folder ``tag`` in ``root``, with what lies around it."""
    framework = framework_of(root, tag)
    return Location(root, tag, chosen, framework, list_tags(root), boundary, real(root))


def framework_of(root: Path, tag: str) -> Framework:
    """Who arranged the folders around a tag in ``root``."""
    if is_file(root / SOURCE_SIDECAR):
        return Framework.ZEXPORT
    if is_file(root / "trainer_state.json"):
        return Framework.HF_TRAINER
    if models_of_accelerate([tag]):
        return Framework.ACCELERATE
    if root.suffix == ".ckpt" and tag == "checkpoint":
        return Framework.LIGHTNING
    if root.name in ("_actor", "_critic"):
        return Framework.OPENRLHF
    return Framework.DEEPSPEED
