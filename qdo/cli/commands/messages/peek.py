"""`qdo peek`: show messages that are not done."""

from __future__ import annotations

import json
from typing import Any

import click

from qdo.cli.connections import open_connections
from qdo.cli.framework import output_option, require_app, with_settings
from qdo.cli.output import emit, iso_time, print_message
from qdo.coordination.znodes.queue_node import FailureRecord
from qdo.encoding import parsed
from qdo.errors import NotFoundError, UsageError
from qdo.ops.dead_letters import body_value, decrypted
from qdo.ops.peek import KINDS, MOST, Kind, PeekedMessage, peek, peek_named
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of

SHOWN = 60
"""Characters of a body in a table."""
_COLUMNS = ("id", "kind", "key", "sent", "due", "attempts", "body_bytes")
_FAILURES = ("error", "next_attempt")


@click.command("peek")
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
@with_settings("app", "broker", "coordinator", "namespace", "connect_seconds", "keys")
@output_option
def peek_messages(
    queue: str,
    limit: int,
    kind: Kind | None,
    name: str | None,
    with_body: bool,
    form: str,
    settings: Settings,
) -> None:
    """Show messages of a queue that are not done, in the order in which they will run.

    They stay where they are: nothing is received, and nothing changes. A message that waits may be
    in flight: its owner records within a second that it is done.
    """
    require_app(settings)
    if name is not None and kind is not None:
        raise UsageError(reason="give --kind or --id, not both")
    with open_connections(settings) as connections:
        broker = connections.known_broker()
        if broker is None:
            raise NotFoundError(what="queue", name=queue)
        client, layout = connections.client, connections.layout
        if name is not None:
            found = iter([peek_named(client, layout, broker, queue, name)])
        else:
            kinds = KINDS if kind is None else (kind,)
            found = peek(client, layout, broker, queue, kinds, limit)
        vault = vault_of(settings, settings.app) if with_body else None
        items = [_item(queue, each, vault, with_body) for each in found]
    if not items:
        print_message(f"no {kind or 'waiting'} messages in queue {queue}")
    columns = [*_COLUMNS, *(_FAILURES if any(each["attempts"] for each in items) else ())]
    if any(each["decision"] for each in items):
        columns.append("decision")
    if with_body:
        columns.append("body")
    if form == "table":
        items = [_row(each) for each in items]
    emit("qdo.peek/1", items, form, {each: each.replace("_", " ").upper() for each in columns})


def _item(queue: str, message: PeekedMessage, vault: Any, with_body: bool) -> dict[str, Any]:
    failure = message.failure
    item = {
        "queue": queue,
        "id": message.id,
        "kind": message.kind,
        "position": None if message.position is None else str(message.position),
        "key": message.key,
        "sent": message.sent,
        "due": message.due,
        "attempts": 0 if failure is None else failure.attempts,
        "error": None if failure is None else failure.error,
        "next_attempt": _next_attempt(failure),
        "decision": failure.decision or None if failure else None,
        "body_bytes": message.body_bytes,
        "headers": None if message.body_bytes is None else _headers(message.headers),
    }
    if not with_body or message.body is None:
        return item
    body, headers, fault = decrypted(queue, message.body, message.headers, vault)
    if fault is not None:
        return {**item, "body_error": fault}
    return {**item, "headers": _headers(headers), **body_value(body, headers)}


def _next_attempt(failure: FailureRecord | None) -> str | None:
    """Return the time of the next attempt, None if there is none."""
    if failure is None or not failure.retry_at or failure.decision:
        return None
    return iso_time(failure.retry_at)


def _headers(stored: str | None) -> Any:
    found = parsed(stored)
    return stored if found is None else found


def _row(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose body is one cell of a table."""
    if "body" in item:
        text = json.dumps(item["body"], ensure_ascii=False)
    elif "body_base64" in item:
        text = f"base64 {item['body_base64']}"
    elif "body_error" in item:
        text = f"({item['body_error']})"
    else:
        return item
    return {**item, "body": text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"}
