"""Environment variables that may not set an option, and those that set none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import click
from click.core import ParameterSource

_OURS = "ZEXPORT_"
_ALIKE = 0.8


def typed_alone(context: click.Context, option: click.Parameter, value: bool) -> bool:
    """The value of a flag that no environment variable may set."""
    if value and context.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT:
        variable = f"{context.auto_envvar_prefix}_{str(option.name).upper()}"
        raise click.UsageError(
            f"{option.opts[0]} is asked for by {variable} alone: a removal has to be typed. "
            f"Type {option.opts[0]}, or unset {variable}.",
            context,
        )
    return value


def told_of_unknown(command: click.Command, others: Iterable[str]) -> Iterator[str]:
    """Tells of variables that look like an option of a command, and are none.

    Those of the ``others`` are told of when these run; any other name may be somebody else's.
    """
    import difflib

    own = f"{_OURS}{str(command.name).upper()}_"
    known = [option.name.upper() for option in command.params if option.name]
    elsewhere = tuple(f"{_OURS}{name.upper()}_" for name in others)
    for variable in sorted(one for one in os.environ if one.startswith(_OURS)):
        name = variable.removeprefix(own)
        if name in known or (name == variable and variable.startswith(elsewhere)):
            continue
        cutoff = _ALIKE if name == variable else 0.6
        near = difflib.get_close_matches(name.removeprefix(_OURS), known, 1, cutoff)
        if near:
            yield f"{variable} sets nothing; did you mean {own}{near[0]}?"
        elif name != variable:
            yield f"{variable} sets nothing: no option is called so"
