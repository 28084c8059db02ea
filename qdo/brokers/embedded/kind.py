"""The registry entry of the embedded broker: ``sqlite:PATH``."""

from __future__ import annotations

from qdo.brokers.base import Broker
from qdo.brokers.registry import BrokerKind
from qdo.errors import SettingsError
from qdo.system.files import sqlite_path
from qdo.system.sqlite import sqlite_address_error


def _open(url: str, app: str) -> Broker:
    reason = sqlite_address_error(url)
    if reason is not None:
        raise SettingsError(name="broker", reason=reason)
    from qdo.brokers.embedded.broker import EmbeddedBroker

    return EmbeddedBroker(sqlite_path(url) or "", app)


KIND = BrokerKind(open=_open, address_error=sqlite_address_error, form="sqlite:PATH")
