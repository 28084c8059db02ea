"""`qdo retry-now`, `skip`, `cancel`, `purge` and `peek`, which act on messages of a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TextIO

import click

from qdo.brokers.registry import kind_of
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import open_connections, open_for_queue
from qdo.cli.options import ANSWER_TIMEOUT, duration_option, require_app, with_output
from qdo.cli.output import each_shown, emit, json_text, print_message
from qdo.cli.readings import SHARED
from qdo.coordination.queue_admin import chosen
from qdo.coordination.znodes.queue_node import MAX_LAST, CancelOutcome, FailureRecord
from qdo.errors import NotFoundError, UsageError
from qdo.ops.cancel import NOT_FOUND, Cancellation, cancel, check_outcomes
from qdo.ops.decisions import OperatorDecision, check_store, decide, plan_decision
from qdo.ops.peek import KINDS, MOST, Kind, peek, peek_item, peek_named
from qdo.ops.seek import PurgePlan, check_purging, plan_purges, purge_all, queues_to_purge
from qdo.positions import TIME_POSITIONS, format_last, format_position
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of
from qdo.text import pluralize

_DECISION_COLUMNS = ("queue", "id", "attempts", "decision", "error")
_VERBS: Mapping[OperatorDecision, str] = {
    "retry": "retry",
    "skip": "skip",
    "dead-letter": "store as dead letters",
}
_SCHEMAS: Mapping[OperatorDecision, str] = {
    "retry": "qdo.retry-now/1",
    "skip": "qdo.skip/1",
    "dead-letter": "qdo.dead-letters-added/1",
}
_HELPS: Mapping[OperatorDecision, str] = {
    "retry": """Run messages that fail or block a queue again now, with attempts counted from 1.

    ID is the id of a message, which `qdo peek` shows, or its position, which `qdo peek -o json`
    shows. Without one: the first message that blocks the queue, or else the first that waits for
    its next attempt. Workers may be running: the owner acts at once, also during a backoff. If a
    message is not failing, or an operator has already decided about it, the command changes
    nothing: exit code 5.
    """,
    "skip": """Skip messages that fail, run or block a queue: they never run, and are not kept.

    ID is the id of a message or its position; `qdo peek` and `qdo ps` show ids. The worker ends an
    attempt that runs now, as at its deadline, and the queue continues; if the attempt succeeds
    first, the message is done. A thread in a call that Python cannot interrupt ends only with `qdo
    action WORKER restart`: see the log. If a message neither fails nor runs, the command changes
    nothing (exit code 5): typed twice, it skips no other message. Workers may be running.
    """,
    "dead-letter": """Store messages that fail, run or block a queue as dead letters.

    ID is the id of a message or its position; `qdo peek` and `qdo ps` show ids. The worker ends an
    attempt that runs now, like `qdo skip`. Workers may be running. If one of the messages neither
    fails nor runs, or Kinesis has no store for dead letters, none is stored: exit code 5.
    """,
}
_CANCEL_COLUMNS = ("queue", "id", "position", "outcome")
_OUTCOMES_HELP = """\b
OUTCOME:
  cancelled          it will not run
  waiting, delayed   it would be cancelled: --dry-run, or not confirmed yet
  already-cancelled  by this operator or another one
  started            it is in flight, or the next to be started: use `qdo skip`
  failing            it has failed: use `qdo skip`
  done               or the queue has passed it after it was cancelled
  not-found          no such message, or an id beyond the first 10,000 that
                     wait: give its position
  unknown            the owner did not answer: repeat the command

The exit code is 4 if a message is not cancelled, and 6 if none exists. The owner answers although a
job runs, unless that blocks its event loop. Without an owner, the command records the cancellation
itself.

Up to 1000 messages of a queue can be cancelled that it has not passed; up to there its messages run
one by one. A deduplication key stays in force. A seek back runs cancelled messages only if the
queue had passed them. BACKLOG and AGE leave them out, except AGE with Kinesis. SQS cannot cancel,
an owner of a version without this command neither: exit code 5."""
_PURGE_COLUMNS = ("queue", "waiting", "delayed", "executed")
# Maximum number of characters of a body in a table.
SHOWN = 60
_PEEK_COLUMNS = ("id", "kind", "key", "priority", "sent", "due", "attempts", "body_bytes")
_FAILURES = ("error", "next_attempt")
_KINDS_HELP = """\b
KIND:
  waiting   waits for its first attempt, or is in flight
  delayed   is not due yet: DUE is the time, and it has no position
  failing   has failed ATTEMPTS times with ERROR; NEXT ATTEMPT is the time of the
            next one, DECISION what an operator decided and the owner will do
  blocking  has failed for the last time, and blocks its queue or key until
            `qdo retry-now`, `qdo skip` or `qdo dead-letters add`

With `order="key"` or `"none"`, messages of other keys may run before one that fails. Bodies are
decrypted if `keys` has their keys; JSON has them whole, as `body` or `body_base64`, and
`body_error` if that fails. Bodies of more than 64 MiB end the list earlier.

