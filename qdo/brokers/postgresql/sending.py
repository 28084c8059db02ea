"""Messages with options, and messages in the transaction of an app."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdo.brokers.base import Outgoing
from qdo.brokers.postgresql.session import PostgresqlConnection
from qdo.brokers.postgresql.writer import LOCK_SECONDS, columns
from qdo.encoding import with_header
from qdo.errors import UsageError
from qdo.positions import new_id, position_now, position_of_time

_SECOND = 10_000_000
_ARRAYS = (
    "%b::text[], %b::text[], %b::text[], %b::bytea[],"
    " %b::text[], %b::bigint[], %b::text[], %b::bigint[]"
)
"""Names, keys, headers, bodies, ids, dues, deduplication keys and windows."""


class SendWork:
    """Sends messages with options, in the given order; its result is their ids.

    :param max_queues: see `Broker.max_queues`.
    """

    def __init__(
        self, schema: str, app: str, messages: Sequence[Outgoing], max_queues: int | None
    ) -> None:
        self._statement = f"SELECT {schema}.send(%s, {_ARRAYS}, %s, %s)"  # nosec B608 # the address allows a-z, 0-9 and _
        arrays = arrays_of(messages)
        self._parameters = (app, *arrays, max_queues, round(LOCK_SECONDS * 1000))

    def __call__(self, connection: PostgresqlConnection) -> list[str]:
        (ids,) = connection.execute(self._statement, self._parameters).fetchone() or ([],)
        return list(ids)


def arrays_of(messages: Sequence[Outgoing], *, with_ids: bool = False) -> tuple[Any, ...]:
    """Return the arrays that `send` and `stage` take.

    A delayed message has no position yet, so it gets a random id, which a header keeps.

    :param with_ids: give every message such an id.
    """
    now = position_now()
    ids: list[str | None] = []
    dues: list[int | None] = []
    headers: list[str | None] = []
    for message in messages:
        due = None if message.terms is None or message.terms.due is None else message.terms.due
        later = None if due is None or position_of_time(due) <= now else position_of_time(due)
        own = new_id() if later is not None or with_ids else None
        ids.append(own)
        dues.append(later)
        headers.append(message.headers if own is None else with_header(message.headers, qdo_id=own))
    names, keys, _, bodies = columns(messages)
    terms = [message.terms for message in messages]
    dedup_keys = [None if each is None else each.dedup_key for each in terms]
    windows = [None if each is None else round(each.dedup_seconds * _SECOND) for each in terms]
    return (
        names, keys, _sparse(headers), bodies, _sparse(ids), _sparse(dues), _sparse(dedup_keys),
        _sparse(windows),
    )  # fmt: skip


def _sparse(values: list[Any]) -> list[Any] | None:
    """Return None for an array of None."""
    return values if any(value is not None for value in values) else None


def check_text(message: Outgoing) -> None:
    """Check that PostgreSQL can store the texts of a message.

    :raises UsageError: one has NUL or surrogate characters.
    """
    options = message.terms
    texts = (
        ("key", message.key),
        ("headers", message.headers),
        ("dedup_key", None if options is None else options.dedup_key),
    )
    for word, text in texts:
        if text is not None and not _is_storable(text):
            raise UsageError(
                reason=f"the {word} of a message for queue {message.queue!r} must not contain NUL "
                f"or surrogate characters, which PostgreSQL cannot store, got {text!r}"
            )


def _is_storable(text: str) -> bool:
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:  # a stray surrogate
        return False
    return "\0" not in text
