"""The duty of the leader that gives back the requests of workers that are gone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from qdo.brokers.requests import WAITING, NewRequest
from qdo.coordination import leader_queues
from qdo.coordination.znodes.layout import Layout
from qdo.settings.live import SettingsInForce
from qdo.settings.settings import Settings
from qdo.worker.pools import returner
from qdo.worker.pools.returner import COUNT_SECONDS, EVERY_SECONDS, LOOK_SECONDS, Returner
from tests.support.fakes.pools import UnsureRequests


class LaggingLeader:
    """A leader on a clock that stands still, its server, and requests of the workers a and b.

    :ivar workers: those that exist; `listed` are those that the leader knows.
    :ivar known: those that its server knows before a `sync`.
    :ivar then: called after each list of workers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.workers = {"a", "b"}
        self.changes = 2
        self.listed = self.known = frozenset(self.workers)
        self.failures: list[Exception] = []
        self.leader = self
        self.store = UnsureRequests()
        self.settings = SettingsInForce(Settings())
        app = SimpleNamespace(broker=SimpleNamespace(requests=self.store))
        self._duty = Returner(app, self.store, self.settings)  # type: ignore[arg-type]
        monkeypatch.setattr(returner, "clock", lambda: self.now)
        monkeypatch.setattr(leader_queues, "names_below", lambda client, path: client.names())
        for owner in "ab":
            self.take(owner)

    def is_leader(self) -> bool:
        return True

    def worker_names(self) -> frozenset[str]:
        return self.listed

    def with_fence(self, act: Any) -> Any:
        return act(self, Layout("/qdo/test"), None)

    def exists(self, path: str) -> Any:
        return SimpleNamespace(cversion=self.changes)

    def sync(self, path: str) -> None:
        if self.failures:
            raise self.failures.pop()
        self.known = frozenset(self.workers)

    def names(self) -> list[str]:
        return sorted(self.known)

    def take(self, owner: str, keep_seconds: float = 0.0) -> Any:
        id = f"of-{owner}"
        self.store.ask([NewRequest("p", id, (b"1", None), b"", keep_seconds=keep_seconds)])
        return self.store.take(owner, "p", 1, []).requests[0].take

    def look(self) -> tuple[float, dict[str, int]]:
        """Look once; return the pause, and the failed attempts of requests that wait."""
        pause = self._duty.step(self)  # type: ignore[arg-type]
        return pause, {each.id: each.failed for each in self.store.records(states=[WAITING])}


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> LaggingLeader:
    return LaggingLeader(monkeypatch)


def test_only_requests_of_workers_that_are_gone_wait_again(leader: LaggingLeader) -> None:
    """At once when the leader learns that a worker has left, and as one failed attempt."""
    assert leader.look() == (LOOK_SECONDS, {})
    leader.workers.discard("b")
    looks = leader.store.calls["owners"]
    assert leader.look() == (LOOK_SECONDS, {})
    assert leader.store.calls["owners"] == looks  # nothing is asked while nothing has changed
    leader.listed, leader.changes = frozenset("a"), 3
    assert leader.look() == (LOOK_SECONDS, {"of-b": 1})


def test_a_worker_that_the_leader_never_listed_is_found(leader: LaggingLeader) -> None:
    """It came, took a request and was killed between two reads of the names."""
    leader.look()
    leader.take("late")
    leader.changes += 2
    assert leader.look() == (LOOK_SECONDS, {})
    leader.now += COUNT_SECONDS
    assert leader.look() == (LOOK_SECONDS, {"of-late": 1})


def test_owners_that_the_leader_never_knew_are_found_later(leader: LaggingLeader) -> None:
    """Their take was stored after they were gone, or another worker led."""
    leader.look()
    leader.take("late")
    assert leader.look() == (LOOK_SECONDS, {})
    leader.now += EVERY_SECONDS
    assert leader.look() == (LOOK_SECONDS, {"of-late": 1})


@pytest.mark.parametrize("method", ["owners", "give_back", "sync", "expire"])
def test_a_look_that_fails_is_repeated(leader: LaggingLeader, method: str) -> None:
    leader.workers.discard("b")
    leader.listed = frozenset("a")
    leader.failures += [ConnectionLoss()] * (method == "sync")
    leader.store.lost[method] = 1
    assert leader.look()[0] == 1.0
    assert leader.look() == (LOOK_SECONDS, {"of-b": 1})


def test_requests_that_are_over_long_enough_are_deleted(leader: LaggingLeader) -> None:
    leader.store.end(leader.take("c"), "done")
    leader.store.end(leader.take("d", keep_seconds=60), "done")
    leader.look()
    assert [each.id for each in leader.store.records()] == ["of-a", "of-b", "of-d"]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, ["d", "e", "f"]),
        ({"dead_letter_limit": 2}, ["e", "f"]),
        ({"dead_letter_retention_seconds": 3600.0}, ["d", "e", "f"]),
        ({"dead_letter_retention_seconds": 1e-9}, []),
    ],
)
def test_failed_requests_stay_within_the_limits_of_dead_letters(
    leader: LaggingLeader, limits: dict[str, Any], left: list[str]
) -> None:
    """Those of each pool, the oldest first; no other request goes."""
    leader.settings.replace(replace(Settings(), **limits))
    for owner in "def":
        leader.store.end(leader.take(owner), "failed")
    leader.look()
    found = [each.id.removeprefix("of-") for each in leader.store.records()]
    assert found == ["a", "b", *left]


def test_deleting_ends_before_the_next_look(leader: LaggingLeader) -> None:
    """However much there is to delete: workers that are gone come first."""
    leader.store.expire = lambda failed=(): 1000  # type: ignore[method-assign]
    assert leader.look()[0] == LOOK_SECONDS
    leader.workers.discard("b")
    leader.now += COUNT_SECONDS
    leader.changes += 1
    assert leader.look()[1] == {"of-b": 1}
