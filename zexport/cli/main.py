"""The shell: it assembles the commands, and turns errors into one message and an exit code."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import click

from zexport import __version__
from zexport.cli.environment import told_of_unknown
from zexport.cli.streams import prepare_streams, put_json
from zexport.errors import OutputError, UsageError, ZexportError

_INTERRUPTED = 130
_AGAIN_S = 0.01
_BUG = 1
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})
"""What Click takes for yes in an environment variable."""


_COMMANDS = (
    *("inspect", "consolidate", "verify", "reshard", "diff"),
    *("watch", "prune", "finish", "train"),
)
_MEANT = {
    **dict.fromkeys(("export", "convert", "merge", "save", "zero_to_fp32"), "consolidate"),
    **dict.fromkeys(("resume", "ds_to_universal", "universal", "repartition"), "reshard"),
    **dict.fromkeys(("info", "show", "list", "ls"), "inspect"),
    **dict.fromkeys(("check", "validate"), "verify"),
    **dict.fromkeys(("compare", "cmp"), "diff"),
    **dict.fromkeys(("strip", "shrink", "clean", "delete", "rm"), "prune"),
}
"""What other tools call the commands."""


class _Commands(click.Group):
    """Commands that are imported when they are asked for: one a module of its own name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - Click's signature
        """Their names, in the order of use."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name, if there is one."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"zexport.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As Click has it; a refusal names the command that was meant."""
        word = args[0]
        if word == "help":
            raise click.UsageError("No such command 'help'. Did you mean --help?", ctx)
        if word not in _COMMANDS and (meant := _meant(word.lower())):
            raise click.UsageError(f"No such command {word!r}. Did you mean {meant!r}?", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            for told in told_of_unknown(command, {*_COMMANDS} - {name}):
                click.echo(f"Warning: {told}", err=True)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        """What the command returns; an interrupt ends in one line (Click 8 begins another)."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise click.Abort from interrupt


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
@click.option("--local_rank", hidden=True, expose_value=False)  # put there by deepspeed's launcher
def cli() -> None:
    """DeepSpeed ZeRO checkpoints to Hugging Face models: offline, bit-exact, in bounded memory.

    Example: zexport consolidate run/checkpoint-100 model
    """


def _meant(word: str) -> str | None:
    return _MEANT.get(word) or next(iter(_nearest(word, _COMMANDS)), None)


def _nearest(word: str, words: Sequence[str]) -> list[str]:
    """The one of these that is most like the word; none where none is."""
    import difflib

    return difflib.get_close_matches(word, words, 1)


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    gc.disable()  # a command makes hardly a cycle; to look for them takes a fifth of its time
    prepare_streams()
    _answer_signals()
    as_json = _wants_json(sys.argv[1:])
    try:
        code = cli.main(standalone_mode=False, prog_name="zexport")
        sys.stdout.flush()
    except ZexportError as error:
        code = _tell(error, as_json=as_json)
    except click.UsageError as error:
        code = _tell_usage(error, as_json=as_json)
    except (click.Abort, KeyboardInterrupt) as error:
        code = _tell_interrupt(error)
    except BrokenPipeError:
        code = _BUG  # the reader of our output has gone, as in `zexport inspect run | head -1`
    sys.exit(code)


def _wants_json(words: Sequence[str]) -> bool:
    """Whether a failure is told in JSON; asked before the words are parsed, which may fail."""
    command = next((word for word in words if word in _COMMANDS), "")
    setting = os.environ.get(f"ZEXPORT_{command}_JSON".upper(), "")
    return "--json" in words or setting.lower() in _YES


def _answer_signals() -> None:
    """Answer requests to end as Ctrl-C; one that is ignored, as under nohup, stays so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _take_up


def _take_up(told: sys.UnraisableHookArgs) -> None:
    """Ask anew for an end that Python dropped, as it does in what it calls while it cleans up."""
    if issubclass(told.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(told)


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """End the work, so that nothing half-made is left.

    While a module is imported, the process ends at once, which is safe at any moment: extension
    modules (numpy 2.4, ml_dtypes 0.5) make a traceback and an ImportError of an exception there.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            with suppress(OSError):
                os.write(sys.stderr.fileno(), b"Interrupted.\n")
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _tell_interrupt(error: BaseException) -> int:
    """Say that the work has ended, and what is kept; Click raises its own for Ctrl-C's error."""
    notes: list[str] = getattr(error.__cause__ or error, "__notes__", [])
    click.echo(" ".join(["Interrupted.", *notes]), err=True)
    return _INTERRUPTED


def _tell(error: ZexportError, *, as_json: bool) -> int:
    """Say what is wrong, once for people and once for programs; the exit code."""
    *lines, last = [error.sentence()] if as_json else error.lines()
    first, *more = [*lines, " ".join([last, *getattr(error, "__notes__", [])])]
    for line in _shown((f"Error: {first}", *more)):
        click.echo(line, err=True)
    if as_json:
        from zexport.report.failure import Failure, Told
        from zexport.storage.json import form_of

        with suppress(OutputError, BrokenPipeError):  # the first failure is the one to be told
            put_json(form_of(Failure(Told.of(error))))
    return error.exit_code


def _shown(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a message as people read them: paths as typed from here, folded on a terminal."""
    from zexport.report.text import folded, near_text

    for line in map(near_text, lines):
        if not sys.stderr.isatty():
            yield line
            continue
        indent = len(line) - len(line.lstrip()) + 2
        yield from folded(line, shutil.get_terminal_size().columns, indent)


def _tell_usage(error: click.UsageError, *, as_json: bool) -> int:
    error = _plainer(error)
    if as_json:
        problem, _, hint = error.format_message().partition(". ")
        told = UsageError(problem.rstrip("."), hint=hint.rstrip(".") or "See --help")
        return _tell(told, as_json=True)
    error.show()
    return error.exit_code


def _plainer(error: click.UsageError) -> click.UsageError:
    """Click's refusal, with the one option that was likely meant, or the command's example."""
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        typed, meant = error.option_name, error.possibilities
        begun = [one for one in meant if one.startswith(typed)]
        near = begun[:1] or _nearest(typed, meant)
        return click.NoSuchOption(typed, possibilities=near, ctx=error.ctx)
    if isinstance(error, click.MissingParameter) and not error.message and error.ctx is not None:
        example = re.search(r"Example: (.+)", error.ctx.command.help or "")
        told = f"As in: {example[1]}" if example else ""
        return click.MissingParameter(told, error.ctx, error.param)
    return error
