"""Proof that the rules of a soak can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from qdo.brokers.requests import Take
from qdo.brokers.streams import first_shards, split
from qdo.message import Message
from tests.acceptance.ci_app import QUESTIONS, TICK_SECONDS
from tests.soak.checks import Judged, check_journal, check_streams, read_journal
from tests.soak.ci_rules import CiFacts, check_ci
from tests.soak.request_rules import RequestFacts, check_requests
from tests.soak.request_steps import RequestStep


def judge(*lines: str, **facts: object) -> list[str]:
    """Return the violated rules of a journal."""
    text = "".join(f"{line}\n" for line in lines)
    found = check_journal(read_journal(text), Judged(sent={"plain-0": 2, "block-0": 1}, **facts))
    return sorted({each.partition(":")[0] for each in found})


GOOD = (
    "S plain-0 0 1 1 10 1.0",
    "E plain-0 0 1 1 10 1.1",
    "S plain-0 1 1 1 10 1.2",
    "E plain-0 1 1 1 10 9.0",
    "S block-0 0 1 1 10 1.0",
    "E block-0 0 1 1 10 1.1",
)


def test_a_clean_journal_violates_nothing() -> None:
    assert judge(*GOOD) == []


def test_each_rule_can_be_violated() -> None:
    """A message lost, one too early, a stale start, two at once, a wrong dead letter."""
    assert judge(*GOOD[:2], *GOOD[4:]) == ["lost"]
    assert judge(*GOOD[2:4], *GOOD[:2], *GOOD[4:]) == ["order"]
    again = ("S plain-0 1 2 1 11 5.0", "E plain-0 1 2 1 11 5.1")
    assert judge(*GOOD[:3], *again, *GOOD[3:]) == ["overlap"]
    stale = ("S plain-0 1 1 2 10 9.5", "E plain-0 1 1 2 10 9.6")
    assert judge(*GOOD, *again, *stale) == ["fence"]
    assert judge(*GOOD, letters={("block-0", 0)}) == ["attempts"]
    five = [f"S block-0 0 {fence} 1 10 {fence}.0" for fence in range(1, 6)]
    endless = {"endless": {("block-0", 0)}, "letters": {("block-0", 0)}}
    assert judge(*GOOD[:4], *five, **endless) == ["attempts"]


def test_frozen_processes_are_excused() -> None:
    """They could not know; so are those whose parent could not keep their session."""
    again = ("S plain-0 1 2 1 11 5.0", "E plain-0 1 2 1 11 5.1")
    stale = ("S plain-0 1 1 2 10 9.5", "E plain-0 1 1 2 10 9.6")
    frozen = [(10, 4.0, 9.4)]
    assert judge(*GOOD[:3], *again, *GOOD[3:], *stale, stopped=frozen) == []
    assert judge(*GOOD[:3], *again, *GOOD[3:], unkept=frozen) == []
    assert judge(*GOOD[:3], *again, *GOOD[3:], stopped=[(12, 4.0, 9.4)]) == ["overlap"]


def test_shared_parts_have_rules() -> None:
    """Four runs at once of three, a lock's older fence, a start within a section."""
    four = [f"S limit-{number} 0 1 1 {number} 1.{number}" for number in range(4)]
    ends = [f"E limit-{number} 0 1 1 {number} 2.{number}" for number in range(4)]
    assert judge(*GOOD, *four, *ends) == ["limit"]
    assert judge(*GOOD, *four[:3], ends[0], four[3], *ends[1:]) == []
    assert judge(*GOOD, *four, *ends, stopped=[(2, 1.0, 2.0)]) == []
    locks = ("L lock-0 0 8 1 10 1.0", "L lock-1 0 7 1 11 1.1")
    assert judge(*GOOD, *locks) == ["lock"]
    assert judge(*GOOD, *locks, stopped=[(11, 0.0, 1.0)]) == []
    inside = ("S plain-11 0 1 1 10 3.0", "E plain-11 0 1 1 10 3.1")
    assert judge(*GOOD, *inside, sections=[(2.9, 3.2)]) == ["section"]
    assert judge(*GOOD, *inside, sections=[(3.1, 3.2)]) == []


def step(state: int, take: int = 0, outcome: str | None = None, at: float = 1.0) -> RequestStep:
    owner = f"worker-{take}" if take else ""
    return RequestStep(at, "r", "green", state, take, owner, 0.0, outcome, "then-0")


