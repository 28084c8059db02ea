"""`qdo unblock`, and the blocks that `qdo queues` shows."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdo.app import App
from qdo.cli.framework import run
from qdo.cli.main import qdo
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.progress import FailureRecord, OutOfOrderProgress
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.cli import QDO, Ended, command
from tests.support.processes import wait_until

LAYOUT = Layout.of("pay")
MARKS = FailureRecord(135471512647131000, 3, "ValueError: no", blocked_since=1_700_000_000.0)


class UnblockSetup:
    """A coordinator with a worker and a queue, and the command line of an operator."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.places = {
            "QDO_APP": "pay",
            "QDO_BROKER": f"sqlite:{folder / 'messages.db'}",
            "QDO_COORDINATOR": f"sqlite:{folder / 'coordination.db'}",
        }
        self.client: Client = connect(self.places["QDO_COORDINATOR"], handler="threading")
        self.client.open(5.0)
        for path in LAYOUT.persistent:
            self.client.ensure_path(path)
        self.client.create(LAYOUT.worker("worker-1"), WorkerNode(("q",)).encode(), ephemeral=True)
        self.put(MARKS)
        with self.app() as app:
            app.send("q", 1)

    def app(self) -> App:
        return App("pay", broker=self.places["QDO_BROKER"])

    def put(self, marks: FailureRecord | None, above: OutOfOrderProgress | None = None) -> None:
        node = QueueNode(last=7, owner="worker-1", failure=marks, out_of_order=above).encode()
        path = LAYOUT.queue("q")
        if self.client.exists(path):
            self.client.set(path, node)
        else:
            self.client.create(path, node)

    def node(self) -> QueueNode:
        return QueueNode.parse(self.client.get(LAYOUT.queue("q"))[0])

    def reread(self) -> tuple[str, ...]:
        return WorkerNode.parse(self.client.get(LAYOUT.worker("worker-1"))[0]).reread

    def qdo(self, *argv: str) -> Ended:
        return command(*QDO, *argv, cwd=self._folder, env=self.places)

    def close(self) -> None:
        self.client.stop()
        self.client.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[UnblockSetup]:
    desk = UnblockSetup(tmp_path)
    yield desk
    desk.close()


def items(ended: Ended) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ended.out)["items"]
    return found


def test_queues_shows_what_blocks(desk: UnblockSetup) -> None:
    """With attempts, error and time, in the table and as JSON."""
    (item,) = items(desk.qdo("queues", "-o", "json"))
    assert item["failing"] is None
    assert item["blocked"] == {
        "position": "135471512647131000",
        "attempts": 3,
        "error": "ValueError: no",
        "blocked_since": 1_700_000_000.0,
    }
    table = desk.qdo("queues").out
    assert "failed in 3 attempts and has blocked its queue or key for " in table
    assert "ValueError: no" in table
    desk.put(None)
    assert "ValueError" not in desk.qdo("queues").out


def test_queues_shows_what_fails(desk: UnblockSetup) -> None:
    """A message that is still retried does not block."""
    desk.put(FailureRecord(135471512647131000, 2, "KeyError: 'x'", retry_at=1.0))
    (item,) = items(desk.qdo("queues", "-o", "json"))
    assert (item["blocked"], item["failing"]["attempts"]) == (None, 2)


@pytest.mark.parametrize("verdict", ["retry", "skip", "dead-letter"])
def test_unblock_writes_the_decision_and_tells_the_owner(desk: UnblockSetup, verdict: str) -> None:
    """As a counted operator's change that leaves `last` and owner alone."""
    named = ("--message", str(MARKS.position)) if verdict == "skip" else ()
    ended = desk.qdo("unblock", "q", f"--{verdict}", *named, "-o", "json")
    assert ended.code == 0, ended.err
    (item,) = items(ended)
    assert (item["queue"], item["decision"], item["attempts"]) == ("q", verdict, 3)
    node = desk.node()
    assert (node.last, node.owner, node.seek) == (7, "worker-1", 1)
    assert desk.reread() == ("q",)
    if verdict == "retry":
        assert node.failure is None
    else:
        assert node.failure is not None
        assert (node.failure.blocked, node.failure.decision) == (False, verdict)


def test_several_messages_that_block(desk: UnblockSetup) -> None:
    """Each is shown with its position, and decided on by it; or all of them are at once."""
    other = replace(MARKS, position=135471512647131060, error="KeyError: 'y'")
    third = replace(MARKS, position=135471512647131090)
    desk.put(MARKS, OutOfOrderProgress((), (other, third)))
    (item,) = items(desk.qdo("queues", "-o", "json"))
    positions = [each["position"] for each in (item["blocked"], *item["also_blocked"])]
    assert positions == [str(each.position) for each in (MARKS, other, third)]
    assert "ValueError: no. 2 more messages do so." in desk.qdo("queues").out
    ended = desk.qdo("unblock", "q", "--skip", "--message", positions[1])
    assert ended.code == 0, ended.err
    assert "KeyError: 'y'" in ended.out
    assert desk.node().blocking == (MARKS, third)
    again = desk.qdo("unblock", "q", "--skip", "--message", positions[1])
    assert again.code == 5
    both = items(desk.qdo("unblock", "q", "--all", "--retry", "-o", "json"))
    assert [each["position"] for each in both] == [positions[0], positions[2]]
    assert desk.node().blocking == ()
    assert desk.qdo("unblock", "q", "--all", "--message", "7", "--retry").code == 2


