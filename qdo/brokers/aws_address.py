"""Addresses of brokers at AWS, as values: ``sqs://REGION/PREFIX?...``, ``kinesis://REGION/STREAM?...``.

Credentials never stand in an address: boto3 finds them as it always does.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from qdo.errors import SettingsError

MAX_SQS_MESSAGE = 1024 * 1024
"""Bytes of body and attributes that SQS takes."""
MAX_SQS_NAME = 80
"""Characters, `.fifo` included."""
FIFO = ".fifo"
"""How the names of FIFO queues end."""

_SQS_FORM = "sqs://REGION/PREFIX"
_KINESIS_FORM = "kinesis://REGION/STREAM"
_REGION = re.compile(r"[a-z]{2,5}(-[a-z]+)+-\d{1,2}")
_SQS_NAME = re.compile(r"[A-Za-z0-9_-]*")
_STREAM = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

Options = Mapping[str, str]
_Read = Callable[[str, str], Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a service of AWS is spoken to.

    :ivar service: as boto3 names it: sqs, kinesis, s3.
    :ivar endpoint: URL of a service that does as AWS does; None: AWS's own in the region.
    """

    service: str
    region: str
    endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SqsAddress:
    """The queues of SQS whose names begin with a prefix.

    :ivar tag: (key, value); only queues with this tag are taken. None: all.
    :ivar visibility_seconds: how long SQS hides what was received, before it is extended.
    :ivar wait_seconds: of one long poll.
    :ivar idle_seconds: longest pause between polls of an empty queue; 0: none.
    :ivar create: none, standard or fifo: what sending to a missing queue creates.
    :ivar dead_letters: full SQS name of qdo's own dead-letter queue of standard queues.
    :ivar bucket: of S3, for bodies over `max_body`; None: such bodies are refused.
    :ivar max_body: bytes of a body that is kept in SQS itself.
    """

    region: str
    prefix: str
    dead_letters: str
    endpoint: str | None = None
    tag: tuple[str, str] | None = None
    visibility_seconds: int = 60
    wait_seconds: int = 20
    idle_seconds: float = 20.0
    create: str = "none"
    bucket: str | None = None
    max_body: int = 262144

    @property
    def place(self) -> Place:
        """Where SQS is spoken to."""
        return Place("sqs", self.region, self.endpoint)

    @property
    def letter_queues(self) -> tuple[str, str]:
        """Full SQS names of qdo's dead-letter queues: of standard queues, and of FIFO queues."""
        return self.dead_letters, self.dead_letters + FIFO


@dataclass(frozen=True, slots=True, kw_only=True)
class KinesisAddress:
    """One stream of Kinesis.

    :ivar start: where a shard begins that has no position yet: oldest, latest, or a Unix time.
    :ivar reads_per_second: GetRecords calls for each shard, at most 5.
    :ivar trimmed: stop or oldest: what to do when a position is gone from the stream.
    :ivar dead_letters: (bucket, prefix) in S3, None for nowhere.
    """

    region: str
    stream: str
    endpoint: str | None = None
    start: str | float = "oldest"
    reads_per_second: float = 1.0
    trimmed: str = "stop"
    dead_letters: tuple[str, str] | None = None

    @property
    def place(self) -> Place:
        """Where Kinesis is spoken to."""
        return Place("kinesis", self.region, self.endpoint)


def sqs_address(url: str) -> SqsAddress:
    """Return what a URL ``sqs://REGION/PREFIX?...`` says.

    :raises SettingsError: it will not do; the reason says what would.
    """
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


def kinesis_address(url: str) -> KinesisAddress:
    """Return what a URL ``kinesis://REGION/STREAM?...`` says.

    :raises SettingsError: it will not do; the reason says what would.
    """
    region, stream, options = _split(url, _KINESIS_FORM)
    if not _STREAM.fullmatch(stream):
        raise _fault(
            f"{stream!r} cannot name a stream of Kinesis: use 1 to 128 letters, digits, '-', '_' "
            f"and '.', as in {_KINESIS_FORM}"
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


def _split(url: str, form: str) -> tuple[str, str, dict[str, str]]:
    """Return region, name and options of a URL."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
    except ValueError as error:
        raise _fault(f"{url!r} is no {form}?OPTION=VALUE&...: {error}") from error
    if "@" in parts.netloc:
        raise _fault(
            f"an address holds no credentials: write {form}, and give them where boto3 looks for "
            "them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role"
        )
    if parts.fragment:
        raise _fault(f"{url!r} has a '#': write it as %23, or leave it out")
    if not _REGION.fullmatch(parts.netloc):
        raise _fault(f"{parts.netloc!r} is no region such as eu-west-1: write {form}")
    if not parts.path.startswith("/"):
        raise _fault(f"{url!r} names nothing in the region: write {form}")
    options: dict[str, str] = {}
    for name, value in pairs:
        if name in options:
            raise _fault(f"option {name!r} is given twice")
        options[name] = value
    return parts.netloc, parts.path[1:], options


def _read(options: Options, known: Mapping[str, _Read]) -> dict[str, Any]:
    """Return the values of options.

    :raises SettingsError: one is unknown, or its value will not do.
    """
    found: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise _fault(f"there is no option {name!r}{hint}; known are {', '.join(known)}")
        found[name] = known[name](name, text)
    return found


def _fault(reason: str) -> SettingsError:
    return SettingsError(name="broker", reason=reason)


def _endpoint(name: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise _fault(f"{name}={text!r} is no URL such as http://127.0.0.1:5000")
    return text.rstrip("/")


def _tag(name: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise _fault(f"{name}={text!r} is no tag: write {name}=KEY=VALUE")
    return key, value


def _letter_queue(name: str, text: str) -> str:
    bare = text.removesuffix(FIFO)
    if not bare or not _SQS_NAME.fullmatch(bare):
        raise _fault(
            f"{name}={text!r} cannot name a queue of SQS: use letters, digits, '-' and '_'; "
            f"{FIFO!r} is added where it is needed"
        )
    return bare


def _bucket(name: str, text: str) -> str:
    if not _BUCKET.fullmatch(text):
        raise _fault(f"{name}={text!r} cannot name a bucket of S3")
    return text


def _s3(name: str, text: str) -> tuple[str, str]:
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    if not text.startswith("s3://") or not _BUCKET.fullmatch(bucket):
        raise _fault(f"{name}={text!r} is no s3://BUCKET/PREFIX")
    return bucket, prefix.strip("/")


def _start(name: str, text: str) -> str | float:
    if text in ("oldest", "latest"):
        return text
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise _fault(
            f"{name}={text!r} is neither oldest nor latest nor a time such as 2026-11-21T08:00:00Z"
        ) from error
    if moment.tzinfo is None:
        raise _fault(f"{name}={text!r} names no time zone: add Z for UTC")
    return moment.timestamp()


def _choice(*choices: str) -> _Read:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise _fault(f"{name}={text!r} is none of {', '.join(choices)}")
        return text

    return read


def _number(low: float, high: float) -> _Read:
    def read(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise _fault(f"{name}={text!r} is no number from {low:g} to {high:g}")
        return value

    return read


def _whole(low: int, high: int) -> _Read:
    def read(name: str, text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if not low <= value <= high:
            raise _fault(f"{name}={text!r} is no whole number from {low} to {high}")
        return value

    return read
