"""The SQS broker beyond the contract, on a server that speaks SQS over HTTP.

The same tests run a second time in a process that gevent has patched: see
test_broker_gevent.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import pytest

from qdo.broker_errors import AwsNotFoundError, AwsUnreachableError
from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.base import OPEN_POLL, Outgoing, SendOptions
from qdo.brokers.catalog import Backlog
from qdo.brokers.registry import open_broker
from qdo.brokers.sqs import queues as sqs_queues
from qdo.brokers.sqs.broker import SqsBroker
from qdo.brokers.sqs.codec import decode_received, make_position
from qdo.errors import MessageTooLargeError, UnsupportedError
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.aws.clients import client
from tests.support.aws.messages import raw_messages, received_all
from tests.support.cli import command
from tests.support.policies import in_force

REGION = "eu-west-1"
with_s3 = pytest.mark.parametrize("endpoint", ["moto"], indirect=True)
POSITION = make_position(10**17, 0, 12345)
LETTER = dead_letter("a", POSITION)


@pytest.fixture(params=["moto", "stub"])
def endpoint(request: pytest.FixtureRequest) -> str:
    """Where SQS is: each test runs on both servers, unless it needs S3."""
    return str(request.getfixturevalue({"moto": "moto_url", "stub": "sqs_url"}[request.param]))


@pytest.fixture
def connect(endpoint: str, aws_prefix: str) -> Iterator[Callable[..., SqsBroker]]:
    """Open further connections to the queues of this test, with further options."""
    opened: list[SqsBroker] = []

    def connect(**options: Any) -> SqsBroker:
        given = {"endpoint": endpoint, "wait_seconds": 0, **options}
        text = "&".join(f"{name}={value}" for name, value in given.items())
        broker = open_broker(f"sqs://{REGION}/{aws_prefix}?{text}", "app")
        assert isinstance(broker, SqsBroker)
        opened.append(broker)
        return broker

    yield connect
    for each in opened:
        each.close()


@pytest.fixture
def broker(connect: Callable[..., SqsBroker]) -> SqsBroker:
    return connect(create="standard")


@pytest.fixture
def make(endpoint: str, aws_prefix: str) -> Callable[..., str]:
    """Create a queue with the prefix of this test; return its URL."""
    sqs = client("sqs", endpoint, region=REGION)

    def make(name: str, tags: dict[str, str] | None = None, **attributes: str) -> str:
        if name.endswith(".fifo"):
            attributes["FifoQueue"] = "true"
        url = sqs.create_queue(QueueName=aws_prefix + name, Attributes=attributes, tags=tags or {})
        return str(url["QueueUrl"])

    return make


@pytest.fixture
def s3(moto_url: str, aws_bucket: str) -> Any:
    """A client of S3, with a bucket of this test's own."""
    made = client("s3", moto_url, region=REGION)
    where = {"LocationConstraint": REGION}
    made.create_bucket(Bucket=aws_bucket, CreateBucketConfiguration=where)
    return made


def objects(s3: Any, bucket: str) -> list[str]:
    return [each["Key"] for each in s3.list_objects_v2(Bucket=bucket).get("Contents", ())]


# --- finding queues -----------------------------------------------------------------


def test_queues_are_found_page_by_page(
    connect: Callable[..., SqsBroker], make: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the prefix, whatever their kind; new ones with the next list."""
    monkeypatch.setattr(sqs_queues, "_PAGE", 3)
    broker = connect()
    assert broker.catalog.names() == []
    for number in range(7):
        make(f"t{number}" + (".fifo" if number % 2 else ""))
    assert broker.catalog.names() == ["t0", "t1.fifo", "t2", "t3.fifo", "t4", "t5.fifo", "t6"]
    make("t9")
    assert "t9" in broker.catalog.names()
    assert (broker.catalog.order("t0"), broker.catalog.order("t1.fifo")) == ("none", "queue")


def test_only_queues_with_the_tag(
    connect: Callable[..., SqsBroker], make: Callable[..., str]
) -> None:
    """Key and value; a queue that qdo creates has it."""
    make("mine", {"team": "a"})
    make("theirs", {"team": "b"})
    make("nobodys")
    broker = connect(tag="team=a", create="standard")
    broker.send(Outgoing("new", b"1"))
    assert broker.catalog.names() == ["mine", "new"]


def test_dead_letter_queues_are_no_queues(
    connect: Callable[..., SqsBroker], make: Callable[..., str], aws_prefix: str
) -> None:
    """Neither qdo's own nor those that a redrive policy names."""
    make("broken")
    arn = f"arn:aws:sqs:{REGION}:123456789012:{aws_prefix}broken"
    make("a", RedrivePolicy=json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "3"}))
    broker = connect()
    broker.dead_letters.store(LETTER)
    broker.dead_letters.store(replace(LETTER, queue="a.fifo"))
    assert broker.catalog.names() == ["a"]
    redrive = broker.sqs_queues.settings("a").redrive
    assert redrive is not None
    assert (redrive.target, redrive.max_receives) == (f"{aws_prefix}broken", 3)


