"""Parses addresses of AWS brokers: ``sqs://REGION/PREFIX?...``, ``kinesis://REGION/STREAM?...``.

An address never contains credentials, because boto3 finds the credentials in its usual places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from qdo.errors import SettingsError
from qdo.text import did_you_mean, hide_credentials

_REGION = re.compile(r"[a-z]{2,5}(-[a-z]+)+-\d{1,2}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

Options = Mapping[str, str]
_Read = Callable[[str, str], Any]


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """An AWS service and its endpoint."""

    # The name of the service in boto3: sqs, kinesis or s3.
    service: str
    region: str
    # The URL of a compatible service; None: use AWS's endpoint in the region.
    endpoint: str | None = None


def _split(url: str, form: str) -> tuple[str, str, dict[str, str]]:
    if "@" in url.partition("?")[0]:
        raise _fault(
            f"an address must not contain credentials: write {form}, and set them where boto3 "
            "finds them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role"
        )
    shown = hide_credentials(url)
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
    except ValueError as error:
        raise _fault(f"{shown!r} is not {form}?OPTION=VALUE&...: {error}") from error
    if parts.fragment:
        raise _fault(f"{shown!r} has a '#': write it as %23, or leave it out")
    if not _REGION.fullmatch(parts.netloc):
        raise _fault(f"{parts.netloc!r} is not a region such as eu-west-1: write {form}")
    if not parts.path.startswith("/"):
        raise _fault(f"{shown!r} lacks the part after the region: write {form}")
    options: dict[str, str] = {}
    for name, value in pairs:
        if name in options:
            raise _fault(f"option {name!r} is given twice")
        options[name] = value
    return parts.netloc, parts.path[1:], options


def _read(options: Options, known: Mapping[str, _Read]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise _fault(f"unknown option {name!r}{hint}; valid options: {', '.join(known)}")
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
        raise _fault(
            f"{name}={hide_credentials(text)!r} is not a URL such as http://127.0.0.1:5000"
        )
    return text.rstrip("/")


def _bucket(name: str, text: str) -> str:
    bucket, slash, prefix = text.partition("/")
    if not _BUCKET.fullmatch(bucket) or (slash and not prefix.strip("/")):
        raise _fault(f"{name} must be BUCKET or BUCKET/PREFIX in S3, got {text!r}")
    return text.rstrip("/")


def _s3(name: str, text: str) -> tuple[str, str]:
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    if not text.startswith("s3://") or not _BUCKET.fullmatch(bucket):
        raise _fault(f"{name}={text!r} is not s3://BUCKET/PREFIX")
    return bucket, prefix.strip("/")


def _choice(*choices: str) -> _Read:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise _fault(f"{name}={text!r} is not one of {', '.join(choices)}")
        return text

    return read


def _number(low: float, high: float) -> _Read:
    def read(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise _fault(f"{name}={text!r} is not a number from {low:g} to {high:g}")
        return value

    return read


def _whole(low: int, high: int) -> _Read:
    def read(name: str, text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if not low <= value <= high:
            raise _fault(f"{name}={text!r} is not an integer from {low} to {high}")
        return value

    return read


class BodyPointer(NamedTuple):
    """The bucket and key of a body in S3."""

    bucket: str
    key: str
