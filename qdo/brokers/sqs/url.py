"""The address of an SQS broker: sqs://REGION/PREFIX with options."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qdo.brokers.aws.address import (
    ServiceAddress,
    _bucket,
    _choice,
    _endpoint,
    _fault,
    _number,
    _read,
    _split,
    _whole,
)

# The maximum number of messages in one call.
BATCH = 10
# The maximum time for which SQS hides a received message, including extensions.
HOLD_SECONDS = 12 * 3600.0
# The maximum size of body and attributes in SQS, in bytes.
MAX_SQS_MESSAGE = 1024 * 1024
# The maximum length of a queue name in characters, including `.fifo`.
MAX_SQS_NAME = 80
# The suffix of FIFO queue names.
FIFO = ".fifo"

_SQS_FORM = "sqs://REGION/PREFIX"
_SQS_NAME = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SqsAddress:
    """The SQS queues whose names begin with a prefix."""

    region: str
    prefix: str
    # The full SQS name of qdo's dead-letter queue for standard queues.
    dead_letters: str
    endpoint: str | None = None
    # The key and value of a tag; workers process only queues with this tag. If None, workers
    # process all queues.
    tag: tuple[str, str] | None = None
    # The visibility timeout: the time for which a receive or an extension hides a message.
    visibility_seconds: int = 60
    # The duration of one long poll.
    wait_seconds: int = 20
    # The maximum pause between polls of an empty queue; 0: no pause.
    idle_seconds: float = 20.0
    # The type of queue that a send to a missing queue creates: None, standard or fifo.
    create: str = "none"
    # The S3 bucket for bodies over `max_body`; None: the sender rejects such bodies.
    bucket: str | None = None
    # The maximum size of a body in SQS, in bytes.
    max_body: int = 262144

    @property
    def place(self) -> ServiceAddress:
        return ServiceAddress("sqs", self.region, self.endpoint)

    @property
    def letter_queues(self) -> tuple[str, str]:
        """The full SQS names of qdo's dead-letter queues for standard and for FIFO queues."""
        return self.dead_letters, self.dead_letters + FIFO


def sqs_address(url: str) -> SqsAddress:
    region, prefix, options = _split(url, _SQS_FORM)
    if not _SQS_NAME.fullmatch(prefix) or len(prefix) >= MAX_SQS_NAME:
        raise _fault(
            f"{prefix!r} cannot begin names of SQS queues: use letters, digits, '-' and '_', "
            f"under {MAX_SQS_NAME} characters"
        )
    given = _read(
        options,
        {
            "endpoint": _endpoint,
            "tag": _tag,
            "visibility_seconds": _whole(1, 43_200),
            "wait_seconds": _whole(0, 20),
            "idle_seconds": _number(0, 3600),
            "create": _choice("none", "standard", "fifo"),
            "dead_letters": _letter_queue,
            "bucket": _bucket,
            "max_body": _whole(1, MAX_SQS_MESSAGE),
        },
    )
    letters = given.pop("dead_letters", f"{prefix}dead-letters")
    if len(letters) + len(FIFO) > MAX_SQS_NAME:
        raise _fault(
            f"dead_letters={letters!r} is too long: with {FIFO!r} a queue of SQS has at most "
            f"{MAX_SQS_NAME} characters"
        )
    return SqsAddress(region=region, prefix=prefix, dead_letters=letters, **given)


def _tag(name: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise _fault(f"{name}={text!r} is not a tag: write {name}=KEY=VALUE")
    return key, value


def _letter_queue(name: str, text: str) -> str:
    bare = text.removesuffix(FIFO)
    if not bare or not _SQS_NAME.fullmatch(bare):
        raise _fault(
            f"{name}={text!r} cannot name a queue of SQS: use letters, digits, '-' and '_'; "
            f"{FIFO!r} is added where it is needed"
        )
    return bare
