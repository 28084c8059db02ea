"""The attributes of an SQS queue, parsed from the answers of SQS; pure functions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import ujson

from qdo.brokers.sqs.url import FIFO, MAX_SQS_NAME

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Redrive:
    """A redrive policy: where SQS itself moves messages that were received too often.

    :ivar target: SQS name of the queue that receives them.
    :ivar max_receives: maximum of receives before the move.
    """

    target: str
    max_receives: int


@dataclass(frozen=True, slots=True)
class QueueAttributes:
    """The settings of an SQS queue and its approximate counts, as SQS reports them.

    :ivar read_at: time on the monotonic clock of the request.
    :ivar waiting: messages that can be received.
    :ivar in_flight: messages that were received and are not deleted.
    :ivar delayed: messages that are not due yet.
    """

    read_at: float
    retention_seconds: int = 345_600
    visibility_seconds: int = 30
    redrive: Redrive | None = None
    waiting: int = 0
    in_flight: int = 0
    delayed: int = 0


def sqs_name_fault(name: str) -> str | None:
    """Return why SQS does not allow a queue name, None when it does."""
    if len(name) > MAX_SQS_NAME:
        return f"{name!r} has {len(name)} characters"
    bare = name.removesuffix(FIFO)
    if not bare:
        return "nothing is left of it"
    refused = next((c for c in bare if not (c.isascii() and c.isalnum()) and c not in "-_"), None)
    return None if refused is None else f"it holds {refused!r}"


def facts_of(attributes: Mapping[str, str], now: float) -> QueueAttributes:
    return QueueAttributes(
        read_at=now,
        retention_seconds=int(attributes.get("MessageRetentionPeriod", 345_600)),
        visibility_seconds=int(attributes.get("VisibilityTimeout", 30)),
        redrive=_redrive_of(attributes.get("RedrivePolicy")),
        waiting=int(attributes.get("ApproximateNumberOfMessages", 0)),
        in_flight=int(attributes.get("ApproximateNumberOfMessagesNotVisible", 0)),
        delayed=int(attributes.get("ApproximateNumberOfMessagesDelayed", 0)),
    )


def _redrive_of(policy: str | None) -> Redrive | None:
    if not policy:
        return None
    try:
        found = ujson.loads(policy)
        target = str(found["deadLetterTargetArn"]).rsplit(":", 1)[-1]
        return Redrive(target, int(found.get("maxReceiveCount", 10)))
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("redrive policy %r cannot be parsed and is ignored", policy)
        return None
