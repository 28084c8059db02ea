"""The command line with brokers that cannot count, whose positions are not times, and SQS."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers import registry
from qdo.brokers.sqs.codec import make_position
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.positions import format_position, position_now, position_of_time
from tests.support.aws.clients import client as aws_client
from tests.support.cli import Ended, run_here
from tests.support.coordinator_process import connected
from tests.support.fakes.wide_positions_broker import WideBroker, wide

LAYOUT = Layout.of("shop")
WORKER = "worker-0000000001"
SENT = 1_600_000_000.0
Run = Callable[..., Ended]


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    with connected("sqlite:qdo-data/coordination.db") as client:
        client.ensure_path(LAYOUT.queues)
        client.create(LAYOUT.worker(WORKER), WorkerNode().encode(), makepath=True)
        yield client


def put(client: Client, queue: str, **values: Any) -> None:
    client.create(LAYOUT.queue(queue), QueueNode(**values).encode())


def node_of(client: Client, queue: str) -> QueueNode:
    return QueueNode.parse(client.get(LAYOUT.queue(queue))[0])


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> WideBroker:
    made = WideBroker()
    monkeypatch.setattr(registry, "open_broker", lambda *args: made)
    for module in ("commands.dead_letters", "commands.decide"):
        monkeypatch.setattr(f"qdo.cli.{module}.kind_of", lambda url: made)
    (Path("qdo-data") / "messages.db").touch()
    return made


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `qdo` for the app; return exit code, stdout and stderr."""

    def call(command: str, *arguments: str) -> Ended:
        return run_here(capsys, *command.split(), "--app", "shop", *arguments)

    return call


# --- queues ---------------------------------------------------------------------------


