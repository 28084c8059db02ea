"""SQS requests about queues, and their frequency."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from botocore import exceptions as boto

from qdo.broker_errors import AccessDeniedError, ThrottledError
from qdo.brokers.sqs.queues import (
    COUNTS_PER_SECOND,
    COUNTS_SECONDS,
    SETTINGS_SECONDS,
    Redrive,
    SqsQueues,
)
from qdo.brokers.sqs.url import sqs_address
from tests.support.fakes.clocks import SettableClock

URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/"


class CountingSqs:
    """A fake SQS that counts its requests."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[tuple[str, str]] = []
        self.attributes: dict[str, dict[str, str]] = {}
        self.failing: dict[str, str] = {}
        self.closed: set[str] = set()

    def _answer(self, action: str, url: str) -> None:
        name = url.rsplit("/", 1)[-1]
        self.asked.append((action, name))
        code = self.failing.get(action)
        if name in self.closed:
            code = "AccessDenied"
        if code is not None:
            raise boto.ClientError(
                {
                    "Error": {"Code": code, "Message": "because"},
                    "ResponseMetadata": {"HTTPStatusCode": 400},
                },
                action,
            )

    def list_queues(self, **options: Any) -> dict[str, Any]:
        self._answer("ListQueues", "")
        return {"QueueUrls": [URL + name for name in self.names]}

    def get_queue_url(self, QueueName: str) -> dict[str, Any]:
        return {"QueueUrl": URL + QueueName}

    def get_queue_attributes(self, QueueUrl: str, AttributeNames: list[str]) -> dict[str, Any]:
        self._answer("GetQueueAttributes", QueueUrl)
        return {"Attributes": self.attributes.get(QueueUrl.rsplit("/", 1)[-1], {})}

    def list_queue_tags(self, QueueUrl: str) -> dict[str, Any]:
        self._answer("ListQueueTags", QueueUrl)
        return {"Tags": {"team": "a"}} if QueueUrl.endswith("1") else {}


def queues(service: CountingSqs, clock: SettableClock[float], options: str = "") -> SqsQueues:
    return SqsQueues(service, sqs_address(f"sqs://eu-west-1/p-{options}"), clock)


def counted(service: CountingSqs, action: str) -> int:
    return sum(each == action for each, _ in service.asked)


def test_counts_are_young_where_few_are_asked_for() -> None:
    """One request for each queue in a few seconds, however often counts are requested."""
    service, clock = CountingSqs("p-a"), SettableClock(1000.0)
    known = queues(service, clock)
    known.names()
    for _ in range(3):
        known.counts("a")
    assert counted(service, "GetQueueAttributes") == 1
    clock.now += COUNTS_SECONDS + 0.1
    known.counts("a")
    assert counted(service, "GetQueueAttributes") == 2


def test_counts_of_many_queues_stay_within_the_budget() -> None:
    """In the long run no more than so many requests a second, however many queues there are."""
    names = [f"p-{number}" for number in range(100)]
    service, clock = CountingSqs(*names), SettableClock(1000.0)
    known = queues(service, clock)
    known.names()
    start = len(service.asked)
    for _ in range(100):
        clock.now += 1
        for number in range(100):
            known.counts(str(number))
    assert 0 < len(service.asked) - start <= 101 * COUNTS_PER_SECOND