def test_what_is_not_blocked_is_refused(desk: UnblockSetup) -> None:
    """With an exit code of its own; nothing is changed."""
    desk.put(FailureRecord(135471512647131000, 2, "KeyError: 'x'"))
    ended = desk.qdo("unblock", "q", "--skip")
    assert ended.code == 5
    assert desk.node().seek == 0
    assert desk.qdo("unblock", "nothing", "--skip").code == 6


def test_skip_typed_twice_skips_no_second_message(desk: UnblockSetup) -> None:
    """It names its message by the id of the sender; the message behind is refused."""
    with desk.app() as app:
        vase, lamp = (app.send("q", body) for body in ("vase", "lamp"))
    first, second = (replace(MARKS, position=uuid.UUID(each).time) for each in (vase, lamp))
    desk.put(first)
    unnamed = desk.qdo("unblock", "q", "--skip")
    assert (unnamed.code, vase in unnamed.err) == (2, True)
    assert desk.node().failure == first
    skip = ("unblock", "q", "--skip", "--message", vase)
    ended = desk.qdo(*skip)
    assert (ended.code, vase in ended.out) == (0, True)
    desk.put(second)
    again = desk.qdo(*skip)
    assert (again.code, desk.node().failure) == (5, second)


def test_a_message_that_blocks_meanwhile_is_not_skipped(
    desk: UnblockSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an id: it was retried when the command looked."""
    monkeypatch.setattr("qdo.cli.commands.unblock.failing", lambda *arguments: ())
    for name, value in desk.places.items():
        monkeypatch.setenv(name, value)
    assert run(qdo, "qdo", ["unblock", "q", "--skip"]) == 5
    assert desk.node().failure == MARKS


def test_a_delayed_message_is_named_by_its_own_id(desk: UnblockSetup) -> None:
    """Which is in its headers: its position came later."""
    with desk.app() as app:
        stop = app.broker.listen(lambda queues: None)
        sent = app.send("q", "late", delay_seconds=0.01)
        wait_until(lambda: app.broker.catalog.backlog("q", 0).count == 2, "it is due")
        stop()
        _, row = app.broker.reader("q", 0).fetch(2)
    desk.put(replace(MARKS, position=row[0]))
    (item,) = items(desk.qdo("unblock", "q", "--dead-letter", "--message", sent, "-o", "json"))
    assert item["id"] == sent


def test_retry_now_runs_a_failing_message_at_once(desk: UnblockSetup) -> None:
    """It is not blocked: its next attempt would be in an hour. --skip is still refused."""
    desk.put(FailureRecord(135471512647131000, 2, "KeyError: 'x'", retry_at=4e9, retry_delay=3600))
    assert desk.qdo("unblock", "q", "--skip", "--all").code == 5
    (item,) = items(desk.qdo("unblock", "q", "--retry", "-o", "json"))
    assert (item["attempts"], item["decision"]) == (2, "retry")
    assert (desk.node().failure, desk.reread()) == (None, ("q",))


@pytest.mark.parametrize("options", [(), ("--retry", "--skip")])
def test_exactly_one_decision_must_be_made(desk: UnblockSetup, options: tuple[str, ...]) -> None:
    """Omitting an option must never skip a message."""
    ended = desk.qdo("unblock", "q", *options)
    assert (ended.code, "--retry" in ended.err) == (2, True)
    assert desk.node().seek == 0


def test_a_seek_ends_a_block(desk: UnblockSetup) -> None:
    """Going elsewhere is a decision, too."""
    assert desk.qdo("seek", "q", "earliest", "--execute").code == 0
    assert (desk.node().failure, desk.node().last) == (None, 0)


def test_dead_letter_is_rejected_without_a_store(desk: UnblockSetup) -> None:
    """The owner could never execute it, and the queue would be stuck without a block."""
    stream = "kinesis://eu-west-1/clicks"
    ended = desk.qdo("unblock", "q", "--dead-letter", "--broker", stream)
    assert (ended.code, ended.out) == (5, "")
    assert "dead_letters=s3://BUCKET/PREFIX" in ended.err
    assert desk.node().failure == MARKS
    address = f"{stream}?dead_letters=s3://letters/x"
    assert desk.qdo("unblock", "q", "--dead-letter", "--broker", address).code == 0
