"""The address of a Kinesis broker: kinesis://REGION/STREAM with options."""

from __future__ import annotations

import datetime
import re
import time
from dataclasses import dataclass

from qdo.brokers.aws.address import (
    ServiceAddress,
    _choice,
    _endpoint,
    _fault,
    _number,
    _read,
    _s3,
    _split,
)

_KINESIS_FORM = "kinesis://REGION/STREAM"
_STREAM = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KinesisAddress:
    """One stream of Kinesis."""

    region: str
    stream: str
    endpoint: str | None = None
    # The start of a shard without a recorded position: oldest, latest, or a Unix time.
    start: str | float = "oldest"
    # The number of GetRecords calls per second for each shard, at most 5.
    reads_per_second: float = 1.0
    # The reaction if the record at a position is gone from the stream: stop or oldest.
    trimmed: str = "stop"
    # The S3 bucket and prefix of dead letters; None: the broker cannot store dead letters.
    dead_letters: tuple[str, str] | None = None

    @property
    def place(self) -> ServiceAddress:
        return ServiceAddress("kinesis", self.region, self.endpoint)


def kinesis_address(url: str) -> KinesisAddress:
    region, stream, options = _split(url, _KINESIS_FORM)
    if not _STREAM.fullmatch(stream):
        raise _fault(
            "a Kinesis stream name must have 1 to 128 letters, digits, '-', '_' and '.', "
            f"as in {_KINESIS_FORM}, got {stream!r}"
        )
    given = _read(
        options,
        {
            "endpoint": _endpoint,
            "start": _start,
            "reads_per_second": _number(0.01, 5),
            "trimmed": _choice("stop", "oldest"),
            "dead_letters": _s3,
        },
    )
    return KinesisAddress(region=region, stream=stream, **given)


def _start(name: str, text: str) -> str | float:
    if text in ("oldest", "latest"):
        return text
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise _fault(
            f"{name} must be oldest, latest or a time such as 2026-11-21T08:00:00Z, got {text!r}"
        ) from error
    if moment.tzinfo is None:
        raise _fault(f"{name} must have a time zone, got {text!r}; append Z for UTC")
    if moment.timestamp() > time.time():
        raise _fault(
            f"{name} must be a time in the past, got {text!r}; messages before it would never run;"
            " use latest to begin with new messages"
        )
    return moment.timestamp()
