"""Changes by operators through the dashboard, and that only operators make them."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdo import App
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.dashboard import actions, close_app, create_app, reading
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.fleet.pauses import new_pause, pause_queues, read_pauses
from qdo.ops import dead_letters as ops
from qdo.ops.decisions import COMMANDS, OperatorDecision
from tests.support.dashboard.shop import LAYOUT, POSITION, VIEWER, FilledShop, Visitor
from tests.support.processes import wait_until


def letter_name(position: int) -> str:
    return json.dumps(["message", "dead", str(position)])


LETTER = letter_name(POSITION + 1)


def entries(shop: FilledShop) -> list[AuditEntry]:
    """Return the action log, newest first."""
    return read_entries(shop.client, LAYOUT, limit=10)


def read(visitor: Visitor) -> None:
    """Wait until the dashboard knows the app."""
    wait_until(lambda: visitor.reader.look(1.0) is not None, "the app is read")


def test_a_pause_is_confirmed_with_its_number(shop: FilledShop) -> None:
    """The same pause as that of the command, with reason and operator."""
    operator = shop.operator()
    read(operator)
    asked = operator.post("/actions/pause", glob="ord*", lasting="1h")
    assert "Pause 1 queue: ord*?" in asked.text
    assert read_pauses(shop.client, LAYOUT).node.pauses == ()
    answer = operator.act("/actions/pause", "they move", 1, glob="ord*", lasting="1h")
    assert answer.status_code == 302
    [pause] = read_pauses(shop.client, LAYOUT).node.pauses
    assert (pause.queues, pause.why) == (("ord*",), "they move")
    assert pause.until is not None
    assert pause.who.startswith("Grace (dashboard, ")
    [entry] = entries(shop)
    assert (entry.command, entry.target, entry.reason) == ("pause", "ord*", "they move")
    assert entry.by == pause.who
    assert "Done: Pause 1 queue" in operator.page("/holds")


@pytest.mark.parametrize("glob", ["*", "**", "?*", "*?", "[!0]*"])
def test_a_pause_of_all_queues_is_refused(local_shop: FilledShop, glob: str) -> None:
    """However the glob is written. One of them less is allowed."""
    operator = local_shop.operator()
    read(operator)
    for count in (0, 4):
        answer = operator.act("/actions/pause", "why", count, glob=glob, lasting="")
        assert answer.status_code == 409
        assert "use qdo pause" in answer.text
    assert read_pauses(local_shop.client, LAYOUT).node.pauses == ()
    asked = operator.post("/actions/pause", glob="[!f]*", lasting="")
    assert "Pause 3 queues" in asked.text


def test_a_pause_waits_for_the_first_reading(local_shop: FilledShop) -> None:
    """Before, it would be of 0 queues."""
    operator = local_shop.operator()
    operator.reader.close()
    answer = operator.act("/actions/pause", "why", 0, glob="ord*", lasting="")
    assert answer.status_code == 409
    assert read_pauses(local_shop.client, LAYOUT).node.pauses == ()


def test_actions_without_a_coordinator_are_refused(local_shop: FilledShop, tmp_path: Path) -> None:
    """No worker has created its file yet; this is told, and is no error of the dashboard."""
    places = {**local_shop.places, "coordinator": f"sqlite:{tmp_path / 'none.db'}"}
    local_shop.app.close()
    local_shop.app = App("shop", **places)
    operator = local_shop.operator()
    read(operator)
    for path, fields in (
        ("/actions/pause", {"glob": "ord*", "lasting": ""}),
        ("/actions/resume", {"id": "x"}),
        ("/actions/decide", {"queue": "fine", "position": "1", "decision": "skip"}),
        ("/ask/runs", {"queue": "fine"}),
    ):
        answer = operator.act(path, "why", 1, **fields)
        assert answer.status_code == 409
        assert "does not exist" in answer.text


def test_an_action_does_not_wait_for_reads(local_shop: FilledShop) -> None:
    """Neither for those of other visitors nor for those of its own pages."""
    operator = local_shop.operator()
    read(operator)
    board, ends = operator.flask.extensions["qdo"], threading.Event()
    board.direct._thread.submit(lambda connections: ends.wait(20))
    assert operator.act("/actions/pause", "why", 1, glob="ord*", lasting="").status_code == 302
    (letter,) = local_shop.app.broker.dead_letters.find("dead")[:1]
    named = letter_name(letter.position)
    answer = operator.act("/actions/letters", "why", 1, what="discard", letter=named)
    assert answer.status_code == 302
    assert [each.command for each in entries(local_shop)] == ["dead-letters discard", "pause"]
    ends.set()


def test_an_action_that_was_given_up_never_happens(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was reported as failed has failed."""
    monkeypatch.setattr(reading, "ACTION_SECONDS", 0.05)
    operator = local_shop.operator()
    read(operator)
    acting, ends = operator.flask.extensions["qdo"].acting, threading.Event()
    before = acting._thread.submit(lambda connections: ends.wait(20))
    answer = operator.act("/actions/pause", "why", 1, glob="ord*", lasting="")
    assert answer.status_code == 503
    assert "did not begin" in answer.text
    ends.set()
    before.result(20)
    acting._thread.submit(lambda connections: None).result(20)
    assert read_pauses(local_shop.client, LAYOUT).node.pauses == ()


