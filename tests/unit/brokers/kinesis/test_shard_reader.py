"""Answers of Kinesis as messages, and the effect of each failed request."""

from __future__ import annotations

import base64
import datetime
import logging
import time
from email.utils import formatdate
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from qdo.broker_errors import (
    AccessDeniedError,
    AwsNotFoundError,
    AwsUnreachableError,
    ExpiredCredentialsError,
    PositionTrimmedError,
)
from qdo.brokers.kinesis.api import (
    GetIterator,
    GetRecords,
    KinesisApi,
    ShardReadLimiter,
    StartPosition,
    parse_records,
)
from qdo.brokers.kinesis.poller import ShardPoller
from qdo.brokers.kinesis.positions import pack
from qdo.brokers.kinesis.reader import PATIENCE, ShardReader
from qdo.brokers.kinesis.url import KinesisAddress
from qdo.positions import position_of_time, time_of_position

NOW = 1_700_000_000.0
ADDRESS = KinesisAddress(region="eu-west-1", stream="s")


def record(sequence: int, data: bytes, key: str | None = "k") -> dict[str, Any]:
    named = {} if key is None else {"PartitionKey": key}
    return {
        "SequenceNumber": str(sequence),
        "ApproximateArrivalTimestamp": datetime.datetime.fromtimestamp(NOW, datetime.UTC),
        "Data": data,
        **named,
    }


def as_json(each: dict[str, Any]) -> dict[str, Any]:
    return {
        **each,
        "ApproximateArrivalTimestamp": NOW,
        "Data": base64.b64encode(each["Data"]).decode(),
    }


# --- answers ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["boto3", "json"])
def test_an_answer_is_the_same_in_both_forms(form: str) -> None:
    """As boto3 makes it, and as the service sends it."""
    records = [record(5, b'{"n": 1}'), record(7, b"\x00\xff", None)]
    found = parse_records(
        {
            "Records": records if form == "boto3" else list(map(as_json, records)),
            "NextShardIterator": "more",
            "MillisBehindLatest": 1500,
        },
        None,
    )
    time = position_of_time(NOW)
    assert [row[:3] for row in found.rows] == [
        (pack(5, 0, time), b'{"n": 1}', "k"),
        (pack(7, 0, time), b"\x00\xff", None),
    ]
    assert (found.first, found.records, found.size) == (5, 2, 10)
    assert (found.next_iterator, found.behind_seconds) == ("more", 1.5)


def test_an_answer_without_records_says_how_far_it_is_behind() -> None:
    """It also shows, by missing fields, that a shard has ended."""
    found = parse_records({"Records": [], "ChildShards": []}, None)
    assert (found.first, found.last, found.rows) == (None, 0, [])
    assert (found.next_iterator, found.behind_seconds) == (None, 0)


# --- failures -----------------------------------------------------------------------


class ScriptedClient:
    """Replaces boto3's client and its requests; raises the configured errors."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.created = NOW - 1_000_000
        self.date: str | None = None

    def get_shard_iterator(self, **_: Any) -> dict[str, Any]:
        self._raise()
        headers = {} if self.date is None else {"date": self.date}
        return {"ShardIterator": "one", "ResponseMetadata": {"HTTPHeaders": headers}}

    def call(self, action: str, value: Any) -> dict[str, Any]:
        assert action == "GetRecords"
        self._raise()
        return {"Records": [], "NextShardIterator": "two", "MillisBehindLatest": 0}

    def describe_stream_summary(self, **_: Any) -> dict[str, Any]:
        created = datetime.datetime.fromtimestamp(self.created, datetime.UTC)
        said = {"RetentionPeriodHours": 24, "StreamCreationTimestamp": created}
        return {"StreamDescriptionSummary": said}

    def close(self) -> None: ...

    def _raise(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def refusal(code: str, status: int = 400) -> ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": "no"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "GetRecords")


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


def reading(client: ScriptedClient, after: int = 0, trimmed: str = "stop") -> ShardReader:
    source = KinesisApi(client, client, ADDRESS)
    return ShardReader(source, "shard", None, ShardPoller(after, StartPosition(), 1.0), trimmed)


def step(made: ShardReader) -> GetIterator | GetRecords | None:
    """Make the next request; return the one behind it."""
    request = made.poll.next(NOW)
    assert request is not None
    made.step(request, NOW)
    return made.poll.next(NOW)


@pytest.mark.parametrize(("hours", "kept"), [(11.9, None), (12.1, 86_400.0)])
def test_old_messages_show_the_retention(
    client: ScriptedClient, hours: float, kept: float | None
) -> None:
    """It costs a request, so nobody asks for that of new ones."""
    oldest = pack(5, 0, position_of_time(NOW - hours * 3600))
    assert reading(client).backlog(oldest, NOW).retention_seconds == kept


@pytest.mark.parametrize(
    "code",
    ["ProvisionedThroughputExceededException", "LimitExceededException", "KMSThrottlingException"],
)
def test_throttling_is_never_an_error(
    client: ScriptedClient, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it lasts; from some time on it is a warning."""
    made = reading(client)
    step(made)
    client.errors = [refusal(code) for _ in range(3 * PATIENCE)]
    with caplog.at_level(logging.INFO):
        for _ in range(3 * PATIENCE):
            assert isinstance(step(made), GetRecords)
    levels = [each.levelname for each in caplog.records]
    assert levels[: PATIENCE - 1] == ["INFO"] * (PATIENCE - 1)
    assert set(levels[PATIENCE:]) == {"WARNING"}


