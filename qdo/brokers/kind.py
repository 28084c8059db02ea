"""Facts about a kind of broker, available without opening one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qdo.brokers.base import Broker
from qdo.errors import SettingsError
from qdo.positions import TIME_POSITIONS, Positions


@dataclass(frozen=True, slots=True)
class BrokerSchema:
    """The schema of a broker that is a database; each function takes the broker's address.

    :ivar script: returns the SQL statements that create it, given the seconds of a partition.
    :ivar is_missing: returns whether `create` would change anything, or raises what it would.
    :ivar create: creates or upgrades it; returns whether it changed anything.
    :ivar grants: returns the SQL statements that let a role be a sender, worker or onlooker.
    """

    script: Callable[[str, int], str]
    is_missing: Callable[[str], bool]
    create: Callable[[str, int], bool]
    grants: Callable[[str, str, str], list[str]]


@dataclass(frozen=True, slots=True)
class BrokerKind:
    """One kind of broker.

    :ivar open: opens a broker, given its address and the app's name; see `registry.open_broker`.
    :ivar address_error: returns why an address is invalid, None if it is valid.
    :ivar positions: meaning of its positions.
    :ivar closing_seconds: how long the broker at an address may take to close.
    :ivar stream: the stream that the queues of an address are parts of, None if each queue is
        separate. A message for one part may be received from another.
    :ivar foreign_senders: whether programs other than qdo may send; see `encryption.marks`.
    :ivar dead_letter_remedy: how to limit its dead letters, where qdo does not; else "".
    :ivar schema: None if opening a broker creates everything that it needs.
    :ivar keeps_dead_letters: whether the broker at an address can store dead letters.
    :ivar connector: returns a function that opens a connection of DB-API 2.0 to the database at an
        address, for native threads; None if the broker is not a database of others, too.
    """

    open: Callable[[str, str], Broker]
    address_error: Callable[[str], str | None]
    positions: Positions = TIME_POSITIONS
    closing_seconds: Callable[[str], float] = lambda url: 0.0
    stream: Callable[[str], str | None] = lambda url: None
    foreign_senders: bool = False
    keeps_dead_letters: Callable[[str], bool] = lambda url: True
    dead_letter_remedy: str = ""
    schema: BrokerSchema | None = None
    connector: Callable[[str], Callable[[], Any]] | None = None


def parse_error(parse: Callable[[str], object], url: str) -> str | None:
    """Return the reason of the `SettingsError` that a parser of addresses raises, else None."""
    try:
        parse(url)
    except SettingsError as error:
        return str(error.details["reason"])
    return None
