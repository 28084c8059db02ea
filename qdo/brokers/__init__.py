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
    if kind == "kinesis":
        from qdo.brokers.kinesis_positions import POSITIONS

        return POSITIONS
    return TIMES


def closing_seconds(url: str) -> float:
    """Return how long the broker at `url` may take to close, without opening it.

    With SQS for as long as a long poll that is open. 0 for an address that will not do: whoever
    opens it says so.
    """
    if url.partition(":")[0] != "sqs":
        return 0.0
    from qdo.brokers.aws_address import sqs_address

    try:
        return float(sqs_address(url).wait_seconds)
    except SettingsError:
        return 0.0


def keeps_dead_letters(url: str) -> bool:
    """Return whether the broker at `url` has a place for dead letters, without opening it.

    True for an address that will not do: whoever opens it says so.
    """
    if url.partition(":")[0] != "kinesis":
        return True
    from qdo.brokers.aws_address import kinesis_address

    try:
        return kinesis_address(url).dead_letters is not None
    except SettingsError:
        return True


def open_broker(url: str, app: str) -> Broker:
    """Open the broker at `url` for one app, making what is missing.

    :param url: `sqlite:PATH`, a file shared by the processes of this machine,
        `sqs://REGION/PREFIX` or `kinesis://REGION/STREAM`.
    :param app: its queues are separate from those of every other app at the same file; in SQS
        the prefix separates apps, and of a stream each app reads everything.
    :raises SettingsError: an address of no known kind, or an impossible app name.
    :raises DatabaseError: the file cannot be used; see its subclasses.
    :raises CredentialsError: AWS knows nobody with these credentials, or there are none.
    :raises UnreachableError: the service does not answer.
    """
    reason = name_fault(app)
    if reason:
        raise SettingsError(name="app", reason=f"{app!r} cannot be a znode name: {reason}")
    kind, colon, path = url.partition(":")
    # Imported late: brokers bring libraries that only their users have installed.
    if kind == "sqs" and colon:
        from qdo.brokers.aws_address import sqs_address

        address = sqs_address(url)  # a wrong one is told without boto3, too
        from qdo.brokers.sqs import SqsBroker

        return SqsBroker(address)
    if kind == "kinesis" and colon:
        from qdo.brokers.aws_address import kinesis_address

        stream = kinesis_address(url)
        from qdo.brokers.kinesis import KinesisBroker

        return KinesisBroker(stream, app)
    if kind != "sqlite" or not colon:
        forms = "sqlite:PATH, sqs://REGION/PREFIX or kinesis://REGION/STREAM"
        raise SettingsError(name="broker", reason=f"{url!r} is no broker; write {forms}")
    if not path or path == ":memory:" or (path.startswith("//") and not path.startswith("///")):
        raise SettingsError(name="broker", reason=f"{url!r} names no file; write sqlite:PATH")
    from qdo.brokers.embedded import EmbeddedBroker

    return EmbeddedBroker(path, app)