def test_a_name_that_no_znode_can_have_is_skipped_with_a_warning(
    broker: SqsBroker,
    make: Callable[..., str],
    aws_prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, not with every list: here the queue that is called as the prefix."""
    make("")
    make("zookeeper")
    make("fine")
    with caplog.at_level(logging.WARNING):
        assert broker.catalog.names() == ["fine"]
        assert broker.catalog.names() == ["fine"]
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2
    assert f"queue '{aws_prefix}' is left out" in said[0]
    assert "ZooKeeper reserves it" in said[1]


def test_an_owner_forgets_a_queue_that_is_gone(
    connect: Callable[..., SqsBroker], make: Callable[..., str], aws_prefix: str
) -> None:
    """One worker of a fleet lists queues; the others would remember each that they ever had."""
    url = make("a")
    broker = connect()
    broker.sqs_queues.settings("a")
    assert aws_prefix + "a" in broker.sqs_queues._known
    broker.client.delete_queue(QueueUrl=url)
    subscription = broker.subscribe("a", 0, (), lambda position: None)
    reader = subscription.reader(0)

    def poll() -> None:
        for _ in range(500):
            reader.fetch(10)
            gevent.sleep(0.01)

    for _ in range(2):  # known by its URL, and not any more
        with pytest.raises(AwsNotFoundError, match="does not exist in region eu-west-1"):
            poll()
        assert broker.sqs_queues._known == {}
    subscription.close()


def test_trap_17_a_queue_that_was_deleted_meanwhile(
    connect: Callable[..., SqsBroker], make: Callable[..., str]
) -> None:
    """SQS still lists it for a while. That is not an error, unless a request is for this queue."""
    url = make("a")
    broker = connect()
    assert broker.catalog.names() == ["a"]
    broker.client.delete_queue(QueueUrl=url)
    with pytest.raises(AwsNotFoundError, match="does not exist in region eu-west-1"):
        broker.send(Outgoing("a", b"1"))
    with pytest.raises(AwsNotFoundError):
        broker.catalog.backlog("a", 0)
    assert broker.catalog.names() == []


# --- counting and advice ------------------------------------------------------------


def test_backlog_is_what_is_not_deleted(broker: SqsBroker) -> None:
    """Received messages as well; delayed ones apart; about, as SQS knows it."""
    broker.send_many([Outgoing("a", b"1")] * 3)
    broker.client.receive_message(QueueUrl=broker.sqs_queues.url("a"), MaxNumberOfMessages=2)
    assert broker.catalog.backlog("a", 10**80) == Backlog(
        count=3,
        oldest=None,
        head=0,
        delayed=0,
        approximate=True,
        in_flight=2,
        retention_seconds=1_209_600,
    )


def test_advice(broker: SqsBroker, make: Callable[..., str], aws_prefix: str) -> None:
    """The effect of the queues' own settings on failing or waiting messages."""
    make("broken")
    arn = f"arn:aws:sqs:{REGION}:123456789012:{aws_prefix}broken"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 30})
    make("a", RedrivePolicy=policy)
    make("b")
    redrive, retention = broker.catalog.config_warnings(
        {"a": in_force(attempts=4), "b": in_force(then="block"), "gone": in_force()}
    )
    assert f"moves messages of a to {aws_prefix}broken after 30 receives" in redrive
    assert "raise maxReceiveCount to 40" in redrive
    assert "may block b, and SQS deletes what waits there after 4 days" in retention
    broker.send(Outgoing("own", b"1"))  # created with 14 days
    assert (
        broker.catalog.config_warnings({"a": in_force(attempts=3), "own": in_force(then="block")})
        == []
    )


