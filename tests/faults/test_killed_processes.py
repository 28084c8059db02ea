"""Real worker processes that kill themselves with SIGKILL at each of their steps.

The app of these tests puts the steps around the classes of the engine; in the process that
reaches the chosen one for the given time, and in no later one, the kernel ends it there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.app_runs import AppRuns
from tests.support.processes import whole_lines

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
OTHER_MODES = [("after-job", "message"), ("within-job", "key"), ("before-checkpoint", "batch")]
"""`test_fault_points` plays each mode at every step, in one process."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One record written by a job."""

    what: str
    queue: str
    body: str
    fence: int


class Mortals(AppRuns):
    """The app in a folder, and what its jobs wrote there."""

    def kill_at(self, point: str, nth: int, mode: str) -> None:
        """Run workers, of which one is killed, until every queue is at its end."""
        (self.folder / "armed").touch()
        self.app.send_many([(queue, body) for body in BODIES for queue in QUEUES])
        proc = self.start(APP, "--burst", POINT=point, NTH=str(nth), MODE=mode)
        assert proc.wait() == 0, proc.output
        assert (self.folder / "killed").exists(), proc.output

    def lines(self) -> list[JobRecord]:
        found = map(str.split, whole_lines(self.folder / "out"))
        return [JobRecord(what, queue, body, int(fence)) for what, queue, body, fence in found]

    def ended(self) -> dict[str, tuple[bool, list[bytes]]]:
        """Return for each queue whether `last` is at its end, and its dead letters."""
        found = {}
        for queue in QUEUES:
            letters = [letter.body for letter in self.broker.dead_letters.records(queue)]
            found[queue] = (self.node(queue).last == self.broker.catalog.head(queue), letters)
        return found


@pytest.fixture
def mortals(tmp_path: Path, embedded_url: str) -> Iterator[Mortals]:
    with contextlib.closing(Mortals("mortal", tmp_path, embedded_url)) as made:
        yield made


@pytest.mark.parametrize(
    ("point", "mode"), [*((each, "interval") for each in POINTS), *OTHER_MODES]
)
def test_a_process_killed_at_a_step(mortals: Mortals, point: str, mode: str) -> None:
    """Nothing is lost, each queue is in order, and only unrecorded messages are repeated."""
    mortals.kill_at(point, 1 if point in ONCE else 2, mode)
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
