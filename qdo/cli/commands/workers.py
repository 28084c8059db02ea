"""The commands `qdo workers`, `ps`, `action` and `move`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import from_coordinator, open_coordinator
from qdo.cli.options import (
    ANSWER_TIMEOUT,
    COORDINATOR,
    DURATION,
    duration_option,
    limit_option,
    require_app,
    with_output,
)
from qdo.cli.output import ago, emit, iso_time, print_message
from qdo.cli.readings import watch_option
from qdo.errors import ActionsFailedError, NotFoundError, UsageError
from qdo.fleet import actions
from qdo.fleet.action_machine import DONE, UnfitError
from qdo.fleet.actions import Asked, ask_workers, list_workers, matching, wait_for_results
from qdo.fleet.components import read_components, skew
from qdo.ops.items import component_item, worker_item
from qdo.ops.placement import (
    execute_move,
    plan_move,
    planned_changes,
    read_plan_input,
    wait_for_owner,
)
from qdo.ops.runs import blocked_texts, read_runs, stack_text
from qdo.ops.worker_status import worker_statuses
from qdo.text import join_some, pluralize, printable, printable_lines, short_duration

if TYPE_CHECKING:
    from qdo.coordination.client import Client
    from qdo.coordination.znodes.layout import Layout
    from qdo.fleet.audit_entries import Values
    from qdo.settings.settings import Settings

_WORKER_COLUMNS = (
    *("worker", "queues", "assigned", "host", "pid", "state", "reported", "started", "version"),
    *("filter", "jobs", "fault"),
)
_PROCESS_COLUMNS = (
    *("kind", "host", "pid", "version", "level", "zone", "state", "busy", "live", "fault"),
)
_RUN_COLUMNS = ("worker", "queue", "message", "attempt", "running", "where")
# The outcome of an action in a plan, which the command does not request.
PLANNED = "planned"
_ACTION_COLUMNS = ("worker", "outcome", "result", "seconds")


@click.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--all", "every", is_flag=True, help="List all processes, with their versions.")
@with_output(*COORDINATOR)
@watch_option
def workers(names: tuple[str, ...], every: bool, form: str, settings: Settings) -> None:
    """List the registered workers, or show everything about each NAME.

    QUEUES counts the queues that a worker owns, ASSIGNED those that it should own; if they differ,
    a handover is in progress. FILTER shows the settings queues and exclude of a worker, and
    JOBS the globs of its jobs; both are empty for a worker that takes all queues.

    STATE is what the worker last reported, and REPORTED the age of that report, by this machine's
    clock. A worker reports every 10 seconds, or three times per session timeout if that is more
    often. One that died unnoticed stays registered until its session ends, but reports nothing.

    JSON also has the counters of each process: messages processed, failed and so on. Of a NAME, the
    last changes are shown, too. `qdo ps --worker NAME` lists the messages that run now, `qdo action
    NAME stacks` their stacks.

    With --all, LEVEL is the format level of the data that the process writes to the coordinator.
    BUSY is the number of queues with a running job at the last report. LIVE is the version of the
    live settings in use. FAULT is why a node is not that of a process. A process that uses locks or
    permits has the kind `client`. A web server or another sender is listed after `app.register()`.
    The parent process has no node: `parent`, in JSON, is its id. Processes with the same
    `settings`, a digest, have equal settings.
    """
    require_app(settings)
    if names and every:
        raise UsageError(reason="give NAMEs or --all, not both")
    if names:
        from qdo.cli.commands.show import show_workers

        show_workers(names, form, settings)
    elif every:
        _list_processes(form, settings)
    else:
        _list_workers(form, settings)


def _list_workers(form: str, settings: Settings) -> None:
    statuses = from_coordinator(settings, worker_statuses, [])
    if not statuses:
        print_message(f"hint: no worker of app {settings.app!r} is registered")
    takes = {each.worker: each.takes for each in statuses}
    has_jobs = any("*" not in each.jobs for each in takes.values())

    def cells(item: Mapping[str, Any]) -> dict[str, Any]:
        filters = takes[item["worker"]]
        return {
            "started": _moment(item.get("started")),
            "reported": ago(item["reported"]) if item["reported"] else None,
            "filter": str(filters),
            "jobs": join_some(filters.jobs) if has_jobs else "",
        }

    emit("qdo.workers/1", map(worker_item, statuses), form, _WORKER_COLUMNS, cells=cells)


def _moment(value: Any) -> str | None:
    return iso_time(value) if isinstance(value, int | float) else value


def _list_processes(form: str, settings: Settings) -> None:
    components = from_coordinator(settings, read_components, [])
    if not components:
        print_message(f"hint: no process of app {settings.app!r} is registered")
    emit("qdo.components/1", map(component_item, components), form, _PROCESS_COLUMNS)
    versions = skew(components)
    if versions:
        print_message(f"hint: the processes have different versions of qdo: {versions}")


def _ask(
    settings: Settings,
    glob: str,
    name: str,
    args: Values,
    seconds: float,
    reason: str,
    *,
    agreed: Callable[[Sequence[str]], bool] = lambda workers: True,
) -> list[Asked]:
    """Ask the matching workers if `agreed` allows it, and wait for their results."""
    with open_coordinator(settings) as (client, layout):
        workers = list_workers(client, layout) if client is not None else []
        targets = matching(workers, glob)
        if client is None or not targets:
            raise NotFoundError(what="worker that matches", name=glob)
        if not agreed(targets):
            return []
        asked = ask_workers(
            client, layout, targets, name, args, within_seconds=seconds, reason=reason
        )
        wait_for_results(client, layout, asked, seconds)
    return asked


def _require_done(name: str, asked: Sequence[Asked]) -> None:
    """Raise ActionsFailedError if a worker has not done the action."""
    failed = [f"{each.worker} ({each.outcome})" for each in asked if each.outcome != DONE]
    if failed:
        total = pluralize(len(asked), "worker")
        raise ActionsFailedError(
            action=name, total=total, count=len(failed), names=join_some(failed)
        )


@click.command()
@click.argument("glob", default="*")
@click.option("--worker", metavar="GLOB", default="*", help="Only ask these workers.")
@limit_option(100, "List at most N messages, those that have run for longest.", actions.MAX_RUNS)
@click.option("--stacks", is_flag=True, help="Show the stack of each job.")
@duration_option("--timeout", "5s", "How long to wait.", ANSWER_TIMEOUT)
@with_output(*COORDINATOR)
@watch_option
def ps(
    glob: str,
    worker: str,
    limit: int,
    stacks: bool,
    timeout: float,
    form: str,
    settings: Settings,
) -> None:
    """List the messages that run now, in queues that match GLOB, the longest first.

    Each worker is asked, which needs the right to ask, and its answer is in the action log. RUNNING
    is accurate to 10 seconds, because the engine does not time each message. WHERE is the innermost
    line of your code or of a library; - for `async def` jobs and jobs in processes.

    For a worker whose event loop is blocked, its parent names the message at fault on stderr. The
    exit code is 4 if a worker does not answer.
    """
    require_app(settings)
    args: Values = {"queues": glob, "most": limit}
    asked = _ask(settings, worker, actions.RUNS, args, timeout, "")
    runs = read_runs(asked)
    for text in blocked_texts(runs):
        print_message(text)
    items = runs.items[:limit]
    emit("qdo.runs/1", items, form, _RUN_COLUMNS, cells=_run_cells)
    if form == "table" and stacks:
        _print_stacks(items)
    if len(items) < runs.total:
        print_message(
            f"hint: {len(items)} of {pluralize(runs.total, 'message')} are listed; see --limit"
        )
    _require_done(actions.RUNS, asked)
    if not runs.total:
        print_message("hint: no message runs now")


def _run_cells(item: Mapping[str, Any]) -> dict[str, str]:
    return {"message": item["id"], "running": f"~{short_duration(item['seconds'])}"}


def _print_stacks(items: Sequence[dict[str, Any]]) -> None:
    for item in items:
        heading = f"--- {item['queue']}, message {item['id']}, on {item['worker']} ---"
        sys.stdout.write(f"\n{printable(heading)}\n{stack_text(item)}\n")


@click.command()
@click.argument("glob")
@click.argument("name", metavar="ACTION", type=click.Choice(actions.ACTIONS))
@click.argument("argument", required=False)
@click.option("--for", "lasting", type=DURATION, help="With log-level: how long. [10m]")
@duration_option(
    "--timeout", "5s", "How long to wait; workers do not begin it later.", ANSWER_TIMEOUT
)
@changing(*COORDINATOR)
def action(
    glob: str,
    name: str,
    argument: str | None,
    lasting: float | None,
    timeout: float,
    consent: Consent,
    settings: Settings,
) -> None:
    """Ask the workers whose names match GLOB (see `qdo workers`) for an action, once.

    \b
    ping               answer
    stacks             return the stacks of all jobs and threads
    log-level LEVEL    write the log from another level up, for a while
    drain              finish the messages in flight, and stop
    restart            drain, and start again
    reload             restart all workers of the same parent process, also drained ones

    Results are also in `qdo audit`. Exit code 4: a worker did not do it; 6: no worker matches.
    """
    require_app(settings)
    args = _arguments(name, argument, lasting)

    def agreed(workers: Sequence[str]) -> bool:
        planned = _effect([Asked(worker, "", PLANNED) for worker in workers])
        count = pluralize(len(workers), "worker")
        stops = name in (actions.DRAIN, actions.RESTART, actions.RELOAD)
        what = f"{name} {count}" if stops else f"ask {count} for {name}"
        # One reload restarts all workers of a parent process.
        asks = stops and (name == actions.RELOAD or list(workers) != [glob])
        return consent.given(what, planned.show, asks=asks)

    asked = _ask(settings, glob, name, args, timeout, consent.reason, agreed=agreed)
    if not asked:
        return
    _effect(asked).show(consent.form)
    if consent.form == "table":
        _print_outputs(asked)
    _require_done(name, asked)


def _arguments(name: str, argument: str | None, lasting: float | None) -> Values:
    if name != actions.LOG_LEVEL:
        if lasting is not None:
            raise UsageError(reason=f"--for is for the action {actions.LOG_LEVEL}, got {name}")
        if argument is not None:
            raise UsageError(reason=f"{name} must have no argument")
        return {}
    if argument is None:
        raise UsageError(reason=f"{name} must have a LEVEL such as debug")
    args: Values = {"level": argument, "seconds": 600.0 if lasting is None else lasting}
    try:
        actions.seconds_of(args)
        actions.level_of(args)
    except UnfitError as error:
        raise UsageError(reason=str(error)) from error
    return args


def _effect(asked: Sequence[Asked]) -> Effect:
    return Effect("qdo.action/1", _ACTION_COLUMNS, [_item(each) for each in asked])


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


@click.command()
@click.argument("queue", required=False)
@click.argument("worker", required=False)
@click.option(
    "--plan", is_flag=True, help="List what the leader would assign to other workers now, and why."
)
@duration_option(
    "--timeout", "30s", "How long to wait until the worker owns the queue; 0s: do not wait."
)
@changing(*COORDINATOR)
def move(
    queue: str | None,
    worker: str | None,
    plan: bool,
    timeout: float,
    consent: Consent,
    settings: Settings,
) -> None:
    """Hand QUEUE to WORKER, without a pause of any other queue.

    The present owner finishes its message and releases the queue, then the worker claims it. The
    queue stays with the worker until that worker stops, drains, or does not take it any more; a
    restarted worker has another name. For balance, another queue of the worker may go to another
    worker. `qdo workers` lists the workers.

    After --timeout the exit code is 1, and the queue still changes hands later. A worker that
    drains or does not take the queue is rejected (5), a missing one not found (6). At most 1,000
    queues of an app can be moved. A leader of an older version ignores the move: exit code 1.

    With --plan, nothing moves. Normally the list is empty, because the leader assigns queues at
    once when workers or queues change, and once a minute. If it has the same queues twice, a minute
    apart, the leader does not work: see its log. A worker that claims nothing for ten seconds gets
    nothing for five minutes, which is not shown.
    """
    if plan is not (queue is None) or plan is not (worker is None):
        raise UsageError(reason="give QUEUE and WORKER, or only --plan")
    with open_coordinator(settings) as (client, layout):
        if queue is None or worker is None:
            _list_changes(client, layout, consent.form)
            return
        if client is None:
            raise NotFoundError(what="queue", name=queue)
        planned = plan_move(client, layout, queue, worker)
        item = {"queue": planned.queue, "owner": planned.owner, "worker": planned.worker}
        columns = {"queue": "QUEUE", "owner": "OLD OWNER", "worker": "NEW OWNER"}
        effect = Effect("qdo.move/1", columns, [item])
        if consent.given(f"move queue {queue!r} to {worker}", effect.show, asks=False):
            execute_move(client, layout, planned, consent.reason)
            if timeout:
                wait_for_owner(client, layout, planned, timeout)
            effect.show(consent.form, executed=True)


def _list_changes(client: Client | None, layout: Layout, form: str) -> None:
    changes = planned_changes(read_plan_input(client, layout)) if client is not None else []
    columns = {"queue": "QUEUE", "before": "ASSIGNED TO", "after": "NEXT", "why": "WHY"}
    emit("qdo.rebalance/1", map(dataclasses.asdict, changes), form, columns)
    if form != "table":
        return
    if not changes:
        print_message("every queue is assigned as the leader would assign it now")
    else:
        print_message(f"{pluralize(len(changes), 'queue')} would be assigned differently")
