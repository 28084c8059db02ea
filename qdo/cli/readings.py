"""Options of the commands that judge queues, and the readings they ask for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from qdo.cli.connections import open_connections
from qdo.cli.durations import parse_duration
from qdo.cli.output import print_message
from qdo.ops.queue_case import RULES, VerdictRules
from qdo.ops.status import Statuses, queue_statuses
from qdo.sending.connections import Connections
from qdo.settings.settings import Settings
from qdo.text import pluralize

SHARED = ("app", "broker", "coordinator", "namespace", "connect_seconds")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def reading_options(function: _Function) -> _Function:
    """Add the options that `read_queues` takes."""
    for option in (
        click.option(
            "--budget",
            metavar="N",
            type=click.IntRange(min=0),
            help="Request at most N backlogs from brokers that need a request for each"
            " (default 100).",
        ),
        click.option(
            "--window",
            metavar="DURATION",
            default="0s",
            help="Read twice, this far apart: only then a queue can be catching-up or rewound.",
        ),
    ):
        function = option(function)
    return verdict_options(function)


def verdict_options(function: _Function) -> _Function:
    """Add the options that `rules_of` takes."""
    for option in (
        click.option(
            "--late",
            metavar="DURATION",
            default=f"{RULES.late_seconds:g}s",
            show_default=True,
            help="A queue lags if its next message is this old.",
        ),
        click.option(
            "--stuck",
            metavar="DURATION",
            default=f"{RULES.stuck_seconds:g}s",
            show_default=True,
            help="A queue is stuck if one message runs for so long.",
        ),
    ):
        function = option(function)
    return function


def rules_of(late: str, stuck: str) -> VerdictRules:
    """Return the rules with these durations.

    :raises UsageError: one is not a duration.
    """
    return VerdictRules(parse_duration(late, "--late"), parse_duration(stuck, "--stuck"))


def read_queues(settings: Settings, glob: str, budget: int | None, window: str) -> list[Statuses]:
    """Read the queues once, or twice with some time between.

    :raises UsageError: `window` is not a duration.
    """
    pause = parse_duration(window, "--window")
    with open_connections(settings) as connections:
        return read_opened(connections, glob, budget, pause)


def read_opened(
    connections: Connections, glob: str, budget: int | None, pause: float
) -> list[Statuses]:
    """Read the queues once; twice with some seconds between, unless `pause` is 0."""

    def read() -> Statuses:
        return queue_statuses(
            connections.client,
            connections.layout,
            connections.broker,
            glob,
            budget,
            connections.broker_fault,
        )

    readings = [read()]
    if pause:
        time.sleep(pause)
        readings.append(read())
    return readings


def report_unasked(statuses: Statuses) -> None:
    """Tell on stderr what the broker was not asked for."""
    if statuses.unasked:
        print_message(
            f"{statuses.unasked} of {pluralize(len(statuses.queues), 'backlog')} were not"
            " requested, because each needs a request; failing queues, queues without a worker"
            " and those longest without progress come first; --budget N requests more"
        )
    for what, reason in statuses.unread.items():
        print_message(f"cannot read {what}: {reason}")
