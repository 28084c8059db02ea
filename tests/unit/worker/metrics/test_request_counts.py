"""The metric of requests: the leader counts those of the app, by the globs of its jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from qdo import App
from qdo.brokers.requests import PoolCounts
from qdo.worker.metrics import catalog
from qdo.worker.metrics.duty import MetricsDuty, pool_states
from qdo.worker.metrics.meters import MOST_GLOBS, OTHERS


def app_of(*globs: str) -> App:
    app = App("a")
    for glob in globs:
        app.job(glob, pool=True)(lambda request, context: None)
    return app


def test_pools_are_counted_by_the_globs_of_their_jobs() -> None:
    """A job whose pools are empty has zeros; pools without a job count together."""
    counts = {f"build-{zone}": PoolCounts(2, 1, 0, 1.0) for zone in ("eu", "us")}
    counts |= {"gone": PoolCounts(0, 0, 3, None)}
    app = app_of("build-*", "mail")
    app.job("gone")(lambda message, context: None)
    assert pool_states(counts, app) == {
        ("build-*", "waiting"): 4,
        ("build-*", "running"): 2,
        ("build-*", "paused"): 0,
        ("mail", "waiting"): 0,
        ("mail", "running"): 0,
        ("mail", "paused"): 0,
        (OTHERS, "waiting"): 0,
        (OTHERS, "running"): 0,
        (OTHERS, "paused"): 3,
    }


def test_the_page_stays_small() -> None:
    """Whatever the number of jobs."""
    names = [f"pool-{number}" for number in range(MOST_GLOBS + 2)]
    counts = {name: PoolCounts(1, 0, 0, None) for name in names}
    found = pool_states(counts, app_of(*names))
    assert len({glob for glob, _ in found}) == MOST_GLOBS + 1
    assert found[OTHERS, "waiting"] == 2


class Counting:
    """A broker whose requests are counted, and a worker that may lead.

    :ivar answers: what counting returns or raises, one after the other.
    """

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.leads = True
        self.requests = self.leader = self.member = self
        self.pages: list[Any] = []

    def counts(self) -> dict[str, PoolCounts]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return cast("dict[str, PoolCounts]", answer)

    def is_leader(self) -> bool:
        return self.leads


def test_only_the_leader_counts() -> None:
    """After an error and after its deposition it shows nothing; without errors it goes on."""
    fake: Any = Counting()
    parts: list[Any] = [SimpleNamespace() for _ in range(4)]
    duty = MetricsDuty(fake, parts[0], parts[1], fake, parts[2], parts[3], app_of("p"))
    one = {"p": PoolCounts(1, 0, 0, None)}
    fake.answers = [one, OSError("gone"), one]
    shown = []
    for leads in (True, True, False, True):
        fake.leads = leads
        duty.count_requests()
        shown.append(sum(count for _, (count,) in duty.request_rows()))
    assert shown == [1, 0, 0, 1]
    fake.leads = False
    assert duty.request_rows() == []
    assert catalog.REQUESTS in catalog.FROM_WORKERS
