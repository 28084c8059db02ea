"""`qdo action`: ask workers for something."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

import click

from qdo.cli.asking import ask
from qdo.cli.changing import Consent, changing
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, parse_duration
from qdo.errors import ActionsFailedError, UsageError
from qdo.fleet import actions as names
from qdo.fleet.action_machine import AHEAD_SECONDS, DONE, UnfitError
from qdo.fleet.actions import Asked
from qdo.fleet.audit_entries import Values
from qdo.settings.settings import Settings
from qdo.text import join_some, pluralize, printable_lines

PLANNED = "planned"
"""The outcome of an action that was not asked for."""
_COLUMNS = ("worker", "outcome", "result", "seconds")


@click.command()
@click.argument("glob")
@click.argument("name", metavar="ACTION", type=click.Choice(names.ACTIONS))
@click.argument("argument", required=False)
@click.option("--for", "lasting", metavar="DURATION", help="With log-level: how long. [10m]")
@click.option(
    "--timeout",
    metavar="DURATION",
    default="5s",
    show_default=True,
    help="How long to wait; workers do not begin it later.",
)
@changing
@with_settings("app", "coordinator", "namespace", "connect_seconds")
@output_option
def action(
    glob: str,
    name: str,
    argument: str | None,
    lasting: str | None,
    timeout: str,
    consent: Consent,
    form: str,
    settings: Settings,
) -> None:
    """Ask the workers whose names match GLOB for an action, each at most once.

    \b
    ping               answer
    stacks             return the stacks of all jobs and threads
    profile SECONDS    return samples of the stacks, for a flame graph
    log-level LEVEL    write the log from another level up, for a while
    drain              finish the messages in flight, and stop
    restart            drain, and start again
    reload             restart all workers of the same parent process, also drained ones

    `qdo workers` lists the names. The results are in the action log as well: `qdo audit`.
    """
    require_app(settings)
    args = _arguments(name, argument, lasting)
    seconds = parse_duration(timeout, "--timeout")
    if not 0 < seconds <= AHEAD_SECONDS:
        raise UsageError(reason=f"--timeout must be at most 1h and not 0, got {timeout!r}")

    def agreed(workers: Sequence[str]) -> bool:
        planned = [Asked(worker, "", PLANNED) for worker in workers]
        count = pluralize(len(workers), "worker")
        stops = name in (names.DRAIN, names.RESTART, names.RELOAD)
        what = f"{name} {count}" if stops else f"ask {count} for {name}"
        # One reload restarts all workers of a parent process.
        asks = stops and (name == names.RELOAD or list(workers) != [glob])
        return consent.given(what, partial(_show, planned), form, asks=asks)

    asked = ask(settings, glob, name, args, seconds, consent.reason, agreed=agreed)
    if not asked:
        return
    _show(asked, form)
    if form == "table":
        _print_outputs(asked)
    failed = [f"{each.worker} ({each.outcome})" for each in asked if each.outcome != DONE]
    if failed:
        total = pluralize(len(asked), "worker")
        raise ActionsFailedError(
            action=name, total=total, count=len(failed), names=join_some(failed)
        )


def _arguments(name: str, argument: str | None, lasting: str | None) -> Values:
    """Return the arguments of an action from those of the command."""
    if lasting is not None and name != names.LOG_LEVEL:
        raise UsageError(reason=f"--for is for the action {names.LOG_LEVEL}, got {name}")
    wanted = {names.LOG_LEVEL: "a LEVEL such as debug", names.PROFILE: "SECONDS such as 10"}
    if (argument is None) != (name not in wanted):
        raise UsageError(reason=f"{name} must have {wanted.get(name, 'no argument')}")
    try:
        if name == names.PROFILE:
            args: Values = {"seconds": parse_duration(argument or "", "SECONDS")}
            names.seconds_of(name, args)
        elif name == names.LOG_LEVEL:
            args = {"level": argument, "seconds": parse_duration(lasting or "10m", "--for")}
            names.seconds_of(name, args)
            names.level_of(args)
        else:
            args = {}
    except UnfitError as error:
        raise UsageError(reason=str(error)) from error
    return args


def _show(asked: Sequence[Asked], form: str, out: TextIO | None = None) -> None:
    columns = {name: name.upper() for name in _COLUMNS}
    emit("qdo.action/1", [_item(each) for each in asked], form, columns, out)


def _item(asked: Asked) -> dict[str, Any]:
    return {
        "worker": asked.worker,
        "id": asked.id or None,
        "outcome": asked.outcome,
        "result": asked.result,
        "seconds": None if asked.seconds is None else round(asked.seconds, 3),
        "output": asked.output,
        "executed": asked.outcome != PLANNED,
    }


def _print_outputs(asked: Sequence[Asked]) -> None:
    for each in asked:
        if each.output:
            heading = f"--- {each.worker} ---"
            sys.stdout.write(f"\n{heading}\n{printable_lines(each.output.rstrip())}\n")
