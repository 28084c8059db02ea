"""A broker for senders, with a doorbell that notifies the owners of queues."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from qdo.brokers.base import Broker
from qdo.settings.hosts import share_files
from qdo.settings.settings import Settings
from qdo.settings.vaults import marks_of

if TYPE_CHECKING:
    from qdo.coordination.doorbell_notifier import DoorbellNotifier


def attach_doorbell(broker: Broker, settings: Settings, app: str) -> DoorbellNotifier | None:
    """Notify queue owners of messages sent through a broker, if the settings allow this."""
    # Some brokers need no doorbell, because they wake their readers themselves.
    if not settings.doorbell or not broker.capabilities.doorbell:
        return None
    # Import late, because most senders need no coordinator.
    from qdo.coordination.doorbell_notifier import DoorbellNotifier
    from qdo.coordination.znodes.layout import Layout
    from qdo.settings.coordinator_access import coordinator_access

    layout = Layout.of(app, settings.namespace)
    access = coordinator_access(settings, layout)
    notifier = DoorbellNotifier(settings.coordinator, layout, access=access)
    broker.on_sent = notifier.ring
    return notifier


@dataclass(slots=True)
class OpenBroker:
    """An open broker with its doorbell; a context manager, which yields the broker."""

    broker: Broker
    notifier: DoorbellNotifier | None

    def close(self) -> None:
        """Close the broker, and then the doorbell, because a closing broker may still send."""
        try:
            self.broker.close()
        finally:
            if self.notifier is not None:
                self.notifier.close()

    def __enter__(self) -> Broker:
        return self.broker

    def __exit__(self, *error: object) -> None:
        self.close()


def open_broker_with_doorbell(settings: Settings, app: str) -> OpenBroker:
    """Open an app's broker for sending; raise UnreachableError if it does not respond."""
    from qdo.brokers.registry import open_broker

    share_files(settings)
    broker = open_broker(settings.broker, app, settings.max_queues)
    broker.sets_limit = False
    try:
        broker.dead_letters.marks = partial(marks_of, settings, app, broker.stream_of)
        return OpenBroker(broker, attach_doorbell(broker, settings, app))
    except BaseException:
        broker.close()
        raise
