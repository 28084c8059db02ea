"""The commands `qdo status` and `qdo check`, which is a plugin for monitoring systems."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qdo.cli.connections import open_connections
from qdo.cli.options import duration_option, require_app, with_output, with_settings
from qdo.cli.output import cell, emit, print_step
from qdo.cli.readings import (
    SHARED,
    ReadOptions,
    read_queues,
    reading_options,
    report_unasked,
    watch_parameter,
    watch_screen,
    watched,
)
from qdo.errors import BrokerMissingError, QdoError, UnreachableError
from qdo.ops.doctor import notices
from qdo.ops.doctor_case import Case
from qdo.ops.items import SILENT_SECONDS, Judged, overview, silent
from qdo.ops.verdicts import QueueHealth, judge_all
from qdo.ops.worker_status import WorkerStatus, worker_statuses
from qdo.text import join_some, pluralize, short_duration

if TYPE_CHECKING:
    from qdo.connections.opened import Connections
    from qdo.settings.settings import Settings

# Exit code of a monitoring plugin for an outage.
CRITICAL = 2
# Exit code of a monitoring plugin for an unknown state.
UNKNOWN = 3
# The checks of `qdo doctor` about work outside of queues.
OF_WORK = ("outbox", "timers", "requests")

_Result = TypeVar("_Result")


@click.command()
@click.argument("glob", default="*")
@reading_options
@with_output(*SHARED)
@watch_parameter
def status(
    glob: str, reading: ReadOptions, watch: float | None, form: str, settings: Settings
) -> None:
    """Show workers, the states of queues that match GLOB, and the worst ten with the next step.

    Workers without a report for 30 seconds are named, and what the checks coordinator-servers,
    lost-workers, dead-processes, starved-workers, outbox, timers, requests, clocks and disk of
    `qdo doctor` find, the queues and pools with the most dead letters, and up to three messages
    that have run for 30 seconds. JSON has them as one item.

    With --watch, a terminal shows the worst queues and the busiest workers. It compares each look
    with that half a minute ago. The rate of a worker is the mean since the report before its last
    one.
    """
    require_app(settings)
    if watch is not None and form == "table" and sys.stdout.isatty():
        from qdo.cli.commands.top import Screen

        watch_screen(Screen(settings, glob, reading).show, watch)
    watched(lambda: _show(glob, reading, form, settings), watch)


def _show(glob: str, reading: ReadOptions, form: str, settings: Settings) -> None:
    with open_connections(settings) as connections:
        workers = worker_statuses(connections.client, connections.layout)
        around = _around(connections, settings, workers)
        readings = read_queues(connections, glob, reading)
    judged = judge_all(readings, reading.rules)
    last = readings[-1]
    item = overview(settings.app, workers, judged, around, unread=last.unread, pools=last.pools)
    if form == "table":
        _print(item)
    else:
        emit("qdo.status/1", [item], form)
    report_unasked(last)


def _around(
    connections: Connections, settings: Settings, workers: list[WorkerStatus]
) -> list[dict[str, str | None]]:
    case = Case(
        connections.client,
        connections.broker,
        connections.layout,
        {},
        settings.coordinator,
        settings.broker,
    )
    case.once("workers", lambda: workers)  # do not read the workers again
    return notices(case)


def _print(item: dict[str, Any]) -> None:
    versions = f" of qdo {cell(', '.join(item['versions']))}" if item["versions"] else ""
    dead = item["dead_letters"]
    print(
        f"app {cell(item['app'])}: {pluralize(item['workers'], 'worker')}{versions},"
        f" {pluralize(item['queues'], 'queue')},"
        f" {'?' if dead is None else dead} dead {'letter' if dead == 1 else 'letters'}"
    )
    if waiting := ", ".join(_waiting(item)):
        print(waiting)
    if item["silent_workers"]:
        print(f"silent for over {SILENT_SECONDS:g} s: {cell(join_some(item['silent_workers']))}")
    if item["states"]:
        print(", ".join(f"{count} {state}" for state, count in item["states"].items()))
    for each in item["notices"]:
        print(f"\n{each['check']}: {each['status']}")
        print_step(each["reason"], each["remedy"])
    for each in item["long_runs"]:
        print(f"\n{cell(each['queue'])}: a message runs for long")
        print_step(each["reason"], each["remedy"])
    for each in item["worst"]:
        print(f"\n{cell(each['queue'])}: {', '.join(_facts(each))}")
        print_step(each["reason"], each["remedy"])
    more = item["attention"] - len(item["worst"])
    if more > 0:
        print(f"\nand {pluralize(more, 'more queue')}: qdo queues --sort state")


def _waiting(item: dict[str, Any]) -> Iterator[str]:
    word = "waits" if item["backlog"] == 1 else "wait"
    yield from (f"{each} {word}" for each in _backlog(item))
    if item["eta_seconds"]:
        yield f"done in about {short_duration(item['eta_seconds'])}"
    asked = [f"{count} {state}" for state, count in item["requests"].items() if count]
    if asked:
        yield f"requests: {', '.join(asked)}"


def _backlog(item: dict[str, Any]) -> Iterator[str]:
    if item["backlog"]:
        yield ("about " if item["approximate"] else "") + pluralize(item["backlog"], "message")


def _facts(item: dict[str, Any]) -> Iterator[str]:
    yield item["state"]
    yield from _backlog(item)
    if item["behind_seconds"]:
        yield f"{short_duration(item['behind_seconds'])} behind"


class _PluginCommand(click.Command):
    """A command that reports errors as UNKNOWN, and outages as CRITICAL."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        return _answered(lambda: click.Command.make_context(self, *arguments, **options))

    def invoke(self, ctx: click.Context) -> Any:
        return _answered(lambda: click.Command.invoke(self, ctx))


