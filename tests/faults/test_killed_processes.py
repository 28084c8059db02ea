"""Real worker processes that kill themselves with SIGKILL at each of their steps.

The app of these tests puts the steps around the classes of the engine; in the process that
reaches the chosen one for the given time, and in no later one, the kernel ends it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import qdo
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from tests.support.processes import Proc

APP = "from tests.apps.mortal import app\n"

QUEUES = ("a", "b")
BODIES = ("one", "two", "bad", "three", "four")
POINTS = [
    f"{when}-{what}"
    for what in ("fetch", "job", "dead-letter", "checkpoint", "answer", "release")
    for when in ("before", "after")
] + ["within-job"]
ONCE = {f"{when}-{what}" for what in ("checkpoint", "answer") for when in ("before", "after")}
"""Reached once, where the progress of all queues is recorded together."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One record written by a job."""

    what: str
    queue: str
    body: str
    fence: int


class Mortals:
    """The app in a folder, and the files of its workers there."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.folder = folder
        self.places = {"QDO_BROKER": f"sqlite:{folder / 'messages.db'}"}
        self.places["QDO_COORDINATOR"] = coordinator
        (folder / "jobs.py").write_text(APP)
        (folder / "armed").touch()
        with qdo.App("mortal", broker=self.places["QDO_BROKER"]) as app:
            app.send_many([(queue, body) for body in BODIES for queue in QUEUES])

    def work(self, point: str, nth: int, mode: str) -> None:
        """Run workers until every queue is at its end."""
        env = {**self.places, "POINT": point, "NTH": str(nth), "MODE": mode}
        argv = ("-m", "qdo.cli.worker", "jobs:app", "--burst")
        with Proc.python(*argv, env=env, cwd=self.folder) as proc:
            code = proc.wait()
            assert code == 0, proc.output
            assert (self.folder / "killed").exists(), proc.output

    def lines(self) -> list[JobRecord]:
        found = (line.split() for line in (self.folder / "out").read_text().splitlines())
        return [JobRecord(what, queue, body, int(fence)) for what, queue, body, fence in found]

    def ended(self) -> dict[str, tuple[bool, list[bytes]]]:
        """Return for each queue whether `last` is at its end, and its dead letters."""
        broker = open_broker(self.places["QDO_BROKER"], "mortal")
        client = connect(self.places["QDO_COORDINATOR"], handler="threading")
        client.open(10.0)
        try:
            found = {}
            for queue in QUEUES:
                node = QueueNode.parse(client.get(Layout.of("mortal").queue(queue))[0])
                letters = [letter.body for letter in broker.dead_letters.records(queue)]
                found[queue] = (node.last == broker.catalog.backlog(queue, 0).head, letters)
            return found
        finally:
            client.stop()
            client.close()
            broker.close()


@pytest.fixture
def mortals(tmp_path: Path, embedded_url: str) -> Iterator[Mortals]:
    return Mortals(tmp_path, embedded_url)


@pytest.mark.parametrize("mode", ["interval", "message", "key", "batch"])
@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_a_step(mortals: Mortals, point: str, mode: str) -> None:
    """Nothing is lost, each queue is in order, and only unrecorded messages are repeated."""
    mortals.work(point, 1 if point in ONCE else 2, mode)
    assert mortals.ended() == dict.fromkeys(QUEUES, (True, [b'"bad"']))
    lines = mortals.lines()
    done = Counter((line.queue, line.body) for line in lines if line.what == "done")
    assert done.keys() == {(queue, body) for queue in QUEUES for body in BODIES if body != "bad"}
    assert max(done.values()) <= 2
    for queue in QUEUES:
        if mode == "message":
            assert sum(done[queue, body] > 1 for body in BODIES) <= 1
        starts = [line for line in lines if (line.what, line.queue) == ("start", queue)]
        assert list(dict.fromkeys(line.body for line in starts)) == list(BODIES)
        for fence in {line.fence for line in starts}:
            under = [BODIES.index(line.body) for line in starts if line.fence == fence]
            assert under == sorted(under)
            assert set(under) == set(range(under[0], under[-1] + 1))
