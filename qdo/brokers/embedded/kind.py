"""The embedded broker as the registry knows it: ``sqlite:PATH``."""

from __future__ import annotations

from qdo.brokers.base import Broker
from qdo.brokers.kind import BrokerKind
from qdo.errors import SettingsError


def _open(url: str, app: str) -> Broker:
    path = url.removeprefix("sqlite:")
    if not path or path == ":memory:" or (path.startswith("//") and not path.startswith("///")):
        reason = f"{url!r} does not name a file; write sqlite:PATH"
        raise SettingsError(name="broker", reason=reason)
    from qdo.brokers.embedded.broker import EmbeddedBroker

    return EmbeddedBroker(path, app)


KIND = BrokerKind(open=_open)
