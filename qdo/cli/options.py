"""Shared options of commands, for the settings, the app and the output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qdo.cli.output import FORMATS, parse_duration, parse_time, print_message
from qdo.errors import UsageError
from qdo.settings.settings import Settings, code_origin, declarations
from qdo.settings.sources import load
from qdo.settings.values import CONFIG_VARIABLE, DEFAULT, Declaration

if TYPE_CHECKING:
    from qdo.app import App

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The settings of a command that opens only the coordinator.
COORDINATOR = ("app", "coordinator", "namespace", "connect_seconds")
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


class Duration(click.ParamType[float]):
    """The type of an option for a duration such as 90, 15m, 2h or 7d, with a value in seconds.

    :param rule: the requirement that `allows` checks, for error messages.
    """

    name = "DURATION"

    def __init__(
        self, rule: str = "", allows: Callable[[float], bool] = lambda seconds: True
    ) -> None:
        self._rule = rule
        self._allows = allows

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        flag = "the duration" if param is None else max(param.opts, key=len)
        seconds = parse_duration(value, flag)
        if not self._allows(seconds):
            raise UsageError(reason=f"{flag} must be {self._rule}, got {value!r}")
        return seconds


class Time(click.ParamType[float]):
    """The type of an option for a time, with a Unix time as the value."""

    name = "TIME"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        return parse_time(value, "the time" if param is None else param.opts[0])


def _can_be_awaited(seconds: float) -> bool:
    from qdo.fleet.action_machine import AHEAD_SECONDS  # only commands that ask workers need it

    return 0 < seconds <= AHEAD_SECONDS


DURATION = Duration()
TIME = Time()
# The interval of a command that reads repeatedly.
PERIOD = Duration("at least 0.5s", lambda seconds: seconds >= 0.5)
# The time limit for a worker's answer.
ANSWER_TIMEOUT = Duration("at most 1h and not 0", _can_be_awaited)


def duration_option(
    flag: str, default: str, help: str, kind: Duration = DURATION
) -> Callable[[_Function], _Function]:
    return click.option(flag, type=kind, default=default, show_default=True, help=help)


def limit_option(
    default: int | None, help: str, most: int | None = None
) -> Callable[[_Function], _Function]:
    """Add --limit, from 1 to `most`. If `default` is None, there is no limit by default."""
    return click.option(
        "--limit",
        metavar="N",
        type=click.IntRange(1, most),
        default=default,
        show_default=default is not None,
        help=help,
    )


def import_settings(settings: Settings, names: Collection[str]) -> tuple[App | None, Settings]:
    """Return the app that `settings` name, and the app's settings. Report overridden settings."""
    app, settings = import_app(settings)
    if app is not None:
        # Do not report options, because the user has just typed them.
        report_overridden(app, settings, [each for each in names if not _is_option(settings, each)])
    return app, settings


def import_app(settings: Settings) -> tuple[App | None, Settings]:
    """Return the app that the settings name as MODULE:APP, and the settings in force.

    If the settings contain only a name or no app, return None and the unchanged settings.
    """
    if not settings.target:
        _note_dotted(settings.app)
        return None, settings
    # Import this late, because a command that needs only the app's name then starts faster.
    from qdo.loading import load_named_app

    # The app's module may print, but only the command's data belongs to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        app = load_named_app(settings)
    return app, app.use(settings)


def _note_dotted(name: str) -> None:
    # Any name may be the name of an app, so this is only a hint.
    module, _, app = name.rpartition(".")
    path = module.replace(".", os.sep)
    files = [each for each in (f"{path}.py", f"{path}/__init__.py") if os.path.isfile(each)]
    if module and files:
        print_message(
            f"hint: {name!r} is the name of an app here; if you mean that of {files[0]}, write "
            f"{module}:{app}"
        )


def report_overridden(app: App, settings: Settings, names: Collection[str]) -> None:
    """Report on stderr the named settings that differ from the app's code."""
    for name, value in settings.overridden(app.given).items():
        if name in names:
            print_message(
                f"hint: {name} is {getattr(settings, name)} (from {settings.origin(name)}), which "
                f"overrides {value} in {app.origin}"
            )


def _is_option(settings: Settings, name: str) -> bool:
    return settings.origin(name).startswith("--")


def is_code_known(settings: Settings) -> bool:
    """Return whether the app was imported, so that its name comes from its code."""
    return settings.origin("app") == code_origin(settings.app)


def code_hint(settings: Settings, name: str) -> str:
    """Return the end of a hint about an empty location.

    Code that was not read may name another location.
    """
    if is_code_known(settings) or settings.origin(name) != DEFAULT:
        return ""
    return f"; if the code of app {settings.app!r} sets another {name}, use --app MODULE:APP"


def with_settings(
    *names: str, import_app: bool = True, pass_app: bool = False
) -> Callable[[_Function], click.Command]:
    """Add --config, --debug, an option for each named setting, and `settings` to a function.

    :param import_app: import an app that is named as MODULE:APP, because its code may contain
        settings.
    :param pass_app: also pass the imported app, or None, to the function as `code`.
    """
    chosen = [each for each in declarations() if each.name in names and each.kind != "tables"]

    def decorate(function: Any) -> Any:
        def call(config: str | None, **arguments: Any) -> Any:
            # Check options like values from other sources. Then the errors are the same.
            flags = {each.name: _given(arguments.pop(each.name)) for each in chosen}
            settings = load(flags=flags, config=config)
            app = None
            if import_app:
                app, settings = import_settings(settings, names)
            if pass_app:
                arguments["code"] = app
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


def with_output(*names: str, **options: bool) -> Callable[[Any], Any]:
    """Add -o table|json|jsonl|csv|name (as `form`) and settings to a command.

    :param options: options of `with_settings`.
    """

    def decorate(function: Any) -> Any:
        click.option(
            "-o",
            "--output",
            "form",
            type=click.Choice(FORMATS),
            default="table",
            show_default=True,
            help="Format of the data on stdout.",
        )(function)
        return with_settings(*names, **options)(function)

    return decorate


def reason_option(function: _Function) -> _Function:
    """Add --reason, as `reason`, for the action log."""
    return click.option(
        "--reason",
        metavar="TEXT",
        default="",
        callback=_checked_reason,
        help="Why you do this; `qdo audit` shows it.",
    )(function)


def _checked_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    from qdo.fleet.audit_entries import MAX_TEXT  # only changes need this module

    if len(value) > MAX_TEXT:
        raise UsageError(
            reason=f"--reason must have at most {MAX_TEXT} characters, got {len(value)}; shorten"
            " it, or refer to a longer text"
        )
    return value


def require_app(settings: Settings) -> str:
    """Return the name of the app; raise UsageError if the settings name no app."""
    if not settings.app:
        raise UsageError(
            reason="an app must be named; use --app MODULE:APP, QDO_APP=MODULE:APP, or "
            'app = "MODULE:APP" in the settings file; NAME is enough if the app has no settings '
            "in code"
        )
    return settings.app
