"""The tests on AWS itself, tried out on moto: that they can be trusted, and leave nothing."""

from __future__ import annotations

import sys

import pytest
from botocore.exceptions import ClientError

from tests.support.aws.clients import REGION, client, surroundings
from tests.support.aws.resources import Resources
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


def test_it_is_skipped_with_a_reason() -> None:
    """Credentials of the environment are never used by accident."""
    ended = command(*SUITE[1:], cwd=ROOT, env=surroundings())
    assert ended.code == 0
    assert "4 skipped" in ended.out
    assert "only with TESTS_AWS=1" in ended.out


def test_without_a_region_it_fails_and_says_so() -> None:
    """Asked for, it is not passed over."""
    env = {**surroundings(), "TESTS_AWS": "1", "AWS_DEFAULT_REGION": ""}
    ended = command(*SUITE[1:], "-x", cwd=ROOT, env=env)
    assert ended.code == 1
    assert "needs a region" in ended.out


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
