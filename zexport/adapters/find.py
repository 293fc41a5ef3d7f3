"""A peft model's adapters: which there are, and what is to become of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from zexport.adapters.peft_format import (
    DEFAULT_ADAPTER,
    AdapterConfig,
    find_adapter_config,
    other_adapter_configs,
)
from zexport.adapters.peft_names import adapters_of, of_adapter, read_name
from zexport.checkpoint.state import StoredTensor, TrainingState
from zexport.checkpoint.trainer_state import checkpoint_before
from zexport.errors import (
    FrozenLeftOutError,
    NotACheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from zexport.filenames import ADAPTER_CONFIG
from zexport.options import AdapterMode, ExportOptions, NameLayout
from zexport.printable import some
from zexport.store.contents import read_json_object
from zexport.store.folders import is_file, matching
from zexport.weights.named import PEFT_PREFIX, Weights

_LEAVES = frozenset({"weight", "bias"})


class Adapter(Struct, frozen=True):
    """One adapter of a checkpoint: its name in the module, and its ``adapter_config.json``.

    ``others`` are the files of that name that lie elsewhere with the run, ``nodes`` those beside
    the parts that other nodes kept, and ``shares`` the other adapters whose file it is as well.
    """

    name: str
    config: AdapterConfig
    others: tuple[AdapterConfig, ...] = ()
    nodes: tuple[AdapterConfig, ...] = ()
    shares: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Where peft puts its files below the output folder, ending in a slash; may be empty."""
        return "" if self.name == DEFAULT_ADAPTER else f"{self.name}/"


def adapter_mode(
    checkpoint: TrainingState, stored: Weights, options: ExportOptions, *, has_config: bool
) -> AdapterMode | None:
    """What is to become of the adapters; ``None`` for a checkpoint that is no peft model's.

    Names as they are in memory are nothing to work on: then a peft model is like any other. So is
    one of which nothing says what its adapters are, unless the options say what to make of them, or
    the model has a config (``has_config``): with that the folder would load, and with no weight.
    """
    if not is_peft(stored, adapter_places(checkpoint, options)):
        if options.adapter is AdapterMode.AUTO and options.adapter_name is None:
            return None
        config = _config_of(options.adapter_name or DEFAULT_ADAPTER, checkpoint, options)
        if _is_prefixed(stored) and config is not None and not config.is_kept_by_name:
            raise not_just_tensors(config)  # it names its tensors in no known way
        raise UsageError(
            "--adapter is about the checkpoint of a peft model, which this is not",
            path=checkpoint.location.tag_dir,
            hint="Leave --adapter and --adapter-name out",
        )
    if options.layout is NameLayout.MEMORY and options.adapter is not AdapterMode.MERGE:
        if options.adapter is AdapterMode.AUTO:
            return None
        raise UsageError(
            "--layout memory keeps every name as it is, and an adapter's folder has peft's names",
            hint="Leave --layout or --adapter out",
        )
    if options.adapter is not AdapterMode.AUTO:
        return options.adapter
    is_told = any(_config_of(name, checkpoint, options) for name in adapters_in(stored))
    if not (is_told or has_config):
        return None
    return AdapterMode.KEEP if options.base is None else AdapterMode.MERGE


def not_just_tensors(config: AdapterConfig) -> UnsupportedError:
    """The error for an adapter of a method of which peft saves more than it trained."""
    return UnsupportedError(
        "is of a method whose adapters are not just tensors of the module",
        path=config.path,
        found=config.peft_type,
        expected="LORA or another method that saves what it trained",
        hint="Write the tensors as they are with --layout memory --exclude-frozen",
    )


def is_peft(stored: Weights, places: Iterable[Path]) -> bool:
    """Whether the tensors are those of a model under peft.

    Models exist that have adapters as parts of their own (Phi-4-multimodal); peft's prefix, or its
    file beside the checkpoint, tells one under peft from them.
    """
    adapted = [name for name in stored.tensors if read_name(name).adapter]
    if not adapted:
        return False
    if _is_prefixed(stored) or any(read_name(name).is_prompt for name in adapted):
        return True
    return any(is_file(place) or is_file(place / ADAPTER_CONFIG) for place in places)


def _is_prefixed(stored: Weights) -> bool:
    return any(f".{PEFT_PREFIX}" in f".{name}" for name in stored.tensors)


def adapter_places(
    checkpoint: TrainingState, options: ExportOptions, *, is_alone: bool = True
) -> tuple[Path, ...]:
    """Where an adapter's configuration may lie, the likeliest first: folders, or the file given.

    Of several adapters a file given is that of one, and the others' lie where peft puts them.
    """
    location, path = checkpoint.location, options.adapter_config
    given = [] if path is None else [_place_of(path)]
    if path is not None and not is_alone and path.name == ADAPTER_CONFIG and is_file(path):
        given = [path.parent]
    base = [] if options.base is None else [options.base]
    return (*given, location.root, location.tag_dir, location.root.parent, *base)


def _place_of(path: Path) -> Path:
    """What ``--adapter-config`` means: a folder, or a file."""
    if any(matching(path, name) for name in (ADAPTER_CONFIG, f"*/{ADAPTER_CONFIG}")):
        return path
    if is_file(path) and (path.name == ADAPTER_CONFIG or "peft_type" in read_json_object(path)):
        return path
    raise NotACheckpointError(
        f"is no {ADAPTER_CONFIG}",
        path=path,
        expected="a JSON object with peft_type",
        hint="Give --adapter-config the file that peft wrote",
    )


