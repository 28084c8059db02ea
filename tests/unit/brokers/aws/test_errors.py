"""boto3 errors become one line that names the remedy, with an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto

from qdo.broker_errors import (
    AccessDeniedError,
    AwsError,
    AwsNotFoundError,
    AwsUnreachableError,
    ClockError,
    CredentialsError,
    ExpiredCredentialsError,
    ThrottledError,
)
from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.aws.clients import make_calls, make_client
from qdo.brokers.aws.errors import (
    BOTO_ERRORS,
    is_not_found,
    is_transient,
    regions,
    translate,
    translation,
)
from qdo.errors import QdoError, SettingsError, UnreachableError
from tests.support.aws.clients import new_session
from tests.support.webhook_receiver import Answer, Receiver, receiving

AWS = ServiceAddress("sqs", "eu-west-1")


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def place_of(server: Receiver) -> ServiceAddress:
    return ServiceAddress("sqs", "eu-west-1", server.url)


def refuse(server: Receiver, status: int, code: str, message: str) -> None:
    """Answer like SQS when it rejects a request."""
    value = {"__type": f"com.amazonaws.sqs#{code}", "message": message}
    server.default = Answer(status, json.dumps(value).encode())


def asked(place: ServiceAddress, **options: Any) -> QdoError:
    """Return the error that receiving from a queue ends with."""
    client = make_client(place, **{"attempts": 1, **options})
    with pytest.raises(QdoError) as caught, translate(place, "queue", "shop-t1"):
        client.receive_message(QueueUrl="http://127.0.0.1/1/shop-t1")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "kind", "exit_code", "words"),
    [
        (403, "ExpiredTokenException", ExpiredCredentialsError, 2, "have expired"),
        (403, "InvalidClientTokenId", CredentialsError, 2, "AWS_PROFILE"),
        (403, "UnrecognizedClientException", CredentialsError, 2, "cannot be used"),
        (403, "SignatureDoesNotMatch", CredentialsError, 2, "cannot be used"),
        (403, "RequestTimeTooSkewed", ClockError, 3, "clock of this machine"),
        (403, "AccessDeniedException", AccessDeniedError, 5, "sqs:ReceiveMessage on queue"),
        (400, "QueueDoesNotExist", AwsNotFoundError, 6, "'shop-t1' does not exist in region"),
        (400, "AWS.SimpleQueueService.NonExistentQueue", AwsNotFoundError, 6, "create=fifo"),
        (400, "ThrottlingException", ThrottledError, 3, "sqs:ReceiveMessage on queue"),
        (403, "RequestThrottled", ThrottledError, 3, "throttled"),
        (400, "OverLimit", ThrottledError, 3, "throttled"),
        (500, "InternalFailure", AwsUnreachableError, 3, "it answered 500 InternalFailure"),
        (503, "ServiceUnavailable", AwsUnreachableError, 3, "it answered 503"),
        (400, "InvalidMessageContents", AwsError, 1, "InvalidMessageContents: it was so"),
    ],
)
def test_every_answer(
    server: Receiver, status: int, code: str, kind: type, exit_code: int, words: str
) -> None:
    """Its kind decides the exit code; the error includes AWS's reason if that is more specific."""
    refuse(server, status, code, "it was so\nindeed.")
    error = asked(place_of(server))
    assert type(error) is kind
    assert error.exit_code == exit_code
    assert words in str(error)
    assert "it was so indeed" in str(error) or kind is AwsNotFoundError
    assert len(server.requests) == 1


@pytest.mark.parametrize("code", ["InvalidSignatureException", "SignatureDoesNotMatch"])
@pytest.mark.parametrize(
    "reason",
    [
        "Signature expired: 20261121T080000Z is now earlier than 20261121T085500Z"
        " (20261121T090000Z - 5 min.)",
        "Signature not yet current: 20261121T100000Z is still later than 20261121T090500Z"
        " (20261121T090000Z + 5 min.)",
    ],
)
def test_a_clock_that_is_wrong_is_named(server: Receiver, code: str, reason: str) -> None:
    """AWS has the codes of wrong credentials for it, and these are looked at for hours then."""
    refuse(server, 403, code, reason)
    error = asked(place_of(server))
    assert type(error) is ClockError
    assert error.exit_code == 3  # to start again helps, once the clock was set
    assert reason in str(error)
    assert "AWS_ACCESS_KEY_ID" not in str(error)


