"""`qdo retry-now`, `qdo skip`, `qdo dead-letters add`, and what `qdo queues` shows of failures."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.worker_node import WorkerNode
from tests.support.app_runs import OperatorDesk
from tests.support.processes import wait_until

MARKS = FailureRecord(135471512647131000, 3, "ValueError: no", blocked_since=1_700_000_000.0)


class DecisionSetup(OperatorDesk):
    """A coordinator with a worker and a queue, and the command line of an operator."""

    owner = "worker-1"

    def put(self, marks: FailureRecord | None, above: OutOfOrderProgress | None = None) -> None:
        node = QueueNode(last=7, owner=self.owner, failure=marks, out_of_order=above)
        self.client.set(self.layout.queue("q"), node.encode())

    def disown(self) -> None:
        """Leave the queue without an owner: no worker is asked which messages run."""
        self.owner = ""
        self.put(MARKS)

    def reread(self) -> tuple[str, ...]:
        return WorkerNode.parse(self.client.get(self.layout.worker("worker-1"))[0]).reread


@pytest.fixture
def desk(tmp_path: Path, embedded_url: str) -> Iterator[DecisionSetup]:
    with closing(DecisionSetup("desk", tmp_path, embedded_url)) as desk:
        for path in desk.layout.persistent:
            desk.client.ensure_path(path)
        node = WorkerNode(("q",)).encode()
        desk.client.create(desk.layout.worker("worker-1"), node, ephemeral=True)
        desk.known()
        desk.put(MARKS)
        desk.app.send("q", 1)
        yield desk


def test_queues_shows_what_blocks(desk: DecisionSetup) -> None:
    """With attempts, error and time, in the table and as JSON."""
    (item,) = desk.items("queues")
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


def test_queues_shows_what_fails(desk: DecisionSetup) -> None:
    """A message that is still retried does not block."""
    desk.put(FailureRecord(135471512647131000, 2, "KeyError: 'x'", retry_at=1.0))
    (item,) = desk.items("queues")
    assert (item["blocked"], item["failing"]["attempts"]) == (None, 2)


FAILING = FailureRecord(135471512647131060, 2, "KeyError: 'x'", retry_at=4e9, retry_delay=3600)
ID = str(MARKS.position)
COMMANDS = {
    "retry": ("retry-now", "q", ID),
    "skip": ("skip", "--yes", "q", ID),
    "dead-letter": ("dead-letters", "add", "q", ID),
}
EACH = pytest.mark.parametrize("decision", [*COMMANDS])


@EACH
@pytest.mark.parametrize("blocked", [True, False], ids=["blocking", "failing"])
def test_a_decision_is_written_and_told_to_the_owner(
    desk: DecisionSetup, decision: str, blocked: bool
) -> None:
    """As a counted operator's change that leaves `last` and owner alone."""
    marks = MARKS if blocked else replace(FAILING, position=MARKS.position)
    desk.put(marks)
    ended = desk.qdo(*COMMANDS[decision], "-o", "json")
    assert ended.code == 0, ended.err
    (item,) = ended.items()
    assert (item["queue"], item["position"], item["decision"]) == ("q", ID, decision)
    assert (item["attempts"], item["error"]) == (marks.attempts, marks.error)
    node = desk.node("q")
    assert (node.last, node.owner, node.seek, node.onward) == (7, "worker-1", 1, 1)
    assert desk.reread() == ("q",)
    if decision == "retry":
        assert node.failure is None
    else:
        assert node.failure == replace(marks, blocked_since=0.0, decision=decision)


@EACH
def test_a_decision_leaves_an_entry_in_the_action_log(desk: DecisionSetup, decision: str) -> None:
    """With the name of the command and the reason."""
    command = COMMANDS[decision]
    assert desk.qdo(*command, "--reason", "the address is wrong").code == 0
    [entry] = desk.items("audit")
    assert entry["command"] == {"dead-letter": "dead-letters add"}.get(decision, command[0])
    assert entry["reason"] == "the address is wrong"
    assert (entry["target"], entry["from"]["messages"]) == ("q", ID)


@EACH
def test_a_dry_run_of_a_decision_changes_nothing(desk: DecisionSetup, decision: str) -> None:
    """It shows what would be changed, and fails where the command would fail."""
    desk.disown()
    before = desk.node("q")
    ended = desk.qdo(*COMMANDS[decision], "--dry-run", "-o", "json")
    assert (ended.code, [each["position"] for each in ended.items()]) == (0, [ID])
    assert (desk.node("q"), desk.reread()) == (before, ())
    assert desk.items("audit") == []
    assert desk.qdo(*COMMANDS[decision][:-1], "99", "--dry-run").code == 5


