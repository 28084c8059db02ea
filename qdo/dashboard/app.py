"""The dashboard as a WSGI app."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from flask import Flask, Response, render_template, request
from werkzeug.exceptions import HTTPException

from qdo.dashboard.access import guard
from qdo.dashboard.actions import ANSWER_SECONDS, actions, asking
from qdo.dashboard.api import api
from qdo.dashboard.board import EXTENSION, Board, DashboardOptions
from qdo.dashboard.pages import page, pages, queue_pages
from qdo.dashboard.reading import MOST_WAITING, Actions, DirectReads, FleetReader
from qdo.dashboard.rendering import prepare
from qdo.errors import QdoError, UnreachableError, UsageError
from qdo.settings.settings import Settings

_P = ParamSpec("_P")


def _typed(
    fields: Callable[_P, DashboardOptions],
) -> Callable[[Callable[..., Flask]], Callable[Concatenate[Settings, _P], Flask]]:
    """Show type checkers the fields of `DashboardOptions` as parameters of a function."""
    return lambda function: function


@_typed(DashboardOptions)
def create_app(settings: Settings, **options: Any) -> Flask:
    """Return a WSGI app that shows one app. Serve it, or mount it in another WSGI app.

    The app opens connections at the first request. `close_app` ends the threads of the app.

    :param settings: the settings of the app, such as ``app.settings``.
    :param options: the fields of `DashboardOptions`.
    :raises DashboardUnsafeError: there is no token, and `anonymous` is False.
    """
    chosen = DashboardOptions(**options)
    chosen.check()
    if not settings.app:
        raise UsageError(reason="the settings must name an app, got none")
    flask = Flask(__name__)
    room = threading.BoundedSemaphore(MOST_WAITING)
    flask.extensions[EXTENSION] = Board(
        settings,
        chosen,
        FleetReader(settings, chosen.rules, chosen.pause_seconds, room),
        DirectReads(settings, "qdo-dashboard-direct", room=room),
        DirectReads(settings, "qdo-dashboard-asking", ANSWER_SECONDS),
        Actions(settings),
    )
    prepare(flask)
    guard(flask, chosen, settings.app)
    for blueprint in (pages, queue_pages, actions, asking, api):
        flask.register_blueprint(blueprint)
    flask.register_error_handler(HTTPException, _refused)
    flask.register_error_handler(QdoError, _failed)
    return flask


def close_app(flask: Flask) -> None:
    """End the threads of the dashboard, and close its connections."""
    board: Board = flask.extensions[EXTENSION]
    board.close()


def _failed(error: QdoError) -> tuple[str, int]:
    code = 503 if isinstance(error, UnreachableError) else 409
    return page("failed.html", reason=str(error)), code


def _refused(error: HTTPException) -> Response | tuple[Any, int]:
    code = error.code or 500
    if request.path.startswith("/api/"):
        return {"error": error.description}, code
    return render_template("refused.html", code=code, reason=error.description), code
