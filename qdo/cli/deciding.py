"""The common part of `qdo retry-now`, `qdo skip` and `qdo dead-letters add`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import click

from qdo.brokers.registry import positions_of
from qdo.cli.changing import Consent
from qdo.cli.connections import open_connections
from qdo.cli.framework import require_app
from qdo.cli.output import emit
from qdo.coordination.queue_admin import Which, chosen
from qdo.coordination.znodes.progress import MAX_LAST, FailureRecord
from qdo.errors import (
    AlreadyDecidedError,
    MessageNotFailingError,
    NotFoundError,
    UsageError,
)
from qdo.ops.decisions import OperatorDecision, check_store, decide, id_of, read_queue
from qdo.positions import TIME_POSITIONS, format_position
from qdo.settings.settings import Settings
from qdo.text import pluralize

_COLUMNS = ("queue", "id", "attempts", "decision", "error")
_VERBS: Mapping[OperatorDecision, str] = {
    "retry": "retry",
    "skip": "skip",
    "dead-letter": "store as dead letters",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def all_option(function: _Function) -> _Function:
    """Add --all, as `every`."""
    return click.option(
        "--all", "every", is_flag=True, help="All messages that fail or block the queue."
    )(function)


def decide_about(
    settings: Settings,
    decision: OperatorDecision,
    queue: str,
    ids: Sequence[str],
    *,
    schema: str,
    form: str,
    consent: Consent,
    every: bool = False,
) -> None:
    """Decide about the messages that a command names, and print them.

    A skipped message is dropped, so that decision is always to be confirmed.

    :param ids: ids or positions of messages. Without any: the first, or with `every` all.
    """
    require_app(settings)
    if ids and every:
        raise UsageError(reason="give the IDs of messages or --all, not both")
    if decision == "dead-letter":
        check_store(settings.broker)
    positions = positions_of(settings.broker)
    with open_connections(settings, broker=positions is TIME_POSITIONS) as connections:
        client, layout = connections.client, connections.layout
        if client is None:
            raise NotFoundError(what="queue", name=queue)
        node = read_queue(client, layout, queue)
        broker = connections.broker if _are_positions(ids) else connections.known_broker()
        names = {
            each.position: id_of(broker, positions, queue, each.position) for each in node.failures
        }
        which: Which = "all" if every else "first"
        if ids:
            which = tuple(_position(queue, id, node.failures, names) for id in ids)
        decided, executed = chosen(node, queue, which), False

        def show(form: str, out: TextIO) -> None:
            items = [
                _item(queue, each, names, decision, settings) | {"executed": executed}
                for each in decided
            ]
            emit(schema, items, form, {name: name.upper() for name in _COLUMNS}, out)

        what = f"{_VERBS[decision]} {pluralize(len(decided), 'message')}"
        asks = decision == "skip" or (every and len(decided) > 1)
        if not consent.given(what, show, form, asks=asks):
            return
        decided, executed = decide(client, layout, queue, decision, which, consent.reason), True
    show(form, sys.stdout)


def _are_positions(names: Sequence[str]) -> bool:
    """Return whether no message has to be read for its id."""
    return all(map(str.isdecimal, names))


def _position(
    queue: str, name: str, failures: Sequence[FailureRecord], ids: Mapping[int, str | None]
) -> int:
    """Return the position of a failing message that is named by its id or position."""
    for failure in failures:
        if name.lower() in (ids[failure.position], str(failure.position)):
            if failure.decision:
                raise AlreadyDecidedError(queue=queue, message=name, decision=failure.decision)
            return failure.position
    raise MessageNotFailingError(queue=queue, message=name)


def _item(
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
    """Return the time the message was sent; None if the address is not that of its broker."""
    last = positions_of(broker).to_time(position)
    return format_position(last) if last <= MAX_LAST else None
