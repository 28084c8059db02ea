"""Messages as senders give them: checked, and made ready for a broker."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from qdo.brokers.base import DEDUP_SECONDS, NO_DEDUP, NO_DELAY, Capabilities, Outgoing, Terms
from qdo.encoding import encoded
from qdo.errors import UnsupportedError, UsageError
from qdo.message import position_now, time_of_position
from qdo.names import check_queue_name

LATEST = 253402300800.0
"""The year 10000; later times have no ISO 8601 form."""
MAX_DEDUP_KEY = 1000
"""Characters."""

Moment: TypeAlias = "datetime.datetime | float"


@dataclass(frozen=True, slots=True)
class NewMessage:
    """One message for `App.send_many`, with what `App.send` takes."""

    queue: str
    body: Any
    key: str | None = None
    headers: Mapping[str, str] | None = None
    delay_seconds: float | None = None
    at: Moment | None = None
    dedup_key: str | None = None
    dedup_seconds: float | None = None


AnyMessage: TypeAlias = "NewMessage | Mapping[str, Any] | tuple[Any, ...]"


def outgoing(
    queue: str,
    body: Any,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    delay_seconds: float | None = None,
    at: Moment | None = None,
    dedup_key: str | None = None,
    dedup_seconds: float | None = None,
) -> Outgoing:
    """Return a checked message in the form brokers take; see `App.send`."""
    _check_queue(queue)
    if key is not None and not isinstance(key, str):
        raise UsageError(reason=f"the key of a message is text, not {key!r}")
    data, head = encoded(queue, body, headers)
    if delay_seconds is None and at is None and dedup_key is None and dedup_seconds is None:
        return Outgoing(queue, data, key, head)
    return Outgoing(queue, data, key, head, terms(delay_seconds, at, dedup_key, dedup_seconds))


def outgoing_of(message: AnyMessage) -> Outgoing:
    """Return a checked message of any form that `App.send_many` takes."""
    if isinstance(message, tuple | list):
        if not 2 <= len(message) <= 4:
            raise UsageError(
                reason=f"a message is (queue, body), with key and headers behind, not {message!r}"
            )
        return outgoing(*message)
    if isinstance(message, NewMessage):
        return _of_new(message)
    if not isinstance(message, Mapping):
        raise UsageError(reason=f"a message is a tuple, a dict or qdo.NewMessage, not {message!r}")
    try:
        return _of_new(NewMessage(**message))
    except TypeError as error:
        fields = ", ".join(NewMessage.__slots__)
        raise UsageError(reason=f"a message as a dict has {fields}: {error}") from error


def _of_new(message: NewMessage) -> Outgoing:
    return outgoing(
        message.queue,
        message.body,
        message.key,
        message.headers,
        delay_seconds=message.delay_seconds,
        at=message.at,
        dedup_key=message.dedup_key,
        dedup_seconds=message.dedup_seconds,
    )


def terms(
    delay_seconds: float | None = None,
    at: Moment | None = None,
    dedup_key: str | None = None,
    dedup_seconds: float | None = None,
    now: Callable[[], int] = position_now,
) -> Terms | None:
    """Return checked terms, None when there are none.

    :raises UsageError: they contradict each other, or a value will not do.
    """
    if delay_seconds is not None and at is not None:
        raise UsageError(reason="give delay_seconds or at, not both")
    due: float | None = None
    if delay_seconds is not None:
        if not _is_number(delay_seconds) or delay_seconds < 0:
            raise UsageError(reason=f"delay_seconds={delay_seconds!r} is no number from 0 on")
        due = time_of_position(now()) + delay_seconds if delay_seconds else None
    elif at is not None:
        due = _unix_time(at)
    if due is not None and due >= LATEST:
        raise UsageError(reason="a message cannot be delayed beyond the year 9999")
    if dedup_key is None:
        if dedup_seconds is not None:
            raise UsageError(reason="dedup_seconds is the window of a dedup_key: give one")
        return None if due is None else Terms(due)
    return Terms(due, _dedup_key(dedup_key), _dedup_seconds(dedup_seconds))


def _unix_time(at: Moment) -> float:
    if isinstance(at, datetime.datetime):
        if at.tzinfo is None:
            raise UsageError(
                reason=f"at={at.isoformat()} names no time zone: add one, such as "
                "tzinfo=datetime.timezone.utc"
            )
        return at.timestamp()
    if not _is_number(at):
        raise UsageError(reason=f"at={at!r} is neither a datetime nor a Unix time in seconds")
    return float(at)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _dedup_key(key: Any) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_DEDUP_KEY:
        raise UsageError(reason=f"a dedup_key is a text of 1 to {MAX_DEDUP_KEY} characters")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise UsageError(reason=f"dedup_key {key!r} cannot be encoded in UTF-8") from error
    return key


def _dedup_seconds(seconds: float | None) -> float:
    if seconds is None:
        return DEDUP_SECONDS
    if not _is_number(seconds) or not 0 < seconds < LATEST:
        raise UsageError(reason=f"dedup_seconds={seconds!r} is no number of seconds above 0")
    return float(seconds)


def check_terms(capabilities: Capabilities, wanted: Terms | None, broker: str) -> None:
    """Raise UnsupportedError for terms that a broker cannot keep."""
    if wanted is None:
        return
    if wanted.due is not None and not capabilities.delay:
        raise UnsupportedError(broker=broker, what="delay messages", remedy=NO_DELAY)
    if wanted.dedup_key is not None and not capabilities.dedup:
        raise UnsupportedError(broker=broker, what="deduplicate messages", remedy=NO_DEDUP)


@functools.lru_cache(maxsize=4096)
def _check_queue(queue: str) -> str:
    return check_queue_name(queue)
