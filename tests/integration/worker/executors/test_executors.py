"""Jobs in threads and on the asyncio loop, and deadlines of everything that shares the process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gevent
import pytest

from qdo.errors import JobTimeoutError, UsageError
from qdo.jobs.job import Job
from qdo.message import Message
from qdo.outcomes import DeadLetter, Retry
from qdo.system.native import native_lock
from qdo.worker.executors.aio import AsyncioExecutor
from qdo.worker.executors.base import JobInterrupt, NotStarted
from qdo.worker.executors.thread import ThreadExecutor
from tests.support.engine import EngineSetup, until


class Failures:
    """The arguments of `job_failure`."""

    def __init__(self, engine: EngineSetup) -> None:
        self.errors: list[BaseException] = []
        engine.app.failure(self.hook)

    def hook(self, message: Message, context: Any, error: BaseException) -> None:
        self.errors.append(error)


# --- threads --------------------------------------------------------------------------


def test_thread_jobs_run_in_order_on_other_threads(engine: EngineSetup) -> None:
    seen: list[tuple[str, Any, int]] = []

    @engine.app.job(executor="thread")
    def job(message: Message, context: Any) -> None:
        seen.append((message.queue, message.body, threading.get_ident()))

    for queue in ("a", "b", "c"):
        engine.send(queue, *range(50))
    engine.start("a", "b", "c")
    until(lambda: len(seen) >= 150)
    for queue in ("a", "b", "c"):
        assert [body for name, body, _ in seen if name == queue] == list(range(50))
    assert threading.get_ident() not in {ident for _, _, ident in seen}
    assert engine.end() == 0


def test_a_setting_makes_threads_the_default(make: Callable[..., EngineSetup]) -> None:
    engine = make(executor="thread")
    idents: list[int] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        idents.append(threading.get_ident())

    engine.send("q", 1)
    engine.start("q")
    until(lambda: idents)
    assert idents[0] != threading.get_ident()


def _block_in_c(seconds: float) -> None:
    """Block in a call that gives the GIL up but knows nothing of Python's interrupts."""
    ctypes.CDLL(None).usleep(int(seconds * 1e6))


def _compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("hold", [_block_in_c, _compute])
def test_a_thread_that_never_yields_delays_no_other_queue(
    engine: EngineSetup, hold: Callable[[float], None]
) -> None:
    """Another queue's greenlet job continues all the time: the slow one ends when interrupted."""
    state: list[str] = []
    quick: list[int] = []
    enough: list[bool] = []

    @engine.app.job("slow", executor="thread")
    def slow(message: Message, context: Any) -> None:
        state.append("began")
        while not enough:
            hold(0.2)
        state.append("ended")

    @engine.app.job("quick")
    def fast(message: Message, context: Any) -> None:
        quick.append(message.body)

    engine.send("slow", 1)
    engine.start("slow", "quick")
    until(lambda: state)
    for number in range(10):
        engine.send("quick", number)
        until(lambda number=number: len(quick) > number)  # type: ignore[misc]
    assert state == ["began"]
    enough.append(True)
    until(lambda: state == ["began", "ended"])


def test_a_thread_job_is_stopped_at_its_deadline(make: Callable[..., EngineSetup]) -> None:
    """A busy loop of Python is reached, and the attempt is a failure like any other."""
    engine = make(attempts=2)
    failures = Failures(engine)
    seen: list[tuple[Any, int]] = []

    @engine.app.job(executor="thread", timeout_seconds=0.1)
    def job(message: Message, context: Any) -> None:
        seen.append((message.body, message.attempt))
        while message.body == "poison":
            pass

    engine.send("q", "poison", "next")
    engine.start("q")
    until(lambda: ("next", 1) in seen)
    assert seen == [("poison", 1), ("poison", 2), ("next", 1)]
    (letter,) = engine.broker.dead_letters.records()
    assert letter.error.startswith("JobTimeoutError: ")
    assert "while message.body" in letter.traceback or "in job" in letter.traceback
    assert all(isinstance(error, JobTimeoutError) for error in failures.errors)


