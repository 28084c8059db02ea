"""Imports apps and jobs by their names on the command line or in settings."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from qdo.app import App
from qdo.errors import JobImportError, JobModuleError, QdoError, UsageError
from qdo.jobs.options import check_job
from qdo.settings.settings import Settings
from qdo.settings.values import from_origin
from qdo.system.logs import enable_again
from qdo.text import did_you_mean, one_line

USAGE = (
    "name an app with its jobs as MODULE:APP, as an argument or in the setting `app`, or give "
    "--app NAME and --job MODULE:FUNCTION"
)
# Names of files with import code, and of generated code such as the `__init__` of a dataclass.
_IMPORT = ("<", os.path.dirname(importlib.__file__) + os.sep)
_QDO_FOLDER = os.path.dirname(__file__) + os.sep


def prepare(settings: Settings, target: str | None = None) -> tuple[App, Settings]:
    """Return the app that the settings or `target` name, and the current settings.

    :param settings: the settings from file, environment and flags.
    :param target: MODULE:APP (see `choose_target`).
    """
    target = choose_target(settings, target)
    app = load_app(target) if target else _app_around_job(settings)
    if settings.job_context:
        app.hooks.replace_context(load_callable(settings.job_context))
    if settings.job_failure:
        app.hooks.replace_failure(load_callable(settings.job_failure))
    if not app.jobs:
        raise UsageError(
            reason=f"app {app.name!r} has no job; decorate a function with @app.job(), "
            "in a module that is imported together with the app"
        )
    app.use(settings)
    return app, app.anchor()


def choose_target(settings: Settings, target: str | None) -> str | None:
    """Return the app to import, from the argument `target` or from the setting `app`.

    The function imports nothing, because the parent of worker processes calls it.

    :return: MODULE:APP, or None to make an app around the settings `app` and `job`.
    """
    target = target or settings.target or None
    if target:
        _split(target)
        if settings.job:
            raise UsageError(
                reason=f"both {target} and the job {settings.job} "
                f"(from {settings.origin('job')}) are named; {USAGE}"
            )
    elif not settings.app or not settings.job:
        raise UsageError(reason=USAGE)
    return target


def load_named_app(settings: Settings) -> App:
    """Import the app that the setting `app` names as MODULE:APP, for a command."""
    try:
        return load_app(settings.target)
    except JobImportError as error:
        origin = from_origin(settings.origin("app"))
        reason = error.details["reason"]
        raise UsageError(
            reason=f"cannot import the app {settings.target!r}{origin}: {reason}; fix it, start in "
            "the folder that contains its module, or give --app NAME and, as options, what the app "
            "sets in code",
            target=settings.target,
        ) from error


def load_app(target: str) -> App:
    """Import the app MODULE:APP; raise JobImportError, or JobModuleError if its code fails."""
    app = _load(target)
    if isinstance(app, App):
        return app
    raise JobImportError(
        target=target,
        reason=f"it must be a qdo.App, as qdo.App(NAME) creates it, got {_kind(app)}",
    )


def load_job(target: str) -> Any:
    """Import the job MODULE:FUNCTION; raise UsageError if it does not accept a job's arguments."""
    job = load_callable(target)
    check_job(job)
    return job


def load_callable(target: str) -> Any:
    """Import MODULE:NAME, and check that the object is callable."""
    function = _load(target)
    if isinstance(function, App):
        raise JobImportError(target=target, reason=f"it is an app; omit --job: qdo-worker {target}")
    if not callable(function):
        raise JobImportError(target=target, reason=f"it must be a function, got {_kind(function)}")
    return function


def _app_around_job(settings: Settings) -> App:
    app = App(settings.app)
    app.job()(load_job(settings.job))
    return app


def _split(target: str) -> tuple[str, str]:
    module, colon, attribute = target.partition(":")
    if not colon:
        raise JobImportError(target=target, reason="it has no ':'")
    if not module or not attribute:
        raise JobImportError(target=target, reason="it must have a name on both sides of ':'")
    return module, attribute


def _load(target: str) -> Any:
    module_name, path = _split(target)
    value: Any = _import(target, module_name)
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            hint = did_you_mean(name, dir(value)) + _hidden(value)
            reason = f"{_kind(value)} has no {name!r}{hint}"
            raise JobImportError(target=target, reason=reason) from error
    return value


def _hidden(value: Any) -> str:
    """Return a hint if a module hides a module in the current folder, or ""."""
    own = os.path.abspath(getattr(value, "__name__", "").partition(".")[0])
    path = getattr(value, "__file__", None) or "built-in"
    if not isinstance(value, ModuleType) or path.startswith(own):
        return ""
    if not (os.path.isfile(f"{own}.py") or os.path.isfile(os.path.join(own, "__init__.py"))):
        return ""
    return f"; it is {path}, which comes before the current folder: rename yours"


def _import(target: str, module_name: str) -> ModuleType:
    # By default, a console script does not search the current folder for modules. Add the folder
    # last, because its files must not replace modules of Python or of an installed package.
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise JobImportError(
                target=target, reason=f"there is no module {error.name!r}"
            ) from error
        raise _broken(target, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(target, error) from error
    finally:
        enable_again(f"module {module_name}")


def _broken(target: str, error: BaseException) -> JobModuleError:
    if isinstance(error, SyntaxError) and error.filename:
        # The module has not run, so no frame belongs to the module. str() would repeat the
        # location.
        text: object = error.msg
        place = _place(error.filename, error.lineno)
    else:
        text = error
        frames = traceback.extract_tb(error.__traceback__)
        # An error of qdo concerns a call in the module. Report the line of the call, not a line of
        # qdo.
        skipped = (_QDO_FOLDER,) if isinstance(error, QdoError) else ()
        own = [each for each in frames if not each.filename.startswith((*_IMPORT, *skipped))]
        place = _place(own[-1].filename, own[-1].lineno) if own else ""
    return JobModuleError(target=target, reason=f"{type(error).__name__}: {one_line(text)}{place}")


def _place(path: str, line: int | None) -> str:
    return f" ({os.path.relpath(path)} line {line})"


def _kind(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__!r}"
    return f"{value!r:.60} of type {type(value).__name__}"
