"""Checks the messages of senders, and converts them for a broker."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from qdo.bodies import PLAIN, BodyType, checked_body, checked_kind, kind_of, plain_value
from qdo.brokers.base import (
    DEDUP_SECONDS,
    LASTING_DEDUP_SECONDS,
    NO_DEDUP,
    NO_DELAY,
    Capabilities,
    Outgoing,
    SendOptions,
)
from qdo.encoding import (
    MAX_STORED_BODY_BYTES,
    JsonText,
    encoded,
    with_header,
    with_missing,
)
from qdo.errors import BodyLimitError, UnsupportedError, UsageError
from qdo.message import NORMAL, Message
from qdo.positions import LATEST_SECONDS, position_now, time_of_position
from qdo.queues import check_queue_name
from qdo.sending.once import once_options
from qdo.settings.settings import Settings
from qdo.settings.vaults import StreamOf, vault_of
from qdo.text import did_you_mean

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

MAX_DEDUP_KEY = 1000
MAX_DEDUP_SECONDS = 366 * 86_400
# Maximum length of a key, in characters.
MAX_KEY = 1000
# Maximum size of all headers of a message as JSON in UTF-8.
MAX_HEADERS_BYTES = 64 * 1024
_MAX_NUMBER = 1e300

Moment: TypeAlias = datetime.datetime | float
# Returns the type of bodies (None for any) and the kind, by queue, kind (None for that of the
# class), class of the body, and whether the queue is a pool.
TypeOf: TypeAlias = Callable[[str, str | None, type, bool], tuple[BodyType | None, str | None]]


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message for `App.send_many`, with the parameters of `App.send`."""

    queue: str
    body: Any
    key: str | None = None
    headers: Mapping[str, str] | None = None
    delay_seconds: float | None = None
    at: Moment | None = None
    dedup_key: str | None = None
    dedup_seconds: float | None = None
    after: int | None = None
    once: Message | None = None
    priority: int = NORMAL
    kind: str | None = None
    unique: str | None = None


AnyMessage: TypeAlias = NewMessage | Mapping[str, Any] | tuple[Any, ...]


class MessageOptions(TypedDict, total=False):
    """The optional parameters of `App.send` that describe a message."""

    delay_seconds: float | None
    at: Moment | None
    dedup_key: str | None
    dedup_seconds: float | None
    after: int | None
    once: Message | None
    priority: int
    kind: str | None
    unique: str | None


def body_and_kind(
    queue: str, body: Any, kind: str | None, type_of: TypeOf | None, pool: bool = False
) -> tuple[Any, str | None]:
    """Return a body as JSON or bytes, and the kind of its message.

    :raises UsageError: no job of the app would take them.
    """
    if kind is not None:
        checked_kind(kind)
    expected = None
    if type_of is not None:
        expected, kind = type_of(queue, kind, body.__class__, pool)
    elif kind is None:
        kind = kind_of(body.__class__)
    what = f"the body for queue {queue!r}"
    # Webhooks are JSON texts. Their senders could not correct a misfit, so an operator must see it.
    if expected is None or type(body) is JsonText:
        return plain_value(what, body), kind
    return checked_body(what, body, expected), kind


def build_outgoing(message: NewMessage, type_of: TypeOf | None = None) -> Outgoing:
    """Return a checked message in the form for brokers. Raise the errors of `App.send`.

    :param type_of: see `Sender.type_of`.
    """
    queue = check_queue_name(message.queue)
    key = message.key
    if key is not None:
        check_key(key)
    body = message.body
    kind = message.kind
    if type_of is not None or kind is not None or type(body) not in PLAIN:
        body, kind = body_and_kind(queue, body, kind, type_of)
    data, own_headers = encoded(queue, body, message.headers)
    if own_headers is not None:
        _check_headers(queue, own_headers)
    if kind is not None:
        own_headers = with_header(own_headers, qdo_kind=kind)
    headers = own_headers
    if message.after is not None:
        headers = with_header(headers, qdo_after=_time_of_documents(message.after))
    if message.priority != NORMAL:
        headers = with_header(headers, qdo_priority=priority_text(message.priority))
    options = build_send_options(
        message.delay_seconds, message.at, message.dedup_key, message.dedup_seconds
    )
    if message.unique is not None:
        if message.dedup_key is not None or message.once is not None:
            raise UsageError(reason="use unique, dedup_key or once, only one of them")
        key_text = _dedup_key(message.unique, "unique")
        headers = with_header(headers, qdo_unique=key_text)
        due_time = None if options is None else options.due
        options = SendOptions(due_time, key_text, LASTING_DEDUP_SECONDS, until_done=True)
    if message.once is not None:
        # Without qdo's other headers: a later attempt may send with another `after`.
        delay = options or SendOptions()
        options = once_options(message.once, delay, queue, key, own_headers, body=data)
    if options is not None and options.due is not None:
        now = time_of_position(position_now())
        due = options.due_at(now)
        if due is not None and due > now:
            headers = with_header(headers, qdo_sent=time_text(now), qdo_due=time_text(due))
    return Outgoing(queue, data, key, headers, options)