ASKED, TAKEN, DONE = step(0), step(1, 1, at=1.1), step(3, 1, "done", 1.3)
RAN = ("S r 0 1 1 10 1.15", "E r 0 1 1 10 1.25")
TOLD = "D then-0|r|done 0 1 1 10 1.4"


def judge_requests(
    steps: Sequence[RequestStep], *lines: str, told: Sequence[str] = ("done",), result: int = 1
) -> list[str]:
    """Return the violated rules of requests."""
    take = Take("r", "worker-1", steps[-1].take)
    record = Mock(take=take, id="r", outcome=steps[-1].outcome, result=(b'{"take": %d}' % result,))
    facts = RequestFacts(
        [("asked", ["r"]), ("wish", ["r"]), ("wish", ["unknown"])],
        steps,
        [record],
        read_journal("".join(f"{line}\n" for line in lines)),
        {"then-0": [("r", each) for each in told]},
        Judged({}),
        offset=0.0,
    )
    return sorted({each.partition(":")[0] for each in check_requests(facts)})


def test_each_rule_of_requests_can_be_violated() -> None:
    """A lost one, half a batch, two ends, other results, lost messages, starts without a take."""
    good = (ASKED, TAKEN, DONE)
    assert judge_requests(good, *RAN, TOLD) == []
    assert judge_requests((ASKED, TAKEN), *RAN, told=()) == ["ends"]
    assert judge_requests((*good, step(3, 2, "done")), *RAN, TOLD, told=("done",) * 2) == ["once"]
    assert judge_requests(good, *RAN, TOLD, result=2) == ["once"]
    assert judge_requests(good, TOLD) == ["once"]
    assert judge_requests(good, *RAN, TOLD, told=("done", "done")) == ["told"]
    assert judge_requests(good, *RAN) == ["told"]
    assert judge_requests((ASKED, step(1, 3), step(3, 3, "failed")), told=("failed",)) == [
        "takes",
        "told",
    ]
    never = (ASKED, step(3, 0, "cancelled"))
    told = TOLD.replace("done", "cancelled")
    assert judge_requests(never, told, told=("cancelled",)) == []
    assert judge_requests(never, RAN[0], told, told=("cancelled",)) == ["takes"]


def test_a_start_after_the_end_of_its_take_is_late() -> None:
    again = (step(0, 1, at=2.0), step(1, 2, at=2.1), step(3, 2, "done", 2.4))
    second = ("S r 0 2 2 11 2.2", "E r 0 2 2 11 2.3")
    steps = (ASKED, TAKEN, *again)
    assert judge_requests(steps, *RAN, *second, TOLD, result=2) == []
    assert judge_requests(steps, RAN[0], *second, RAN[1], TOLD, result=2) == ["overlap"]
    late = RAN[0].replace("1.15", "9.0")
    assert judge_requests(steps, *second, late, TOLD, result=2) == ["fence", "late"]


WHOLE = first_shards("user", 1)
SHARDS = [*WHOLE, *split(WHOLE, "user.-")]


def judge_streams(*lines: str, **facts: Any) -> list[str]:
    """Return the violated rules of streams."""
    journal = read_journal("".join(f"{line}\n" for line in lines))
    found = check_streams(journal, SHARDS, Judged(sent={}, **facts)).violations
    return sorted({each.partition(":")[0] for each in found})


SPLIT = (
    "S user.-/ada 0 1 1 10 1.0",
    "S user.-/bob 1 1 1 10 1.1",
    "S user.-80/ada 2 1 1 11 1.2",
)


def test_rules_of_streams_can_be_violated() -> None:
    """A smaller number, a repetition without a reason, one behind a child, and an older fence."""
    assert judge_streams(*SPLIT) == []
    assert judge_streams(SPLIT[2], *SPLIT[:2]) == ["heirs", "order"]
    again = "S user.-/bob 1 2 1 12 1.3"
    assert judge_streams(*SPLIT, again) == ["repeated"]
    assert judge_streams(*SPLIT[:2], "X user.-/bob 1 1 1 10 1.1", SPLIT[2], again) == []
    assert judge_streams(*SPLIT, again, died=[(10, 1.2)]) == []
    late = "S user.-/ada 0 1 1 10 1.4"
    assert judge_streams(*SPLIT, late, died=[(10, 1.3)]) == ["heirs"]
    assert judge_streams(*SPLIT, late, stopped=[(10, 1.1, 1.35)]) == []
    assert judge_streams(again, "S user.-/eve 2 1 1 10 1.4") == ["fence"]


