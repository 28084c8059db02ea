"""Runs command lines and converts errors to exit codes. Few imports keep --help fast."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import click
from click.shell_completion import shell_complete

from qdo._version import __version__
from qdo.cli.output import forget_stdout, print_message, print_traceback
from qdo.errors import QdoError, UsageError
from qdo.system.logs import escape_last_resort
from qdo.text import did_you_mean

EXIT_CODES = """\b
Exit codes:
  0  success
  1  ran and failed
  2  invalid usage, setting or input
  3  coordinator or broker unreachable
  4  some targets failed
  5  rejected
  6  not found
  130  interrupted"""
INTERRUPTED = 130
# Option of `qdo send`. With this option, BODY may be any bytes.
RAW = "--raw"
# The libraries of other projects that most faults concern.
_LIBRARIES = ("gevent", "kazoo", "psycopg", "boto3")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code.

    Every error that qdo raises deliberately becomes one line on stderr. Only --debug adds a
    traceback. A reader of stdout that exits early, such as `head`, is not an error.
    """
    _replace_closed_streams()
    _escape_what_a_stream_lacks()
    sys.excepthook = print_traceback
    escape_last_resort()
    state = {"debug": False}
    variable = completion_variable(program)
    if variable in os.environ:  # a shell asks for completions
        return shell_complete(command, {}, program, variable, os.environ[variable])
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _invoke(command, program, sys.argv[1:] if arguments is None else arguments, state)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        forget_stdout()
        return 0
    # An OSError means an unreadable file, or a full disk for stdout.
    except (QdoError, OSError) as error:
        if state["debug"]:
            raise
        print_message(f"{program}: {error}")
        return error.exit_code if isinstance(error, QdoError) else QdoError.exit_code
    except KeyboardInterrupt:
        print_message(f"{program}: interrupted")
        return INTERRUPTED


def completion_variable(program: str) -> str:
    """Return the environment variable that a shell uses to request completions."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"


def _escape_what_a_stream_lacks() -> None:
    # Escape characters that a terminal cannot encode, because one character must not hide a whole
    # list.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _replace_closed_streams() -> None:
    # Some supervisors close these streams. Python then sets them to None, and the next opened file
    # would get the stream's file descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - kept open
            os.set_inheritable(stream.fileno(), True)  # worker processes also need the stream
            setattr(sys, name, stream)


def _invoke(
    command: click.Command, program: str, arguments: Sequence[str], state: dict[str, bool]
) -> int:
    for argument in () if RAW in arguments else arguments:
        if argument != argument.encode(errors="replace").decode():
            reason = (
                f"arguments must be UTF-8, got {argument!r}; rename the file, or correct the name"
            )
            raise UsageError(reason=reason)
    try:
        with command.make_context(program, list(arguments), obj=state) as context:
            return command.invoke(context) or 0
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)  # the text of --help
        return UsageError.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        message = " ".join(error.format_message().split()).rstrip(".")
        raise UsageError(reason=f"{message}; see `{path} --help`") from error


# Name of a command -> (module in `qdo.cli.commands`, attribute, short help).
Commands: TypeAlias = Mapping[str, tuple[str, str, str]]


class LazyGroup(click.Group):
    """A group that imports each command at its first use. `sections` has the headings."""

    def __init__(self, *, sections: Mapping[str, Commands], **options: Any) -> None:
        super().__init__(**options)
        self._sections = sections
        self._commands = {
            name: each for commands in sections.values() for name, each in commands.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._commands:
            return None
        module, attribute, _ = self._commands[cmd_name]
        command = getattr(importlib.import_module(f"qdo.cli.commands.{module}"), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._commands and not name.startswith("-"):
            hint = self._hint(ctx, name)
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: click.Context, name: str) -> str:
        admin = self.get_command(ctx, "admin")
        if isinstance(admin, click.Group) and name in admin.list_commands(ctx):
            return f" (did you mean 'admin {name}'?)"
        return did_you_mean(name, self._commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self._commands))
        for heading, commands in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{name:{width}}", each[2]) for name, each in commands.items()]
                )


def _show_versions(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    import platform  # these take 30 ms, which --help needs not
    from importlib import metadata

    click.echo(f"{ctx.info_name} {__version__}")
    click.echo(f"Python {platform.python_version()} on {platform.platform()}")
    for name in _LIBRARIES:
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} not installed")
    ctx.exit()


def version_option(function: _Function) -> _Function:
    """Add ``--version``, which shows the versions that a report of a fault needs."""
    return click.option(
        "--version",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_show_versions,
        help="Show the versions of qdo and of its platform, and exit.",
    )(function)