# --- sending ------------------------------------------------------------------------


def test_fifo_keeps_the_order_and_takes_a_dedup_key_once(
    connect: Callable[..., SqsBroker],
) -> None:
    """The deduplication id is the dedup key."""
    broker = connect(create="fifo")
    broker.send_many([Outgoing("a.fifo", str(n).encode(), "k") for n in range(25)])
    for _ in range(2):
        broker.send(Outgoing("a.fifo", b"25", "k", terms=SendOptions(dedup_key="x")))
    raw = raw_messages(broker.client, broker.sqs_queues.url("a.fifo"))
    assert [int(each["Body"]) for each in raw] == list(range(26))
    assert {each["Attributes"]["MessageGroupId"] for each in raw} == {"k"}


def test_trap_19_the_owner_alone_sees_messages(broker: SqsBroker) -> None:
    """Looking would hide them from it."""
    with pytest.raises(UnsupportedError) as caught:
        broker.reader("a", 0)
    assert caught.value.exit_code == 5
    assert broker.trim("a", 10**18, 0.0) == 0


# --- large bodies -------------------------------------------------------------------


@with_s3
def test_a_large_body_is_in_s3(connect: Callable[..., SqsBroker], s3: Any, aws_bucket: str) -> None:
    """Its message points there, as those of AWS's own extended clients do."""
    broker = connect(create="standard", bucket=aws_bucket, max_body=10)
    assert broker.objects is not None
    broker.send(Outgoing("a", b"x" * 11, "k"))
    (key,) = objects(s3, aws_bucket)
    assert key.startswith("a/")
    (raw,) = raw_messages(broker.client, broker.sqs_queues.url("a"))
    assert json.loads(raw["Body"])[1] == {"s3BucketName": aws_bucket, "s3Key": key}
    pointer = decode_received(raw).pointer
    assert pointer is not None
    assert broker.objects.is_ours(pointer)
    assert broker.objects.get(pointer) == b"x" * 11
    foreign = BodyPointer("somebody-elses", key)
    assert not broker.objects.is_ours(foreign)
    broker.objects.delete([foreign])
    assert objects(s3, aws_bucket) == [key]
    broker.objects.delete([pointer])
    assert objects(s3, aws_bucket) == []
    assert broker.objects.get(pointer) is None


@with_s3
def test_a_large_dead_letter_is_in_s3_as_well(
    connect: Callable[..., SqsBroker], s3: Any, aws_bucket: str
) -> None:
    """Its object goes when the letter goes, not before."""
    broker = connect(create="standard", bucket=aws_bucket, max_body=10)
    large = [replace(LETTER, position=POSITION + n, body=b'"%s"' % (b"x" * 20)) for n in range(3)]
    for each in large:
        broker.dead_letters.store(each)
    assert broker.dead_letters.records() == large
    assert broker.dead_letters.get("a", POSITION) == large[0]
    assert [each.body_bytes for each in broker.dead_letters.find()] == [22, 22, 22]
    before = objects(s3, aws_bucket)
    assert len(before) == 3
    assert broker.dead_letters.discard([("a", POSITION)]) == [True]
    assert len(objects(s3, aws_bucket)) == 2
    broker.dead_letters.retry([("a", POSITION + 1)])
    (row,) = received_all(broker, "a")
    assert len(set(objects(s3, aws_bucket)) - set(before)) == 1  # the message's own
    assert aws_bucket in row.body.decode()
    broker.close()
    without = connect()
    with pytest.raises(AwsNotFoundError, match=r"body of dead letter .* S3 object"):
        without.dead_letters.records()
    assert len(without.dead_letters.find()) == 1


