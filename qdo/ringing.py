"""Ringing doorbells on behalf of whoever sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdo.brokers.base import Broker
from qdo.settings import Settings

if TYPE_CHECKING:
    from qdo.coordination.ringing import Ringer


def ring_for(broker: Broker, settings: Settings, app: str) -> Ringer | None:
    """Have the owners of queues told of what is sent through a broker, where that is wanted.

    :return: what rings, to be closed after the broker; None: nothing does, as with brokers that
        wake by themselves, and without the setting `doorbell`.
    """
    if not settings.doorbell or not broker.polled:
        return None
    # Imported late: most senders need no coordinator.
    from qdo.coordination.layout import Layout
    from qdo.coordination.ringing import Ringer

    ringer = Ringer(settings.coordinator, Layout.of(app, settings.namespace))
    broker.on_sent = ringer.ring
    return ringer
