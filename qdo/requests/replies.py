"""Stores the results and the ends of requests, with the messages about their outcomes."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import ujson

from qdo.backoff import Backoff
from qdo.brokers.base import Outgoing
from qdo.brokers.request_checks import storable_text
from qdo.brokers.requests import Content, Take
from qdo.encoding import decoded_headers, encoded, is_raw, parsed
from qdo.errors import FailureKind, UsageError
from qdo.refusals import failure_kind
from qdo.sending.messages import NewMessage, build_outgoing
from qdo.settings.vaults import vault_of
from qdo.text import describe

if TYPE_CHECKING:
    from qdo.sending.sender import Sender

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Pauses between attempts to store the end of a request. The request keeps its place meanwhile.
REPEAT = Backoff(0.05, 5.0)


def sealed(sender: Sender, pool: str, value: Any) -> Content:
    """Return the stored form of a body or result, encrypted if the settings require encryption.

    :raises UsageError: the value is not JSON or bytes.
    :raises BodyLimitError: the value is larger than the setting `max_body_bytes`.
    """
    data, headers = encoded(pool, value, None)
    (message,) = sender.ready([Outgoing(pool, data, None, headers)])
    return message.body, message.headers


def opened(sender: Sender, pool: str, content: Content) -> Any:
    """Return the value of a stored body or result; raise the errors of `BodyVault.open`."""
    body, headers = content
    vault = vault_of(sender.settings, sender.name, sender._stream_of)
    if vault is not None:
        body, headers = vault.open(pool, body, headers)
    return body if headers and is_raw(parsed(headers) or {}) else ujson.loads(body)


def reply_messages(
    sender: Sender,
    take: Take,
    pool: str,
    reply: str | None,
    outcome: str,
    result: Any = None,
    error: str | None = None,
) -> list[Outgoing]:
    """Return the message for the queue that the request names in `then`, if any.

    The key `take` in its body distinguishes the outcome of a retried request from an earlier
    outcome.

    :param reply: JSON object with the keys `then`, `key`, `tag` and `events`.
    :param outcome: the request's outcome, or "started" or "paused". The latter need `events`.
    :param result: the job's result. The message omits bytes, which `Handle.result` returns.
    """
    terms = decoded_headers(reply) or {}
    is_event = outcome in ("started", "paused")
    if not terms.get("then") or (is_event and not terms.get("events")):
        return []
    value = None if isinstance(result, bytes) else result
    tag = terms.get("tag") or {}
    if not isinstance(tag, dict):
        raise UsageError(
            reason=f"the tag of request {take.id!r} must be a JSON object, got {tag!r:.80}"
        )
    origin = {"request": take.id, "take": take.number, "pool": pool}
    # The tag comes first, because it must not replace the keys of qdo.
    body = {**tag, **origin, "outcome": outcome, "result": value, "error": storable_text(error)}
    return sender.ready([build_outgoing(NewMessage(terms["then"], body, terms.get("key")))])


def until_answered(call: Callable[[], _T], what: str) -> _T:
    """Call a function until the broker answers.

    Raise a refusal, because the broker would repeat it.

    :param what: the name of the request in the log.
    """
    failures = 0
    while True:
        try:
            return call()
        except Exception as error:
            if failure_kind(error) is FailureKind.REFUSED:
                raise
            failures += 1
            # Use random pauses, because many workers wait for the same broker.
            pause = REPEAT.delay(failures, random.random())
            text = "cannot store the state of %s, retrying in %.2f s: %s"
            _log.warning(text, what, pause, describe(error))
        time.sleep(pause)


def store_end(
    sender: Sender,
    take: Take,
    pool: str,
    reply: str | None,
    outcome: str,
    result: Any = None,
    error: str | None = None,
    failed: int | None = None,
) -> bool:
    """Store the end of a request and its message, in one transaction of the broker.

    :param result: the value that the job returned. Only the outcome "done" stores this value.
    :param failed: the parameter of `RequestStore.end`.
    :return: False if the request has ended or another worker has taken it. Then nothing is stored.
    """
    messages = reply_messages(sender, take, pool, reply, outcome, result, error)
    content = sealed(sender, pool, result) if outcome == "done" else None
    return sender.broker.requests.end(take, outcome, content, error, messages, failed)


def end_request(
    sender: Sender,
    take: Take,
    pool: str,
    reply: str | None,
    outcome: str,
    error: str | None = None,
    run: Callable[[Callable[[], bool]], bool] = lambda call: call(),
    failed: int | None = None,
) -> bool:
    """End a request without a result; return what `store_end` returns.

    If the broker refuses the message, the request ends without the message, and its error has the
    reason. A done request then counts as failed.

    :param run: a function that calls its argument, such as `until_answered`.
    """
    try:
        return run(
            lambda: store_end(sender, take, pool, reply, outcome, error=error, failed=failed)
        )
    except Exception as refusal:
        if failure_kind(refusal) is not FailureKind.REFUSED:
            raise
        why = describe(refusal)
        _log.error("request %s of pool %s ends without its message: %s", take.id, pool, why)
        text = error or ""
        if why not in text:
            text = f"{text}{text and '; '}its message is refused: {why}"
        # The queue in `then` never gets the outcome, so an operator must see a failure.
        ending = "failed" if outcome == "done" else outcome
        # A reply of None requests no message, so only the broker can refuse this end.
        return run(lambda: store_end(sender, take, pool, None, ending, error=text, failed=failed))
