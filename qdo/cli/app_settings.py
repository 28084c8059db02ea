"""The settings in force for a command, including those that the app sets in code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from qdo.cli.output import print_message
from qdo.sending.sender import code_origin
from qdo.settings.settings import Settings
from qdo.settings.values import DEFAULT

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