@with_s3
def test_a_bucket_that_does_not_exist_is_told_at_the_start(
    connect: Callable[..., SqsBroker], aws_bucket: str
) -> None:
    """Not with the first large body."""
    with pytest.raises(AwsNotFoundError, match=f"S3 bucket '{aws_bucket}' does not exist"):
        connect(bucket=aws_bucket)


def test_large_bodies_are_refused_without_a_bucket(broker: SqsBroker) -> None:
    """The default limit is 256 KiB; the error names the options that raise it."""
    with pytest.raises(MessageTooLargeError, match=r"262144.*max_body.*bucket=NAME"):
        broker.send(Outgoing("a", b"x" * 262145))
    assert broker.capabilities.max_body_bytes == 262144


# --- dead letters -------------------------------------------------------------------


def test_letters_of_fifo_queues(connect: Callable[..., SqsBroker], aws_prefix: str) -> None:
    """More of one queue than a receive brings are all seen; the same twice is stored once."""
    broker = connect(create="fifo")
    letters = [
        replace(LETTER, queue="a.fifo", position=POSITION + n, dead_at=1_700_000_000.0 + n)
        for n in range(23)
    ]
    for each in [*letters, letters[3], letters[3]]:
        broker.dead_letters.store(each)
    assert broker.dead_letters.records("a.fifo") == letters
    url = broker.sqs_queues.url_of(f"{aws_prefix}dead-letters.fifo")
    facts = broker.sqs_queues.counts_of(f"{aws_prefix}dead-letters.fifo")
    assert (url.endswith(".fifo"), facts.retention_seconds) == (True, 1_209_600)
    moved = broker.dead_letters.retry([("a.fifo", each.position) for each in letters[:12]])
    rows = received_all(broker, "a.fifo")
    assert [row.position & ((1 << 256) - 1) for row in rows] == [
        (each or 0) & ((1 << 256) - 1) for each in moved
    ]
    assert {row.key for row in rows} == {"k"}
    assert broker.dead_letters.records() == letters[12:]


def test_a_letter_that_was_buried_twice_is_one(broker: SqsBroker) -> None:
    """A standard queue keeps both, which are shown, sent and deleted as one."""
    broker.dead_letters.store(LETTER)
    again = make_position(10**17 + 99, 0, 12345)
    broker.dead_letters.store(
        replace(LETTER, position=again)
    )  # received again, it has another position
    assert len(broker.dead_letters.records()) == 1
    assert broker.dead_letters.get("a", again) is not None
    assert len(broker.dead_letters.retry([("a", POSITION)])) == 1
    assert broker.dead_letters.records() == []
    assert len(received_all(broker, "a")) == 1


def test_what_others_put_there_is_left_alone(broker: SqsBroker, make: Callable[..., str]) -> None:
    """SQS may move messages into the same queue: they are not qdo's letters."""
    url = make("dead-letters")
    broker.client.send_message(QueueUrl=url, MessageBody="moved by SQS")
    broker.dead_letters.store(LETTER)
    assert len(broker.dead_letters.records()) == 1
    assert broker.dead_letters.discard([("a", POSITION)]) == [True]
    broker.close()
    (raw,) = raw_messages(client("sqs", broker.address.endpoint or "", region=REGION), url)
    assert raw["Body"] == "moved by SQS"


def test_letters_are_hidden_during_an_action_and_then_released(
    broker: SqsBroker, connect: Callable[..., SqsBroker]
) -> None:
    """Looking gives them back at once, acting when the broker is closed or looks again."""
    for number in range(12):
        broker.dead_letters.store(replace(LETTER, position=POSITION + number))
    assert len(broker.dead_letters.records()) == 12
    other = connect()
    assert len(other.dead_letters.records()) == 12
    assert broker.dead_letters.discard([("a", POSITION)]) == [True]
    assert other.dead_letters.records() == []
    assert broker.dead_letters.discard([("a", POSITION + 1)]) == [True]
    broker.close()
    assert len(other.dead_letters.records()) == 10


def test_reading_letters_one_by_one_costs_no_requests(broker: SqsBroker) -> None:
    """They were listed a moment ago."""
    for number in range(12):
        broker.dead_letters.store(replace(LETTER, position=POSITION + number))
    entries = broker.dead_letters.find()
    asked: list[str] = []
    broker.client.meta.events.register(
        "before-call.sqs", lambda model, **rest: asked.append(model.name)
    )
    for each in entries:
        assert broker.dead_letters.get(each.queue, each.position) is not None
    assert asked == []