def test_a_thread_in_c_is_waited_for(
    make: Callable[..., EngineSetup],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its queue starts nothing before it has ended, and the log states the reason."""
    monkeypatch.setattr("qdo.worker.executors.wait.GRACE_SECONDS", 0.05)
    engine = make(attempts=1)
    seen: list[Any] = []

    @engine.app.job(executor="thread", timeout_seconds=0.05)
    def job(message: Message, context: Any) -> None:
        if message.body == "slow":
            _block_in_c(0.4)
            seen.append("back")
        seen.append(message.body)

    began = time.monotonic()
    engine.send("q", "slow", "next")
    engine.start("q")
    until(lambda: "next" in seen)
    assert time.monotonic() - began >= 0.4
    assert "back" not in seen
    assert seen == ["next"]
    (record,) = [each for each in caplog.records if each.name.endswith(".wait")]
    assert record.levelname == "WARNING"
    assert record.args is not None
    queue, name, _ = record.args
    assert (queue, str(name).rpartition(".")[2]) == ("q", "job")


def test_a_job_that_catches_its_interruption_says_how_it_ends(engine: EngineSetup) -> None:
    """Cleaning up works, and so does an outcome of its own."""
    seen: list[str] = []

    @engine.app.job(executor="thread", timeout_seconds=0.05)
    def job(message: Message, context: Any) -> None:
        try:
            while True:
                pass
        except JobInterrupt as error:
            seen.append("cleaned")
            raise DeadLetter("too big") from error

    engine.send("q", 1)
    engine.start("q")
    until(lambda: engine.broker.dead_letters.records())
    assert engine.broker.dead_letters.records()[0].error == "too big"
    assert seen == ["cleaned"]


def test_a_late_interruption_never_hits_the_next_message(make: Callable[..., EngineSetup]) -> None:
    """Deadlines about as long as the jobs: whatever the race, each message ends one way."""
    engine = make(attempts=1)
    seen: list[int] = []

    @engine.app.job(executor="thread", timeout_seconds=0.002)
    def job(message: Message, context: Any) -> None:
        _compute(0.0019 + 0.0002 * (message.body % 2))
        seen.append(message.body)

    engine.send("q", *range(200))
    engine.start("q")
    counters = engine.pipeline.counters
    until(lambda: counters.processed + counters.dead_lettered >= 200)
    assert counters.processed + counters.dead_lettered == 200
    assert seen == sorted(seen)
    assert len(seen) >= counters.processed


def test_an_aborted_thread_job_ends_before_its_queue_is_released(
    make: Callable[..., EngineSetup],
) -> None:
    engine = make(drain_seconds=30)
    ends: list[str] = []

    @engine.app.job(executor="thread")
    def job(message: Message, context: Any) -> None:
        ends.append("begin")
        try:
            while True:
                pass
        finally:
            ends.append("end")

    engine.send("q", 1)
    engine.start("q")
    until(lambda: ends)
    engine.stop()
    assert engine.end() == 1
    assert ends == ["begin", "end"]
    assert engine.registrar.recorded.get("q", 0) == 0


@pytest.mark.slow
def test_a_process_whose_threads_go_on_ends_at_once(make: Callable[..., EngineSetup]) -> None:
    """Else the session would be closed, and the queue begin elsewhere, while its job runs."""
    engine = make(drain_seconds=0)
    codes: list[int] = []
    engine.worker._stop._exit = codes.append
    began, leave = threading.Event(), threading.Event()

    @engine.app.job(executor="thread")
    def job(message: Message, context: Any) -> None:
        began.set()
        while not leave.is_set():
            with contextlib.suppress(JobInterrupt):
                leave.wait(0.01)

    engine.send("q", 1)
    engine.start("q")
    until(began.is_set)
    engine.stop()
    until(lambda: codes)
    leave.set()
    engine.join()
    assert codes == [1]


class NotingLock:
    """A lock that notes the arguments of its waits."""

    waits: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._lock = native_lock()
        self.release = self._lock.release

    def acquire(self, *given: Any, **timeout: Any) -> Any:
        self.waits.append((given, timeout))
        return self._lock.acquire(*given, **timeout)


def test_threads_set_no_timer_for_each_message(
    engine: EngineSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait with a timeout cost 4 us of the 35 us of a message."""
    monkeypatch.setattr("qdo.worker.executors.thread.native_lock", NotingLock)
    monkeypatch.setattr(NotingLock, "waits", [])
    seen = engine.collect(executor="thread")
    engine.send("q", *range(20))
    engine.start("q")
    until(lambda: len(seen) == 20)
    assert len(NotingLock.waits) >= 20
    assert all(each == ((), {}) for each in NotingLock.waits)


# --- greenlets -------------------------------------------------------------------------


def test_a_waiting_greenlet_job_is_stopped_at_its_deadline(
    make: Callable[..., EngineSetup],
) -> None:
    engine = make(attempts=2)
    seen: list[Any] = []

    @engine.app.job(timeout_seconds=0.05)
    def job(message: Message, context: Any) -> None:
        seen.append((message.body, message.attempt))
        if message.body == "slow":
            gevent.sleep(60)

    engine.send("q", "slow", "next")
    engine.start("q")
    until(lambda: ("next", 1) in seen)
    assert seen == [("slow", 1), ("slow", 2), ("next", 1)]
    assert engine.broker.dead_letters.records()[0].error.startswith("JobTimeoutError")


def test_jobs_see_their_deadline_coming(engine: EngineSetup) -> None:
    seen: list[tuple[bool, bool, float]] = []

    @engine.app.job(timeout_seconds=1.0)
    def job(message: Message, context: Any) -> None:
        before = message.stopping
        left = (message.deadline or 0.0) - time.clock_gettime(time.CLOCK_BOOTTIME)
        while not message.stopping:
            gevent.sleep(0.01)
        seen.append((before, message.stopping, left))

    engine.send("q", 1)
    engine.start("q")
    until(lambda: seen)
    before, after, left = seen[0]
    assert (before, after) == (False, True)
    assert 0.9 < left <= 1.0
    assert engine.pipeline.counters.processed == 1


def test_jobs_see_that_their_worker_drains(engine: EngineSetup) -> None:
    """A job without a deadline, too."""
    seen: list[str] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        seen.append("begin")
        while not message.stopping:
            gevent.sleep(0.01)
        seen.append("end")

    engine.send("q", 1, 2)
    engine.start("q")
    until(lambda: seen)
    assert engine.end() == 0
    assert seen == ["begin", "end"]


@pytest.mark.parametrize("executor", ["greenlet", "thread", "asyncio"])
def test_jobs_see_that_their_queue_moves(engine: EngineSetup, executor: str) -> None:
    """The one that stays runs on; the message of the other one runs again at its next owner."""
    seen: list[str] = []
    left: list[str] = []

    def plain(message: Message, context: Any) -> None:
        seen.append(message.queue)
        while not message.stopping:
            (time if executor == "thread" else gevent).sleep(0.01)
        left.append(message.queue)
        raise Retry(after=0, counts=False)

    async def coroutine(message: Message, context: Any) -> None:
        seen.append(message.queue)
        while not message.stopping:
            await asyncio.sleep(0.01)
        left.append(message.queue)
        raise Retry(after=0, counts=False)

    options = {"executor": "thread"} if executor == "thread" else {}
    engine.app.job(**options)(coroutine if executor == "asyncio" else plain)
    for queue in ("moves", "stays"):
        engine.send(queue, 1)
    engine.start("moves", "stays")
    until(lambda: len(seen) == 2)
    claim = engine.member.take_back("moves")
    until(lambda: ("finished", "moves") in engine.member.events)
    assert left == ["moves"]
    assert claim.done == 0
    assert claim.failure is not None
    assert (claim.failure.attempts, claim.failure.retry_at) == (0, 0.0)
    assert seen == ["moves", "stays"] or seen == ["stays", "moves"]


# --- asyncio ----------------------------------------------------------------------------


def test_async_jobs_wait_together_each_queue_in_order(engine: EngineSetup) -> None:
    """Fifty queues whose jobs wait take no longer than one."""
    seen: list[tuple[str, Any]] = []
    together = 0
    most = 0

    @engine.app.job()
    async def job(message: Message, context: Any) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.05)
        together -= 1
        seen.append((message.queue, message.body))

    queues = [f"q{number}" for number in range(50)]
    engine.app.send_many([(queue, number) for number in range(3) for queue in queues])
    engine.start(*queues)
    until(lambda: len(seen) == 150)
    assert most >= 25
    for queue in queues:
        assert [body for name, body in seen if name == queue] == [0, 1, 2]
    assert engine.end() == 0


