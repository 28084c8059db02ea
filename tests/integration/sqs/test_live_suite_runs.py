"""The tests on AWS itself, tried out on moto: that they can be trusted, and leave nothing."""

from __future__ import annotations

import sys

import pytest
from botocore.exceptions import ClientError

from tests.support.aws.clients import REAL, REGION, client, surroundings
from tests.support.aws.resources import Resources, ambient_region
from tests.support.cli import command
from tests.support.paths import ROOT

SUITE = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/live_aws", "-rs")

pytestmark = pytest.mark.together("live suite")
"""These tests look for everything that the suite leaves at moto, so they run one by one."""


def left(moto_url: str) -> list[str]:
    """Return the leftovers of this suite's tests."""
    queues = client("sqs", moto_url).list_queues(QueueNamePrefix="qdo-test-").get("QueueUrls", [])
    # In one page: other tests make and delete streams meanwhile.
    streams = client("kinesis", moto_url).list_streams(Limit=10_000)["StreamNames"]
    return [*queues, *(name for name in streams if name.startswith("qdo-test-"))]


def test_the_suite_passes_and_leaves_nothing(moto_url: str) -> None:
    """With credentials and a region in the environment, as on AWS."""
    env = {**surroundings(), "TESTS_AWS": "1", "TESTS_AWS_ENDPOINT": moto_url}
    ended = command(*SUITE[1:], cwd=ROOT, env=env, timeout_seconds=110)
    assert ended.code == 0, ended.out
    assert "4 passed" in ended.out
    assert left(moto_url) == []


def test_ambient_credentials_are_used_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never by accident; asked for, a test without a region is not passed over."""
    monkeypatch.delenv(REAL, raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"only with {REAL}=1"):
        ambient_region()
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(REAL, "1")
    with pytest.raises(pytest.fail.Exception, match="needs a region"):
        ambient_region()


def test_a_test_that_fails_leaves_nothing(moto_url: str) -> None:
    """It deletes its queues and those that qdo created below its prefix, even if one is gone."""

    def fail() -> None:
        with Resources(REGION, moto_url) as made:
            gone = made.queue("gone")
            made.queue("strict.fifo")
            made.stream("events", 1)
            made.sqs.create_queue(QueueName=f"{made.prefix}dead-letters")
            made.sqs.delete_queue(QueueUrl=gone)
            assert len(left(moto_url)) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left(moto_url) == []


def test_what_cannot_be_deleted_is_named(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs money until an operator deletes it; everything else is deleted."""
    made = Resources(REGION, moto_url)
    made.stream("events", 1)
    kept = made.queue("kept")
    made.queue("other")
    delete = made.sqs.delete_queue

    def refuse(*, QueueUrl: str) -> None:
        if QueueUrl == kept:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "DeleteQueue")
        delete(QueueUrl=QueueUrl)

    monkeypatch.setattr(made.sqs, "delete_queue", refuse)
    with pytest.raises(RuntimeError, match=made.prefix):
        made.close()
    assert left(moto_url) == [kept]
    delete(QueueUrl=kept)