def test_an_answer_that_is_none(server: Receiver) -> None:
    """A proxy's page instead of an answer is something out of reach."""
    server.default = Answer(502, b"<html>Bad Gateway</html>")
    assert isinstance(asked(place_of(server)), AwsUnreachableError)


def test_a_long_answer_is_cut(server: Receiver) -> None:
    """The line of a log has room for the beginning of a page."""
    server.default = Answer(400, b"<html>" + b"<p>busy</p>\n" * 1000)
    assert len(str(asked(place_of(server)))) < 500


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"", b"[]", b'{"Queue', b"\x1f\x8b\xff"])
def test_what_is_no_answer_is_not_taken_for_an_empty_one(server: Receiver, body: bytes) -> None:
    """To boto3 it is one in which nothing stands: all queues would be retired."""
    server.default = Answer(200, body)
    error = asked(place_of(server))
    assert isinstance(error, AwsUnreachableError)
    assert "status 200" in str(error)
    client = make_client(place_of(server), attempts=1)
    for call in (client.list_queues, lambda: client.get_queue_url(QueueName="shop-t1")):
        with pytest.raises(AwsUnreachableError), translate(AWS, "queue", "shop-t1"):
            call()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, AwsUnreachableError),
        (408, AwsUnreachableError),
        (429, ThrottledError),
        (413, AwsError),
    ],
)
def test_statuses_of_proxies(server: Receiver, status: int, kind: type) -> None:
    """They come without an AWS error code, with a page that has the details."""
    server.default = Answer(status, b"<p>too much</p>")
    error = asked(place_of(server))
    assert type(error) is kind
    assert "<p>too much</p>" in str(error)
    client = make_client(place_of(server), attempts=1)
    with pytest.raises(BOTO_ERRORS) as caught:
        client.list_queues()
    assert is_transient(caught.value) is (status in (408, 429))
    assert not is_not_found(caught.value)


def test_no_answer_in_time(server: Receiver) -> None:
    """The caller chooses the timeout."""
    server.before_answer = lambda: server.closing.wait(30)
    assert isinstance(asked(place_of(server), read_seconds=0.05), AwsUnreachableError)


def test_nobody_there() -> None:
    """The error asks to check region and endpoint."""
    place = ServiceAddress("sqs", "eu-west-1", "http://127.0.0.1:1")
    error = asked(place)
    assert isinstance(error, AwsUnreachableError)
    assert error.exit_code == 3
    assert "SQS in region eu-west-1" in str(error)
    assert "http://127.0.0.1:1" in str(error)
    assert isinstance(error, UnreachableError)


def test_what_may_be_repeated_is(server: Receiver) -> None:
    """By botocore's standard retries, as often as the caller configures."""
    refuse(server, 500, "InternalFailure", "")
    assert "no reason was given" in str(asked(place_of(server), attempts=2))
    assert len(server.requests) == 2


