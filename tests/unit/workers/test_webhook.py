"""The webhook program: its requests, their signatures, and the effect of each answer."""

from __future__ import annotations

import email.utils
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from qdo import DeadLetter, Message, Retry, Stop
from qdo.errors import SettingsError, UsageError
from qdo.programs import webhook
from qdo.programs._options import read
from qdo.programs.webhook import (
    Courier,
    UndeliveredError,
    WebhookOptions,
    judge,
    new_secret,
    retry_after,
)
from tests.support.cli import clean_environment
from tests.support.paths import ROOT
from tests.support.webhook_receiver import Answer, Receiver, WebhookRequest, receiving

SECRET = new_secret()
NOW = 1_800_000_000.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def options(receiver: Receiver, path: str = "/hook", **changes: Any) -> WebhookOptions:
    return WebhookOptions(**{"url": receiver.url + path, "secret": SECRET, **changes})


def message(body: Any = None, queue: str = "orders", **more: Any) -> Message:
    more = {"id": "0f5d2f8e-0000-4000-8000-000000000001", **more}
    return Message(queue, 140049072629181272, {"n": 1} if body is None else body, **more)


def deliver(receiver: Receiver, *messages: Message, **changes: Any) -> list[WebhookRequest]:
    """Deliver messages; return all requests until now."""
    courier = Courier(options(receiver, **changes))
    try:
        for each in messages:
            courier.deliver(each)
    finally:
        courier.close()
    return receiver.requests


# --- requests ---------------------------------------------------------------------


def test_a_message_is_posted_as_json(receiver: Receiver) -> None:
    """With its id, queue, position and attempt in headers."""
    [request] = deliver(receiver, message({"name": "Zoë"}, attempt=3, key="ada"))
    assert request.path == "/hook"
    assert json.loads(request.body) == {"name": "Zoë"}
    names = ["content-type", "webhook-id", "qdo-queue", "qdo-key", "qdo-position", "qdo-attempt"]
    assert [request.headers[name] for name in names] == [
        "application/json",
        "0f5d2f8e-0000-4000-8000-000000000001",
        "orders",
        "ada",
        "140049072629181272",
        "3",
    ]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, "application/octet-stream"),
        ({"content-type": "text/csv; charset=utf-8"}, "text/csv; charset=utf-8"),
        ({"content-type": "text/x\r\nevil: 1"}, "application/octet-stream"),
    ],
)
def test_bytes_are_posted_as_they_are(receiver: Receiver, given: dict[str, str], sent: str) -> None:
    """With the content type that their sender gave, if it can be one."""
    [request] = deliver(receiver, message(b"a;b\n\xff", headers=given))
    assert request.body == b"a;b\n\xff"
    assert request.headers["content-type"] == sent
    assert "evil" not in request.headers


def test_names_cannot_leave_their_place(receiver: Receiver) -> None:
    """Queues and keys hold any letter: in the address and in headers they are encoded."""
    each = message(queue="a/../b?x=1#é", key="k\r\nevil: 1")
    [request] = deliver(receiver, each, path="/{queue}/in?q={queue}")
    assert request.path == "/a%2F..%2Fb%3Fx%3D1%23%C3%A9/in?q=a%2F..%2Fb%3Fx%3D1%23%C3%A9"
    assert request.headers["qdo-queue"] == "a%2F..%2Fb%3Fx%3D1%23%C3%A9"
    assert request.headers["qdo-key"] == "k%0D%0Aevil%3A 1"
    assert "evil" not in request.headers


def test_a_connection_serves_many_messages(receiver: Receiver) -> None:
    """A handshake for each would cost more than the message; also after a short rejection."""
    receiver.answers = [Answer(), Answer(503, b"later"), Answer()]
    courier = Courier(options(receiver))
    courier.deliver(message())
    with pytest.raises(UndeliveredError):
        courier.deliver(message())
    courier.deliver(message())
    courier.close()
    assert (len(receiver.requests), receiver.connections) == (3, 1)


# --- signatures -------------------------------------------------------------------


def test_receivers_can_verify_the_signature(receiver: Receiver) -> None:
    """With the library that the specification's authors publish."""
    [request] = deliver(receiver, message({"amount": 5}))
    assert Webhook(SECRET).verify(request.body, dict(request.headers)) == {"amount": 5}