@pytest.mark.parametrize(
    "error", [refusal("InternalFailure", 500), ReadTimeoutError(endpoint_url="http://x")]
)
def test_what_may_pass_is_told_when_it_does_not(client: ScriptedClient, error: Exception) -> None:
    """And the iterator is not trusted any more."""
    made = reading(client)
    step(made)
    client.errors = [error] * (PATIENCE + 1)
    for _ in range(PATIENCE):
        assert isinstance(step(made), GetIterator)
    with pytest.raises(AwsUnreachableError, match="Kinesis in region eu-west-1"):
        step(made)


def test_reads_that_always_fail_raise_an_error(client: ScriptedClient) -> None:
    """An iterator does not count as an answer."""
    made = reading(client)

    def fail() -> None:
        assert isinstance(step(made), GetRecords)
        client.errors = [refusal("InternalFailure", 500)]
        step(made)

    for _ in range(PATIENCE):
        fail()
    with pytest.raises(AwsUnreachableError):
        fail()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AccessDeniedException", AccessDeniedError),
        ("ExpiredTokenException", ExpiredCredentialsError),
        ("ResourceNotFoundException", AwsNotFoundError),
    ],
)
def test_what_does_not_pass_is_told_at_once(
    client: ScriptedClient, code: str, kind: type[Exception]
) -> None:
    """With the shard and its stream."""
    made = reading(client)
    step(made)
    client.errors = [refusal(code)]
    with pytest.raises(kind):
        step(made)


def test_a_refused_position_is_one_that_is_gone(client: ScriptedClient) -> None:
    """The stream's error is that it does not know the sequence number."""
    old = pack(7, 0, position_of_time(NOW - 3 * 86_400))
    client.errors = [refusal("InvalidArgumentException")]
    with pytest.raises(PositionTrimmedError) as caught:
        step(reading(client, old))
    assert caught.value.details["position"] == 7
    assert caught.value.details["time"].startswith("20")
    client.errors = [refusal("InvalidArgumentException")]
    assert step(reading(client, old, "oldest")) == GetIterator("TRIM_HORIZON")
    client.errors = [refusal("InvalidArgumentException")]
    young = pack(7, 0, position_of_time(NOW - 3600))
    assert step(reading(client, young)) == GetIterator("TRIM_HORIZON")


def test_an_onlooker_passes_over_what_is_gone(
    client: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It decides nothing, and so logs nothing."""
    old = pack(7, 0, position_of_time(NOW - 3 * 86_400))
    client.errors = [refusal("InvalidArgumentException")]
    assert step(reading(client, old, "look")) == GetIterator("TRIM_HORIZON")
    gone = reading(client, old, "look")
    gone.expired()
    assert gone.poll.next(NOW) is None
    assert caplog.records == []


def test_a_refused_iterator_is_another_matter(client: ScriptedClient) -> None:
    """The same error code for a read proves nothing about the position."""
    made = reading(client, pack(7, 0, position_of_time(NOW - 3600)))
    step(made)
    client.errors = [refusal("InvalidArgumentException")]
    with pytest.raises(Exception, match="InvalidArgumentException") as caught:
        step(made)
    assert not isinstance(caught.value, PositionTrimmedError)


# --- rates and looks ----------------------------------------------------------------


def test_readers_of_one_process_share_the_rate_of_a_shard() -> None:
    """The first reader to ask reads; shards do not wait for each other."""
    paces = ShardReadLimiter(1.0)
    assert paces.wait("a", NOW) == 0
    assert paces.wait("a", NOW + 0.25) == 0.75
    assert paces.wait("b", NOW + 0.25) == 0
    assert paces.wait("a", NOW + 1) == 0
    assert paces.wait("a", NOW - 3600) == 0  # the clock was set back
    paces.forget("a")
    assert paces.wait("a", NOW + 1) == 0


def test_a_look_that_found_nothing_before_the_tip_is_not_nothing() -> None:
    """Messages may be there that no read has come to yet."""
    made = reading(ScriptedClient())
    assert (made.backlog(None, NOW).count, made.backlog(None, NOW).behind_seconds) == (1, None)
    made.poll.next(NOW)
    made.poll.iterator_received("one")
    empty = {"Records": [], "NextShardIterator": "two", "MillisBehindLatest": 60_000}
    made.poll.records_received(parse_records(empty, None), NOW)
    assert made.backlog(None, NOW).count == 1
    assert made.backlog(None, NOW).behind_seconds == 60


@pytest.mark.parametrize(("ahead_seconds", "age"), [(600, 599.0), (-600, 0.0)])
def test_the_head_is_none_to_come_at_kinesis(ahead_seconds: int, age: float) -> None:
    """The clock here may be ahead; one that is behind is left alone."""
    client = ScriptedClient()
    client.date = formatdate(time.time() - ahead_seconds, usegmt=True)
    made = reading(client)
    step(made)
    found = NOW - time_of_position(made.backlog(None, NOW).head)
    assert found == pytest.approx(age, abs=1.5 if age else 0.001)


@pytest.mark.parametrize("date", ["yesterday", "", None])
def test_an_answer_without_a_date_says_nothing_about_the_clock(date: str | None) -> None:
    client = ScriptedClient()
    client.date = date
    made = reading(client)
    step(made)
    assert time_of_position(made.backlog(None, NOW).head) == pytest.approx(NOW, abs=0.001)
