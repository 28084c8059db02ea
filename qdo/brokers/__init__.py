"""Brokers: where messages live."""

from __future__ import annotations

from qdo.brokers.base import Broker
from qdo.errors import SettingsError
from qdo.names import name_fault
from qdo.positions import TIMES, Positions


def positions_of(url: str) -> Positions:
    """Return what the positions of the broker at `url` mean, without opening it."""
    kind = url.partition(":")[0]
    if kind == "sqs":
        from qdo.brokers.sqs_positions import SQS_POSITIONS

        return SQS_POSITIONS
    return TIMES


def open_broker(url: str, app: str) -> Broker:
    """Open the broker at `url` for one app, making what is missing.

    :param url: `sqlite:PATH`, a file shared by the processes of this machine.
    :param app: its queues are separate from those of every other app at the same address.
    :raises SettingsError: an address of no known kind, or an impossible app name.
    :raises DatabaseError: the file cannot be used; see its subclasses.
    """
    reason = name_fault(app)
    if reason:
        raise SettingsError(name="app", reason=f"{app!r} cannot be a znode name: {reason}")
    kind, colon, path = url.partition(":")
    if kind != "sqlite" or not colon:
        raise SettingsError(name="broker", reason=f"{url!r} is no broker; write sqlite:PATH")
    if not path or path == ":memory:" or (path.startswith("//") and not path.startswith("///")):
        raise SettingsError(name="broker", reason=f"{url!r} names no file; write sqlite:PATH")
    # Imported late: other brokers bring libraries that only their users have installed.
    from qdo.brokers.embedded import EmbeddedBroker

    return EmbeddedBroker(path, app)