@pytest.mark.parametrize("part", ["body", "webhook-id", "webhook-timestamp", "secret"])
def test_what_was_changed_on_the_way_does_not_verify(receiver: Receiver, part: str) -> None:
    """Body, id and time are signed, and another secret signs otherwise."""
    [request] = deliver(receiver, message())
    headers, body, secret = dict(request.headers), request.body, SECRET
    if part == "body":
        body += b" "
    elif part == "secret":
        secret = new_secret()
    else:
        headers[part] = str(int(time.time()) - 5)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body, headers)


def test_a_secret_can_be_replaced(receiver: Receiver) -> None:
    """While both are set receivers may know either."""
    other = new_secret()
    [request] = deliver(receiver, message(), secret=f"{other} {SECRET}")
    for secret in (SECRET, other):
        assert Webhook(secret).verify(request.body, dict(request.headers)) == {"n": 1}


def test_a_secret_is_made_by_the_module() -> None:
    """`python -m qdo.programs.webhook` prints one that will do."""
    made = subprocess.run(
        [sys.executable, "-m", "qdo.programs.webhook"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    environ = {"QDO_WEBHOOK_URL": "https://a/", "QDO_WEBHOOK_SECRET": made.stdout.strip()}
    assert read(WebhookOptions, environ).secret == made.stdout.strip()


def test_the_secret_is_not_shown() -> None:
    """Options may be logged."""
    assert SECRET not in repr(WebhookOptions(url="http://a/", secret=SECRET))


# --- effects of the answer --------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_it_is_done(status: int) -> None:
    judge(status, {}, "", NOW)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_it_is_tried_again(status: int) -> None:
    """By the policy's backoff if the receiver states no time."""
    with pytest.raises(UndeliveredError, match=f"{status}: busy$") as caught:
        judge(status, {}, "busy", NOW)
    assert isinstance(caught.value, Retry)
    assert caught.value.after is None


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 403, 404, 410, 413, 422])
def test_it_is_set_aside(status: int) -> None:
    """The same request would be rejected again; redirections are not followed."""
    with pytest.raises(DeadLetter, match=f"{status}: no$"):
        judge(status, {}, "no", NOW)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("999999999999", 86_400.0),
        (email.utils.formatdate(NOW + 90, usegmt=True), 90.0),
        (email.utils.formatdate(NOW - 90, usegmt=True), 0.0),
        (email.utils.formatdate(NOW + 10**7, usegmt=True), 86_400.0),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("٣", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    """Seconds or a date, at most a day; any other value is ignored."""
    assert retry_after(value, NOW) == seconds


def test_a_date_in_retry_after_is_one_of_the_receivers_clock() -> None:
    """Where the one here is behind by an hour, the queue does not wait for the hour as well."""
    later = {"retry-after": "Fri, 15 Jan 2027 08:00:30 GMT"}
    for date, now in (("Fri, 15 Jan 2027 08:00:00 GMT", NOW - 3600), ("today", NOW)):
        with pytest.raises(UndeliveredError) as caught:
            judge(503, {"date": date, **later}, "", now)
        assert caught.value.after == 30.0


def test_the_receiver_says_when(receiver: Receiver) -> None:
    """Its Retry-After reaches the queue."""
    receiver.answers = [Answer(429, b"slow\n down", {"Retry-After": "17"})]
    with pytest.raises(UndeliveredError, match=r"429: slow down$") as caught:
        deliver(receiver, message())
    assert caught.value.after == 17.0


def test_redirections_are_not_followed(receiver: Receiver) -> None:
    """A receiver that moved must not choose where signed messages go."""
    receiver.answers = [Answer(307, headers={"Location": f"{receiver.url}/elsewhere"})]
    with pytest.raises(DeadLetter, match="307"):
        deliver(receiver, message())
    assert [request.path for request in receiver.requests] == ["/hook"]


def test_nobody_there() -> None:
    """A refused connection is worth another attempt."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    courier = Courier(WebhookOptions(url=f"http://127.0.0.1:{port}/", secret=SECRET))
    with pytest.raises(UndeliveredError) as caught:
        courier.deliver(message())
    assert isinstance(caught.value.__cause__, urllib3.exceptions.NewConnectionError)


def test_no_answer_in_time() -> None:
    """A receiver that accepts the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        courier = Courier(WebhookOptions(url=url, secret=SECRET, timeout_seconds=0.1))
        with pytest.raises(UndeliveredError):
            courier.deliver(message())
        courier.close()


def test_a_long_refusal_is_cut_short(receiver: Receiver) -> None:
    """A receiver's answer ends up in logs and dead letters."""
    receiver.answers = [Answer(400, b"x" * 100_000)]
    with pytest.raises(DeadLetter) as caught:
        deliver(receiver, message())
    assert len(str(caught.value)) < 600


# --- options ----------------------------------------------------------------------

GOOD = {"QDO_WEBHOOK_URL": "https://example.com/{queue}", "QDO_WEBHOOK_SECRET": SECRET}


def test_options_come_from_the_environment() -> None:
    """Numbers are read as numbers, and everything else is at its default."""
    found = read(WebhookOptions, {**GOOD, "QDO_WEBHOOK_TIMEOUT_SECONDS": "2.5", "PATH": "/bin"})
    assert found == WebhookOptions(url=GOOD["QDO_WEBHOOK_URL"], secret=SECRET, timeout_seconds=2.5)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("URL", "", "POST"),
        ("URL", "example.com", "'example.com'"),
        ("URL", "http://user:hunter2@example.com/", "QDO_WEBHOOK_SECRET"),
        ("URL", "ftp://user:hunter2@example.com/", "'ftp://***@example.com/'"),
        ("URL", "http://[::1", "'http://[::1'"),
        ("URL", "http://{queue}.example.com/", "host"),
        ("URL", "http://a/{name}", "'http://a/{name}'"),
        ("SECRET", "", "signs requests"),
        ("SECRET", "hunter2", "`python -m qdo.programs.webhook`"),
        ("SECRET", "whsec_c2hvcnQ=", "16 to 128 bytes"),
        ("SECRET", "whsec_!", "16 to 128 bytes"),
        ("TIMEOUT_SECONDS", "soon", "'soon'"),
        ("TIMEOUT_SECONDS", "nan", "nan"),
        ("CONNECT_SECONDS", "0", "0.0"),
    ],
)
def test_options_that_will_not_do(name: str, value: str, told: str) -> None:
    """The error names the option, and its value or the remedy; it never repeats a secret."""
    with pytest.raises(SettingsError) as caught:
        read(WebhookOptions, {**GOOD, f"QDO_WEBHOOK_{name}": value})
    assert caught.value.details["name"] == f"QDO_WEBHOOK_{name}"
    assert told in caught.value.details["reason"]
    assert "hunter2" not in str(caught.value)


