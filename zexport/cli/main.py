"""The shell: it assembles the commands, and turns errors into one message and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from zexport.cli.consolidate import consolidate
from zexport.cli.inspect import inspect
from zexport.cli.train import train
from zexport.cli.verify import verify
from zexport.errors import UsageError, ZexportError
from zexport.version import __version__

_INTERRUPTED = 130
_BUG = 1
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})
"""What Click takes for yes in an environment variable."""


@click.group(
    context_settings={
        "auto_envvar_prefix": "ZEXPORT",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog='Completion: eval "$(_ZEXPORT_COMPLETE=bash_source zexport)" (or zsh_source, '
    "fish_source). Every option also reads ZEXPORT_<COMMAND>_<OPTION>.",
)
@click.version_option(__version__, prog_name="zexport")
@click.option("--local_rank", hidden=True, expose_value=False)  # put there by deepspeed's launcher
def cli() -> None:
    """DeepSpeed ZeRO checkpoints to Hugging Face models: offline, bit-exact, in bounded memory.

    Example: zexport consolidate run/checkpoint-100 model
    """


for _command in (consolidate, inspect, verify, train):
    cli.add_command(_command)


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    as_json = _wants_json(sys.argv[1:])
    try:
        code = cli.main(standalone_mode=False, prog_name="zexport")
        sys.stdout.flush()
    except ZexportError as error:
        code = _tell(error, as_json=as_json)
    except click.UsageError as error:
        code = _tell(_usage_error(error), as_json=as_json) if as_json else _show(error)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        code = _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as in `zexport inspect run | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _BUG
    sys.exit(code)


def _wants_json(words: Sequence[str]) -> bool:
    """Whether a failure is told in JSON; asked before the words are parsed, which may fail."""
    command = next((word for word in words if word in cli.commands), "")
    setting = os.environ.get(f"ZEXPORT_{command}_JSON".upper(), "")
    return "--json" in words or setting.lower() in _YES


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does, so that nothing half-made is left."""
    raise KeyboardInterrupt


def _tell(error: ZexportError, *, as_json: bool) -> int:
    """Say what is wrong, once for people and once for programs; the exit code."""
    click.echo(f"Error: {error.sentence()}", err=True)
    if as_json:
        from zexport.report import error_json

        click.echo(json.dumps(error_json(error), indent=2))
    return error.exit_code


def _show(error: click.UsageError) -> int:
    error.show()
    return error.exit_code


def _usage_error(error: click.UsageError) -> UsageError:
    return UsageError(error.format_message().rstrip("."), hint="See --help")
