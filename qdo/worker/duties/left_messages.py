"""The duty "left": releases the messages that dead worker processes held at the broker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from qdo.brokers.base import Broker
from qdo.brokers.subscription import OPEN_POLL
from qdo.text import describe, pluralize
from qdo.worker.duties.runner import Duty

_log = logging.getLogger(__name__)


class LeftMessages(Duty):
    """Releases messages once, instead of waiting for their visibility timeout.

    :param left: queue and receipt handle of each message.
    """

    name = "left"
    ends_at_drain = False

    def __init__(self, broker: Broker, left: Sequence[tuple[str, str]]) -> None:
        self._broker = broker
        self._left = left

    def run(self) -> None:
        count = sum(not receipt.startswith(OPEN_POLL) for _, receipt in self._left)
        try:
            self._broker.release(self._left)
        except Exception as error:  # noqa: BLE001 - brokers raise what their libraries raise
            _log.warning(
                "cannot release %s that a dead worker held; the broker delivers again after the"
                " visibility timeout: %s",
                pluralize(count, "message"),
                describe(error),
            )
        else:
            if count:
                _log.info("released %s that a dead worker held", pluralize(count, "message"))