def _time_of_documents(after: Any) -> str:
    if type(after) is not int or not 0 <= after < 1 << 63:
        raise UsageError(
            reason=f"after must be a time that a set of documents returned, got {after!r:.60}"
        )
    return str(after)


def priority_text(priority: Any) -> str:
    if type(priority) is not int or not 0 <= priority <= 9:
        raise UsageError(
            reason=f"priority must be an integer from 0, the most urgent, to 9, got {priority!r}"
        )
    return str(priority)


def check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise UsageError(reason=f"the key of a message must be text, got {key!r:.60}")
    if len(key) > MAX_KEY:
        raise UsageError(
            reason=f"the key of a message must have at most {MAX_KEY} characters, got {len(key)}; "
            "send a digest of it"
        )


def _check_headers(queue: str, headers: str) -> None:
    size = len(headers.encode("utf-8", "surrogatepass"))
    if size > MAX_HEADERS_BYTES:
        raise UsageError(
            reason=f"the headers of a message for queue {queue!r} must have at most "
            f"{MAX_HEADERS_BYTES} bytes as JSON, got {size}; send large values in the body"
        )


def with_defaults(
    messages: list[Outgoing], defaults: Callable[[], Mapping[str, str]] | None
) -> list[Outgoing]:
    """Add missing headers from the function `defaults` to messages."""
    headers = defaults() if defaults is not None else None
    if not headers:
        return messages
    return [replace(each, headers=with_missing(each.headers, headers)) for each in messages]


def encrypted(
    messages: list[Outgoing], settings: Settings, app: str, stream_of: StreamOf
) -> list[Outgoing]:
    """Encrypt messages if the setting `encrypt` is on; raise SettingsError for invalid settings."""
    vault = vault_of(settings, app, stream_of) if settings.encrypt else None
    return messages if vault is None else [_sealed(each, vault) for each in messages]


def _sealed(message: Outgoing, vault: BodyVault) -> Outgoing:
    body, headers = vault.seal(message.queue, message.body, message.headers)
    return replace(message, body=body, headers=headers)


def check_size(message: Outgoing, max_body_bytes: int) -> None:
    """Raise BodyLimitError for a body that exceeds the setting `max_body_bytes`."""
    size = len(message.body)
    if size > max_body_bytes:
        raise BodyLimitError(
            queue=message.queue, size=size, limit=max_body_bytes, most=MAX_STORED_BODY_BYTES
        )


def time_text(seconds: float) -> str:
    return f"{seconds:.6f}"


def outgoing_of(
    message: AnyMessage, once: Message | None = None, type_of: TypeOf | None = None
) -> Outgoing:
    """Return a checked message from any form of `App.send_many`. Its own `once` has priority."""
    if isinstance(message, tuple | list):
        if not 2 <= len(message) <= 4:
            raise UsageError(
                reason="a message must be (queue, body), optionally followed by key and headers, "
                f"got {message!r}"
            )
        message = NewMessage(*message)
    if isinstance(message, NewMessage):
        own = once is None or message.once is not None
        return build_outgoing(message if own else replace(message, once=once), type_of)
    if not isinstance(message, Mapping):
        raise UsageError(
            reason=f"a message must be a tuple, a dict or qdo.NewMessage, got {message!r}"
        )
    try:
        new = NewMessage(**message)
    except TypeError as error:
        raise names_error("the keys of a message", message, NewMessage.__slots__) from error
    return outgoing_of(new, once, type_of)


