"""Command group, error handling, exit codes and signals."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import click

from zexport import __version__
from zexport.cli.output import prepare_streams, print_json
from zexport.errors import MemoryLimitError, OutputError, UsageError, ZexportError

_INTERRUPTED = 130
_BROKEN_PIPE = 1
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})
"""Values of an environment variable that set a flag in click."""

_COMMANDS = (
    *("inspect", "consolidate", "verify", "reshard", "diff"),
    *("watch", "prune", "finish", "train"),
)
_SYNONYMS = {
    **dict.fromkeys(("export", "convert", "merge", "save", "zero_to_fp32"), "consolidate"),
    **dict.fromkeys(("resume", "ds_to_universal", "universal", "repartition"), "reshard"),
    **dict.fromkeys(("info", "show", "list", "ls"), "inspect"),
    **dict.fromkeys(("check", "validate"), "verify"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("strip", "shrink", "clean", "delete", "rm"), "prune"),
    "help": "--help",
}


class _Commands(click.Group):
    """Commands that are imported on use, each from the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"zexport.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in _COMMANDS:
            import difflib

            near = difflib.get_close_matches(word.lower(), _COMMANDS, 1)
            if similar := _SYNONYMS.get(word.lower()) or next(iter(near), None):
                raise click.UsageError(f"No such command {word!r}. Did you mean {similar!r}?", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # click would print an empty line, among JSON lines too
            raise click.Abort from error


@click.group(
    cls=_Commands,
    context_settings={
        "auto_envvar_prefix": "ZEXPORT",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog='Completion: eval "$(_ZEXPORT_COMPLETE=bash_source zexport)" (or zsh_source, '
    "fish_source). Every option also reads ZEXPORT_<COMMAND>_<OPTION>.",
)
@click.version_option(__version__, "-v", "--version", prog_name="zexport")
@click.option("--local_rank", hidden=True, expose_value=False)  # added by deepspeed's launcher
def cli() -> None:
    """DeepSpeed ZeRO and FSDP checkpoints to Hugging Face models: offline, bit-exact.

    Example: zexport consolidate run/checkpoint-100 model
    """


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    gc.disable()  # commands make few cycles, and collecting takes a fifth of their time
    prepare_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # not: nohup
            signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _retry_interrupt
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are printed."""
    command = next((word for word in words if word in _COMMANDS), "")
    variable = os.environ.get(f"ZEXPORT_{command}_JSON".upper(), "")
    as_json = "--json" in words or variable.lower() in _YES
    try:
        code: int = cli.main([*words], standalone_mode=False, prog_name="zexport") or 0
        sys.stdout.flush()
    except ZexportError as error:
        return print_error(error, as_json=as_json)
    except click.UsageError as error:
        return _print_usage_error(error, as_json=as_json)
    except (click.Abort, KeyboardInterrupt) as error:
        notes: list[str] = getattr(error.__cause__ or error, "__notes__", [])
        click.echo(" ".join(["Interrupted.", *notes]), err=True)
        return _INTERRUPTED
    except BrokenPipeError:  # such as of `zexport inspect run | head -1`
        return _BROKEN_PIPE
    except (MemoryError, OSError, RuntimeError) as error:
        from zexport.storage.os_errors import lacks_memory

        if not lacks_memory(error):
            raise
        refusal = MemoryLimitError(
            "the system refuses more memory", hint="Free memory, raise its limit, or lower --jobs"
        )
        for note in getattr(error, "__notes__", []):
            refusal.add_note(note)
        return print_error(refusal, as_json=as_json)
    return code


def print_error(error: ZexportError, *, as_json: bool) -> int:
    """Print an error on stderr, and with ``as_json`` also on stdout; return the exit code."""
    from zexport.report.text import near_text

    first, *more = [error.sentence()] if as_json else error.lines()
    lines = [f"Error: {first}", *more]
    lines[-1] = " ".join([lines[-1], *getattr(error, "__notes__", [])])
    for line in lines:
        click.echo(near_text(line), err=True)
    if as_json:
        from zexport.report.json import ErrorInfo, Failure
        from zexport.storage.json import form_of

        with suppress(OutputError, BrokenPipeError):  # the first error is the one to report
            print_json(form_of(Failure(ErrorInfo.of(error))))
    return error.exit_code


def _print_usage_error(error: click.UsageError, *, as_json: bool) -> int:
    if as_json:
        problem, _, hint = error.format_message().partition(". ")
        usage = UsageError(problem.rstrip("."), hint=hint.rstrip(".") or "See --help")
        return print_error(usage, as_json=True)
    error.show()
    return error.exit_code


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """End the work, so that cleanup runs.

    During an import, end the process, which is safe then: extension modules (numpy 2.4, ml_dtypes
    0.5) turn an exception there into a traceback and an ImportError.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            with suppress(OSError):
                os.write(sys.stderr.fileno(), b"Interrupted.\n")
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _retry_interrupt(dropped: sys.UnraisableHookArgs) -> None:
    """Interrupt again if Python dropped the exception, as it does in finalizers."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(dropped)