def test_an_option_that_does_not_exist() -> None:
    """The nearest one is named."""
    with pytest.raises(UsageError, match="did you mean 'QDO_WEBHOOK_SECRET'"):
        read(WebhookOptions, {**GOOD, "QDO_WEBHOOK_SECRETS": "x"})


def test_variables_of_a_service_are_no_options() -> None:
    """Kubernetes sets these in every pod beside a service named qdo-webhook."""
    service = {"QDO_WEBHOOK_SERVICE_HOST": "10.0.0.1", "QDO_WEBHOOK_PORT": "tcp://10.0.0.1:80"}
    assert read(WebhookOptions, {**GOOD, **service}) == read(WebhookOptions, GOOD)


def test_a_job_without_its_context() -> None:
    """The worker stops and names the setting to make; the message is not touched."""
    with pytest.raises(Stop, match="QDO_JOB_CONTEXT"):
        webhook.job(message(), {})  # type: ignore[arg-type]


def test_a_body_that_cannot_be_json_is_a_dead_letter() -> None:
    """At once: its queue would stand behind it for an hour."""
    with pytest.raises(DeadLetter):
        webhook.payload(Message("q", 1, [float("inf")]))
    assert webhook.payload(Message("q", 1, "\ud800"))[0] == b'"\\ud800"'


def test_the_program_needs_only_the_libraries_of_its_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('boto3', 'botocore', 'sqlalchemy', 'psycopg', 'google.protobuf'):\n"
        "    sys.modules[name] = None\n"
        "import qdo.programs.webhook"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
