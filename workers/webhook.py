"""Sends every message as a signed HTTP POST request, in the order of its queue.

    export QDO_WEBHOOK_URL='https://example.com/hooks/{queue}'
    export QDO_WEBHOOK_SECRET="$(python -m qdo.programs.webhook)"
    qdo-worker qdo.programs.webhook:app
    qdo send --app webhook orders '{"order": 1}'

The program signs requests according to the Standard Webhooks specification
(https://www.standardwebhooks.com), with HMAC-SHA256 over id, time and body. The response determines
how the attempt ends:

- 2xx: done.
- 408, 425, 429, 5xx, a timeout, or no connection: a retry after the time in Retry-After, or after
  the backoff of the failure policy. Until then the queue waits.
- any other response, including redirects: a dead letter, because a retry would also fail.

Needs ``pip install 'qdo-queues[http]'``.
"""

from __future__ import annotations

import contextlib
import email.utils
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote, urlsplit

import gevent
import urllib3

import qdo
from qdo import App, DeadLetter, Message, Policy, Retry
from qdo.encoding import CONTENT_TYPE, RAW
from qdo.programs._json import json_bytes
from qdo.programs._options import expect, option, read, require_greenlet
from qdo.settings.values import between
from qdo.system.http_responses import BoundedResponse
from qdo.text import hide_credentials
from qdo.webhook_signatures import new_secret, standard_headers, standard_key

JSON = "application/json"

TEMPORARY = frozenset({408, 425, 429})
"""Statuses below 500 after which the same request may succeed later."""
MAX_RETRY_SECONDS = 86_400.0
SHOWN_BYTES = 500
"""Maximum length of a response body to read and show."""


# --- options ----------------------------------------------------------------------


def _url_fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # for example, a '[' without its ']'
        usable = False
    if not usable:
        return f"must be an http:// or https:// address, got {hide_credentials(url)!r}"
    if "@" in parts.netloc:
        return "must not contain a user name or a password; QDO_WEBHOOK_SECRET signs requests"
    if "{" in parts.netloc:
        return "{queue} must not choose the host; use it in the path or after the path"
    if "{" in url.replace("{queue}", "") or "}" in url.replace("{queue}", ""):
        return f"must not have braces except in {{queue}}, got {hide_credentials(url)!r}"
    return None


def _secret_fault(text: str) -> str | None:
    try:
        for each in text.split() or [""]:
            standard_key(each)
    except ValueError as error:
        return f"{error}; `python -m qdo.programs.webhook` prints a new secret"
    return None


@dataclass(frozen=True, kw_only=True)
class WebhookOptions:
    """Options of the program, such as QDO_WEBHOOK_URL."""

    PREFIX: ClassVar[str] = "QDO_WEBHOOK_"

    url: str = option(
        "address for POST requests; {queue} is replaced by the name of the queue", check=_url_fault
    )
    secret: str = option(
        "secret that signs requests; several, separated by spaces, while it is being replaced",
        check=_secret_fault,
        secret=True,
    )
    connect_seconds: float = option("timeout for a connection", 5.0, between(0.01, 3600))
    timeout_seconds: float = option("timeout for a whole request", 30.0, between(0.01, 3600))


# --- requests ---------------------------------------------------------------------


def payload(message: Message) -> tuple[bytes, str]:
    """Return the body of the request and its content type."""
    raw = isinstance(message.body, bytes)
    usual = RAW if raw else JSON
    given = message.headers.get(CONTENT_TYPE, usual)
    kind = given if given.isascii() and given.isprintable() else usual
    if raw:
        return message.body, kind
    return json_bytes(message.body), kind


# --- responses --------------------------------------------------------------------


class UndeliveredError(Retry):
    """The receiver did not accept the message, but a retry may succeed.

    :ivar reason: the cause, for logs and dead letters.
    """

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(after)
        self.args = (reason,)
        self.reason = reason


def judge(status: int, headers: Mapping[str, str], text: str, now: float) -> None:
    """Raise an exception unless the receiver has accepted the message.

    :param headers: headers of the response.
    :param text: beginning of the response's body, for the error message.
    :param now: Unix time in seconds, for a response without a date.
    :raises UndeliveredError: a retry may succeed.
    :raises DeadLetter: the receiver would reject every retry.
    """
    if 200 <= status < 300:
        return
    reason = f"the receiver responded with {status}" + (f": {text}" if text else "")
    if status >= 500 or status in TEMPORARY:
        # A date refers to the receiver's clock, which may differ from the clock of this machine.
        sent = _moment(headers.get("date", ""))
        after = retry_after(headers.get("retry-after"), now if sent is None else sent)
        raise UndeliveredError(reason, after)
    raise DeadLetter(reason)


def retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds of a Retry-After header, or None if the header is missing or invalid.

    The value is a number of seconds or a date (RFC 9110, section 10.2.3). The result is at most a
    day.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_SECONDS)
    moment = _moment(text)
    return None if moment is None else min(max(0.0, moment - now), MAX_RETRY_SECONDS)


def _moment(text: str) -> float | None:
    """Return the Unix time of an HTTP date, or None if the text is not a date."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


# --- sending ----------------------------------------------------------------------


class _Connection(urllib3.connection.HTTPConnection):
    response_class = BoundedResponse


class _TlsConnection(urllib3.connection.HTTPSConnection):
    response_class = BoundedResponse


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class Courier:
    """Posts messages to the receiver over a pool of connections.

    :param clock: a function that returns the Unix time in seconds.
    """

    def __init__(self, options: WebhookOptions, clock: Callable[[], float] = time.time) -> None:
        self._options = options
        self._keys = [standard_key(each) for each in options.secret.split()]
        self._clock = clock
        limits = urllib3.Timeout(connect=options.connect_seconds, read=options.timeout_seconds)
        # urllib3 must not retry, because the queue's policy decides about retries.
        self._pool = urllib3.PoolManager(maxsize=100, timeout=limits, retries=False)
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}

    def deliver(self, message: Message) -> None:
        """POST a message.

        :raises UndeliveredError: the receiver did not accept the message, but a retry may succeed.
        :raises DeadLetter: the receiver rejected the message.
        """
        overdue = gevent.Timeout(self._options.timeout_seconds)
        try:
            with overdue:
                status, headers, text = self._post(message)
        except gevent.Timeout as error:
            if error is not overdue:
                raise
            reason = f"no complete response within {self._options.timeout_seconds:g} s"
            raise UndeliveredError(reason) from error
        except urllib3.exceptions.HTTPError as error:
            raise UndeliveredError(f"no response: {error}") from error
        judge(status, headers, text, self._clock())

    def _post(self, message: Message) -> tuple[int, Mapping[str, str], str]:
        body, kind = payload(message)
        url = self._options.url.replace("{queue}", quote(message.queue, safe=""))
        response = self._pool.request(
            "POST",
            url,
            body=body,
            headers=self._headers(message, body, kind),
            redirect=False,
            preload_content=False,
        )
        return response.status, response.headers, _beginning(response)

    def _headers(self, message: Message, body: bytes, kind: str) -> dict[str, str]:
        headers = {
            "content-type": kind,
            "user-agent": f"qdo/{qdo.__version__}",
            **standard_headers(self._keys, message.id, int(self._clock()), body),
            # Names may contain any character, but headers may not.
            "qdo-queue": quote(message.queue, safe=" "),
            "qdo-position": str(message.position),
            "qdo-attempt": str(message.attempt),
        }
        if message.key is not None:
            headers["qdo-key"] = quote(message.key, safe=" ")
        return headers

    def close(self) -> None:
        self._pool.clear()


def _beginning(response: urllib3.BaseHTTPResponse) -> str:
    """Return the beginning of a response as text. Keep the connection after a complete response."""
    whole = False
    try:
        shown = response.read(SHOWN_BYTES + 1, decode_content=False)
        whole = len(shown) <= SHOWN_BYTES
    except urllib3.exceptions.HTTPError:
        shown = b""  # the status is enough
    finally:
        if whole:
            response.release_conn()
        else:
            response.close()
    return " ".join(shown[:SHOWN_BYTES].decode(errors="replace").split())


@contextlib.contextmanager
def job_context() -> Iterator[Courier]:
    """Yield a courier with the options from the environment.

    :raises SettingsError: an option is missing or invalid.
    """
    with contextlib.closing(Courier(read(WebhookOptions))) as courier:
        yield courier


app = App("webhook", job_context=job_context)


# Outages of receivers last longer than outages of databases. Retry for just over an hour.
@app.job(
    executor="greenlet",
    policy=Policy(attempts=16, backoff_seconds=1.0, backoff_max_seconds=600.0),
)
def job(message: Message, context: Courier) -> None:
    require_greenlet("webhook")
    expect(context, Courier, "webhook").deliver(message)


if __name__ == "__main__":
    sys.stdout.write(f"{new_secret()}\n")
