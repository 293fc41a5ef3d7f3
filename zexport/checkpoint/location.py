"""Which folder is meant: from any level a user may hand over to one tag folder.

The levels, from the top: a run's ``output_dir`` (holding ``checkpoint-N`` folders), the folder with
``latest`` and the tags (which ``checkpoint-N`` is, too), and a tag folder with the rank files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from zexport.checkpoint.ages import are_of_one_run, by_age, by_number, models_of_accelerate
from zexport.checkpoint.boundary import Boundary
from zexport.checkpoint.rank_files import parse_rank_file
from zexport.errors import (
    AmbiguousTagError,
    CheckpointError,
    DamagedCheckpointError,
    NotACheckpointError,
    UnsafeError,
    UsageError,
)
from zexport.regular_files import read_regular

_LATEST = ("latest", "latest_universal")
_LATEST_NBYTES_MAX = 4096


class Framework(Enum):
    """Who arranged the folders around DeepSpeed's own."""

    HF_TRAINER = "Hugging Face Trainer"
    ACCELERATE = "Accelerate"
    LIGHTNING = "PyTorch Lightning"
    OPENRLHF = "OpenRLHF"
    ZEXPORT = "zexport train"
    DEEPSPEED = "DeepSpeed"


class TagChoice(Enum):
    """How the tag was chosen."""

    OPTION = "given by --tag"
    HANDED_OVER = "the folder given"
    LATEST = "named by latest"
    ONLY = "the only tag"
    NEWEST = "the newest complete one"


@dataclass(frozen=True, slots=True)
class Location:
    """One tag folder and what lies around it.

    Attributes:
        root: the folder that holds the tags (and ``latest``, config and tokenizer).
        tag: name of the tag folder.
        chosen: how the tag was chosen.
        framework: who arranged the folders.
        tags: names of all tag folders in ``root``, by the numbers in them.
        boundary: where its files, and those of the other tags, may lie.
    """

    root: Path
    tag: str
    chosen: TagChoice
    framework: Framework
    tags: tuple[str, ...]
    boundary: Boundary

    @property
    def tag_dir(self) -> Path:
        """The folder with the rank files."""
        return self.root / self.tag


def is_tag_dir(path: Path) -> bool:
    """Whether ``path`` holds rank files directly, or the parameters of a universal checkpoint."""
    return path.is_dir() and (
        any(parse_rank_file(child) for child in path.iterdir())
        or any((path / "zero").glob("*/fp32.pt"))
    )


def list_tags(root: Path) -> tuple[str, ...]:
    """Names of the tag folders in ``root``, ordered by the numbers in them."""
    return _children(root, is_tag_dir)


def list_run_checkpoints(path: Path) -> tuple[str, ...]:
    """Names of the folders in a run's ``output_dir`` that hold tags, by the numbers in them."""
    return _children(path, lambda child: child.is_dir() and bool(list_tags(child)))


def _children(folder: Path, is_wanted: Callable[[Path], bool]) -> tuple[str, ...]:
    """Names of the wanted folders in ``folder``; one that may not be read is none of them."""

    def is_readable_and_wanted(child: Path) -> bool:
        try:
            return is_wanted(child)
        except PermissionError:  # such as lost+found, where a disk holds the checkpoints
            return False

    names = (child.name for child in folder.iterdir() if is_readable_and_wanted(child))
    return tuple(sorted(names, key=by_number))


def locate(path: Path, tag: str | None = None, *, follow_symlinks: bool = False) -> Location:
    """The tag folder that ``path`` and ``tag`` mean.

    The tag comes from ``tag``, else from the level given, else from ``latest``, else it is the only
    one there. ``latest`` names a child of its own folder and nothing else. Links lead to somewhere
    below ``path``, unless ``follow_symlinks`` lets them lead anywhere.

    Raises:
        NotACheckpointError: there is no rank file at or below ``path``.
        AmbiguousTagError: several tags, and nothing says which.
        CheckpointError: ``latest`` or ``tag`` names nothing.
        UnsafeError: ``latest``, ``tag`` or a link leads outside its folder.
    """
    with _reading(path):
        path = _folder(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        if is_tag_dir(path):
            return _handed_over(path, tag, boundary)
        if list_tags(path) or (path / "latest").is_file():
            return _locate_in_root(path, tag, boundary)
        return _locate_in_run(path, tag, boundary)


def locate_all(path: Path, *, follow_symlinks: bool = False) -> tuple[Location, ...]:
    """Every tag folder at or below ``path``, newest first, as far as steps and names tell.

    Raises:
        NotACheckpointError: there is no rank file at or below ``path``.
        AmbiguousTagError: it holds checkpoints of several models.
        CheckpointError: a folder cannot be read.
    """
    with _reading(path):
        path = _folder(path)
        boundary = Boundary.of(path, follow=follow_symlinks)
        if is_tag_dir(path):
            return (_handed_over(path, None, boundary),)
        _check_one_model(path, list_tags(path))
        roots = [path] if list_tags(path) else [path / run for run in _ages_of_one_run(path)]
        return tuple(
            _location(root, tag, TagChoice.NEWEST, boundary)
            for root in reversed(roots)
            for tag in reversed(by_age(root, list_tags(root), boundary))
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}",
            path=Path(error.filename) if error.filename else path,
            hint="Check the path and its permissions",
        ) from error


def _folder(path: Path) -> Path:
    path = path.absolute()  # not resolve(): messages should say what the user wrote
    if not path.is_dir():
        what = "is a file, not a checkpoint folder" if path.exists() else "does not exist"
        raise NotACheckpointError(what, path=path, hint="Give the folder that holds `latest`")
    return path