def test_what_a_broker_cannot_count_is_not_shown_as_a_number(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """No column, and null in JSON; how far behind a queue is stands there instead."""
    broker.put_at("behind", wide(5, SENT))
    broker.ages["behind"] = 7_500.0
    broker.put_at("tip", wide(5, SENT))
    broker.ages["tip"] = 1.0
    put(coordinator, "behind", owner=WORKER)
    put(coordinator, "tip", owner=WORKER, last=position_of_time(SENT), position="#5")
    behind, tip = cli("queues", "-o", "json").items()
    assert (behind["backlog"], behind["behind_seconds"]) == (None, 7500)
    assert (tip["backlog"], tip["behind_seconds"], tip["position"]) == (None, 0, "#5")
    assert ("tip", wide(5, SENT)) in broker.asked
    table = cli("queues").out.splitlines()
    heading, behind, tip = (re.split(" {2,}", line) for line in table)
    columns = ["QUEUE", "STATE", "OWNER", "LAST", "AGE", "DEAD LETTERS", "WHY"]
    assert heading == columns
    assert behind[-3:-1] == ["2h 5m", "0"]
    assert tip[-3:] == ["0s", "0", "-"]


def test_only_a_few_are_asked_for_and_the_needy_first(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """Each costs a request: failing, unowned and long idle queues first. The output states this."""
    last = position_of_time(SENT)
    for name, values in {
        "busy": {"owner": WORKER, "last": last + 9},
        "failing": {
            "owner": WORKER,
            "last": last + 9,
            "failure": FailureRecord(wide(7, SENT), 2, "no"),
        },
        "orphan": {"owner": "worker-0000000009", "last": last},
        "still": {"owner": WORKER, "last": last + 1},
        "swift": {"owner": WORKER, "last": last + 8},
    }.items():
        broker.put_at(name, wide(6, SENT))
        broker.ages[name] = 5.0
        put(coordinator, name, **values)
    ended = cli("queues", "-o", "json")
    assert [i["queue"] for i in ended.items() if i["behind_seconds"] is not None] == [
        "failing",
        "orphan",
        "still",
    ]
    assert sorted(queue for queue, _ in broker.asked) == ["failing", "orphan", "still"]
    assert "2 of 5 " in ended.err
    assert "--budget N" in ended.err
    broker.asked.clear()
    assert "--budget" not in cli("queues", "--budget", "5").err
    assert len(broker.asked) == 5
    broker.asked.clear()
    assert "5 of 5" in cli("queues", "--budget", "0").err
    assert broker.asked == []


def test_a_queue_that_vanishes_meanwhile_spoils_nothing(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """The others are shown."""
    broker.put_at("gone", wide(1, SENT))
    broker.put_at("here", wide(1, SENT))
    broker.ages["here"] = 3.0
    gone, here = cli("queues", "-o", "json").items()
    assert (gone["backlog"], gone["behind_seconds"]) == (None, None)
    assert here["behind_seconds"] == 3.0


def test_finished_queues_are_hidden_waiting_ones_show_parents(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """A tombstone is not shown; a queue that an operator marked as deleted is not processed."""
    broker.descent = {
        "grandparent": (),
        "uncle": (),
        "parent": ("grandparent",),
        "child": ("parent", "forgotten"),
        "marked": (),
    }
    put(coordinator, "grandparent", last=5, position="#999", deleted=True)
    put(coordinator, "uncle", last=5, position="#999")  # no leader has marked it yet
    put(coordinator, "parent", owner=WORKER)
    put(coordinator, "marked", deleted=True)
    put(coordinator, "vanished", deleted=True)
    child, marked, parent = cli("queues", "-o", "json").items()
    assert (child["queue"], child["waits_for"]) == ("child", ["parent"])
    assert (marked["queue"], marked["fault"]) == (
        "marked",
        "its deletion was begun and has not finished",
    )
    assert (parent["queue"], parent["waits_for"]) == ("parent", [])
    assert "waits for parent" in cli("queues").out


def test_dead_letters_keep_a_finished_queue_in_sight(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """An operator has to decide on them, even if the queue itself is gone."""
    broker.descent = {"finished": ()}
    broker.ages["finished"] = 0.0
    put(coordinator, "finished", last=5, position="#999", deleted=True)
    put(coordinator, "vanished", last=5, deleted=True)
    assert cli("queues", "-o", "json").items() == []
    broker.add_letter("finished", wide(7, SENT))
    broker.add_letter("vanished", wide(7, SENT))
    finished, vanished = cli("queues", "-o", "json").items()
    assert (finished["dead_letters"], finished["fault"]) == (1, None)
    assert (vanished["dead_letters"], vanished["fault"]) == (1, "it is marked as deleted")


def test_a_position_that_is_none_of_the_brokers_is_a_fault(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """Such a queue is not processed, and its backlog is unknown."""
    broker.put_at("q", wide(1, SENT))
    put(coordinator, "q", last=5, position="garbage")
    (item,) = cli("queues", "-o", "json").items()
    assert "garbage" in item["fault"]
    assert broker.asked == []


# --- seek -----------------------------------------------------------------------------


@pytest.fixture
def log(coordinator: Client, broker: WideBroker) -> WideBroker:
    """A queue with three messages, the first of which is done."""
    for number in range(3):
        broker.put_at("q", wide(10 + number, SENT + number))
    broker.ages["q"] = 42.0
    put(coordinator, "q", last=position_of_time(SENT), position="#10")
    return broker


@pytest.mark.parametrize(
    ("target", "last", "position"),
    [
        ("earliest", 0, None),
        ("latest", position_of_time(SENT + 2), None),
        ("2020-09-13T12:26:41Z", position_of_time(SENT + 1), None),
        ("#10", position_of_time(SENT + 1) - 1, "#10"),
    ],
)
def test_a_seek_records_last_and_position_together(
    coordinator: Client, log: WideBroker, cli: Run, target: str, last: int, position: str | None
) -> None:
    """A place in the broker's own form wins over the time beside it; a time has none."""
    (item,) = cli("seek q", target, "--yes", "-o", "json").items()
    node = node_of(coordinator, "q")
    assert (node.last, node.position, node.seek) == (last, position, 1)
    assert item["after_position"] == position
    assert item["after"] == (format_position(last) if last else "earliest")
    assert item["before_position"] == "#10"
    assert (item["waiting_before"], item["behind_before"]) == (None, 42.0)


def test_a_seek_behind_the_newest_message_counts_from_now(
    coordinator: Client, log: WideBroker, cli: Run
) -> None:
    """No message at that position has a time."""
    began = position_now()
    assert cli("seek q", "#12", "--yes").code == 0
    assert began - 1 <= node_of(coordinator, "q").last <= position_now()


def test_a_seek_shows_how_far_behind_where_nothing_is_counted(log: WideBroker, cli: Run) -> None:
    """In the broker's own positions."""
    header, line = cli("seek q", "#11").out.splitlines()
    assert " ".join(header.split()) == "QUEUE BEFORE AFTER BEHIND"
    assert line.split() == ["q", "#10", "#11", "42s", "->", "42s"]


def test_seek_rejects_other_targets(log: WideBroker, cli: Run) -> None:
    """Also a number, which is a time only if positions are times."""
    for target in ("135471512647131000", "#x", "soon"):
        ended = cli("seek q", target)
        assert ended.code == 2
        assert repr(target) in ended.err


def test_seeking_a_finished_queue_begins_it_again(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """Its tombstone is lifted; and it can be declared finished without being read."""
    broker.ages["q"] = 1.0
    put(coordinator, "q", last=7, position="#999", deleted=True)
    assert cli("seek q", "earliest", "--yes").code == 0
    assert node_of(coordinator, "q") == QueueNode(seek=1)
    broker.put_at("q", wide(5, SENT))
    assert cli("seek q", "#999", "--yes").code == 0
    assert broker.fetches == []
    assert node_of(coordinator, "q").position == "#999"


def test_seeking_leaves_what_an_operator_deleted_deleted(
    coordinator: Client, log: WideBroker, cli: Run
) -> None:
    """Only a tombstone is lifted."""
    put(coordinator, "other", deleted=True)
    log.ages["other"] = 1.0
    assert cli("seek other", "earliest", "--yes").code == 0
    assert node_of(coordinator, "other").deleted


# --- marks and dead letters -----------------------------------------------------------


def test_retry_now_tells_when_a_message_was_sent(
    coordinator: Client, broker: WideBroker, cli: Run
) -> None:
    """Not the value of its position as a time."""
    marks = FailureRecord(wide(7, SENT), 3, "no", blocked_since=1.0)
    put(coordinator, "q", failure=marks)
    (item,) = cli("retry-now q", "-o", "json").items()
    assert item["time"] == format_position(position_of_time(SENT))
    assert item["position"] == str(marks.position)


def test_without_the_address_of_the_broker_there_is_no_time(coordinator: Client, cli: Run) -> None:
    """The position is a time only for the default broker."""
    put(coordinator, "q", failure=FailureRecord(wide(7, SENT), 3, "no", blocked_since=1.0))
    (item,) = cli("retry-now q", "-o", "json").items()
    assert (item["time"], item["id"]) == (None, None)


@pytest.fixture
def letters(coordinator: Client, broker: WideBroker) -> WideBroker:
    for number in (7, 8, 9):
        broker.add_letter("q", wide(number, SENT))
    return broker


def test_dead_letters_have_the_ids_and_times_of_their_broker(letters: WideBroker, cli: Run) -> None:
    """And the position in full, by which they are found."""
    found = cli("dead-letters list", "-o", "json").items()
    assert [each["id"] for each in found] == ["7:0", "8:0", "9:0"]
    assert {each["time"] for each in found} == {format_position(position_of_time(SENT))}
    assert found[0]["position"] == str(wide(7, SENT))
    assert "8:0" in cli("dead-letters show q 8:0").out
    assert "8:0" in cli(f"dead-letters show q {wide(8, SENT)}").out


def test_dead_letters_are_retried_by_id_or_position(letters: WideBroker, cli: Run) -> None:
    """It prints the time of the new message."""
    ended = cli(f"dead-letters retry q 7:0 {wide(9, SENT)}", "-o", "json")
    sent = {each["sent_time"] for each in ended.items()}
    assert sent == {format_position(position_of_time(1_700_000_000.0))}
    assert letters.moved == [("q", wide(7, SENT)), ("q", wide(9, SENT))]
    assert cli("dead-letters retry q 77:0").code == 6
    assert cli("dead-letters retry q nonsense").code == 2


# --- SQS ------------------------------------------------------------------------------


@pytest.fixture
def sqs(moto_url: str, aws_prefix: str, coordinator: Client) -> tuple[Any, str]:
    """A client of moto, and the address of the test's own queues."""
    made = aws_client("sqs", moto_url)
    for number in range(3):
        queue = made.create_queue(QueueName=f"{aws_prefix}q{number}")["QueueUrl"]
        for _ in range(number):
            made.send_message(QueueUrl=queue, MessageBody="1")
    return made, f"sqs://us-east-1/{aws_prefix}?endpoint={moto_url}"


def test_queues_of_sqs_have_rough_backlogs(
    sqs: tuple[Any, str], cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marked as such."""
    ended = cli("queues", "--broker", sqs[1])
    assert [line.split()[2] for line in ended.out.splitlines()[1:]] == ["~0", "~1", "~2"]
    found = cli("queues", "--broker", sqs[1], "-o", "json", "--budget", "2").items()
    assert [each["backlog"] for each in found].count(None) == 1
    assert {each["approximate"] for each in found if each["backlog"] is not None} == {True}


@pytest.mark.parametrize(
    "arguments",
    [
        ("peek q1",),
        ("peek q1", "--kind", "waiting"),
        ("peek q1", "--id", "1"),
        ("cancel q1", "1"),
        ("purge q1",),
    ],
)
def test_sqs_shows_and_drops_no_messages(
    sqs: tuple[Any, str],
    aws_prefix: str,
    coordinator: Client,
    cli: Run,
    arguments: tuple[str, ...],
) -> None:
    """One sentence and exit code 5: a message that is received is hidden from the workers."""
    put(coordinator, "q1", last=5)
    ended = cli(*arguments, "--broker", sqs[1])
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1), ended.err
    url = sqs[0].get_queue_url(QueueName=f"{aws_prefix}q1")["QueueUrl"]
    assert len(sqs[0].receive_message(QueueUrl=url).get("Messages", ())) == 1


@pytest.mark.parametrize(("kind", "name"), [("failing", 2), ("blocking", 1)])
def test_sqs_shows_what_the_coordinator_records(
    sqs: tuple[Any, str], coordinator: Client, cli: Run, kind: str, name: int
) -> None:
    """Failing and blocking messages, without their bodies."""
    blocking, failing = (
        FailureRecord(make_position(7 + each, each, each), each, "no") for each in (1, 2)
    )
    blocking = replace(blocking, blocked_since=1.0)
    put(
        coordinator, "q1", last=5, failure=blocking, out_of_order=OutOfOrderProgress((), (failing,))
    )
    (item,) = cli("peek q1", "--kind", kind, "--broker", sqs[1], "-o", "json").items()
    assert item["id"] == str(uuid.UUID(int=name))
    assert (item["error"], item["body_bytes"], item["headers"]) == ("no", None, None)
