"""The command `qdo doctor`, which checks the services, workers and hosts of an app."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import ExitStack

import click

from qdo.cli.connections import open_connections
from qdo.cli.options import import_app, require_app, with_output
from qdo.cli.output import emit, print_message
from qdo.cli.readings import SHARED
from qdo.connections.opened import Connections
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.ops.doctor import diagnose
from qdo.ops.doctor_case import Case
from qdo.settings.settings import Settings
from qdo.text import hide_credentials, pluralize

SCHEMA = "qdo.doctor/1"
# Exit code if a check failed.
FAILED = 1
CONNECT_SECONDS = 3.0
_COLUMNS = {"check": "CHECK", "status": "STATUS", "reason": "FOUND", "remedy": "REMEDY"}

_CHECKS = """\b
Checks:
  coordinator, broker   can be reached; -latency: the time of nine reads, of a list
  coordinator-servers   all servers run as one ensemble; unknown without srvr, or
                        with TLS
  coordinator-versions  at least 3.6, and none that may lose transactions
  leader, workers       a registered worker leads, and each worker reports
  lost-workers          sessions of the last hour that ended with queues, of the
                        last 20 that the leader remembers
  dead-processes        worker processes that died and were replaced in the last hour,
                        of the last 20 of each place
  starved-workers       workers that hardly get a processor from their host or quota
  chores                the leader has done its chores within five minutes, and
                        none failed; the leader repeats them once a minute
  versions              all processes have one version, which fits the app's level
  clocks                differ by less than two seconds, as far as nodes tell
  disk, open-files      of the embedded files, and of this user, on this machine
  deadlines             timeout_seconds of jobs, against the broker's longest
  dead-letters, queues  their numbers; queues by state
  limits                those that jobs name exist, and permit something
  timers                none is refused, or overdue by more than 30 seconds
  outbox                the broker refused no message of an outbox
  requests              a live worker takes each pool with waiting ones; in PostgreSQL,
                        their table has at most 10,000 dead rows, or 10 for each
  queues-without-jobs, jobs-without-queues
                        names of queues, against globs and filters
  retention             failed: unread messages were deleted; warning: they are at
                        half of that age; SQS and Kinesis: 20 queues
  broker-settings       what a starting worker warns about, for 50 queues
  rights                of the folders and 200 queues; `qdo admin acl check`: all

Chores:
  copied-actions        copies entries of `qdo audit` to the history, if there is one
  lost-actions          ends what workers that are gone were asked for
  action-outputs        deletes stacks after an hour, and beyond 100
  action-log            deletes entries after 30 days, and beyond 5,000
  format-level          raises the level once all workers have a new version
  live-settings         deletes versions beyond the last 100
  empty-locks           deletes nodes of locks that were unused for an hour"""


@click.command(epilog=_CHECKS)
@with_output(*SHARED, import_app=False)
def doctor(form: str, settings: Settings) -> int:
    """Check coordinator, broker, workers, jobs and this machine; exit code 1 if a check failed.

    The command changes nothing. It takes up to ten seconds. With --app MODULE:APP it also checks
    the jobs. STATUS is ok, warning, failed, or unknown if a check could not find out.
    """
    app, settings = import_app(settings)
    name = require_app(settings)
    quick = dataclasses.replace(
        settings, connect_seconds=min(settings.connect_seconds, CONNECT_SECONDS)
    )
    faults: dict[str, str] = {}
    with ExitStack() as stack:
        coordinator = _opened(stack, quick, faults, "coordinator", broker=False)
        broker = _opened(stack, quick, faults, "broker", coordinator=False)
        case = Case(
            client=coordinator.client if coordinator else None,
            broker=broker.broker if broker else None,
            layout=Layout.of(name, settings.namespace),
            faults=faults,
            coordinator_url=hide_credentials(settings.coordinator),
            broker_url=hide_credentials(settings.broker),
            jobs=None if app is None else app.jobs,
            declared=() if app is None else app.limits,
            timers=None if app is None else app.timers,
            policy_of=lambda queue: settings.policy_of(
                queue, None if app is None else app.job_for(queue)
            ),
        )
        items = [
            {"check": check, "status": each.status, "reason": each.text, "remedy": each.remedy}
            for check, each in diagnose(case)
        ]
    emit(SCHEMA, items, form, _COLUMNS)
    counts = Counter(each["status"] for each in items)
    if form == "table":
        print_message(
            f"{pluralize(len(items), 'check')}: "
            + ", ".join(f"{counts[each]} {each}" for each in ("failed", "warning", "unknown", "ok"))
        )
    return FAILED if counts["failed"] else 0


def _opened(
    stack: ExitStack, settings: Settings, faults: dict[str, str], name: str, **only: bool
) -> Connections | None:
    """Open the coordinator or the broker. If this fails, add the reason to `faults`."""
    try:
        opened = stack.enter_context(open_connections(settings, **only))
        if name == "broker":
            opened.known_broker()
        return opened
    except QdoError as error:
        faults[name] = str(error)
        return None