def test_a_queue_that_does_not_say_its_tags_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It probably belongs to another user; the cached tags of own queues stay valid for a while."""
    service, clock = CountingSqs("p-1", "p-21", "p-31"), SettableClock(1000.0)
    service.closed = {"p-21"}
    known = queues(service, clock, "?tag=team=a")
    assert [known.names() for _ in range(3)] == [["1", "31"]] * 3
    assert counted(service, "ListQueueTags") == 3
    (record,) = [each for each in caplog.records if each.name == "qdo.brokers.sqs.queues"]
    assert record.levelname == "WARNING"
    assert "ListQueueTags on queue 'p-21'" in record.getMessage()
    clock.now += 2 * SETTINGS_SECONDS
    service.closed = {"p-31"}
    assert known.names() == ["1", "21", "31"]
    service.closed = set(service.names)
    with pytest.raises(AccessDeniedError, match="sqs:ListQueueTags on queue"):
        queues(service, clock, "?tag=team=a").names()


def test_settings_and_tags_are_asked_for_once_in_a_while() -> None:
    """With every list one request; with the first one, and after an hour, one for each queue."""
    service, clock = CountingSqs("p-1", "p-2", "p-11"), SettableClock(1000.0)
    known = queues(service, clock, "?tag=team=a")
    assert [known.names() for _ in range(3)] == [["1", "11"]] * 3
    assert counted(service, "ListQueues") == 3
    assert counted(service, "ListQueueTags") == 3
    assert counted(service, "GetQueueAttributes") == 2  # not of those without the tag
    clock.now += 1.5 * SETTINGS_SECONDS + 1
    known.names()
    assert counted(service, "ListQueueTags") == 6


def test_settings_of_many_queues_refresh_at_different_times() -> None:
    """Spread over an hour, they cost little of a core at any time."""
    service, clock = CountingSqs(*(f"p-{number}" for number in range(1000))), SettableClock(1000.0)
    known = queues(service, clock)
    known.names()
    most = 0
    for _ in range(120):
        clock.now += 60
        before = counted(service, "GetQueueAttributes")
        known.names()
        most = max(most, counted(service, "GetQueueAttributes") - before)
    assert 10 <= most <= 60
    assert 2000 <= counted(service, "GetQueueAttributes") <= 3500


def test_what_is_known_of_queues_goes_with_them() -> None:
    """Memory does not grow with queues that come and go."""
    service = CountingSqs("p-a", "p-b")
    known = queues(service, SettableClock(1000.0))
    known.names()
    known.counts("a")
    service.names = ("p-b",)
    assert known.names() == ["b"]
    assert counted(service, "GetQueueAttributes") == 2
    known.counts("a")
    assert counted(service, "GetQueueAttributes") == 3


def test_settings_that_may_not_be_read_do_not_stop_discovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names the action once; a caller that needs the settings gets the error."""
    service = CountingSqs("p-a")
    service.failing = {"GetQueueAttributes": "AccessDenied"}
    known = queues(service, SettableClock(1000.0))
    with caplog.at_level(logging.WARNING):
        assert known.names() == ["a"]
        assert known.names() == ["a"]
    assert counted(service, "GetQueueAttributes") == 1
    (record,) = caplog.records
    assert "sqs:GetQueueAttributes on queue 'p-a'" in record.getMessage()
    with pytest.raises(AccessDeniedError):
        known.counts("a")


def test_a_service_out_of_reach_stops_discovery() -> None:
    """A list with a gap would retire queues."""
    service = CountingSqs("p-a")
    service.failing = dict.fromkeys(("GetQueueAttributes", "ListQueueTags"), "RequestThrottled")
    with pytest.raises(ThrottledError):
        queues(service, SettableClock(1000.0)).names()
    with pytest.raises(ThrottledError):
        queues(service, SettableClock(1000.0), "?tag=team=a").names()


@pytest.mark.parametrize(
    ("policy", "redrive"),
    [
        (None, None),
        ("", None),
        (
            json.dumps(
                {"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:x", "maxReceiveCount": "3"}
            ),
            Redrive("x", 3),
        ),
        (json.dumps({"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:x"}), Redrive("x", 10)),
        ("no JSON", None),
        ("[]", None),
    ],
)
def test_redrive_policies(policy: str | None, redrive: Redrive | None) -> None:
    """As SQS writes them; one that cannot be read is taken for none."""
    service = CountingSqs("p-a")
    if policy is not None:
        service.attributes = {"p-a": {"RedrivePolicy": policy}}
    assert queues(service, SettableClock(1000.0)).settings("a").redrive == redrive