def ci_facts(count: int = 2) -> CiFacts:
    """Return what a fleet leaves after some webhooks of one project, each with one build."""
    stored: dict[str, list[Message]] = {}
    steps: list[RequestStep] = []
    commits = [f"c{number}" for number in range(1, count + 1)]
    codes: dict[tuple[str, int], int] = {}

    def store(queue: str, place: int, **body: Any) -> str:
        stored.setdefault(queue, []).append(Message(queue, place, body, "p"))
        return stored[queue][-1].id

    def request(id: str, *states: int) -> None:
        for state in states:
            one = step(state, min(state, 1), "done" if state == 3 else None)
            steps.append(one._replace(id=id, pool=id.rpartition("/")[2]))

    for number, commit in enumerate(commits, 1):
        what, asked = {"pipeline": "gate", "commit": commit}, f"p/{number}/approval"
        store("github", number, repository={"full_name": "p"}, after=commit)
        build = store("project", number, do="build", **what) + "/build"
        store("project", count + number, do="end", number=number)
        store("reports", number, number=number, outcome="done", result={"exit": 0}, **what)
        store("ended", number, project="p", number=number)
        answers = [[f"{asked} 1 {each}"] * 2 for each in QUESTIONS]
        store("approved", number, request=asked, result={"take": 1, "answers": answers})
        store("tick", number, at=f"2026-01-01T00:00:{number * TICK_SECONDS:02}Z", missed=0)
        request(build, 0, 1, 3)
        request(asked, 0, 1, 2, 1, 2, 1, 3)
        codes[build, 1] = 0
    states = {"p": {"asked": count, "builds": []}}
    rows = [("p", number) for number in range(1, count + 1)]
    return CiFacts({"p": commits}, stored, states, rows, steps, codes, [], Judged({}), 0.0)


def answer_other_question(facts: Any) -> None:
    answers = facts.stored["approved"][0].body["result"]["answers"]
    answers[1][1] = answers[0][1]


def answer_older_take(facts: Any) -> None:
    last = facts.steps[-1]
    facts.steps[-1:] = [last._replace(state=0), last._replace(state=1, take=2, owner="worker-2")]
    facts.steps.append(last._replace(take=2, owner="worker-2"))


def double(queue: str) -> Callable[[Any], object]:
    return lambda facts: facts.stored[queue].append(facts.stored[queue][0])


DAMAGES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "nothing": (lambda facts: None, []),
    "an outbox message lost": (lambda facts: facts.stored["ended"].pop(), ["outbox"]),
    "an outbox message doubled": (double("ended"), ["outbox"]),
    "outbox messages in another order": (lambda facts: facts.stored["ended"].reverse(), ["outbox"]),
    "a row doubled": (lambda facts: facts.rows.append(("p", 1)), ["outbox"]),
    "a row lost": (lambda facts: facts.rows.pop(), ["answer", "outbox"]),
    "an approval lost": (lambda facts: facts.stored["approved"].pop(), ["answer"]),
    "an approval told twice": (double("approved"), ["answer"]),
    "an approval without an end": (lambda facts: facts.steps.pop(), ["ends"]),
    "the answer to the other question": (answer_other_question, ["answer"]),
    "the answer to an older take": (answer_older_take, ["answer"]),
    "a state doubled": (lambda facts: facts.states["p"].update(asked=3), ["webhook"]),
    "a state lost": (lambda facts: facts.states.clear(), ["webhook"]),
    "a webhook doubled": (double("github"), ["webhook"]),
    "a tick doubled": (double("tick"), ["timer"]),
    "reports in another order": (lambda facts: facts.stored["reports"].reverse(), ["order"]),
    "another exit code": (lambda facts: facts.codes.clear(), ["build"]),
}


@pytest.mark.parametrize(("damage", "rules"), DAMAGES.values(), ids=DAMAGES)
def test_damage_to_the_ci_is_a_violation(damage: Callable[[Any], object], rules: list[str]) -> None:
    facts = ci_facts()
    damage(facts)
    assert sorted({each.partition(":")[0] for each in check_ci(facts)}) == rules
