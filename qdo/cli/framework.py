"""Shared parts of all commands: options and settings, errors, exit codes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import shell_complete

from qdo._version import __version__
from qdo.cli.output import FORMATS, forget_stdout, print_message, print_traceback
from qdo.errors import QdoError, UsageError
from qdo.fleet.audit_entries import MAX_TEXT
from qdo.sending.sender import code_origin
from qdo.settings.settings import Settings, declarations
from qdo.settings.sources import load
from qdo.settings.values import CONFIG_VARIABLE, DEFAULT, Declaration
from qdo.system.logs import escape_last_resort
from qdo.text import did_you_mean

if TYPE_CHECKING:
    from qdo.app import App


def import_settings(settings: Settings, names: Collection[str]) -> Settings:
    """Return the settings of the app that `settings` name, and tell what may surprise.

    :param names: the settings that the command uses.
    :raises AppImportError: the app cannot be imported.
    """
    app, settings = import_app(settings)
    if app is not None:
        # An option of this command line is no surprise.
        report_overridden(app, settings, [each for each in names if not _is_option(settings, each)])
    return settings


def import_app(settings: Settings) -> tuple[App | None, Settings]:
    """Return the app that the settings name as MODULE:APP, and the settings in force.

    Settings that only name the app, or none, come back as they are, with None for the app.
    Whatever its module prints goes to stderr, because stdout is for the data of the command.

    :raises AppImportError: the app cannot be imported.
    """
    if not settings.target:
        return None, settings
    # Imported late: a command for an app of which it needs only the name starts sooner.
    from qdo.loading import load_named_app

    with contextlib.redirect_stdout(sys.stderr):
        app = load_named_app(settings)
    return app, app.use(settings)


def report_overridden(app: App, settings: Settings, names: Collection[str]) -> None:
    """Tell on stderr which of the named settings differ from the app's code."""
    for name, value in settings.overridden(app.given).items():
        if name in names:
            print_message(
                f"hint: {name} is {getattr(settings, name)} (from {settings.origin(name)}), which "
                f"overrides {value} in {app.origin}"
            )


def _is_option(settings: Settings, name: str) -> bool:
    return settings.origin(name).startswith("--")


def code_hint(settings: Settings, name: str) -> str:
    """Return the end of a hint about a location where nothing is: the code may name another.

    "" if the location does not depend on code that was not read.
    """
    is_code_known = settings.origin("app") == code_origin(settings.app)
    if is_code_known or settings.origin(name) != DEFAULT:
        return ""
    return f"; if the code of app {settings.app!r} sets another {name}, use --app MODULE:APP"


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
RAW = "--raw"
"""Option of `qdo send`: BODY may be any bytes."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code.

    Every error that qdo raises deliberately becomes one line on stderr, without a traceback
    unless --debug is given. A reader of stdout that exits early, such as `head`, is not an error.
    """
    _replace_closed_streams()
    sys.excepthook = print_traceback
    escape_last_resort()
    state = {"debug": False}
    variable = completion_variable(program)
    if variable in os.environ:  # a shell asks for completions
        return shell_complete(command, {}, program, variable, os.environ[variable])
    try:
        code = _invoke(command, program, sys.argv[1:] if arguments is None else arguments, state)
        sys.stdout.flush()
        return code
    except QdoError as error:
        if state["debug"]:
            raise
        print_message(f"{program}: {error}")
        return error.exit_code
    except BrokenPipeError:
        forget_stdout()
        return 0
    except OSError as error:  # a file that cannot be read completely, or a full disk for stdout
        if state["debug"]:
            raise
        print_message(f"{program}: {error}")
        return QdoError.exit_code
    except KeyboardInterrupt:
        print_message(f"{program}: interrupted")
        return INTERRUPTED


def completion_variable(program: str) -> str:
    """Return the environment variable with which a shell asks a program for completions."""
    return f"_{program.replace('-', '_').upper()}_COMPLETE"


def _replace_closed_streams() -> None:
    """Replace closed standard streams, which some supervisors leave, by the null device.

    Python sets them to None, and the next file that is opened would get the stream's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - kept open
            os.set_inheritable(stream.fileno(), True)  # worker processes need it as well
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
        click.echo(error.format_message(), err=True)  # the help
        return UsageError.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        message = error.format_message().rstrip(".")
        raise UsageError(reason=f"{message}; see `{path} --help`") from error


class LazyGroup(click.Group):
    """A group that imports a command only when it is used.

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
            raise TypeError(f"{module}:{attribute} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            hint = did_you_mean(name, self._table)
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each[2]) for name, each in self._table.items()])


def with_settings(*names: str, import_app: bool = True) -> Callable[[_Function], click.Command]:
    """Give a function --config, --debug and an option for each named setting.

    The function gets the loaded settings as `settings`. Values of options are checked like those
    of all other sources of settings: an invalid value gives the same error everywhere.

    :param import_app: if the setting `app` is MODULE:APP, import the app, so that the settings
        given in its code apply.
    """
    chosen = [each for each in declarations() if each.name in names and each.kind != "tables"]

    def decorate(function: Any) -> Any:
        def call(config: str | None, **arguments: Any) -> Any:
            flags = {each.name: _given(arguments.pop(each.name)) for each in chosen}
            settings = load(flags=flags, config=config)
            if import_app:
                settings = import_settings(settings, names)
            return function(settings=settings, **arguments)

        update_wrapper(call, function)
        for each in reversed(chosen):
            _setting_option(each)(call)
        click.option(
            "-c", "--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]."
        )(call)
        return _debug_option(call)

    return decorate


def _given(value: Any) -> Any:
    """Return the value of an option, None for a repeatable option that was not given."""
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
    "app": "NAME|MODULE:APP",
    "job": "MODULE:FUNCTION",
    "job_context": "MODULE:FUNCTION",
    "job_failure": "MODULE:FUNCTION",
    "queues": "GLOB",
    "exclude": "GLOB",
    "broker": "URL",
    "coordinator": "URL",
    "history": "URL",
    **{f"coordinator_{each}": "FILE" for each in ("ca", "cert", "key", "password_file")},
    "group": "NAME",
    "keys": "FILE",
    "namespace": "PATH",
    "log_level": "LEVEL",
    "log_config": "FILE",
    "log_format": "text|json",
    "http": "HOST:PORT",
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
        help="Show the traceback of an error.",
    )(function)


def output_option(function: _Function) -> _Function:
    """Add -o table|json|jsonl|csv|name, as `form`."""
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="Format of the data on stdout.",
    )(function)


def reason_option(function: _Function) -> _Function:
    """Add --reason, as `reason`: the action log keeps it."""
    return click.option(
        "--reason",
        metavar="TEXT",
        default="",
        callback=_checked_reason,
        help="Why you do this; `qdo audit` shows it.",
    )(function)


def _checked_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if len(value) > MAX_TEXT:
        raise UsageError(
            reason=f"--reason must have at most {MAX_TEXT} characters, got {len(value)}; shorten"
            " it, or refer to a longer text"
        )
    return value


def version_option(function: _Function) -> _Function:
    """Add --version."""
    return click.version_option(__version__, "--version", message="%(prog)s %(version)s")(function)


def require_app(settings: Settings) -> str:
    """Return the name of the app; raise UsageError if none is given."""
    if not settings.app:
        raise UsageError(
            reason="an app must be named; use --app MODULE:APP, QDO_APP=MODULE:APP, or "
            'app = "MODULE:APP" in the settings file; NAME is enough if the app has no settings '
            "in code"
        )
    return settings.app
