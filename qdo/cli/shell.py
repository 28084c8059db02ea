"""What every command has in common: options made from the settings, errors, exit codes."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Any, TypeVar

import click

import qdo
from qdo.cli.output import FORMATS, forget_stdout, say
from qdo.errors import QdoError, UsageError
from qdo.settings import CONFIG_VARIABLE, Declaration, Settings, declarations, load

EXIT_CODES = """\b
Exit codes:
  0  done
  1  ran and failed
  2  wrong usage, setting or input
  3  coordinator or broker out of reach
  4  some targets failed
  5  refused
  6  not found
  130  interrupted"""
INTERRUPTED = 130

_Function = TypeVar("_Function", bound=Callable[..., Any])


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code.

    Every error that qdo raises on purpose becomes one line on stderr, without a traceback
    unless --debug is given. A reader of stdout that goes away early, such as `head`, is none.
    """
    _replace_closed_streams()
    state = {"debug": False}
    try:
        code = _invoke(command, program, sys.argv[1:] if arguments is None else arguments, state)
        sys.stdout.flush()
        return code
    except QdoError as error:
        if state["debug"]:
            raise
        say(f"{program}: {error}")
        return error.exit_code
    except BrokenPipeError:
        forget_stdout()
        return 0
    except OSError as error:  # a file that cannot be read to its end, a full disk behind stdout
        if state["debug"]:
            raise
        say(f"{program}: {error}")
        return QdoError.exit_code
    except KeyboardInterrupt:
        say(f"{program}: interrupted")
        return INTERRUPTED


def _replace_closed_streams() -> None:
    """Put the null device where a standard stream was closed, as some supervisors do.

    Python has None there, and the next file that is opened would get the stream's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - kept open
            os.set_inheritable(stream.fileno(), True)  # worker processes need it as well
            setattr(sys, name, stream)


def _invoke(
    command: click.Command, program: str, arguments: Sequence[str], state: dict[str, bool]
) -> int:
    try:
        with command.make_context(program, list(arguments), obj=state) as context:
            return command.invoke(context) or 0
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return UsageError.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        message = error.format_message().rstrip(".")
        raise UsageError(reason=f"{message}; see `{path} --help`") from error


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, not for every start.

    :param table: name of a command -> (module, attribute, short help).
    """

    def __init__(self, *, table: Mapping[str, tuple[str, str, str]], **options: Any) -> None:
        super().__init__(**options)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, attribute, _ = self._table[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is no command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            near = difflib.get_close_matches(name, self._table, n=1)
            advice = f" (did you mean {near[0]!r}?)" if near else ""
            raise click.UsageError(f"there is no command {name!r}{advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each[2]) for name, each in self._table.items()])


def with_settings(*names: str) -> Callable[[_Function], click.Command]:
    """Give a function --config, --debug and an option for each named setting.

    The function gets the loaded settings as `settings`. Values are checked with all other
    sources of settings, so that a wrong one reads the same wherever it comes from.
    """
    chosen = [each for each in declarations() if each.name in names and each.kind != "tables"]

    def decorate(function: Any) -> Any:
        def call(config: str | None, **arguments: Any) -> Any:
            flags = {each.name: _given(arguments.pop(each.name)) for each in chosen}
            return function(settings=load(flags=flags, config=config), **arguments)

        update_wrapper(call, function)
        for each in reversed(chosen):
            _setting_option(each)(call)
        click.option(
            "-c", "--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]."
        )(call)
        return _debug_option(call)

    return decorate


def _given(value: Any) -> Any:
    """Return the value of an option, None for one that may be repeated and was not given."""
    return None if value == () else value


def _setting_option(declaration: Declaration) -> Callable[[Any], Any]:
    default = _default(declaration)
    text = f"{declaration.help[0].upper()}{declaration.help[1:]} [{declaration.variable}{default}]."
    if declaration.kind == "bool":
        return click.option(declaration.flag, is_flag=True, default=None, help=text)
    metavar = {"int": "N", "float": "SECONDS"}.get(declaration.kind, _METAVARS)
    if isinstance(metavar, dict):
        metavar = metavar.get(declaration.name, "TEXT")
    repeated = declaration.kind == "globs"
    if repeated:
        text += " May be given more than once."
    return click.option(declaration.flag, metavar=metavar, help=text, multiple=repeated)


def _default(declaration: Declaration) -> str:
    value = declaration.default
    if isinstance(value, tuple):
        value = " ".join(value)
    return "" if value in ("", False) else f"; default {value}"


_METAVARS = {
    "app": "NAME",
    "job": "MODULE:FUNCTION",
    "job_context": "MODULE:FUNCTION",
    "job_failure": "MODULE:FUNCTION",
    "queues": "GLOB",
    "exclude": "GLOB",
    "broker": "URL",
    "coordinator": "URL",
    "namespace": "PATH",
    "log_level": "LEVEL",
}


def _debug_option(function: Any) -> Any:
    def remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and context.obj is not None:
            context.obj["debug"] = True

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Show where an error came from.",
    )(function)


def output_option(function: _Function) -> _Function:
    """Add -o table|json|jsonl, as `form`."""
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="How to write the data to stdout.",
    )(function)


def version_option(function: _Function) -> _Function:
    """Add --version."""
    return click.version_option(qdo.__version__, "--version", message="%(prog)s %(version)s")(
        function
    )


def require_app(settings: Settings) -> str:
    """Return the name of the app; raise UsageError when none is given."""
    if not settings.app:
        raise UsageError(
            reason="name the app: --app NAME, QDO_APP=NAME, or app = \"NAME\" in the settings file"
        )
    return settings.app