def test_an_async_job_is_cancelled_at_its_deadline(make: Callable[..., EngineSetup]) -> None:
    engine = make(attempts=1)
    seen: list[Any] = []

    @engine.app.job(timeout_seconds=0.05)
    async def job(message: Message, context: Any) -> None:
        try:
            if message.body == "slow":
                await asyncio.sleep(60)
        finally:
            seen.append(message.body)

    engine.send("q", "slow", "next")
    engine.start("q")
    until(lambda: "next" in seen)
    assert seen == ["slow", "next"]
    assert engine.broker.dead_letters.records()[0].error.startswith("JobTimeoutError")


def test_an_async_job_fails_as_it_raises(make: Callable[..., EngineSetup]) -> None:
    engine = make(attempts=1)
    failures = Failures(engine)

    @engine.app.job()
    async def job(message: Message, context: Any) -> None:
        await asyncio.sleep(0)
        raise KeyError("gone")

    engine.send("q", 1)
    engine.start("q")
    until(lambda: engine.broker.dead_letters.records())
    assert isinstance(failures.errors[0], KeyError)
    assert engine.broker.dead_letters.records()[0].error == "KeyError: 'gone'"


def test_an_aborted_async_job_is_cancelled(engine: EngineSetup) -> None:
    seen: list[str] = []

    @engine.app.job()
    async def job(message: Message, context: Any) -> None:
        seen.append("begin")
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("end")

    engine.send("q", 1)
    engine.start("q")
    until(lambda: seen)
    engine.stop()
    assert engine.end() == 1
    assert seen == ["begin", "end"]