@EACH
def test_a_decision_made_twice_changes_nothing_else(desk: DecisionSetup, decision: str) -> None:
    """The second one is refused, while the owner executes the first and after that."""
    desk.disown()
    behind = replace(MARKS, position=MARKS.position + 50)
    desk.put(MARKS, OutOfOrderProgress((), (behind,)))
    assert desk.qdo(*COMMANDS[decision]).code == 0
    node = desk.node("q")
    again = desk.qdo(*COMMANDS[decision])
    assert (again.code, ID in again.err) == (5, True)
    assert desk.node("q") == node
    desk.put(behind)
    after = desk.qdo(*COMMANDS[decision])
    assert (after.code, ID in after.err) == (5, True)
    assert desk.node("q").failure == behind


@pytest.mark.parametrize("decision", ["skip", "dead-letter"])
def test_every_view_tells_a_decision_that_waits_for_the_owner(
    desk: DecisionSetup, decision: str
) -> None:
    """The message never runs again, so no view says so, and none suggests to decide again."""
    position = uuid.UUID(desk.app.send("q", "vase")).time
    desk.put(replace(FAILING, position=position))
    assert desk.qdo(*COMMANDS[decision][:-1], str(position)).code == 0
    (item,) = desk.items("queues")
    assert "An operator decided to " in item["reason"]
    assert f"message {position}" in item["reason"]
    assert "its owner worker-1 has not carried it out yet" in item["reason"]
    assert item["remedy"] == "qdo workers worker-1"
    assert desk.qdo("workers", "worker-1").code == 0
    page = desk.qdo("queues", "q", "--no-ask").out
    assert f"{decision}; the owner has not carried it out yet" in page
    assert "next attempt" not in page
    for option in ("--kind=failing", f"--id={position}"):
        (peeked,) = desk.items("peek", "q", option)
        assert (peeked["decision"], peeked["next_attempt"]) == (decision, None)
    assert "DECISION" in desk.qdo("peek", "q").out
    check = desk.qdo("check", "--min-workers", "0")
    assert (check.code, " failing: q " in check.out) == (1, True)
    again = desk.qdo("retry-now", "q")
    assert (again.code, str(position) in again.err, decision in again.err) == (5, True, True)


@pytest.mark.parametrize("command", [("retry-now", "q"), ("dead-letters", "add", "q")])
def test_all_messages_need_a_confirmation(desk: DecisionSetup, command: tuple[str, ...]) -> None:
    """Unless there is only one; named messages need none."""
    third = replace(MARKS, position=MARKS.position + 90)
    desk.put(MARKS, OutOfOrderProgress((), (FAILING, third)))
    before = desk.node("q")
    refused = desk.qdo(*command, "--all")
    assert (refused.code, "3 messages" in refused.err) == (5, True)
    assert desk.node("q") == before
    assert len(desk.items(*command, "--all", "--dry-run")) == 3
    assert desk.qdo(*command, "--all", ID).code == 2
    ended = desk.items(*command, "--all", "--yes")
    positions = [each["position"] for each in ended]
    assert positions == [ID, str(third.position), str(FAILING.position)]
    assert (desk.node("q").blocking, desk.node("q").retrying) == ((), ())
    desk.put(MARKS)
    assert desk.qdo(*command, "--all").code == 0


def test_several_messages_are_decided_about_at_once(desk: DecisionSetup) -> None:
    """All that are named, or none of them."""
    desk.disown()
    other = replace(MARKS, position=MARKS.position + 60, error="KeyError: 'y'")
    third = replace(MARKS, position=MARKS.position + 90)
    desk.put(MARKS, OutOfOrderProgress((), (other, third)))
    (item,) = desk.items("queues")
    positions = [each["position"] for each in (item["blocked"], *item["also_blocked"])]
    assert positions == [str(each.position) for each in (MARKS, other, third)]
    assert "ValueError: no. 2 more messages do so." in desk.qdo("queues").out
    assert desk.qdo("skip", "--yes", "q", *positions[:2], "99").code == 5
    assert desk.node("q").blocking == (MARKS, other, third)
    ended = desk.qdo("skip", "--yes", "q", *positions[:2], positions[0])
    assert (ended.code, "KeyError: 'y'" in ended.out) == (0, True)
    assert desk.node("q").blocking == (third,)
    assert desk.qdo("skip", "--yes", "q", *positions[1:]).code == 5
    assert desk.node("q").blocking == (third,)


