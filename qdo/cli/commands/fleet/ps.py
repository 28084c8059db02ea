"""`qdo ps`: the messages that are running now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from qdo.cli.asking import ask
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, parse_duration, print_message
from qdo.cli.readings import watch_option
from qdo.cli.runs import blocked_texts, stack_text
from qdo.errors import ActionsFailedError, UsageError
from qdo.fleet import actions as names
from qdo.fleet.action_machine import AHEAD_SECONDS, DONE
from qdo.fleet.audit_entries import Values
from qdo.ops.runs import read_runs
from qdo.settings.settings import Settings
from qdo.text import join_some, pluralize, printable, short_duration

_COLUMNS = {
    "worker": "WORKER",
    "queue": "QUEUE",
    "id": "MESSAGE",
    "attempt": "ATTEMPT",
    "running": "RUNNING",
    "where": "WHERE",
}


@click.command()
@click.argument("glob", default="*")
@click.option("--worker", metavar="GLOB", default="*", help="Only ask these workers.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, names.MAX_RUNS),
    default=100,
    show_default=True,
    help="List at most N messages, those that have run for longest.",
)
@click.option("--stacks", is_flag=True, help="Show the stack of each job.")
@click.option(
    "--timeout", metavar="DURATION", default="5s", show_default=True, help="How long to wait."
)
@watch_option
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def ps(
    glob: str,
    worker: str,
    limit: int,
    stacks: bool,
    timeout: str,
    form: str,
    settings: Settings,
) -> None:
    """List the messages that run now, in queues that match GLOB, the longest first.

    Each worker is asked, and its answer is in the action log. RUNNING is an estimate, because the
    engine reads no clock for each message. WHERE is the innermost line of your code.
    """
    require_app(settings)
    seconds = parse_duration(timeout, "--timeout")
    if not 0 < seconds <= AHEAD_SECONDS:
        raise UsageError(reason=f"--timeout must be at most 1h and not 0, got {timeout!r}")
    args: Values = {"queues": glob, "most": limit}
    asked = ask(settings, worker, names.RUNS, args, seconds, "")
    found = read_runs(asked)
    for text in blocked_texts(found):
        print_message(text)
    shown = found.items[:limit]
    if form == "table":
        for item in shown:
            item["running"] = f"~{short_duration(item['seconds'])}"
    emit("qdo.runs/1", shown, form, _COLUMNS)
    if form == "table":
        _print_stacks(shown if stacks else ())
    if len(shown) < found.total:
        print_message(
            f"hint: {len(shown)} of {pluralize(found.total, 'message')} are listed; see --limit"
        )
    failed = [f"{each.worker} ({each.outcome})" for each in asked if each.outcome != DONE]
    if failed:
        of = pluralize(len(asked), "worker")
        raise ActionsFailedError(
            action=names.RUNS, total=of, count=len(failed), names=join_some(failed)
        )
    if not found.total:
        print_message("hint: no message runs now")


def _print_stacks(items: Sequence[dict[str, Any]]) -> None:
    for item in items:
        heading = f"--- {item['queue']}, message {item['id']}, on {item['worker']} ---"
        sys.stdout.write(f"\n{printable(heading)}\n{stack_text(item)}\n")
