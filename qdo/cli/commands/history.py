"""`qdo history`: what queues did, and which attempts failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

import click

from qdo.cli.options import output_option, require_app, with_settings
from qdo.cli.output import emit, emit_newest, iso_time, parse_duration, print_message, values_text
from qdo.history.recorder import RecordedAction, RecordedRun
from qdo.history.reports import (
    MinuteReport,
    QueueReport,
    actions,
    failures,
    minute_reports,
    owners,
    queue_reports,
)
from qdo.ops.items import owner_item
from qdo.settings.settings import Settings

_QUEUES = ("queue", "done", "failed", "retried", "dead_letters", "mean_seconds", "p95_seconds")
_MINUTES = (
    *("minute", "done", "failed", "mean_seconds", "p50_seconds", "p95_seconds", "max_seconds"),
)
_ACTIONS = ("time", "by", "command", "target", "from", "to", "reason")
_OWNERS = ("claimed", "ended", "owner", "host", "pid", "fence", "why")
_RUNS = ("time", "queue", "id", "attempt", "outcome", "error", "seconds")

_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group()
def history() -> None:
    """Show what workers recorded in the database of the setting `history`.

    \b
    qdo history queues --app shop:app 'eu-*' --since 2h
    qdo history failures --app shop:app --since 2h
    qdo history durations --app shop:app orders
    qdo history owners --app shop:app orders --since 7d
    qdo history actions --app shop:app --since 90d

    Rows are kept for 30 days, and changes of operators for a year. Rows of attempts appear a second
    after the end of the attempt, and changes about a minute later.
    """


def _report(
    argument: str, nouns: str = "", limit: int = 50
) -> Callable[[_Function], Callable[..., Any]]:
    """Give a command its argument, --since as `oldest`, --limit for some nouns, and the app."""

    def decorate(function: Any) -> Any:
        def call(since: str, settings: Settings, **arguments: Any) -> Any:
            app = require_app(settings)
            oldest = time.time() - parse_duration(since, "--since")
            return function(app=app, oldest=oldest, history=settings.history, **arguments)

        call = with_settings("app", "history")(output_option(update_wrapper(call, function)))
        if nouns:
            click.option(
                "--limit",
                metavar="N",
                type=click.IntRange(min=1),
                default=limit,
                show_default=True,
                help=f"The number of {nouns}, the newest first.",
            )(call)
        click.option(
            "--since",
            metavar="DURATION",
            default="1d",
            show_default=True,
            help="Only what ended at most this long ago: 2h, 7d.",
        )(call)
        click.argument(argument, default="*" if argument == "glob" else None)(call)
        return call

    return decorate


@history.command()
@_report("glob")
def queues(glob: str, oldest: float, app: str, history: str, form: str) -> None:
    """List queues that match GLOB with their attempts, failures and durations.

    P95 is the upper bound of a class of durations: at most three times too large. Without an
    attempt that ran, MEAN and P95 are unknown.
    """
    found = queue_reports(history, app, oldest, glob)
    if not found:
        print_message(f"hint: no attempt of app {app!r} in the history matches")
    emit("qdo.history-queues/1", [_queue_item(each, form) for each in found], form, _QUEUES)


@history.command("failures")
@_report("glob", "attempts")
@click.option("--slow", is_flag=True, help="List attempts that returned after 10 s and more.")
def failures_(
    glob: str, oldest: float, limit: int, slow: bool, app: str, history: str, form: str
) -> None:
    """List attempts that failed, or with --slow were slow, of queues that match GLOB."""
    found = failures(history, app, oldest, glob, limit=limit + 1, slow=slow)
    items = [_run_item(each, form) for each in found]
    empty = f"no {'slow' if slow else 'failed'} attempt of app {app!r} in the history matches"
    schema = "qdo.history-failures/1"
    emit_newest(schema, items, limit, form, _RUNS, nouns="attempts", empty=empty)


@history.command()
@_report("queue", "minutes", 60)
def durations(queue: str, oldest: float, limit: int, app: str, history: str, form: str) -> None:
    """List how long the attempts of QUEUE took, minute by minute, newest first.

    P50, P95 and MAX are upper bounds of classes of durations: at most three times too large.
    """
    found = minute_reports(history, app, queue, oldest, limit=limit + 1)
    items = [_minute_item(each, form) for each in found]
    empty = f"no attempt of queue {queue!r} of app {app!r} in the history matches"
    schema = "qdo.history-durations/1"
    emit_newest(schema, items, limit, form, _MINUTES, nouns="minutes", empty=empty)


@history.command("owners")
@_report("queue", "owners")
def owners_(queue: str, oldest: float, limit: int, app: str, history: str, form: str) -> None:
    """List the workers that owned QUEUE, newest first, and why each gave it up.

    A killed process records no end: the reason is unknown once another worker has claimed the
    queue.
    """
    found = owners(history, app, queue, oldest, limit=limit + 1)
    items = list(map(owner_item, found))
    empty = f"no owner of queue {queue!r} of app {app!r} in the history matches"
    emit_newest("qdo.history-owners/1", items, limit, form, _OWNERS, nouns="owners", empty=empty)


@history.command("actions")
@_report("glob", "changes")
def actions_(glob: str, oldest: float, limit: int, app: str, history: str, form: str) -> None:
    """List the changes that operators made, like `qdo audit`, but for a year.

    GLOB selects them by their command, or by the name of what was changed, such as a queue.
    """
    found = actions(history, app, oldest, glob, limit=limit + 1)
    items = [_action_item(each, form) for each in found]
    empty = f"no change of app {app!r} in the history matches"
    schema = "qdo.history-actions/1"
    emit_newest(schema, items, limit, form, _ACTIONS, nouns="changes", empty=empty)


def _action_item(action: RecordedAction, form: str) -> dict[str, Any]:
    before, after = (
        None if each is None else json.loads(each) for each in (action.before, action.after)
    )
    table = form == "table"
    return {
        "id": action.id,
        "time": iso_time(action.at),
        "by": action.by,
        "account": action.account,
        "command": action.command,
        "target": action.target,
        "from": values_text(before) if table else before,
        "to": values_text(after) if table else after,
        "reason": action.reason,
    }


def _minute_item(report: MinuteReport, form: str) -> dict[str, Any]:
    return {
        "minute": iso_time(report.minute),
        "done": report.done,
        "failed": report.failed,
        "mean_seconds": _rounded(report.mean_seconds, form),
        "p50_seconds": _rounded(report.p50_seconds, form),
        "p95_seconds": _rounded(report.p95_seconds, form),
        "max_seconds": _rounded(report.max_seconds, form),
    }


def _queue_item(report: QueueReport, form: str) -> dict[str, Any]:
    return {
        "queue": report.queue,
        "done": report.done,
        "failed": report.failed,
        "retried": report.retried,
        "dead_letters": report.dead_lettered,
        "mean_seconds": _rounded(report.mean_seconds, form),
        "p95_seconds": _rounded(report.p95_seconds, form),
    }


def _run_item(run: RecordedRun, form: str) -> dict[str, Any]:
    return {
        "time": iso_time(run.at),
        "queue": run.queue,
        "id": run.id,
        "attempt": run.attempt,
        "outcome": run.outcome,
        "error": run.error,
        "seconds": _rounded(run.seconds, form),
    }


def _rounded(seconds: float | None, form: str) -> float | None:
    """Return seconds for a table in steps of 0.1 ms, the smallest class of durations."""
    return round(seconds, 4) if seconds is not None and form == "table" else seconds
