"""The names that a package with a broker needs; :doc:`brokers` says what a broker must do.

This package imports its modules at first use, because most programs use one broker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdo.brokers.base import Broker as Broker
    from qdo.brokers.base import Capabilities as Capabilities
    from qdo.brokers.base import DelayedMessage as DelayedMessage
    from qdo.brokers.base import DelayedMessages as DelayedMessages
    from qdo.brokers.base import Reader as Reader
    from qdo.brokers.base import Subscription as Subscription
    from qdo.brokers.catalog import Backlog as Backlog
    from qdo.brokers.catalog import QueueCatalog as QueueCatalog
    from qdo.brokers.dead_letters import DeadLetterRecord as DeadLetterRecord
    from qdo.brokers.dead_letters import DeadLetterStore as DeadLetterStore
    from qdo.brokers.outgoing import Outgoing as Outgoing
    from qdo.brokers.outgoing import SendOptions as SendOptions
    from qdo.brokers.outgoing import checked_size as checked_size
    from qdo.brokers.registry import BrokerKind as BrokerKind
    from qdo.encoding import MAX_STORED_BODY_BYTES as MAX_STORED_BODY_BYTES
    from qdo.encoding import utf8_text as utf8_text
    from qdo.encoding import with_header as with_header
    from qdo.system.home_loop import at_home as at_home

_NAMES = {
    "brokers.base": (
        *("Broker", "Capabilities", "DelayedMessage", "DelayedMessages", "Reader", "Subscription"),
    ),
    "brokers.catalog": ("Backlog", "QueueCatalog"),
    "brokers.dead_letters": ("DeadLetterRecord", "DeadLetterStore"),
    "brokers.outgoing": ("Outgoing", "SendOptions", "checked_size"),
    "brokers.registry": ("BrokerKind",),
    "encoding": ("MAX_STORED_BODY_BYTES", "utf8_text", "with_header"),
    "system.home_loop": ("at_home",),
}
_HOMES = {name: f"qdo.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)

# As in `qdo`: type checkers see the imports above.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'qdo.brokers' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
