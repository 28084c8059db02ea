"""Decisions about failing messages, with two operators, and owners that are killed with SIGKILL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import qdo
from tests.support.app_runs import OperatorDesk, jobs
from tests.support.processes import wait_until

HOUR = qdo.Policy(attempts=9, backoff_seconds=3600, backoff_max_seconds=3600)
COMMANDS = {
    "retry": ("retry-now", "q"),
    "skip": ("skip", "--yes", "q"),
    "dead-letter": ("dead-letters", "add", "q"),
}
MORTAL = """
from qdo.brokers.embedded.dead_letters import EmbeddedDeadLetters
from qdo.coordination.protocol.checkpoints import Checkpoints
from qdo.worker.engine.outcomes import Outcomes
from tests.apps import deaths
from tests.apps.deaths import around

deaths.point = {point!r}
around(Outcomes, "apply", "outcome")
around(EmbeddedDeadLetters, "store", "store")
around(Checkpoints, "_send", "checkpoint")
around(Checkpoints, "_recorded", "record")
"""


@pytest.fixture(params=["embedded_url", "zookeeper_url", "database_url"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OperatorDesk]:
    desk = OperatorDesk("desk", tmp_path, request.getfixturevalue(request.param))
    desk.known()
    yield desk
    desk.close()


def failing(desk: OperatorDesk, *bodies: int) -> list[str]:
    """Send messages whose job fails; return their ids once they wait for an hour."""
    for body in bodies:
        (desk.folder / f"fail-{body}").touch()
    ids = desk.send(*bodies)
    wait_until(lambda: len(desk.node("q").failures) == len(bodies), "the failures")
    return ids


def letters(desk: OperatorDesk) -> list[bytes]:
    return sorted(each.body for each in desk.broker.dead_letters.records("q"))


def test_of_two_operators_one_decides(desk: OperatorDesk) -> None:
    """Both commands run at once, about several messages; each message ends in one way, once."""
    desk.work(order="key", policy=HOUR)
    ids = failing(desk, 1, 2, 3, 4)
    rivals = [[desk.begin(*COMMANDS[each], id) for each in ("skip", "dead-letter")] for id in ids]
    codes = [[each.wait(120.0) for each in pair] for pair in rivals]
    assert [sorted(pair) for pair in codes] == [[0, 5]] * 4, codes
    desk.send(5)
    assert desk.wait_done().failures == ()
    stored = [body for body, pair in zip((b"1", b"2", b"3", b"4"), codes, strict=True) if pair[0]]
    assert letters(desk) == stored
    assert sorted(desk.runs("q")) == [(each, 1) for each in "12345"]
    assert len(desk.audit("skip")) + len(desk.audit("dead-letters add")) == 4


POINTS = [
    f"{when}-{what}" for what in ("outcome", "checkpoint", "record") for when in ("before", "after")
]


@pytest.mark.parametrize("order", ["queue", "key"])
@pytest.mark.parametrize(
    ("decision", "point"),
    [
        *((decision, point) for decision in ("skip", "dead-letter") for point in POINTS),
        ("dead-letter", "before-store"),
        ("dead-letter", "after-store"),
        ("retry", "before-checkpoint"),
        ("retry", "after-record"),
    ],
)
def test_an_owner_killed_while_it_carries_a_decision_out(
    desk: OperatorDesk, decision: str, point: str, order: str
) -> None:
    """The next one does: nothing is lost, nothing else skipped, no other message repeated."""
    desk.start(MORTAL.format(point=point) + jobs(policy=HOUR, order=order))
    desk.send(0)
    desk.wait_done()
    (id,) = failing(desk, 1)
    wait_until(lambda: desk.node("q").failures != (), "the record")
    (desk.folder / "armed").touch()
    (desk.folder / "fail-1").unlink()
    assert desk.qdo(*COMMANDS[decision], id).code == 0
    wait_until((desk.folder / "killed").exists, "the kill")
    desk.send(2)
    node = desk.wait_done()
    assert node.failures == ()
    runs = [run for run in desk.runs("q") if run[0] != "1"]
    assert runs == [("0", 1), ("2", 1)]
    own = len(desk.runs("q")) - 2
    assert own in ((2, 3) if decision == "retry" else (1,))
    assert letters(desk) == ([b"1"] if decision == "dead-letter" else [])
    assert desk.qdo(*COMMANDS[decision], id).code == 5