If --id is not found, the exit code is 6. The id of a message that was delayed, or was a dead
letter, is in a header: only the first 10,000 messages are searched. SQS shows messages only by
handing them out: exit code 5, except for --kind failing and blocking, without bodies."""


def _decide(
    decision: OperatorDecision,
    *,
    queue: str,
    ids: Sequence[str],
    consent: Consent,
    settings: Settings,
    every: bool = False,
) -> None:
    """Decide about the messages with these ids or positions.

    Without ids, decide about the first message, or all.
    """
    require_app(settings)
    if ids and every:
        raise UsageError(reason="give the IDs of messages or --all, not both")
    if decision == "dead-letter" and not ids and not every:
        raise UsageError(reason="name messages as QUEUE ID..., or give --all")
    if decision == "dead-letter":
        check_store(settings.broker)
    positions = kind_of(settings.broker).positions
    with open_connections(settings, broker=positions is TIME_POSITIONS) as connections:
        client = connections.client
        layout = connections.layout
        if client is None:
            raise NotFoundError(what="queue", name=queue)
        broker = connections.broker if _are_positions(ids) else connections.known_broker()
        plan = plan_decision(client, layout, broker, positions, queue, decision, ids, every)

        def effect(failures: Sequence[FailureRecord]) -> Effect:
            items = [_decision_item(queue, each, plan.ids, decision, settings) for each in failures]
            return Effect(_SCHEMAS[decision], _DECISION_COLUMNS, items)

        planned = chosen(plan.node, queue, plan.which)
        what = f"{_VERBS[decision]} {pluralize(len(planned), 'message')}"
        # Ask even about one message, because skipping drops the message.
        asks = decision == "skip" or (every and len(planned) > 1)
        if not consent.given(what, effect(planned).show, asks=asks):
            return
        decided = decide(
            client, layout, queue, decision, plan.which, consent.reason, running=plan.running
        )
    effect(decided).show(consent.form, executed=True)


def _are_positions(names: Sequence[str]) -> bool:
    """Return whether all names are positions, which are usable without reading messages."""
    return all(map(str.isdecimal, names))


def _decision_item(
    queue: str,
    failure: FailureRecord,
    ids: Mapping[int, str | None],
    decision: OperatorDecision,
    settings: Settings,
) -> dict[str, Any]:
    return {
        "queue": queue,
        "id": ids.get(failure.position),
        "position": str(failure.position),
        "time": _sent(failure.position, settings.broker),
        "attempts": failure.attempts,
        "error": failure.error,
        "decision": decision,
    }


def _sent(position: int, broker: str) -> str | None:
    """Return the send time of a message; None for a position of another broker."""
    last = kind_of(broker).positions.to_time(position)
    return format_position(last) if last <= MAX_LAST else None


def _decision_command(name: str, decision: OperatorDecision) -> click.Command:
    """Return the command for a decision about messages. Only `skip` requires message ids."""
    call: Any = partial(_decide, decision)
    call = changing(*SHARED)(call)
    skips = decision == "skip"
    if not skips:
        click.option(
            "--all", "every", is_flag=True, help="All messages that fail or block the queue."
        )(call)
    click.argument("ids", nargs=-1, required=skips, metavar="ID..." if skips else "[ID]...")(call)
    click.argument("queue")(call)
    return click.command(name, help=_HELPS[decision])(call)


retry_now = _decision_command("retry-now", "retry")
skip_messages = _decision_command("skip", "skip")
add_dead_letters = _decision_command("add", "dead-letter")


@click.command("cancel", epilog=_OUTCOMES_HELP)
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@duration_option(
    "--timeout", "5s", "How long the owner of the queue may take to answer.", ANSWER_TIMEOUT
)
@changing(*SHARED)
def cancel_messages(
    queue: str,
    ids: tuple[str, ...],
    timeout: float,
    consent: Consent,
    settings: Settings,
) -> None:
    """Cancel messages that wait or are delayed, so that they never run.

    ID is the id of a message or its position; `qdo peek` shows ids. A message whose first attempt
    has begun is not cancelled, and the command says so. If the queue's worker has died since its
    last checkpoint, the message may have run before, and REASON says so. Workers may be running.
    """
    with open_for_queue(settings, queue) as fleet:
        planned: list[Cancellation] = []

        def show(form: str, out: TextIO) -> None:
            planned[:] = cancel(fleet, queue, ids, really=False)
            _show_cancellations(queue, planned, form, out)
            if all(each.outcome == NOT_FOUND for each in planned):
                check_outcomes(queue, planned)  # nothing to confirm

        if not consent.given(f"cancel {pluralize(len(ids), 'message')}", show):
            check_outcomes(queue, planned)
            return
    with open_for_queue(settings, queue, create=True) as fleet:
        cancelled = cancel(fleet, queue, ids, timeout_seconds=timeout, reason=consent.reason)
    _show_cancellations(queue, cancelled, consent.form)
    check_outcomes(queue, cancelled)


def _show_cancellations(
    queue: str, results: Sequence[Cancellation], form: str, out: TextIO | None = None
) -> None:
    columns = [*_CANCEL_COLUMNS, *(("reason",) if any(each.reason for each in results) else ())]
    items = [_cancellation_item(queue, each) for each in results]
    emit("qdo.cancel/1", items, form, columns, out)


def _cancellation_item(queue: str, result: Cancellation) -> dict[str, Any]:
    return {
        "queue": queue,
        "id": result.id or result.name,
        "position": None if result.position is None else str(result.position),
        "outcome": result.outcome,
        "executed": result.outcome == CancelOutcome.CANCELLED.value,
        "reason": result.reason or None,
    }


@click.command("purge")
@click.argument("glob", metavar="QUEUE|GLOB")
@click.option("--delayed", is_flag=True, help="Also drop the delayed messages.")
@changing(*SHARED)
def purge_queues(glob: str, delayed: bool, consent: Consent, settings: Settings) -> None:
    """Drop all messages that wait in queues, without running them.

    This includes messages that fail or block a queue. Messages that arrive later and dead letters
    stay. Workers may be running: the owner finishes its message in flight, which is neither retried
    nor kept if it fails. Until it hears of the purge, a moment later, it may start others: `qdo
    pause` before prevents that. Without --delayed, delayed messages run when they are due.

    WAITING counts the messages after the recorded position, those in flight included. The positions
    move as by `qdo seek`: a seek back runs dropped messages after all, if the broker still has
    them. If the command is interrupted, repeat it. SQS queues are purged at SQS: exit code 5.
    """
    with open_for_queue(settings, glob, check_purging) as fleet:
        queues = queues_to_purge(fleet, glob)
        if not queues:
            raise NotFoundError(what="queue that matches", name=glob)
        plans = plan_purges(fleet, queues, delayed=delayed)
        items = [_purge_item(plan) for plan in plans]
        effect = Effect("qdo.purge/1", _PURGE_COLUMNS, items)
        if consent.given(f"purge {pluralize(len(plans), 'queue')}", effect.show):
            try:
                done = purge_all(fleet, plans, glob, consent.reason)
                for index, dropped in enumerate(done):
                    items[index] = _purge_item(plans[index], executed=True, dropped=dropped)
            finally:  # show the purged queues even if other queues failed
                effect.show(consent.form)


def _purge_item(
    plan: PurgePlan, executed: bool = False, dropped: int | None = None
) -> dict[str, Any]:
    planned = None if plan.delayed is None else len(plan.delayed)
    return {
        "queue": plan.queue,
        "waiting": plan.waiting,
        "delayed": planned if dropped is None or planned is None else dropped,
        "upto": format_last(plan.seek.after.last),
        "executed": executed,
    }


@click.command("peek", epilog=_KINDS_HELP)
@click.argument("queue")
@click.option(
    "-n",
    "limit",
    metavar="N",
    type=click.IntRange(1, MOST),
    default=10,
    show_default=True,
    help="How many messages.",
)
@click.option("--kind", type=click.Choice(KINDS), help="Only messages of this kind.")
@click.option("--id", "name", metavar="ID", help="Only the message with this id or position.")
@click.option("--body", "with_body", is_flag=True, help="Also show the bodies.")
@with_output(*SHARED, "keys")
def peek_messages(
    queue: str,
    limit: int,
    kind: Kind | None,
    name: str | None,
    with_body: bool,
    form: str,
    settings: Settings,
) -> None:
    """Show messages of a queue that are not done, in the order of the queue.

    A job with order="priority" runs those with the smallest PRIORITY first. They stay where they
    are: nothing is received, and nothing changes. Delayed ones come last. A message that waits may
    be in flight; cancelled ones are not shown.
    """
    if name is not None and kind is not None:
        raise UsageError(reason="give --kind or --id, not both")
    with open_for_queue(settings, queue) as fleet:
        if name is not None:
            messages = iter([peek_named(fleet, queue, name)])
        else:
            kinds = KINDS if kind is None else (kind,)
            messages = peek(fleet, queue, kinds, limit)
        vault = vault_of(settings, settings.app, fleet.broker.stream_of) if with_body else None
        make = partial(peek_item, queue, vault=vault, with_body=with_body)
        with each_shown(lambda each: f"message {each.id or each.position}") as rows:
            items = list(rows(messages, make))
            _show_peeked(queue, items, kind, with_body, form)


def _show_peeked(
    queue: str, items: list[dict[str, Any]], kind: Kind | None, with_body: bool, form: str
) -> None:
    if not items:
        print_message(f"no {kind or 'waiting'} messages in queue {queue}")
    columns = [*_PEEK_COLUMNS, *(_FAILURES if any(each["attempts"] for each in items) else ())]
    if any(each["decision"] for each in items):
        columns.append("decision")
    if with_body:
        columns.append("body")
    emit("qdo.peek/1", items, form, columns, cells=_body_cell)


def _body_cell(item: Mapping[str, Any]) -> dict[str, Any]:
    if "body" in item:
        text = json_text(item["body"])
    elif "body_base64" in item:
        text = f"base64 {item['body_base64']}"
    elif "body_error" in item:
        text = f"({item['body_error']})"
    else:
        return {}
    return {"body": text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"}