def adapters_in(stored: Weights) -> tuple[str, ...]:
    """The names of a checkpoint's adapters, which are those of folders too."""
    names = adapters_of([*stored.tensors, *stored.aliases])
    for name in names:
        if "/" in name or "\\" in name or "\0" in name:
            raise UnsafeError(
                "an adapter's name leads to another folder",
                found=repr(name),
                expected="a plain name",
                hint="Give the tensors another with --rename",
            )
    return names


def choose_adapters(
    checkpoint: TrainingState, stored: Weights, options: ExportOptions
) -> tuple[Adapter, ...]:
    """The adapters that the options mean: the one they name, else all."""
    names = every = adapters_in(stored)
    if options.adapter_name is not None:
        if options.adapter_name not in names:
            raise UsageError(
                f"there is no adapter named {options.adapter_name!r}", found=", ".join(names)
            )
        names = (options.adapter_name,)
    adapters, location, is_alone = [], checkpoint.location, len(names) == 1
    of_run = [location.root, location.tag_dir, location.root.parent]
    if (before := checkpoint_before(location)) is not None:
        of_run.append(before)
    for name in names:
        config = _config_of(name, checkpoint, options, is_alone=is_alone)
        if config is None:
            raise NotACheckpointError(
                f"has no {ADAPTER_CONFIG}, which says what the adapter {name!r} is",
                path=adapter_places(checkpoint, options)[0],
                found="none there, in the tag folder, in the folder above or in --base",
                hint="Give the one that training began with as --adapter-config FILE; or write the "
                "tensors as they are with --layout memory --exclude-frozen",
            )
        others = other_adapter_configs(config, name, of_run, location.boundary)
        parts = checkpoint.parts if options.adapter_config is None else ()
        nodes = [
            one
            for part in parts
            for one in other_adapter_configs(config, name, (part.root, part.tag_dir), part.boundary)
        ]
        is_meant = is_alone and config.path == options.adapter_config
        shares = () if name == DEFAULT_ADAPTER or is_meant else every
        shares = tuple(
            one
            for one in shares
            if one != name
            and (other := _config_of(one, checkpoint, options, is_alone=False)) is not None
            and other.path == config.path
        )
        adapters.append(Adapter(name, config, tuple(others), tuple(nodes), shares))
    return tuple(adapters)


def places_told(
    adapter: Adapter, checkpoint: TrainingState, options: ExportOptions
) -> Iterator[str]:
    """Where an adapter's configuration lies, unless that is the checkpoint's own folder."""
    location, path, given = checkpoint.location, adapter.config.path, options.adapter_config
    around = {path.parent, *([path.parent.parent] if path.parent.name == adapter.name else [])}
    named = {location.root: "", location.tag_dir: "the tag folder"}
    named |= {location.root.parent: "the folder above"}
    named |= {} if options.base is None else {options.base: "--base"}
    where = next((told for folder, told in named.items() if folder in around), "elsewhere")
    if given is not None and path.is_relative_to(given):
        where = "--adapter-config"
    if where:
        yield f"the adapter {adapter.name!r} goes by {adapter.config.path.name} of {where}"


def check_renamed(before: Weights, after: Weights) -> None:
    """Refuse renames that take an adapter's name out of its tensors, which peft does by itself."""
    lost = {*adapters_in(before)} - {*adapters_in(after)}
    if lost and (made := _LEAVES.intersection(adapters_in(after)).difference(adapters_in(before))):
        raise UsageError(
            "--rename takes the name of an adapter out of its tensors",
            found=f"{min(lost)} becomes {min(made)}",
            expected="names as the training had them",
            hint="Leave that out: an adapter's file gets the names that peft loads",
        )


def _config_of(
    name: str, checkpoint: TrainingState, options: ExportOptions, *, is_alone: bool = True
) -> AdapterConfig | None:
    """Of several adapters, one that has a folder of its own anywhere goes by that."""
    places = adapter_places(checkpoint, options, is_alone=is_alone)
    boundary = checkpoint.location.boundary
    own = () if is_alone or name == DEFAULT_ADAPTER else [place / name for place in places]
    return find_adapter_config(DEFAULT_ADAPTER, own, boundary) or find_adapter_config(
        name, places, boundary
    )


def check_whole(
    checkpoint: TrainingState,
    stored: Weights,
    adapter: Adapter,
    kept: Mapping[str, StoredTensor],
) -> None:
    """Refuse an adapter of which parts were left out of the save.

    Frozen parts of an adapter are left out with all that is frozen; of two factors that one is
    there tells that the other was.
    """
    lost = [*of_adapter(stored.left_out, adapter.name)]
    for name in kept:
        for one, other in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            for here, there in ((one, other), (other, one)):
                counterpart = name.replace(f".{here}", f".{there}")
                if (
                    f".{here}" in name
                    and name.endswith(("weight", here))
                    and (counterpart not in kept)
                ):
                    lost.append(counterpart)
    if lost:
        raise FrozenLeftOutError(
            f"parts of the adapter {adapter.name!r} were frozen, and left out of the save",
            path=checkpoint.location.tag_dir,
            found=f"no values for {some(lost, 4)}",
            expected="all of the adapter",
            hint="Save again with exclude_frozen_parameters=False",
        )
