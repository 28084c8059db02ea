"""Results of requests as they are stored, and the messages that tell of their ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ujson

from qdo.brokers.base import Outgoing
from qdo.brokers.requests import Content
from qdo.encoding import decoded_headers, encoded, is_raw, parsed
from qdo.errors import UsageError
from qdo.sending.messages import NewMessage, build_outgoing
from qdo.settings.vaults import vault_of

if TYPE_CHECKING:
    from qdo.sending.sender import Sender

_log = logging.getLogger(__name__)


def sealed(sender: Sender, pool: str, value: Any) -> Content:
    """Return a body or result as it is stored, encrypted if the settings say so.

    :raises BodyError: it is neither JSON nor bytes.
    :raises BodyLimitError: it is larger than the setting `max_body_bytes`.
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
    id: str,
    pool: str,
    reply: str | None,
    outcome: str,
    result: Any = None,
    error: str | None = None,
) -> list[Outgoing]:
    """Return the message for the queue that asked, if it wants one.

    :param reply: JSON object with the keys `then`, `key`, `tag` and `events`.
    :param outcome: of the request; or "started" or "paused", which it wants only with `events`.
    :param result: what the job returned; bytes are left out, see `Handle.result`.
    """
    wanted = decoded_headers(reply) or {}
    is_event = outcome in ("started", "paused")
    if not wanted.get("then") or (is_event and not wanted.get("events")):
        return []
    value = None if isinstance(result, bytes) else result
    told = {"request": id, "pool": pool, "outcome": outcome, "result": value, "error": error}
    body = {**(wanted.get("tag") or {}), **told}
    try:
        return sender.ready([build_outgoing(NewMessage(wanted["then"], body, wanted.get("key")))])
    except UsageError as error:
        if result is not None:
            raise  # the request fails, and tells that without its result
        _log.error("request %s of pool %s ends without its message: %s", id, pool, error)
        return []
