"""Proof that the rules on operators can fail."""

from __future__ import annotations

from typing import Any

from tests.soak.checks import Judged, read_journal
from tests.soak.ledger import OperatorRequest
from tests.soak.operator_rules import CrewFacts, StoredMessage, check_crew

STORED = [StoredMessage("ops-0", 10 * number, number, "") for number in range(3)]


def run(number: int, at: float, pid: int = 10) -> list[str]:
    """Return the lines of one run."""
    return [f"S ops-0 {number} 1 1 {pid} {at}", f"E ops-0 {number} 1 1 {pid} {at + 0.1}"]


RUNS = [*run(0, 1.0), *run(1, 2.0), *run(2, 3.0)]


def judge(lines: list[str], *requests: OperatorRequest, **facts: Any) -> list[str]:
    """Return the violated rules of a journal about three messages."""
    crew = {"sent": {"ops-0": 3}, "stored": STORED, "requests": requests, "logged": {"id": 1}}
    died = facts.pop("died", ())
    text = "".join(f"{line}\n" for line in lines)
    found = check_crew(
        read_journal(text), CrewFacts(**{**crew, **facts}), Judged(sent={}, died=died)
    )
    return sorted({each.partition(":")[0] for each in found})


def request(what: str, asked: float = 0.5, answer: Any = None, **args: Any) -> OperatorRequest:
    """Return a request about the queue that was answered."""
    return OperatorRequest("id", what, "ops-0", args, asked, asked + 0.1, answer or {})


def test_a_journal_without_requests() -> None:
    """A message is missing, or before its turn, or again without a reason."""
    assert judge(RUNS) == []
    assert judge(RUNS[:4]) == ["lost"]
    assert judge(RUNS[:4], letters={("ops-0", 2)}) == []
    assert judge([*RUNS[2:4], *RUNS[:2], *RUNS[4:]]) == ["order"]
    assert judge([*RUNS, *run(2, 9.0)]) == ["repeated"]
    assert judge([*RUNS, *run(2, 9.0)], died=[(10, 3.2)]) == []
    assert judge([*RUNS, *run(2, 9.0)], died=[(11, 3.2)]) == ["repeated"]


def test_cancelled_messages_do_not_start() -> None:
    """Those that were not cancelled are not lost."""
    named = {"20": 2}
    assert judge(RUNS[:4], request("cancel", named=named, answer={"2": "cancelled"})) == []
    assert judge(RUNS[:4], request("cancel", named=named, answer={"2": "started"})) == ["lost"]
    assert judge(RUNS, request("cancel", named=named, answer={"2": "cancelled"})) == ["cancelled"]
    assert judge(RUNS, request("cancel", 3.5, named=named, answer={"2": "cancelled"})) == []


def test_a_seek_is_a_reason_once() -> None:
    """Without an entry in the action log, an unanswered one has not been made."""
    again = [*RUNS, *run(2, 9.0)]
    assert judge(again, request("seek", 8.0, last=10)) == []
    assert judge([*again, *run(2, 20.0)], request("seek", 8.0, last=10)) == ["repeated"]
    assert judge(again, request("seek", 8.0, last=20)) == ["repeated"]
    assert judge(RUNS[:4], request("seek", last=20)) == []
    killed = OperatorRequest("id", "seek", "ops-0", {"last": 20}, 0.5)
    assert judge(RUNS[:4], killed) == []
    assert judge(RUNS[:4], killed, logged={}) == ["lost"]


def test_what_was_asked_for_is_not_lost() -> None:
    """Purges, skips and discarded dead letters; a retried one runs again."""
    assert judge(RUNS[:4], request("purge", last=20, numbers=[])) == []
    assert judge(RUNS[:4], request("purge", last=10, numbers=[])) == ["lost"]
    assert judge(RUNS[:4], request("purge", last=10, numbers=[2])) == []
    skip = {"decision": "skip", "which": "first"}
    assert judge(RUNS[:4], request("decide", answer={"positions": [20]}, **skip)) == []
    assert judge(RUNS[:4], request("decide", answer={"positions": [10]}, **skip)) == ["lost"]
    assert judge(RUNS[:4], request("discard", numbers=[2])) == []
    assert judge([*RUNS, *run(2, 9.0)], request("retry", 8.0, numbers=[2])) == []


def test_paused_queues_stand_still() -> None:
    """From the answer to a pause to the request to resume, or to its end."""
    pause = request("pause", 1.5, answer={"in_force": 1.9}, hold="x", until=None)
    assert judge(RUNS, pause) == ["paused"]
    assert judge(RUNS[:2], pause, sent={}) == []
    resume = OperatorRequest("other", "resume", "ops-0", {"hold": "x"}, 1.95, 1.96, {})
    assert judge(RUNS, pause, resume) == []


def test_each_change_has_one_entry() -> None:
    seek = request("seek", 8.0, last=30)
    assert judge(RUNS, seek, logged={}) == ["audit"]
    assert judge(RUNS, seek, logged={"id": 2}) == ["audit"]