def test_missing_credentials(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is made; the error names the places where boto3 looks."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    new_session(monkeypatch)
    error = asked(place_of(server))
    assert isinstance(error, CredentialsError)
    assert "AWS_PROFILE" in str(error)
    assert len(server.requests) == 0


def test_a_profile_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised when the client is made, or before."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    new_session(monkeypatch)
    with pytest.raises(CredentialsError, match="nobody"):
        make_client(AWS)


ASSUMED = b"""<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleResult><Credentials><AccessKeyId>ASIA</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>t</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleResult></AssumeRoleResponse>"""


def test_a_role_is_assumed_in_the_region_of_the_address(
    server: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its profile need not name one, nor any variable."""
    server.default = Answer(body=ASSUMED)
    (tmp_path / "config").write_text(
        "[profile shop]\nrole_arn = arn:aws:iam::123456789012:role/shop\nsource_profile = base\n"
        "[profile base]\naws_access_key_id = AKIA\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "shop")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    new_session(monkeypatch)
    client = make_client(AWS)
    assert client._get_credentials().get_frozen_credentials().access_key == "ASIA"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AWS_ENDPOINT_URL", "localhost:4566", "Invalid endpoint: localhost:4566"),
        ("AWS_DEFAULTS_MODE", "fast", "InvalidDefaultsMode"),
    ],
)
def test_what_variables_of_aws_say_may_be_unusable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    """The error names the variable; a retry would not help."""
    monkeypatch.setenv(variable, value)
    new_session(monkeypatch)
    with pytest.raises(SettingsError, match=words) as caught:
        make_client(AWS)
    assert caught.value.exit_code == 2


EXPIRED = {
    "Version": 1,
    "AccessKeyId": "AKIA",
    "SecretAccessKey": "secret",
    "SessionToken": "token",
    "Expiration": "2020-01-01T00:00:00Z",
}


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo '<html>'", "JSONDecodeError"),
        (f"echo '{json.dumps(EXPIRED)}'", "still expired"),
        ("exit 3", "Error when retrieving credentials"),
        (None, "FileNotFoundError"),
    ],
)
def test_credentials_that_cannot_be_renewed(
    server: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: str | None,
    said: str,
) -> None:
    """Whatever boto3 makes of the credential program's output, the error states the real cause."""
    script = tmp_path / "renew"
    if program is not None:
        script.write_text(f"#!/bin/sh\n{program}\n")
        script.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    new_session(monkeypatch)
    with pytest.raises(CredentialsError, match=said) as caught, translate(AWS, "queue", "q"):
        make_client(place_of(server), attempts=1).list_queues()
    assert caught.value.exit_code == 2
    assert len(server.requests) == 0
    methods = {"ReceiveMessage": "receive_message"}
    with pytest.raises(CredentialsError, match=said), translate(AWS, "queue", "q"):
        make_calls(place_of(server), "AmazonSQS", methods, connections=1).call("ReceiveMessage", {})


def test_a_misspelt_region_is_named() -> None:
    """Only where boto3 does not know it, and AWS itself is meant."""
    assert "eu-west-1" in regions()
    failure = boto.EndpointConnectionError(endpoint_url="https://sqs.eu-wset-1.amazonaws.com/")
    said = str(translation(failure, ServiceAddress("sqs", "eu-wset-1"), "queue", "q"))
    assert "boto3 knows no region 'eu-wset-1': did you mean 'eu-west-1'?" in said
    assert "did you mean" not in str(translation(failure, AWS, "queue", "q"))
    local = ServiceAddress("sqs", "eu-wset-1", "http://127.0.0.1:1")
    assert "did you mean" not in str(translation(failure, local, "queue", "q"))


def test_mistakes_of_ours_are_named_as_what_they_are() -> None:
    """The error names a parameter that botocore rejects."""
    client = make_client(ServiceAddress("sqs", "eu-west-1", "http://127.0.0.1:1"))
    with pytest.raises(AwsError, match="ParamValidationError"), translate(AWS, "queue", "q"):
        client.receive_message(QueueUrl=3)


def test_what_passes_by_itself(server: Receiver) -> None:
    """Throttling, faults of the service and of the network; not requests that AWS rejects."""

    def passing(call: Callable[[], Any]) -> bool:
        with pytest.raises(BOTO_ERRORS) as caught:
            call()
        return is_transient(caught.value)

    client = make_client(place_of(server), attempts=1)
    lost = make_client(ServiceAddress("sqs", "eu-west-1", "http://127.0.0.1:1"), attempts=1)
    assert passing(lost.list_queues)
    for status, code, passes in (
        (400, "ThrottlingException", True),
        (500, "InternalFailure", True),
        (403, "AccessDenied", False),
        (400, "QueueDoesNotExist", False),
    ):
        refuse(server, status, code, "")
        assert passing(client.list_queues) is passes


def test_actions_are_named_as_policies_name_them() -> None:
    """Batches are allowed with their single action, and the look at a bucket as listing it."""
    for service, operation, allowed in (
        ("sqs", "SendMessageBatch", "sqs:SendMessage on"),
        ("s3", "HeadBucket", "s3:ListBucket on"),
        ("s3", "DeleteObjects", "s3:DeleteObject on"),
        ("kinesis", "PutRecords", "kinesis:PutRecords on"),
    ):
        failure = boto.ClientError({"Error": {"Code": "AccessDenied"}}, operation)
        assert allowed in str(
            translation(failure, ServiceAddress(service, "eu-west-1"), "thing", "x")
        )
