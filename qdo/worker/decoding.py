"""Messages made of rows outside the loop over them, which does it in line."""

from __future__ import annotations

from collections.abc import Mapping

import ujson

from qdo.brokers.base import Broker
from qdo.coordination.slots import Claim
from qdo.describe import describe
from qdo.errors import BodyDecodeError
from qdo.headers import is_raw
from qdo.message import Message
from qdo.worker.fetching import Row
from qdo.worker.slot import Slot

_NO_HEADERS: Mapping[str, str] = {}


class Decoder:
    """Makes messages of the rows of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def decoded(
        self, slot: Slot, claim: Claim, row: Row, attempt: int
    ) -> tuple[Message, BaseException | None]:
        """Return the message of a row of a batch; with the error if it cannot be read."""
        position, body, key, headers = row
        try:
            given = _NO_HEADERS if headers is None else ujson.loads(headers)
            content = body if given and is_raw(given) else ujson.loads(body)
        except Exception as error:  # noqa: BLE001 - whatever a body makes of its decoder
            return self.undecoded(slot, claim, row, attempt, error)
        node = self._broker.naming
        return Message(slot.queue, position, content, key, given, claim.fence, attempt, node), None

    def undecoded(
        self, slot: Slot, claim: Claim, row: Row, attempt: int, error: BaseException
    ) -> tuple[Message, BaseException]:
        """Return a message with the body as it was sent, and the error to record."""
        position, body, key, _ = row
        message = Message(
            slot.queue,
            position,
            body,
            key,
            _NO_HEADERS,
            claim.fence,
            attempt,
            self._broker.naming,
        )
        fault = BodyDecodeError(queue=slot.queue, id=message.id, reason=describe(error))
        fault.__cause__ = error
        return message, fault
