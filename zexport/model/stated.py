"""What all files around the weights say of the same facts, in one sequence of statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zexport.facts.statements import Statement
from zexport.filenames import CONFIG
from zexport.model.card import card_statements
from zexport.model.config import ConfigFile
from zexport.model.config_facts import (
    dtype_statements,
    level_statements,
    rope_statements,
    run_statements,
    type_statements,
    unstated_statements,
)
from zexport.model.fit import ModelNames, NamesUnknown
from zexport.model.hub_cache import hub_id_of
from zexport.model.sidecars import Sidecars
from zexport.model.small_files import beside_statements


def file_facts(sidecars: Sidecars, named_bases: Mapping[str, str]) -> Iterator[Statement]:
    """What the files that are copied state, and those of other folders; no model is needed.

    ``named_bases`` are those who name the base model, with the name.
    """
    yield from beside_statements(sidecars)
    yield from card_statements(sidecars, named_bases)
    yield from dtype_statements(sidecars.config)
    yield from rope_statements(sidecars.config)
    yield from level_statements(sidecars.config)
    for by, other in sidecars.run_configs.items():
        if sidecars.config is not None:
            yield from run_statements(sidecars.config, other, by)


def named_bases(sidecars: Sidecars, *, is_adapter: bool) -> dict[str, str]:
    """What configs of the run call the model that training began from, and what was given for it.

    The base's own config names what that was made of; an adapter's base has rows of its own.
    """
    own, base = sidecars.config, sidecars.base_config
    configs = {f"{by}'s {CONFIG}": one for by, one in sidecars.run_configs.items()}
    if own is not None and (base is None or own.path != base.path):
        configs = {CONFIG: own} | configs
    named = {by: str(one.content.get("_name_or_path") or "") for by, one in configs.items()}
    given = None if is_adapter or sidecars.base is None else hub_id_of(sidecars.base)
    return {**named, "--base": given or ""}


def model_facts(
    sidecars: Sidecars, config: ConfigFile | None, names: ModelNames | NamesUnknown
) -> Iterator[Statement]:
    """What files state of the model that the weights are of, whose config this is."""
    if isinstance(names, ModelNames):
        yield from type_statements(config, names)
    defaults = names.defaults if isinstance(names, ModelNames) else {}
    others = {f"{by}'s": one for by, one in sidecars.run_configs.items()}
    others |= {} if sidecars.base_config is None else {"the base's": sidecars.base_config}
    for by, other in others.items():
        if config is not None and config.path != other.path:
            yield from unstated_statements(config, other, by, defaults)
