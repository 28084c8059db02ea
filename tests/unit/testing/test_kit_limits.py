"""Limits and pauses of a testing kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import qdo
from qdo import App
from qdo.errors import LimitTimeoutError, SharedNameError, UsageError
from qdo.testing import TestKit


def acting(act: Callable[[qdo.Message], object], queues: str = "*", **options: Any) -> App:
    """Return an app whose job does with a message what the test says."""
    app = App("shop")

    @app.job(queues, **options)
    def job(message: qdo.Message, context: Any) -> None:
        act(message)

    return app


def limited(act: Callable[[qdo.Message], object] = lambda message: None, **options: Any) -> App:
    """Return an app whose jobs need the limit "crm"."""
    return acting(act, "sync-*", limits=["crm"], **options)


def done_at(kit: TestKit, seconds: float) -> int:
    """Let time pass; return how many messages are done then."""
    kit.advance(seconds)
    return len(kit.attempts(outcome="done"))


def test_a_limit_that_is_not_set_allows_everything() -> None:
    with TestKit(limited()) as kit:
        for number in range(20):
            kit.send("sync-a", number)
        assert done_at(kit, 0.0) == 20


def test_a_rate_follows_the_clock_of_the_kit() -> None:
    """The first queue takes the burst in its turn; then the queues take turns."""
    with TestKit(limited()) as kit:
        kit.limits.set("crm", rate="2/s", burst=3)
        for number in range(10):
            kit.send(f"sync-{number % 2}", number)
        assert [done_at(kit, seconds) for seconds in (0.0, 1.4, 0.1, 1.4, 0.1)] == [3, 3, 6, 6, 9]
        assert [len(kit.done("sync-0")), len(kit.done("sync-1"))] == [5, 4]
        assert kit.run_until_settled() == pytest.approx(1.5)
        assert len(kit.attempts(outcome="done")) == 10


def test_keys_of_a_queue_wait_for_its_own_rate() -> None:
    app = acting(lambda message: None, order="key", concurrency=4, per_queue_rate="1/s")
    with TestKit(app) as kit:
        for number in range(4):
            kit.send("a", number, key=str(number))
        assert [done_at(kit, seconds) for seconds in (0.0, 1.0, 0.5, 0.5)] == [0, 1, 1, 2]
        assert kit.run_until_settled() == pytest.approx(2.0)


def test_a_limit_of_messages_in_parallel_is_refused() -> None:
    with TestKit(limited(order="key", concurrency=4)) as kit:
        with pytest.raises(UsageError):
            kit.limits.set("crm", rate="1/s")
        kit.send("sync-a", 1, key="k")
        kit.run_until_idle()
        assert kit.done("sync-a") == [1]


def test_a_max_of_zero_waits_for_an_operator() -> None:
    with TestKit(limited()) as kit:
        kit.limits.set("crm", max=0)
        kit.send("sync-a", 1)
        assert kit.run_until_settled() == 0.0
        assert kit.waiting("sync-a") == [1]
        kit.limits.set("crm", max=1)
        kit.run_until_idle()
        assert kit.done("sync-a") == [1]


def test_a_limit_is_changed_by_a_job() -> None:
    """The next message asks again, also in the middle of many fetched ones."""

    def act(message: qdo.Message) -> None:
        if message.body == 5:
            kit.limits.set("crm", max=0)

    with TestKit(limited(act)) as kit:
        for number in range(50):
            kit.send("sync-a", number)
        kit.run_until_idle()
        assert kit.done("sync-a") == [*range(6)]
        kit.limits.set("crm")
        kit.run_until_idle()
        assert len(kit.done("sync-a")) == 50


def test_permits_of_scripts_count() -> None:
    """A permit that the test holds lets jobs wait; without a free one no caller waits."""
    app = limited()
    with TestKit(app) as kit:
        kit.limits.set("crm", max=1)
        kit.send("sync-a", 1)
        with app.limit("crm"):
            kit.run_until_idle()
            assert kit.waiting("sync-a") == [1]
            assert app.limit("crm").try_acquire() is None
            with pytest.raises(LimitTimeoutError), app.limit("crm"):
                pass
        kit.run_until_idle()
        assert kit.done("sync-a") == [1]
        assert app.limit("crm").try_acquire() is not None


def test_permits_of_a_dead_worker_are_free() -> None:
    with TestKit(limited()) as kit:
        kit.limits.set("crm", max=1)
        kit.send("sync-a", 1)
        kit.crash_at("after-job")
        kit.run_until_settled()
        assert kit.done("sync-a") == [1]
        kit.send("sync-b", 2)
        kit.run_until_idle()
        assert kit.done("sync-b") == [2]


def test_a_frozen_worker_keeps_its_permit_from_nobody() -> None:
    fences: list[int] = []

    def act(message: qdo.Message) -> None:
        fences.append(message.fence)
        if len(fences) == 1:
            kit.lose_lease()

    with TestKit(limited(act)) as kit:
        kit.limits.set("crm", max=1)
        kit.send("sync-a", 1)
        kit.run_until_idle()
        assert len({*fences}) == 2
        kit.send("sync-b", 2)
        kit.run_until_idle()
        assert kit.done("sync-b") == [2]


def test_limits_that_are_not_valid() -> None:
    """They are checked as those of the commands."""
    with TestKit(limited()) as kit:
        for options in ({"max": True}, {"rate": 5}, {"burst": 3}):
            with pytest.raises(UsageError):
                kit.limits.set("crm", **options)  # type: ignore[arg-type]
        with pytest.raises(SharedNameError):
            kit.limits.set("a/b", max=1)


# --- pauses ------------------------------------------------------------------------------


def pausable() -> App:
    def act(message: qdo.Message) -> None:
        if message.body == "fails":
            raise qdo.Retry(after=10.0)

    return acting(act)


def test_a_paused_queue_stands_still() -> None:
    """Also one that comes later; the others go on."""
    with TestKit(pausable()) as kit:
        kit.send("import-a", 1)
        kit.run_until_idle()
        kit.holds.pause("import-*", reason="new schema")
        assert kit.holds.pauses[0].why == "new schema"
        for queue in ("import-a", "import-b", "mail"):
            kit.send(queue, 2)
        kit.run_until_idle()
        assert kit.waiting("import-a") == kit.waiting("import-b") == [2]
        assert kit.done("mail") == [2]
        assert kit.run_until_settled() == 0.0
        kit.holds.resume("import-*")
        kit.run_until_idle()
        assert kit.done("import-b") == [2]
        assert kit.done("import-a") == [1, 2]


def test_a_pause_survives_the_worker() -> None:
    with TestKit(pausable()) as kit:
        kit.send("a", 1)
        kit.run_until_idle()
        kit.holds.pause("a", "b")
        kit.send("a", 2)
        for stop in (kit.hand_over, kit.crash, kit.lose_lease):
            stop()
            kit.run_until_idle()
        assert kit.done("a") == [1]
        kit.holds.resume("b", "a")
        kit.run_until_idle()
        assert kit.done("a") == [1, 2]


def test_a_pause_within_a_job_lets_its_message_end() -> None:

    def act(message: qdo.Message) -> None:
        if message.body == 3:
            kit.holds.pause("a")

    with TestKit(acting(act)) as kit:
        for number in range(10):
            kit.send("a", number)
        kit.run_until_idle()
        assert kit.done("a") == [0, 1, 2, 3]
        kit.holds.resume()
        kit.run_until_idle()
        assert kit.done("a") == [*range(10)]


def test_a_backoff_ends_during_a_pause() -> None:
    with TestKit(pausable()) as kit:
        kit.send("a", "fails")
        kit.run_until_idle()
        kit.holds.pause("*")
        kit.advance(60.0)
        assert len(kit.attempts()) == 1
        kit.holds.resume("*")
        kit.run_until_idle()
        assert len(kit.attempts()) == 2


def test_pauses_that_are_not_valid() -> None:
    with TestKit(pausable()) as kit:
        for globs in ((), ("",), ("a/b",)):
            with pytest.raises(UsageError):
                kit.holds.pause(*globs)
        kit.holds.pause("a")
        with pytest.raises(UsageError):
            kit.holds.resume("b")
