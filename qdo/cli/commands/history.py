"""The commands of `qdo history`, which show the past of queues and failed attempts."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

import click

from qdo.cli.options import duration_option, limit_option, require_app, with_output
from qdo.cli.output import change_cells, emit, emit_newest, iso_time, print_message
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


def _report(argument: str, nouns: str = "", limit: int = 50) -> Callable[[Any], Any]:
    """Add the argument, --since (as `oldest`), --limit (for a list) and the app to a command."""

    def decorate(function: Any) -> Any:
        def call(since: float, settings: Settings, **arguments: Any) -> Any:
            app = require_app(settings)
            oldest = time.time() - since
            return function(app=app, oldest=oldest, history=settings.history, **arguments)

        call = with_output("app", "history")(update_wrapper(call, function))
        if nouns:
            limit_option(limit, f"The number of {nouns}, the newest first.")(call)
        duration_option("--since", "1d", "Only what ended at most this long ago: 2h, 7d.")(call)
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
    reports = queue_reports(history, app, oldest, glob)
    if not reports:
        print_message(f"hint: no attempt of app {app!r} in the history matches")
    items = map(_queue_item, reports)
    emit("qdo.history-queues/1", items, form, _QUEUES, cells=_rounded)


@history.command("failures")
@_report("glob", "attempts")
@click.option("--slow", is_flag=True, help="List attempts that returned after 10 s and more.")
def failures_(
    glob: str, oldest: float, limit: int, slow: bool, app: str, history: str, form: str
) -> None:
    """List attempts that failed, or with --slow were slow, of queues that match GLOB."""
    emit_newest(
        "qdo.history-failures/1",
        list(map(_run_item, failures(history, app, oldest, glob, limit=limit + 1, slow=slow))),
        limit,
        form,
        _RUNS,
        nouns="attempts",
        empty=f"no {'slow' if slow else 'failed'} attempt of app {app!r} in the history matches",
        cells=_rounded,
    )


@history.command()
@_report("queue", "minutes", 60)
def durations(queue: str, oldest: float, limit: int, app: str, history: str, form: str) -> None:
    """List how long the attempts of QUEUE took, minute by minute, newest first.

    P50, P95 and MAX are upper bounds of classes of durations: at most three times too large.
    """
    emit_newest(
        "qdo.history-durations/1",
        list(map(_minute_item, minute_reports(history, app, queue, oldest, limit=limit + 1))),
        limit,
        form,
        _MINUTES,
        nouns="minutes",
        empty=f"no attempt of queue {queue!r} of app {app!r} in the history matches",
        cells=_rounded,
    )


@history.command("owners")
@_report("queue", "owners")
def owners_(queue: str, oldest: float, limit: int, app: str, history: str, form: str) -> None:
    """List the workers that owned QUEUE, newest first, and why each gave it up.

    A killed process records no end: the reason is unknown once another worker has claimed the
    queue.
    """
    emit_newest(
        "qdo.history-owners/1",
        list(map(owner_item, owners(history, app, queue, oldest, limit=limit + 1))),
        limit,
        form,
        _OWNERS,
        nouns="owners",
        empty=f"no owner of queue {queue!r} of app {app!r} in the history matches",
    )


@history.command("actions")
@_report("glob", "changes")
def actions_(glob: str, oldest: float, limit: int, app: str, history: str, form: str) -> None:
    """List the changes that operators made, like `qdo audit`, but for a year.

    GLOB selects them by their command, or by the name of what was changed, such as a queue.
    """
    emit_newest(
        "qdo.history-actions/1",
        list(map(_action_item, actions(history, app, oldest, glob, limit=limit + 1))),
        limit,
        form,
        _ACTIONS,
        nouns="changes",
        empty=f"no change of app {app!r} in the history matches",
        cells=change_cells,
    )


def _action_item(action: RecordedAction) -> dict[str, Any]:
    return {
        "id": action.id,
        "time": iso_time(action.at),
        "by": action.by,
        "account": action.account,
        "command": action.command,
        "target": action.target,
        "from": None if action.before is None else json.loads(action.before),
        "to": None if action.after is None else json.loads(action.after),
        "reason": action.reason,
    }


def _minute_item(report: MinuteReport) -> dict[str, Any]:
    return {**dataclasses.asdict(report), "minute": iso_time(report.minute)}


def _queue_item(report: QueueReport) -> dict[str, Any]:
    return {
        "queue": report.queue,
        "done": report.done,
        "failed": report.failed,
        "retried": report.retried,
        "dead_letters": report.dead_lettered,
        "mean_seconds": report.mean_seconds,
        "p95_seconds": report.p95_seconds,
    }


def _run_item(run: RecordedRun) -> dict[str, Any]:
    return {
        "time": iso_time(run.at),
        "queue": run.queue,
        "id": run.id,
        "attempt": run.attempt,
        "outcome": run.outcome,
        "error": run.error,
        "seconds": run.seconds,
    }


def _rounded(item: Mapping[str, Any]) -> dict[str, float]:
    """Round durations to 0.1 ms, which is the smallest class of durations."""
    return {key: round(each, 4) for key, each in item.items() if isinstance(each, float)}
