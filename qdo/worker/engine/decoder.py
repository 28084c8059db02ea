"""Make messages from rows. The hot loop has its own inline decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ujson

from qdo.brokers.base import Broker
from qdo.encoding import ID, LEFT_ON_SERVER, JsonText, is_raw, key_id_of, unreadable_reason
from qdo.encryption.marks import RowOpener
from qdo.errors import BodyDecodeError, KeyMissingError, LargeBodyError
from qdo.message import Message
from qdo.text import describe
from qdo.worker.engine.jobs import Turn
from qdo.worker.engine.slot import Row
from qdo.worker.large_bodies import LARGE_BYTES, load_large

NO_HEADERS: Mapping[str, str] = {}
# Names the place of a missing key in error texts if there is no key file.
NO_KEYS = "the setting keys"


class Decoder:
    """Makes messages from the rows of a broker.

    :param most: the setting `max_body_bytes`.
    :ivar opener: decrypts bodies; None without keys.
    :ivar large_bytes: minimum size in bytes of JSON bodies that `large` decodes.
    """

    def __init__(self, broker: Broker, opener: RowOpener | None, most: int) -> None:
        self._broker = broker
        self._most = most
        self.opener = opener
        self.large_bytes = min(LARGE_BYTES, most + 1)

    def large(self, turn: Turn, position: int, body: bytes) -> Any:
        """Decode a large body; return its JSON undecoded if the job runs in a process.

        :raises LargeBodyError: the body is too large.
        :raises ValueError: the body is not JSON.
        """
        if len(body) > self._most:
            id = self.undecoded(turn, (position, body, None, None), 1).id
            raise LargeBodyError(queue=turn.slot.queue, id=id, limit=self._most, size=len(body))
        return JsonText(body) if turn.job.executor == "process" else load_large(body)

    def decode(self, turn: Turn, row: Row, attempt: int) -> tuple[Message, BaseException | None]:
        """Return the message of a row, and the error if decoding fails."""
        try:
            opened = row if self.opener is None else self.opener.open(turn.slot.queue, row)
            position, body, key, raw_headers = opened
            headers = NO_HEADERS if raw_headers is None else ujson.loads(raw_headers)
            if headers and is_raw(headers):
                content = body
            elif len(body) < self.large_bytes:
                content = ujson.loads(body)
            else:
                content = self.large(turn, position, body)
        except Exception as error:  # noqa: BLE001 - a body may make its decoder raise anything
            return self.undecodable(turn, row, attempt, error)
        message = Message(
            turn.slot.queue,
            position,
            content,
            key,
            headers,
            turn.claim.fence,
            attempt,
            turn.slot.origin,
        )
        return message, None

    def undecoded(self, turn: Turn, row: Row, attempt: int) -> Message:
        """Return the message of a row with the original body and without headers."""
        position, body, key, _ = row
        return Message(
            turn.slot.queue,
            position,
            body,
            key,
            {ID: turn.pool.id_of(position)} if turn.slot.is_pool else NO_HEADERS,
            turn.claim.fence,
            attempt,
            turn.slot.origin,
        )

    def undecodable(
        self, turn: Turn, row: Row, attempt: int, error: BaseException
    ) -> tuple[Message, BaseException]:
        """Return a message with the original body, and the error to record."""
        message = self.undecoded(turn, row, attempt)
        queue = turn.slot.queue
        if row[3] == LEFT_ON_SERVER:
            error = LargeBodyError(queue=queue, id=message.id, limit=self._most, size="more")
        if isinstance(error, BodyDecodeError | KeyMissingError):
            return message, error
        failure: BodyDecodeError | KeyMissingError
        # Without keys, `decode` took the encrypted body for JSON. The body names the missing key.
        if self.opener is None and (id := key_id_of(row[1])) is not None:
            failure = KeyMissingError(queue=queue, key=id, place=NO_KEYS)
        else:
            reason = unreadable_reason(row[3]) or describe(error)
            failure = BodyDecodeError(queue=queue, id=message.id, reason=reason)
        failure.__cause__ = error
        return message, failure