def test_retry_now_without_an_id_takes_the_first(desk: DecisionSetup) -> None:
    """One that blocks comes before one that waits."""
    desk.put(FAILING, OutOfOrderProgress((), (MARKS,)))
    for position in (MARKS.position, FAILING.position):
        (item,) = desk.items("retry-now", "q")
        assert item["position"] == str(position)
    assert desk.qdo("retry-now", "q").code == 5


@pytest.mark.parametrize("command", [("skip", "--yes", "q"), ("dead-letters", "add", "q")])
def test_what_ends_a_message_must_name_it(desk: DecisionSetup, command: tuple[str, ...]) -> None:
    """Typed twice, it would end the next one, too."""
    assert desk.qdo(*command).code == 2
    assert desk.node("q").failure == MARKS


def test_what_does_not_fail_is_refused(desk: DecisionSetup) -> None:
    """With an exit code of its own; nothing is changed."""
    desk.disown()
    desk.put(None)
    for words in (*COMMANDS.values(), ("retry-now", "q"), ("retry-now", "q", "--all")):
        assert desk.qdo(*words).code == 5
    assert desk.node("q").seek == 0
    assert desk.qdo("skip", "--yes", "nothing", ID).code == 6
    assert desk.qdo("skip", "--yes", "../q", ID).code == 2


def test_skip_typed_twice_skips_no_second_message(desk: DecisionSetup) -> None:
    """It names its message by the id of the sender; the message behind is refused."""
    desk.disown()
    vase, lamp = (desk.app.send("q", body) for body in ("vase", "lamp"))
    first, second = (replace(MARKS, position=uuid.UUID(each).time) for each in (vase, lamp))
    desk.put(first)
    ended = desk.qdo("skip", "--yes", "q", vase.upper())
    assert (ended.code, vase in ended.out) == (0, True)
    desk.put(second)
    again = desk.qdo("skip", "--yes", "q", vase)
    assert (again.code, vase in again.err, desk.node("q").failure) == (5, True, second)


def test_a_delayed_message_is_named_by_its_own_id(desk: DecisionSetup) -> None:
    """Which is in its headers: its position came later."""
    stop = desk.broker.listen(lambda queues: None)
    sent = desk.app.send("q", "late", delay_seconds=0.01)
    wait_until(lambda: desk.broker.catalog.backlog("q", 0).count == 2, "it is due")
    stop()
    _, row = desk.broker.reader("q", 0).fetch(2)
    desk.put(replace(MARKS, position=row[0]))
    (item,) = desk.items("dead-letters", "add", "q", sent)
    assert item["id"] == sent


def test_a_seek_ends_a_block(desk: DecisionSetup) -> None:
    """Going elsewhere is a decision, too."""
    assert desk.qdo("seek", "q", "earliest", "--yes").code == 0
    assert (desk.node("q").failure, desk.node("q").last) == (None, 0)


def test_dead_letter_is_rejected_without_a_store(desk: DecisionSetup) -> None:
    """The owner could never execute it, and the queue would be stuck without a block."""
    stream = "kinesis://eu-west-1/clicks"
    add = ("dead-letters", "add", "q", ID)
    ended = desk.qdo(*add, "--broker", stream)
    assert (ended.code, ended.out) == (5, "")
    assert "dead_letters=s3://BUCKET/PREFIX" in ended.err
    assert desk.node("q").failure == MARKS
    address = f"{stream}?dead_letters=s3://letters/x"
    assert desk.qdo(*add, "--broker", address).code == 0


def test_remedies_work_for_a_name_that_looks_like_an_option(desk: DecisionSetup) -> None:
    """Pasted into a shell, with more options before them."""
    desk.app.send("--all", "vase")
    node = QueueNode(7, "worker-1", failure=FAILING)
    desk.client.create(desk.layout.queue("--all"), node.encode())
    (item,) = [each for each in desk.items("queues") if each["queue"] != "q"]
    words = shlex.split(item["remedy"])
    assert words == ["qdo", "retry-now", "--", "--all"]
    ended = desk.qdo(*words[1:])
    assert ended.code == 0, ended.err