def _handed_over(path: Path, tag: str | None, boundary: Boundary) -> Location:
    if tag not in (None, path.name):
        raise UsageError(
            "is a tag folder itself, and --tag names another",
            path=path,
            found=tag,
            hint=f"Leave out --tag, or give {path.parent}",
        )
    boundary = boundary.including(path.parent)
    return _location(path.parent, path.name, TagChoice.HANDED_OVER, boundary)


def _locate_in_run(path: Path, tag: str | None, boundary: Boundary) -> Location:
    """Descend from a run's ``output_dir`` into one of its checkpoints."""
    runs = _runs(path)
    if tag is None and len(runs) > 1:
        raise AmbiguousTagError(
            "holds several checkpoints",
            path=path,
            found=", ".join(runs),
            hint=f"Choose one with --tag, for example --tag {runs[-1]}"
            if are_of_one_run(runs)
            else "Choose one with --tag",
        )
    if tag is None:
        return _locate_in_root(path / runs[0], None, boundary)
    if tag in runs:
        return _locate_in_root(path / tag, None, boundary)
    raise CheckpointError(
        f"has no checkpoint named {tag!r}", path=path, found=", ".join(runs), hint="Choose one"
    )


def _ages_of_one_run(path: Path) -> tuple[str, ...]:
    """The checkpoints of a run, newest last; those of several models are not ordered."""
    runs = _runs(path)
    if not are_of_one_run(runs):
        raise AmbiguousTagError(
            "holds several checkpoints, none of which is the newest by its name",
            path=path,
            found=", ".join(runs),
            expected="names that differ in a number alone, such as checkpoint-100",
            hint="Choose one with --tag",
        )
    return runs


def _runs(path: Path) -> tuple[str, ...]:
    """The checkpoints below a folder, by the numbers in their names; at least one."""
    runs = list_run_checkpoints(path)
    if not runs:
        raise NotACheckpointError(
            "holds no ZeRO checkpoint",
            path=path,
            found="no *_optim_states.pt and no *_model_states.pt at, or up to two levels below",
            expected="`latest` and a tag folder such as global_step100",
            hint="Give the folder that DeepSpeed's save_checkpoint wrote to",
        )
    return runs


def _locate_in_root(root: Path, tag: str | None, boundary: Boundary) -> Location:
    tags = list_tags(root)
    if tag is not None:
        _check_child_name(tag, root / tag, UsageError)
        if is_tag_dir(root / tag):
            return _location(root, tag, TagChoice.OPTION, boundary)
        raise CheckpointError(
            f"has no tag {tag!r}", path=root, found=_listed(tags), hint="Choose one of these tags"
        )
    _check_one_model(root, tags)
    for name in _LATEST:
        boundary.check(root / name)
    latest = next(filter(None, (read_latest(root, name) for name in _LATEST)), None)
    if latest is not None and is_tag_dir(root / latest):
        return _location(root, latest, TagChoice.LATEST, boundary)
    tags = by_age(root, tags, boundary)
    if latest is not None:
        raise CheckpointError(
            f"names the tag {latest!r}, which is not there",
            path=root / "latest",
            found=_listed(tags),
            hint=f"Export another with --tag {tags[-1]}" if tags else "Copy the tag folder again",
        )
    if len(tags) > 1:
        raise AmbiguousTagError(
            "has several tags and no `latest`",
            path=root,
            found=_listed(tags),
            hint=f"Choose one with --tag, for example --tag {tags[-1]}",
        )
    return _location(root, tags[0], TagChoice.ONLY, boundary)


def _check_one_model(root: Path, tags: Sequence[str]) -> None:
    """Refuse to choose between models that were saved together: none of them is the newer."""
    models = models_of_accelerate(tags)
    if len(models) > 1:
        raise AmbiguousTagError(
            "holds several models, which Accelerate saved together",
            path=root,
            found=_listed(models),
            hint="Choose one with --tag",
        )


def read_latest(root: Path, name: str = "latest") -> str | None:
    """The tag that ``root/latest`` names, or ``None`` without that file.

    A converted checkpoint's is called ``latest_universal`` (DeepSpeed, ``ds_to_universal.py``).

    Raises:
        DamagedCheckpointError: the file is not a line of text.
        UnsafeError: it names anything but a child of ``root``.
    """
    path = root / name
    if not path.is_file():
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
    _check_child_name(tag, path, UnsafeError)
    return tag


def _check_child_name(tag: str, path: Path, error: type[UnsafeError] | type[UsageError]) -> None:
    if tag in (".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise error(
            "leads outside the checkpoint's folder",
            path=path,
            found=repr(tag),
            expected="the name of a folder beside `latest`",
            hint="Name the tag with --tag",
        )


def _location(root: Path, tag: str, chosen: TagChoice, boundary: Boundary) -> Location:
    return Location(root, tag, chosen, _framework(root, tag), list_tags(root), boundary)


def _framework(root: Path, tag: str) -> Framework:
    if (root / "zexport_source.json").is_file():
        return Framework.ZEXPORT
    if (root / "trainer_state.json").is_file():
        return Framework.HF_TRAINER
    if models_of_accelerate([tag]):
        return Framework.ACCELERATE
    if root.suffix == ".ckpt" and tag == "checkpoint":
        return Framework.LIGHTNING
    if root.name in ("_actor", "_critic"):
        return Framework.OPENRLHF
    return Framework.DEEPSPEED


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "no tag folder"
