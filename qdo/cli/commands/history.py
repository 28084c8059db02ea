"""`qdo history`: what queues did, and which attempts failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, parse_duration, print_message, values_text
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

_SETTINGS = ("app", "history")
_QUEUES = {
    "queue": "QUEUE",
    "done": "DONE",
    "failed": "FAILED",
    "retried": "RETRIED",
    "dead_letters": "DEAD LETTERS",
    "mean_seconds": "MEAN SECONDS",
    "p95_seconds": "P95 SECONDS",
}
_MINUTES = {
    "minute": "MINUTE",
    "done": "DONE",
    "failed": "FAILED",
    "mean_seconds": "MEAN SECONDS",
    "p50_seconds": "P50 SECONDS",
    "p95_seconds": "P95 SECONDS",
    "max_seconds": "MAX SECONDS",
}
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


def _since_option(function: _Function) -> _Function:
    return click.option(
        "--since",
        metavar="DURATION",
        default="1d",
        show_default=True,
        help="Only what ended at most this long ago: 2h, 7d.",
    )(function)


@history.command()
@click.argument("glob", default="*")
@_since_option
@with_settings(*_SETTINGS)
@output_option
def queues(glob: str, since: str, form: str, settings: Settings) -> None:
    """List queues that match GLOB with their attempts, failures and durations.

    P95 is the upper bound of a class of durations: at most three times too large. Without an
    attempt that ran, MEAN and P95 are unknown.
    """
    app = require_app(settings)
    oldest = time.time() - parse_duration(since, "--since")
    found = queue_reports(settings.history, app, oldest, glob)
    if not found:
        print_message(f"hint: no attempt of app {app!r} in the history matches")
    emit("qdo.history-queues/1", [_queue_item(each, form) for each in found], form, _QUEUES)


@history.command("failures")
@click.argument("glob", default="*")
@_since_option
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="The number of attempts, the newest first.",
)
@click.option("--slow", is_flag=True, help="List attempts that returned after 10 s and more.")
@with_settings(*_SETTINGS)
@output_option
def failures_(glob: str, since: str, limit: int, slow: bool, form: str, settings: Settings) -> None:
    """List attempts that failed, or with --slow were slow, of queues that match GLOB."""
    app = require_app(settings)
    oldest = time.time() - parse_duration(since, "--since")
    found = failures(settings.history, app, oldest, glob, limit=limit + 1, slow=slow)
    if not found:
        kind = "slow" if slow else "failed"
        print_message(f"hint: no {kind} attempt of app {app!r} in the history matches")
    items = [_run_item(each, form) for each in found[:limit]]
    emit("qdo.history-failures/1", items, form, {name: name.upper() for name in _RUNS})
    if len(found) > limit:
        print_message(f"hint: only the newest {limit} attempts are listed; see --limit and --since")


@history.command()
@click.argument("queue")
@_since_option
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="The number of minutes, the newest first.",
)
@with_settings(*_SETTINGS)
@output_option
def durations(queue: str, since: str, limit: int, form: str, settings: Settings) -> None:
    """List how long the attempts of QUEUE took, minute by minute, newest first.

    P50, P95 and MAX are upper bounds of classes of durations: at most three times too large.
    """
    app = require_app(settings)
    oldest = time.time() - parse_duration(since, "--since")
    found = minute_reports(settings.history, app, queue, oldest, limit=limit + 1)
    if not found:
        print_message(f"hint: no attempt of queue {queue!r} of app {app!r} in the history matches")
    items = [_minute_item(each, form) for each in found[:limit]]
    emit("qdo.history-durations/1", items, form, _MINUTES)
    if len(found) > limit:
        print_message(f"hint: only the newest {limit} minutes are listed; see --limit and --since")


@history.command("owners")
@click.argument("queue")
@_since_option
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="The number of owners, the newest first.",
)
@with_settings(*_SETTINGS)
@output_option
def owners_(queue: str, since: str, limit: int, form: str, settings: Settings) -> None:
    """List the workers that owned QUEUE, newest first, and why each gave it up.

    A killed process records no end: the reason is unknown once another worker has claimed the
    queue.
    """
    app = require_app(settings)
    oldest = time.time() - parse_duration(since, "--since")
    found = owners(settings.history, app, queue, oldest, limit=limit + 1)
    if not found:
        print_message(f"hint: no owner of queue {queue!r} of app {app!r} in the history matches")
    items = list(map(owner_item, found[:limit]))
    emit("qdo.history-owners/1", items, form, {name: name.upper() for name in _OWNERS})
    if len(found) > limit:
        print_message(f"hint: only the newest {limit} owners are listed; see --limit and --since")


@history.command("actions")
@click.argument("glob", default="*")
@_since_option
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="The number of changes, the newest first.",
)
@with_settings(*_SETTINGS)
@output_option
def actions_(glob: str, since: str, limit: int, form: str, settings: Settings) -> None:
    """List the changes that operators made, like `qdo audit`, but for a year.

    GLOB selects them by their command, or by the name of what was changed, such as a queue.
    """
    app = require_app(settings)
    oldest = time.time() - parse_duration(since, "--since")
    found = actions(settings.history, app, oldest, glob, limit=limit + 1)
    if not found:
        print_message(f"hint: no change of app {app!r} in the history matches")
    items = [_action_item(each, form) for each in found[:limit]]
    emit("qdo.history-actions/1", items, form, {name: name.upper() for name in _ACTIONS})
    if len(found) > limit:
        print_message(f"hint: only the newest {limit} changes are listed; see --limit and --since")


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