def names_error(what: str, given: Iterable[Any], known: Collection[str]) -> UsageError:
    """Return the error for names of which one is unknown, or a required one is missing."""
    unknown = [each for each in given if each not in known]
    if unknown:
        found = f"{unknown[0]!r}{did_you_mean(unknown[0], known)}"
    else:
        found = f"only {', '.join(given)}"
    return UsageError(reason=f"{what} must be {', '.join(known)}, got {found}")


def build_send_options(
    delay_seconds: float | None = None,
    at: Moment | None = None,
    dedup_key: str | None = None,
    dedup_seconds: float | None = None,
) -> SendOptions | None:
    """Return the checked options of a message, or None without options."""
    due = _due(delay_seconds, at)
    if dedup_key is None:
        if dedup_seconds is not None:
            raise UsageError(reason="dedup_seconds requires a dedup_key: it is the key's window")
        return None if due is None else SendOptions(due)
    return SendOptions(due, _dedup_key(dedup_key), _dedup_seconds(dedup_seconds))


def _due(delay_seconds: float | None, at: Moment | None) -> float | None:
    if delay_seconds is not None:
        if at is not None:
            raise UsageError(reason="use delay_seconds or at, not both")
        if not is_number(delay_seconds) or delay_seconds < 0:
            raise UsageError(
                reason=f"delay_seconds must be a number of at least 0, got {delay_seconds!r}"
            )
        due = -float(delay_seconds) if delay_seconds else None
    else:
        due = None if at is None else max(0.0, _unix_time(at))
    last = SendOptions(due).due_at(time_of_position(position_now())) if due is not None else None
    if last is not None and last >= LATEST_SECONDS:
        raise UsageError(reason="a message cannot be delayed beyond the year 9999")
    return due


def _unix_time(at: Moment) -> float:
    if isinstance(at, datetime.datetime):
        if at.tzinfo is None:
            raise UsageError(
                reason=f"at must have a time zone, got {at.isoformat()}; add one, such as "
                "tzinfo=datetime.timezone.utc"
            )
        return at.timestamp()
    if not is_number(at):
        raise UsageError(reason=f"at must be a datetime or a Unix time in seconds, got {at!r}")
    return float(at)


def is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
    )


def _dedup_key(key: Any, name: str = "dedup_key") -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_DEDUP_KEY:
        raise UsageError(
            reason=f"{name} must be text of 1 to {MAX_DEDUP_KEY} characters, got {key!r:.60}"
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            reason=f"{name} must not contain surrogate characters, which UTF-8 cannot encode, "
            f"got {key!r}"
        ) from error
    return key


def _dedup_seconds(seconds: float | None) -> float:
    if seconds is None:
        return DEDUP_SECONDS
    if not is_number(seconds) or not 0 < seconds <= MAX_DEDUP_SECONDS:
        raise UsageError(
            reason=f"dedup_seconds must be a number above 0 and at most {MAX_DEDUP_SECONDS}, 366"
            f" days, got {seconds!r}"
        )
    return float(seconds)


def check_options(capabilities: Capabilities, options: SendOptions | None, broker: str) -> None:
    """Raise UnsupportedError for options that a broker does not support."""
    if options is None:
        return
    if options.once is not None and not capabilities.lasting_dedup:
        what = f"send once: it does not deduplicate for {LASTING_DEDUP_SECONDS / 86_400:g} days"
        raise UnsupportedError(broker=broker, what=what, remedy="send without once")
    if options.due is not None and not capabilities.delay:
        raise UnsupportedError(broker=broker, what="delay messages", remedy=NO_DELAY)
    if options.until_done and (not capabilities.dedup or capabilities.dedup_seconds is not None):
        what = "keep messages unique until they are done"
        raise UnsupportedError(broker=broker, what=what, remedy="use a PostgreSQL or SQLite broker")
    if options.dedup_key is not None and not capabilities.dedup:
        raise UnsupportedError(broker=broker, what="deduplicate messages", remedy=NO_DEDUP)