def test_tasks_left_by_async_jobs_are_cancelled_at_the_end(engine: EngineSetup) -> None:
    seen: list[str] = []
    left: list[asyncio.Task[None]] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            seen.append("cancelled")

    @engine.app.job()
    async def job(message: Message, context: Any) -> None:
        left.append(asyncio.create_task(linger()))
        await asyncio.sleep(0)
        seen.append("done")

    engine.send("q", 1)
    engine.start("q")
    until(lambda: seen)
    assert engine.end() == 0
    assert seen == ["done", "cancelled"]


def test_a_job_that_returns_too_late_is_done(make: Callable[..., EngineSetup]) -> None:
    """It was stopped at its timeout, but returned normally."""
    engine = make(attempts=1)

    @engine.app.job(executor="thread", timeout_seconds=0.05)
    def job(message: Message, context: Any) -> None:
        try:
            while True:
                pass
        except JobInterrupt:
            return

    engine.send("q", 1)
    engine.start("q")
    counters = engine.pipeline.counters
    until(lambda: counters.processed == 1)
    assert engine.broker.dead_letters.records() == []


def test_async_jobs_have_helper_threads(engine: EngineSetup) -> None:
    """`asyncio.to_thread` and name look-ups, which asyncio gives to threads."""
    seen: list[Any] = []

    @engine.app.job()
    async def job(message: Message, context: Any) -> None:
        ident = await asyncio.to_thread(threading.get_ident)
        found = await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        seen.append((ident != threading.get_ident(), bool(found)))

    engine.send("q", 1)
    engine.start("q")
    until(lambda: seen)
    assert seen == [(True, True)]
    assert engine.end() == 0


def test_a_blocking_async_job_delays_no_greenlet_job(engine: EngineSetup) -> None:
    seen: list[str] = []

    @engine.app.job("blocks")
    async def blocks(message: Message, context: Any) -> None:
        seen.append("begin")
        _block_in_c(0.5)
        seen.append("end")

    @engine.app.job("quick")
    def quick(message: Message, context: Any) -> None:
        seen.append("quick")

    engine.send("blocks", 1)
    engine.start("blocks", "quick")
    until(lambda: seen)
    engine.send("quick", 1)
    until(lambda: len(seen) == 3)
    assert seen == ["begin", "quick", "end"]


def test_an_async_job_that_waited_starts_only_under_the_lease(engine: EngineSetup) -> None:
    """Another job blocks the asyncio loop until the lease has expired."""
    seen: list[str] = []
    release = native_lock()
    release.acquire()

    @engine.app.job("blocks")
    async def blocks(message: Message, context: Any) -> None:
        seen.append("begin")
        release.acquire()
        seen.append("end")

    @engine.app.job("waits")
    async def waits(message: Message, context: Any) -> None:
        seen.append("waits")

    engine.send("blocks", 1)
    engine.start("blocks", "waits")
    until(lambda: seen)
    engine.send("waits", 1)
    until(lambda: len(engine.dispatcher.in_flight()) == 2, "the message that waits")
    lease = engine.member.lease
    until_before, lease.until = lease.until, 0.0
    release.release()
    until(lambda: not engine.dispatcher.in_flight(), "the ends of both calls")
    assert seen == ["begin", "end"]
    lease.until = until_before
    engine.dispatcher.tick()
    until(lambda: len(seen) == 3)
    assert seen == ["begin", "end", "waits"]


@pytest.mark.parametrize("kind", [ThreadExecutor, AsyncioExecutor])
def test_threads_ask_before_they_start_a_job(
    kind: type[ThreadExecutor] | type[AsyncioExecutor],
) -> None:
    """On their own thread: the lease may have ended on the way to it."""
    asked: list[int] = []
    executor = kind(lambda message: bool(asked.append(threading.get_ident())))
    call = executor.bind(Job(lambda message, context: asked.append(0), "job"))
    with pytest.raises(NotStarted):
        call(Message("q", 1, None), None)
    assert len(asked) == 1
    assert asked[0] not in (0, threading.get_ident())
    executor.close()


# --- rejected at start -------------------------------------------------------------------


def test_a_process_job_without_a_module_to_import_is_refused(engine: EngineSetup) -> None:

    @engine.app.job(executor="process")
    def job(message: Message, context: Any) -> None:
        """Never run."""

    with pytest.raises(UsageError, match="qdo-worker MODULE:APP"):
        engine.worker.run()