def test_an_action_that_has_begun_may_still_happen(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says so, and where to look."""
    ends, real = threading.Event(), actions.pause_queues

    def slow(*arguments: Any) -> Any:
        ends.wait(20)
        return real(*arguments)

    monkeypatch.setattr(reading, "ACTION_SECONDS", 0.05)
    monkeypatch.setattr(actions, "pause_queues", slow)
    operator = local_shop.operator()
    read(operator)
    answer = operator.act("/actions/pause", "why", 1, glob="ord*", lasting="")
    assert answer.status_code == 503
    assert "action log" in answer.text
    ends.set()
    wait_until(lambda: read_pauses(local_shop.client, LAYOUT).node.pauses != (), "it happens")


def test_a_number_that_changed_is_asked_again(local_shop: FilledShop) -> None:
    """The operator confirmed one queue, and now there are two."""
    operator = local_shop.operator()
    read(operator)
    local_shop.app.send("orders-2", 1)
    wait_until(lambda: "orders-2" in operator.page("/queues"), "the new queue is read")
    answer = operator.act("/actions/pause", "why", 1, glob="ord*", lasting="")
    assert "Pause 2 queues" in answer.text
    assert read_pauses(local_shop.client, LAYOUT).node.pauses == ()


def test_a_change_needs_a_reason(local_shop: FilledShop) -> None:
    """Spaces are not a reason."""
    operator = local_shop.operator()
    read(operator)
    for reason in ("", "   "):
        answer = operator.act("/actions/pause", reason, 1, glob="orders-1", lasting="")
        assert "Give a reason" in answer.text
    assert (
        operator.act("/actions/pause", "x" * 600, 1, glob="orders-1", lasting="").status_code == 409
    )
    assert entries(local_shop) == []


def test_a_pause_is_ended_by_its_id(shop: FilledShop) -> None:
    """Twice is once."""
    pause = new_pause(["x*"], "why")
    pause_queues(shop.client, LAYOUT, pause)
    operator = shop.operator()
    assert operator.act("/actions/resume", "over", 1, id=pause.id).status_code == 302
    assert read_pauses(shop.client, LAYOUT).node.pauses == ()
    assert entries(shop)[0].command == "resume"
    assert operator.act("/actions/resume", "over", 1, id=pause.id).status_code == 409


@pytest.mark.parametrize("decision", ["retry", "skip", "dead-letter"])
def test_a_decision_names_its_message(shop: FilledShop, decision: OperatorDecision) -> None:
    """The node gets what the command writes; another message is left alone."""
    operator = shop.operator()
    other = {"queue": "blocked", "position": str(POSITION + 1), "decision": decision}
    assert operator.act("/actions/decide", "why", 1, **other).status_code == 409
    fields = {**other, "position": str(POSITION)}
    assert operator.act("/actions/decide", "why", 1, **fields).status_code == 302
    node = QueueNode.parse(shop.client.get(LAYOUT.queue("blocked"))[0])
    if decision == "retry":
        assert node.failure is None or node.failure.attempts == 0
    else:
        assert node.failure is not None
        assert node.failure.decision == decision
    [entry] = entries(shop)
    assert (entry.command, entry.target) == (COMMANDS[decision], "blocked")
    assert entry.by.startswith("Grace")


@pytest.mark.parametrize("decision", ["skip", "dead-letter"])
def test_a_failing_message_can_be_ended(shop: FilledShop, decision: str) -> None:
    """Each of them, also if another one blocks the queue."""
    first, second, third = (
        FailureRecord(POSITION + number, 2, "no", retry_at=4e9) for number in range(3)
    )
    blocking = replace(third, retry_at=0.0, blocked_since=1.0)
    node = QueueNode(failure=blocking, out_of_order=OutOfOrderProgress((), (first, second)))
    shop.client.set(LAYOUT.queue("blocked"), node.encode())
    operator = shop.operator()
    wait_until(lambda: operator.page("/queue?name=blocked").count("Skip it") == 3, "the messages")
    fields = {"queue": "blocked", "position": str(second.position), "decision": decision}
    assert operator.act("/actions/decide", "why", 1, **fields).status_code == 302
    after = QueueNode.parse(shop.client.get(LAYOUT.queue("blocked"))[0])
    assert set(after.failures) == {blocking, first, replace(second, decision=decision)}
    assert operator.act("/actions/decide", "again", 1, **fields).status_code == 409


@pytest.mark.parametrize(("what", "word"), [("retry", "retried"), ("discard", "discarded")])
def test_selected_dead_letters_are_retried_or_discarded(
    shop: FilledShop, what: str, word: str
) -> None:
    """Those that were selected, and no others; once."""
    operator = shop.operator()
    chosen = [LETTER, letter_name(POSITION + 2)]
    asked = operator.post("/actions/letters", what=what, letter=chosen)
    assert f"{what.capitalize()} 2 dead letters?" in asked.text
    assert shop.app.broker.dead_letters.counts()["dead"] == 3
    answer = operator.act("/actions/letters", "data is fixed", 2, what=what, letter=chosen)
    assert answer.status_code == 302
    assert shop.app.broker.dead_letters.counts()["dead"] == 1
    [entry] = entries(shop)
    assert (entry.command, entry.target, dict(entry.after or {})) == (
        f"dead-letters {what}",
        "dead",
        {word: 2},
    )
    again = operator.act("/actions/letters", "again", 2, what=what, letter=chosen)
    assert again.status_code == 409


@pytest.mark.parametrize(
    ("faster", "told"),
    [
        (1, "Discarded 2 dead letters; 1 was gone: another operator was faster"),
        (3, "Discarded 0 dead letters; 3 were gone: another operator was faster"),
    ],
)
def test_what_another_operator_did_is_not_told_as_done(
    local_shop: FilledShop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    faster: int,
    told: str,
) -> None:
    """Page, log and action log have what happened, not what was asked for."""
    operator = local_shop.operator()
    broker = local_shop.app.broker
    seen = ops.find(broker, ops.Filter("dead"), time.time())
    monkeypatch.setattr(ops, "find", lambda *wanted: seen)  # and then they go
    broker.dead_letters.discard([("dead", POSITION + number) for number in range(faster)])
    named = [each.name for each in seen]
    with caplog.at_level("INFO", "qdo.dashboard"):
        answer = operator.act("/actions/letters", "why", 3, what="discard", letter=named)
    assert answer.status_code == 302
    assert f"{told}." in operator.page("/holds")
    logged = [each for each in caplog.records if each.name == "qdo.dashboard.actions"]
    assert [each.getMessage() for each in logged] == [f"dashboard: Grace: {told}"]
    assert [dict(each.after or {}) for each in entries(local_shop)] == (
        [] if faster == 3 else [{"discarded": 2}]
    )


def test_operators_at_the_same_time_share_what_they_did(local_shop: FilledShop) -> None:
    """Each dead letter is told once, by the one who has retried or discarded it."""
    operators = [local_shop.operator() for _ in range(3)]
    named = [letter_name(POSITION + number) for number in range(3)]

    def act(operator: Visitor, what: str) -> int:
        answer = operator.act("/actions/letters", "why", 3, what=what, letter=named)
        if answer.status_code != 302:
            return 0  # it has seen that they are gone
        text = operator.page("/holds")
        found = re.search(r"(?:Retried|Discarded) (\d) dead letters?", text)
        assert found is not None, text
        return int(found[1])

    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(act, operators, ("retry", "discard", "retry")))
    assert sum(done) == 3
    assert local_shop.app.broker.dead_letters.counts().get("dead", 0) == 0


def test_nobody_else_changes_anything(local_shop: FilledShop) -> None:
    """Viewers, operators of a dashboard without actions, and forms that make no sense."""
    fields: dict[str, str] = {"queue": "blocked", "position": str(POSITION), "decision": "retry"}
    tokens = {"viewer_token": VIEWER, "operator_token": "o" * 20}
    viewer = local_shop.visitor(**tokens, allow_actions=True)
    viewer.log_in(VIEWER)
    reader = local_shop.operator(allow_actions=False)
    for visitor in (viewer, reader):
        assert visitor.act("/actions/decide", "why", 1, **fields).status_code == 403
        assert "/actions/" not in visitor.page("/queue?name=blocked")
    operator = local_shop.operator()
    for path, wrong in (
        ("pause", {"glob": "*", "lasting": ""}),
        ("pause", {"glob": "x", "lasting": "forever"}),
        ("pause", {"glob": "a/b", "lasting": ""}),
        ("decide", {**fields, "decision": "delete"}),
        ("decide", {**fields, "position": "first"}),
        ("decide", {**fields, "position": "7" * 100}),
        ("decide", {**fields, "position": "7" * 5000}),
        ("decide", {**fields, "queue": "../x"}),
        ("letters", {"what": "discard", "letter": ["x", "1 none", ""]}),
        ("letters", {"what": "export", "letter": [LETTER]}),
    ):
        assert operator.act(f"/actions/{path}", "why", 1, **wrong).status_code == 409, (path, wrong)
    assert entries(local_shop) == []


def test_an_operator_cancels_a_request(shop: FilledShop) -> None:
    """The change and the entry are those of the command; one that is over is refused."""
    shop.app.request("invoice", {"secret": 1}, id="17/invoice", then="orders")
    operator = shop.operator()
    assert "17/invoice" in operator.page("/requests?pool=invoice")
    assert [each["waiting"] for each in operator.items("/api/pools")] == [1]
    [item] = operator.items("/api/requests?pool=invoice")
    assert (item["id"], item["state"]) == ("17/invoice", "waiting")
    assert operator.items("/api/requests?pool=other") == []
    asked = operator.post("/actions/cancel-request", id="17/invoice")
    assert "Cancel request 17/invoice?" in asked.text
    assert shop.app.handle("17/invoice").state == "waiting"
    answer = operator.act("/actions/cancel-request", "ordered twice", 1, id="17/invoice")
    assert answer.status_code == 302
    text = operator.page("/requests")
    assert "17/invoice was waiting, and is cancelled" in text
    assert "No request waits or runs" in text
    for id in ("17/invoice", "none"):
        assert operator.act("/actions/cancel-request", "why", 1, id=id).status_code == 409
    record = shop.app.broker.requests.find("17/invoice")
    assert record is not None
    assert (record.outcome, record.error) == ("cancelled", "ordered twice")
    assert shop.app.broker.catalog.backlog("orders", 0).count == 1
    [entry] = entries(shop)
    assert (entry.command, entry.target) == ("requests cancel", "17/invoice")
    assert entry.before == {"state": "waiting"}
    assert entry.after == {"pool": "invoice", "state": "cancelled"}
    assert entry.by.startswith("Grace (dashboard, ")
    viewer = shop.visitor(viewer_token=VIEWER)
    viewer.log_in(VIEWER)
    assert viewer.act("/actions/cancel-request", "why", 1, id="none").status_code == 403


@pytest.mark.parametrize("broker", ["sqs://eu-west-1/x-", "kinesis://eu-west-1/x"])
def test_apps_without_requests_have_no_page_of_them(local_shop: FilledShop, broker: str) -> None:
    """No link leads to it."""
    for url, expected in ((local_shop.places["broker"], True), (broker, False)):
        settings = replace(local_shop.app.settings, broker=url)
        made = create_app(settings, anonymous=True)
        answer = made.test_client().get("/audit", base_url="http://localhost")
        assert ('href="/requests"' in answer.text) is expected
        close_app(made)
