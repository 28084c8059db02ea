"""The registry entry of Kinesis: ``kinesis://REGION/STREAM``."""

from __future__ import annotations

from functools import partial

from qdo.brokers.base import Broker
from qdo.brokers.kinesis.positions import POSITIONS
from qdo.brokers.kinesis.url import kinesis_address
from qdo.brokers.registry import BrokerKind, missing_library, parse_error


def _open(url: str, app: str) -> Broker:
    address = kinesis_address(url)  # reports a wrong address even without boto3
    try:
        from qdo.brokers.kinesis.broker import KinesisBroker
    except ImportError as error:
        raise missing_library(error, "aws") from error

    return KinesisBroker(address, app)


def _keeps_dead_letters(url: str) -> bool:
    return kinesis_address(url).dead_letters is not None


def _stream(url: str) -> str:
    return kinesis_address(url).stream


KIND = BrokerKind(
    open=_open,
    address_error=partial(parse_error, kinesis_address),
    form="kinesis://REGION/STREAM",
    positions=POSITIONS,
    stream=_stream,
    foreign_senders=True,
    stores_requests=False,
    stores_streams=False,
    keeps_dead_letters=_keeps_dead_letters,
    dead_letter_remedy="S3 deletes dead letters by their age: add a lifecycle rule to their bucket"
    " instead",
)
