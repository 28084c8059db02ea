"""The registry entry of SQS: ``sqs://REGION/PREFIX``."""

from __future__ import annotations

from functools import partial

from qdo.brokers.base import Broker
from qdo.brokers.registry import BrokerKind, missing_library, parse_error
from qdo.brokers.sqs.codec import SQS_POSITIONS
from qdo.brokers.sqs.url import sqs_address


def _open(url: str, app: str) -> Broker:
    address = sqs_address(url)  # reports a wrong address even without boto3
    try:
        from qdo.brokers.sqs.broker import SqsBroker
    except ImportError as error:
        raise missing_library(error, "aws") from error

    return SqsBroker(address)


def _closing_seconds(url: str) -> float:
    return float(sqs_address(url).wait_seconds)  # closing waits for open long polls


KIND = BrokerKind(
    open=_open,
    address_error=partial(parse_error, sqs_address),
    form="sqs://REGION/PREFIX",
    positions=SQS_POSITIONS,
    closing_seconds=_closing_seconds,
    foreign_senders=True,
    stores_requests=False,
    stores_streams=False,
    dead_letter_remedy="SQS deletes dead letters by their age: set MessageRetentionPeriod of the"
    " dead-letter queue instead",
)