def test_dead_letters_are_named_by_the_address(
    connect: Callable[..., SqsBroker], aws_prefix: str
) -> None:
    """With a name of their own several prefixes share them."""
    broker = connect(dead_letters=f"all-{aws_prefix}")
    broker.dead_letters.store(LETTER)
    assert len(connect(dead_letters=f"all-{aws_prefix}.fifo").dead_letters.records()) == 1
    assert connect().dead_letters.records() == []


# --- opening ------------------------------------------------------------------------


def test_nobody_there() -> None:
    """Opening the broker fails."""
    with pytest.raises(AwsUnreachableError, match="SQS in region eu-west-1"):
        open_broker(f"sqs://{REGION}/x-?endpoint=http://127.0.0.1:1", "app")


def test_opening_makes_one_request(moto_url: str) -> None:
    """Enough to know that it is the right place, with the right credentials."""
    with closing(open_broker(f"sqs://{REGION}/x-?endpoint={moto_url}", "app")) as broker:
        assert isinstance(broker, SqsBroker)
        assert broker.sqs_queues.names() == []


_FORKING = """
import os, sys
from qdo import App

with App("app") as app:
    app.send("a", "before")
    pid = os.fork()
    if pid == 0:
        app.send("a", "child")
        app.close()
        os._exit(0)
    app.send("a", "parent")
    sys.exit(os.waitpid(pid, 0)[1])
"""


def test_a_forked_child_has_connections_of_its_own(
    broker: SqsBroker, endpoint: str, aws_prefix: str, tmp_path: Path
) -> None:
    """As web servers do that load an app once and fork then."""
    url = f"sqs://{REGION}/{aws_prefix}?endpoint={endpoint}&create=standard"
    ended = command("-W", "error", "-c", _FORKING, cwd=tmp_path, env={"QDO_BROKER": url})
    assert (ended.code, ended.err) == (0, "")
    bodies = sorted(row.body for row in received_all(broker, "a"))
    assert bodies == [b'"before"', b'"child"', b'"parent"']


# --- messages of a dead process -----------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["stub"], indirect=True)
def test_what_a_lost_answer_brought_is_given_back(
    connect: Callable[..., SqsBroker], endpoint: str, aws_prefix: str
) -> None:
    """By the attempt id of the poll: no process has the receipts, and the group is locked."""
    broker = connect(create="fifo")
    broker.send_many([Outgoing("q.fifo", b"1", "k", None), Outgoing("q.fifo", b"2", "k", None)])
    sqs = client("sqs", endpoint, region=REGION)
    url = sqs.get_queue_url(QueueName=f"{aws_prefix}q.fifo")["QueueUrl"]
    terms = {"QueueUrl": url, "MaxNumberOfMessages": 10}
    lost = sqs.receive_message(**terms, ReceiveRequestAttemptId="the dead", VisibilityTimeout=600)
    assert len(lost["Messages"]) == 2
    assert "Messages" not in sqs.receive_message(**terms)
    broker.release([("q.fifo", OPEN_POLL + "the dead")])
    found = sqs.receive_message(**terms)["Messages"]
    assert [each["Body"] for each in found] == ["1", "2"]
    sqs.close()


@pytest.mark.parametrize("endpoint", ["stub"], indirect=True)
def test_a_poll_that_brought_nothing_takes_nothing(
    connect: Callable[..., SqsBroker], endpoint: str, aws_prefix: str
) -> None:
    """SQS treats the repeated id as a new receive: its messages are released as well."""
    broker = connect(create="fifo")
    broker.send(Outgoing("q.fifo", b"1", "k", None))
    broker.release([("q.fifo", OPEN_POLL + "never heard of")])
    sqs = client("sqs", endpoint, region=REGION)
    url = sqs.get_queue_url(QueueName=f"{aws_prefix}q.fifo")["QueueUrl"]
    (found,) = sqs.receive_message(QueueUrl=url)["Messages"]
    assert found["Body"] == "1"
    sqs.close()
