"""Addresses of AWS brokers: valid ones, and rejected ones with their remedy."""

from __future__ import annotations

import pytest

from qdo.brokers.aws.address import ServiceAddress
from qdo.brokers.kinesis.url import kinesis_address
from qdo.brokers.registry import kind_of
from qdo.brokers.sqs.url import sqs_address
from qdo.errors import SettingsError


def refused(url: str) -> str:
    read = kinesis_address if url.startswith("kinesis") else sqs_address
    with pytest.raises(SettingsError) as caught:
        read(url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sqs_defaults() -> None:
    """An address of region and prefix is enough."""
    found = sqs_address("sqs://eu-west-1/shop-")
    assert (found.region, found.prefix) == ("eu-west-1", "shop-")
    assert (found.visibility_seconds, found.wait_seconds, found.idle_seconds) == (60, 20, 20.0)
    assert (found.create, found.bucket, found.max_body, found.tag) == ("none", None, 262144, None)
    assert found.letter_queues == ("shop-dead-letters", "shop-dead-letters.fifo")
    assert found.place == ServiceAddress("sqs", "eu-west-1", None)


def test_an_empty_prefix_takes_all_queues_of_the_region() -> None:
    """The slash has to be there: a forgotten prefix must not take every queue."""
    assert sqs_address("sqs://eu-west-1/").prefix == ""
    assert "lacks the part after the region" in refused("sqs://eu-west-1")


def test_every_sqs_option() -> None:
    """All at once."""
    found = sqs_address(
        "sqs://us-gov-west-1/a?endpoint=http://127.0.0.1:5000/&tag=team=a%26b&visibility_seconds=30"
        "&wait_seconds=0&idle_seconds=0&create=fifo&dead_letters=lost.fifo&bucket=big-bodies"
        "&max_body=1000"
    )
    assert found.place == ServiceAddress("sqs", "us-gov-west-1", "http://127.0.0.1:5000")
    assert found.tag == ("team", "a&b")
    assert (found.visibility_seconds, found.wait_seconds, found.idle_seconds) == (30, 0, 0.0)
    assert (found.create, found.bucket, found.max_body) == ("fifo", "big-bodies", 1000)
    assert found.letter_queues == ("lost", "lost.fifo")


def test_every_kinesis_option() -> None:
    """All at once; times are Unix times."""
    plain = kinesis_address("kinesis://eu-west-1/orders")
    assert (plain.start, plain.reads_per_second, plain.trimmed) == ("oldest", 1.0, "stop")
    assert plain.dead_letters is None
    found = kinesis_address(
        "kinesis://ap-southeast-2/my.stream?endpoint=https://localhost:4566&start=1970-01-02T00:00Z"
        "&reads_per_second=2.5&trimmed=oldest&dead_letters=s3://bucket-1/some/where/"
    )
    assert found.place == ServiceAddress("kinesis", "ap-southeast-2", "https://localhost:4566")
    assert (found.stream, found.start, found.reads_per_second) == ("my.stream", 86400.0, 2.5)
    assert (found.trimmed, found.dead_letters) == ("oldest", ("bucket-1", "some/where"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqs://eu-west-1/a?wait_second=3", "did you mean 'wait_seconds'?"),
        ("sqs://eu-west-1/a?colour=red", "unknown option 'colour'; valid options: endpoint"),
        ("sqs://eu-west-1/a?wait_seconds=21", "not an integer from 0 to 20"),
        ("sqs://eu-west-1/a?wait_seconds=", "not an integer from 0 to 20"),
        ("sqs://eu-west-1/a?wait_seconds=1&wait_seconds=2", "given twice"),
        ("sqs://eu-west-1/a?idle_seconds=nan", "not a number from 0 to 3600"),
        ("sqs://eu-west-1/a?create=maybe", "not one of none, standard, fifo"),
        ("sqs://eu-west-1/a?tag=team", "write tag=KEY=VALUE"),
        ("sqs://eu-west-1/a?endpoint=127.0.0.1:5000", "not a URL such as http://127.0.0.1:5000"),
        ("sqs://eu-west-1/a?endpoint=http://me:secret@host", "not a URL such as"),
        ("sqs://eu-west-1/a?bucket=No_Bucket", "No_Bucket"),
        ("sqs://eu-west-1/a?max_body=1048577", "not an integer from 1 to 1048576"),
        ("sqs://eu-west-1/a?dead_letters=a/b", "cannot name a queue of SQS"),
        ("sqs://eu-west-1/a?dead_letters=" + "x" * 78, "too long"),
        ("sqs://eu-west-1/a?=", "unknown option ''"),
        ("sqs://eu-west-1/a?wait_seconds", "bad query field"),
        ("sqs://eu-west-1/a#b", "%23"),
        ("sqs://eu-west-1/a.b", "cannot begin names of SQS queues"),
        ("sqs://eu-west-1/a/b", "cannot begin names of SQS queues"),
        ("sqs://eu-west-1/" + "a" * 80, "cannot begin names of SQS queues"),
        ("sqs://EU/a", "'EU' is not a region such as eu-west-1"),
        ("sqs:///a", "'' is not a region such as eu-west-1"),
        ("sqs://AKIA:secret@eu-west-1/a", "credentials"),
        ("sqs://[eu/a", "is not sqs://REGION/PREFIX"),
        ("kinesis://eu-west-1/", "kinesis://REGION/STREAM"),
        ("kinesis://eu-west-1/a?start=yesterday", "yesterday"),
        ("kinesis://eu-west-1/a?start=2026-01-01T00:00", "time zone"),
        ("kinesis://eu-west-1/a?start=2226-01-01T00:00Z", "in the past"),
        ("kinesis://eu-west-1/a?reads_per_second=6", "not a number from 0.01 to 5"),
        ("kinesis://eu-west-1/a?dead_letters=bucket", "not s3://BUCKET/PREFIX"),
        ("kinesis://eu-west-1/a?wait_seconds=1", "unknown option 'wait_seconds'"),
    ],
)
def test_what_is_refused(url: str, words: str) -> None:
    """In one line, with the remedy; secrets are not repeated."""
    said = refused(url)
    assert words in said
    if "credentials" in said:
        assert "secret" not in said


@pytest.mark.parametrize(
    ("url", "seconds"),
    [
        ("sqs://eu-west-1/shop-", 20),
        ("sqs://eu-west-1/shop-?wait_seconds=3", 3),
        ("sqs://eu-west-1/shop-?wait_seconds=21", 0),
        ("kinesis://eu-west-1/clicks", 0),
        ("sqlite:messages.db", 0),
    ],
)
def test_how_long_a_broker_takes_to_close_stands_in_its_address(url: str, seconds: float) -> None:
    """The time of an open long poll of SQS; invalid addresses are rejected elsewhere."""
    assert kind_of(url).closing_seconds(url) == seconds


def test_a_bucket_may_have_a_prefix() -> None:
    """Objects get it, and pointers without it are not followed."""
    assert sqs_address("sqs://eu-west-1/a?bucket=bodies").bucket == "bodies"
    assert sqs_address("sqs://eu-west-1/a?bucket=bodies/qdo/a/").bucket == "bodies/qdo/a"
    for wrong in ("bodies/", "/qdo", "Bodies/qdo"):
        with pytest.raises(SettingsError):
            sqs_address(f"sqs://eu-west-1/a?bucket={wrong}")
