"""Facts about a kind of broker, available without opening one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qdo.brokers.base import Broker
from qdo.positions import TIME_POSITIONS, Positions


@dataclass(frozen=True, slots=True)
class BrokerKind:
    """One kind of broker.

    :ivar open: opens a broker, given its address and the app's name; see `registry.open_broker`.
    :ivar positions: meaning of its positions.
    :ivar closing_seconds: how long the broker at an address may take to close.
    :ivar keeps_dead_letters: whether the broker at an address can store dead letters.
    """

    open: Callable[[str, str], Broker]
    positions: Positions = TIME_POSITIONS
    closing_seconds: Callable[[str], float] = lambda url: 0.0
    keeps_dead_letters: Callable[[str], bool] = lambda url: True