def _answered(do: Callable[[], _Result]) -> _Result:
    code = UNKNOWN
    word = "UNKNOWN"
    try:
        return do()
    except BrokerMissingError as error:
        reason = str(error)
    except UnreachableError as error:
        code = CRITICAL
        word = "CRITICAL"
        reason = str(error)
    except (QdoError, OSError) as error:
        reason = str(error)
    except click.UsageError as error:
        reason = error.format_message()
    print(f"QDO {word} - {cell(reason)}")
    raise click.exceptions.Exit(code)


@click.command(cls=_PluginCommand)
@click.argument("glob", default="*")
@duration_option("--max-age", "5m", "CRITICAL if the next message of a queue is older.")
@click.option(
    "--min-workers",
    metavar="N",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="CRITICAL if fewer workers are registered and report.",
)
@reading_options
@with_settings(*SHARED)
def check(
    glob: str,
    max_age: float,
    min_workers: int,
    reading: ReadOptions,
    settings: Settings,
) -> None:
    """Print one line about queues that match GLOB, as a monitoring plugin.

    Unlike other commands it ends with 0 for OK, 1 for WARNING, 2 for CRITICAL and 3 for UNKNOWN.

    \b
    CRITICAL  a queue is lost, expiring, blocked, stuck, stopped, no-job,
              no-worker or unowned; its next message is too old, and it is
              not paused; too few workers report; or the coordinator or the
              broker does not answer
    WARNING   a queue is rewound, failing, lagging or unknown; a message or
              request is a dead letter; or, without GLOB, the checks outbox,
              timers and requests of `qdo doctor` warn
    UNKNOWN   the broker's file does not exist although workers have used it,
              a right is missing, or an option is wrong; max_age=U: no age is
              known
    """
    require_app(settings)
    with open_connections(settings) as connections:
        connections.known_broker()
        workers = worker_statuses(connections.client, connections.layout)
        around = _around(connections, settings, workers) if glob == "*" else []
        readings = read_queues(connections, glob, reading)
    judged = judge_all(readings, reading.rules)
    last = readings[-1]
    dead = overview(settings.app, workers, judged, pools=last.pools)["dead_letters"] or 0
    unsent = [f"{each['check']}: {each['reason']}" for each in around if each["check"] in OF_WORK]
    code, line = _plugin_line(workers, judged, max_age, min_workers, dead, unsent)
    print(line)
    raise click.exceptions.Exit(code)


def _plugin_line(
    workers: Sequence[WorkerStatus],
    judged: Judged,
    max_age: float,
    min_workers: int,
    dead: int,
    unsent: Sequence[str],
) -> tuple[int, str]:
    """Return the exit code and line of a monitoring plugin, with performance data.

    :param unsent: work that waits outside of queues.
    """
    alive = len(workers) - len(silent(workers))
    counts = Counter(verdict.state for _, verdict in judged)
    queues = [each for each, verdict in judged if verdict.state is not QueueHealth.PAUSED]
    ages = [each.behind_seconds for each in queues if each.behind_seconds is not None]
    oldest_age = "U" if queues and not ages else f"{max(ages, default=0.0):.1f}s"
    late = [each.queue for each in queues if (each.behind_seconds or 0.0) > max_age]
    critical = alive < min_workers or bool(late) or any(state.is_critical for state in counts)
    is_warning = dead or unsent or any(state.is_warning for state in counts)
    code = 2 if critical else int(bool(is_warning))
    problems = [f"{pluralize(alive, 'worker')} of at least {min_workers}"] * (alive < min_workers)
    for state in QueueHealth:
        if counts[state] and state.needs_attention:
            names = [each.queue for each, verdict in judged if verdict.state is state]
            problems.append(f"{state.value}: {join_some(sorted(names), 3)}")
    if late:
        problems.append(f"older than {short_duration(max_age)}: {join_some(sorted(late), 3)}")
    if dead:
        problems.append(f"{pluralize(dead, 'dead letter')}, see qdo dead-letters --by error")
    problems += unsent
    text = "; ".join(problems) or f"{pluralize(len(judged), 'queue')}, {pluralize(alive, 'worker')}"
    data = " ".join(
        [
            f"workers={alive};;{min_workers}:",
            f"queues={len(judged)}",
            f"max_age={oldest_age};;{max_age:g}",
            *(f"{state.value}={counts[state]}" for state in QueueHealth),
            f"dead_letters={dead};0",
        ]
    )
    word = ("OK", "WARNING", "CRITICAL")[code]
    return code, f"QDO {word} - {cell(text).replace('|', '/')} | {data}"
