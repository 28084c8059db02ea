"""The convention of all commands that change something: --dry-run, --yes and --reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TextIO, TypeVar

import click

from qdo.brokers.registry import positions_of
from qdo.cli.connections import open_connections
from qdo.cli.framework import reason_option, require_app
from qdo.cli.output import emit, print_message
from qdo.coordination.queue_admin import Which, chosen
from qdo.coordination.znodes.queue_node import MAX_LAST, FailureRecord
from qdo.errors import (
    AlreadyDecidedError,
    ConfirmationRequiredError,
    MessageNotFailingError,
    NotFoundError,
    UsageError,
)
from qdo.ops.decisions import OperatorDecision, check_store, decide, id_of, read_queue
from qdo.positions import TIME_POSITIONS, format_position
from qdo.settings.settings import Settings
from qdo.text import pluralize

Show = Callable[[str, TextIO], None]
"""Writes the effect of a change in a format of `output_option` to a stream."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Consent:
    """The consent of an operator to the change that a command makes.

    :ivar dry_run: only show the effect.
    :ivar yes: change without a question.
    :ivar reason: for the action log, "" for none.
    """

    dry_run: bool
    yes: bool
    reason: str = ""

    def given(self, what: str, show: Show, form: str, *, asks: bool = True) -> bool:
        """Return whether to change something; if not, the effect has been shown.

        Nothing may be changed or created before this returns True.

        :param what: the change as messages name it, an imperative such as "delete 2 queues".
        :param show: writes the effect; called only if the change is not certain.
        :param form: the format in which it is written to stdout.
        :param asks: whether this change needs a confirmation.
        :raises ConfirmationRequiredError: nobody has confirmed it.
        """
        unconfirmed = asks and not self.yes
        if self.dry_run:
            show(form, sys.stdout)
            remedy = "replace --dry-run by --yes" if unconfirmed else "leave out --dry-run"
            print_message(f"nothing was changed; {remedy} to {what}")
            return False
        if not unconfirmed:
            return True
        if sys.stdin.isatty() and sys.stderr.isatty():
            show("table", sys.stderr)  # stdout is for the result
            if _answer(what):
                return True
        else:
            show(form, sys.stdout)
        raise ConfirmationRequiredError(what=what)


def _answer(what: str) -> bool:
    try:
        return click.confirm(f"{what}?", err=True)
    except click.Abort:  # Ctrl-C or Ctrl-D
        return False


def changing(function: _Function) -> _Function:
    """Give a command --dry-run, --yes and --reason, as `consent`."""
    decorated: _Function = changing_unlogged(function)
    return reason_option(decorated)


def changing_unlogged(function: Any) -> Any:
    """Give a command --dry-run and --yes: its change belongs to no app, and so to no action log."""

    def call(dry_run: bool, yes: bool, reason: str = "", **arguments: Any) -> Any:
        return function(consent=Consent(dry_run, yes, reason), **arguments)

    update_wrapper(call, function)
    click.option("--yes", is_flag=True, help="Do it without a question.")(call)
    click.option(
        "--dry-run", is_flag=True, help="Only check it and show the effect; change nothing."
    )(call)
    return call


_COLUMNS = ("queue", "id", "attempts", "decision", "error")
_VERBS: Mapping[OperatorDecision, str] = {
    "retry": "retry",
    "skip": "skip",
    "dead-letter": "store as dead letters",
}


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
