"""Jobs in child processes: outcomes, deadlines, limits, and whatever a poisonous job does."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.base import Outgoing
from qdo.errors import BodyDecodeError, JobCrashedError, JobTimeoutError
from qdo.message import Message
from qdo.worker.engine import decoder
from qdo.worker.executors import process as spawned
from qdo.worker.large_bodies import LARGE_BYTES
from tests.support.engine import EngineSetup, until
from tests.support.paths import ROOT
from tests.support.processes import alive, children, stopped, whole_lines

APP = "tests.apps.executors.poison"


class Shop:
    """An engine whose app lies in a module, and the output of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors: list[BaseException] = []
        self.engine: EngineSetup
        self._strangers = set(children(os.getpid()))

    def open(self, **settings: Any) -> Shop:
        app = importlib.import_module(APP).app
        chosen = {"attempts": 2, "log_level": "error", **settings}
        self.engine = EngineSetup(self.folder, app=app, target=f"{APP}:app", **chosen)
        app.failure(self._failed)
        return self

    def processes(self) -> list[int]:
        return [pid for pid in children(os.getpid()) if pid not in self._strangers]

    def _failed(self, message: Message, context: Any, error: BaseException) -> None:
        self.errors.append(error)

    def said(self, word: str) -> list[list[str]]:
        path = self.folder / "said"
        lines = whole_lines(path)
        return [line.split()[1:] for line in lines if line.split()[0] == word]

    def done(self, queue: str) -> list[str]:
        return [words[1] for words in self.said("done") if words[0] == queue]

    def letters(self) -> list[str]:
        return [letter.error for letter in self.engine.broker.dead_letters.records()]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    one = Shop(tmp_path)
    yield one
    one.engine.close()
    assert one.processes() == []
    sys.modules.pop(APP)


def test_messages_run_in_another_process_in_order(shop: Shop) -> None:
    """Whatever they hold; the context is entered once there and torn down at the end."""
    engine = shop.open().engine
    seen = [str(number) for number in range(30)]
    engine.send("plain-a", *range(30))
    engine.start("plain-a")
    until(lambda: len(shop.done("plain-a")) == 30)
    assert shop.done("plain-a") == seen
    pids = {words[3] for words in shop.said("done")}
    assert pids == {words[4] for words in shop.said("done")}
    assert len(pids) == 1
    assert str(os.getpid()) not in pids
    assert engine.end() == 0
    assert [*pids] == [words[0] for words in shop.said("enter")]
    assert [*pids] == [words[0] for words in shop.said("leave")]


def test_outcomes_cross_the_border(shop: Shop) -> None:
    engine = shop.open(attempts=5).engine
    engine.send("plain", "retry", "dead", "skip", "own", "mute", "system-exit", "end")
    engine.start("plain")
    until(lambda: shop.done("plain")[-1:] == ["end"])
    assert [words[1:3] for words in shop.said("done")] == [["retry", "3"], ["end", "1"]]
    assert shop.letters() == [
        "so be it",
        "OwnError: one two",
        "MuteError: (its text cannot be shown: str() of it raises)",
        "SystemExit: 3",
    ]
    own = next(error for error in shop.errors if type(error).__name__ == "OwnError")
    assert isinstance(own, importlib.import_module(APP).OwnError)
    letter = engine.broker.dead_letters.records()[1]
    assert 'raise OwnError("one", "two")' in letter.traceback
    assert len(shop.said("enter")) == 1


@pytest.mark.parametrize("doorbell", [False, True])
def test_a_job_gets_no_password(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, doorbell: bool
) -> None:
    """Unless it sends with a doorbell, for which it needs an account; the rest is handed on."""
    monkeypatch.setenv("QDO_COORDINATOR_PASSWORD", "secret")
    monkeypatch.setenv("KEPT", "yes")
    engine = shop.open(doorbell=doorbell).engine
    engine.send("plain", "environment")
    engine.start("plain")
    until(lambda: len(shop.done("plain")) == 1)
    (names,) = shop.said("environment")
    assert "KEPT" in names
    assert ("QDO_COORDINATOR_PASSWORD" in names) is doorbell
    assert os.environ["QDO_COORDINATOR_PASSWORD"] == "secret"


@pytest.mark.slow
@pytest.mark.parametrize(("poison", "how"), [("close", "channel"), ("babble", "answer")])
def test_a_broken_channel_costs_one_attempt(shop: Shop, poison: str, how: str) -> None:
    """The queue continues after it."""
    engine = shop.open().engine
    engine.send("plain", "before", poison, "after")
    engine.start("plain")
    until(lambda: shop.done("plain") == ["before", "after"])
    assert [type(error) for error in shop.errors] == [JobCrashedError, JobCrashedError]
    assert how in str(shop.errors[0])
    assert len(shop.letters()) == 1


POISONS = {
    "exit": "JobCrashedError: .*code 7",
    "kill": "JobCrashedError: .*SIGKILL",
    "eat": "JobCrashedError: .*128 MiB",
    "spin": "JobTimeoutError: ",
    "mute": "MuteError: ",
    "undecodable": "BodyDecodeError: ",
}
"""Messages, and the errors of their dead letters."""


@pytest.mark.slow
def test_every_poison_ends_by_its_policy(shop: Shop) -> None:
    """Each in a queue of its own, all at once; another queue of the worker continues meanwhile."""
    engine = shop.open().engine
    queues = {poison: f"poison-{poison}" for poison in POISONS} | {"spin": "timed"}
    for poison, queue in queues.items():
        if poison == "undecodable":
            engine.broker.send(Outgoing(queue, b"{no JSON", None, None))
        else:
            engine.send(queue, poison)
        engine.send(queue, "after")
    engine.start(*queues.values(), "greenlet")
    rounds = 0
    while engine.pipeline.counters.dead_lettered < len(POISONS):
        engine.send("greenlet", rounds)
        rounds += 1
        until(lambda count=rounds: len(shop.said("quick")) == count)  # type: ignore[misc]
    assert rounds > 1
    until(lambda: all(shop.done(queue) == ["after"] for queue in queues.values()))
    letters = {each.queue: each.error for each in engine.broker.dead_letters.records()}
    for poison, queue in queues.items():
        assert re.match(POISONS[poison], letters[queue])
    assert len(shop.errors) == 2 * len(POISONS) - 1  # an undecodable message is tried once


def test_work_that_a_job_returns_is_a_failure(shop: Shop) -> None:
    engine = shop.open(attempts=1).engine
    engine.send("unfinished", 1)
    engine.start("unfinished")
    until(shop.letters)
    assert shop.letters()[0].startswith("UsageError: ")
    assert shop.done("unfinished") == []


def test_a_deadline_kills_a_call_in_c(shop: Shop) -> None:
    """It never looks up."""
    engine = shop.open(attempts=1).engine
    engine.send("timed", "c", "after")
    engine.start("timed")
    until(lambda: shop.done("timed") == ["after"])
    assert [type(error) for error in shop.errors] == [JobTimeoutError]


def test_a_process_that_has_grown_is_replaced(shop: Shop) -> None:
    """Leftovers of one message do not count against the next one."""
    engine = shop.open(attempts=1).engine
    engine.send("small", "leak", "after")
    engine.start("small")
    until(lambda: shop.done("small")[-1:] == ["after"])
    pids = [words[3] for words in shop.said("done")]
    assert len(set(pids)) == len(pids)


def test_processes_are_recycled(shop: Shop) -> None:
    """Every second message; the old one leaves its context."""
    engine = shop.open().engine
    engine.send("recycled", *range(5))
    engine.start("recycled")
    until(lambda: len(shop.done("recycled")) == 5)
    assert shop.done("recycled") == ["0", "1", "2", "3", "4"]
    pids = [words[3] for words in shop.said("done")]
    assert pids[0] == pids[1]
    assert pids[2] == pids[3]
    assert len(set(pids)) == 3
    until(lambda: [words[0] for words in shop.said("leave")] == [pids[0], pids[2]])


def test_a_job_that_forks_and_comes_back_twice_answers_once(shop: Shop) -> None:
    engine = shop.open().engine
    engine.send("plain", "fork", "after")
    engine.start("plain")
    until(lambda: shop.done("plain") == ["fork", "after"])
    assert shop.errors == []


def test_no_more_processes_than_allowed(shop: Shop) -> None:
    """Four queues share two, and each queue keeps its order."""
    engine = shop.open(executor_processes=2).engine
    queues = [f"plain-{number}" for number in range(4)]
    for queue in queues:
        engine.send(queue, *range(10))
    engine.start(*queues)
    until(lambda: len(shop.said("done")) == 40)
    assert len(shop.said("enter")) == 2
    for queue in queues:
        assert shop.done(queue) == [str(number) for number in range(10)]


def test_an_idle_process_that_died_costs_nothing(shop: Shop) -> None:
    engine = shop.open().engine
    engine.send("plain", 1)
    engine.start("plain")
    until(lambda: shop.done("plain") == ["1"])
    (pid,) = shop.processes()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    engine.send("plain", 2)
    until(lambda: shop.done("plain") == ["1", "2"])
    assert shop.errors == []


def kill_unread(
    monkeypatch: pytest.MonkeyPatch, dies: Callable[[spawned.JobProcess], bool]
) -> None:
    """Let some processes die when their message is in the channel and they have not read it."""
    give = spawned.JobProcess.give

    def give_and_kill(self: spawned.JobProcess, message: Message) -> None:
        if not dies(self):
            give(self, message)
            return
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: stopped(self.pid))
        give(self, message)
        os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(spawned.JobProcess, "give", give_and_kill)


def test_an_idle_process_that_dies_unread_costs_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message was in its channel, and its job did not run."""
    kill_unread(monkeypatch, lambda process: process.served == 1)
    engine = shop.open().engine
    engine.send("plain", 1)
    engine.start("plain")
    until(lambda: shop.done("plain") == ["1"])
    engine.send("plain", 2)
    until(lambda: shop.done("plain") == ["1", "2"])
    assert "was found dead" in caplog.text
    assert shop.errors == []


def test_a_new_process_that_dies_unread_costs_an_attempt(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a body that no process can read would be tried for ever."""
    kill_unread(monkeypatch, lambda process: True)
    engine = shop.open().engine
    engine.send("plain", 1)
    engine.start("plain")
    until(lambda: len(shop.letters()) == 1)
    assert [type(error) for error in shop.errors] == [JobCrashedError, JobCrashedError]
    assert shop.done("plain") == []


def test_a_process_that_cannot_start_is_not_the_messages_fault(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits until the cause is fixed; no attempt is counted."""
    engine = shop.open().engine
    engine.send("plain", 1)
    engine.start("plain")
    (shop.folder / "broken").touch()
    until(lambda: "the context is broken" in caplog.text)
    (shop.folder / "broken").unlink()
    until(lambda: shop.done("plain") == ["1"])
    assert [words[2] for words in shop.said("done")] == ["1"]
    assert shop.errors == []


def test_a_queue_that_waits_for_a_process_can_be_released(shop: Shop) -> None:
    """Its message is not started anymore."""
    engine = shop.open().engine
    engine.send("plain", 1)
    engine.start("plain")
    (shop.folder / "broken").touch()
    until(lambda: engine.dispatcher.in_flight())
    (claim,) = engine.member.claims.values()
    engine.member.take_back("plain")
    until(lambda: ("finished", "plain") in engine.member.events)
    assert not claim.done
    assert shop.done("plain") == []
    counters = engine.pipeline.counters
    assert (counters.attempts, counters.unsuccessful) == (0, 0)


def test_nothing_is_started_once_the_lease_is_over(shop: Shop) -> None:
    """It may have run out while the process was started; the message waits for the lease."""
    engine = shop.open().engine
    engine.send("plain", 1)
    (shop.folder / "broken").touch()
    engine.start("plain")
    until(lambda: engine.dispatcher.in_flight())
    lease = engine.member.lease
    until_then, lease.until = lease.until, 0.0
    (shop.folder / "broken").unlink()
    until(lambda: not engine.dispatcher.in_flight())
    assert shop.done("plain") == []
    lease.until = until_then
    until(lambda: shop.done("plain") == ["1"])


def test_a_drain_is_seen_in_the_process(shop: Shop) -> None:
    engine = shop.open().engine
    engine.send("plain", "stopping")
    engine.start("plain")
    until(lambda: shop.said("waiting"))
    assert engine.end() == 0
    assert shop.done("plain") == ["stopping"]


def test_a_move_is_seen_in_the_process_of_its_queue(shop: Shop) -> None:
    """That of another queue runs on until the worker drains."""
    engine = shop.open().engine
    for queue in ("plain", "plain-2"):
        engine.send(queue, "stopping")
    engine.start("plain", "plain-2")
    until(lambda: len(shop.said("waiting")) == 2)
    engine.member.take_back("plain")
    until(lambda: ("finished", "plain") in engine.member.events)
    assert shop.done("plain") == ["stopping"]
    assert shop.done("plain-2") == []
    assert engine.end() == 0


def test_an_aborted_job_is_killed(shop: Shop) -> None:
    """Its message is not done and its process is gone before the queue is released."""
    engine = shop.open().engine
    engine.send("plain", "sleep")
    engine.start("plain")
    until(lambda: shop.said("waiting"))
    ((pid,),) = shop.said("waiting")
    engine.stop()
    assert engine.end() == 1
    assert not alive(int(pid))
    assert engine.registrar.recorded.get("plain", 0) == 0


def test_a_process_that_will_not_leave_is_killed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawned, "LEAVE_SECONDS", 0.05)
    engine = shop.open().engine
    engine.send("plain", 1)
    engine.start("plain")
    until(lambda: shop.done("plain") == ["1"])
    (pid,) = shop.processes()
    os.kill(pid, signal.SIGSTOP)
    assert engine.end() == 0
    assert not alive(pid)


def test_a_process_decodes_its_large_bodies(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker process never does, so none of them stops its other queues."""

    def refuse(body: bytes) -> Any:
        raise AssertionError("decoded in the worker process")

    monkeypatch.setattr(decoder, "load_large", refuse)
    engine = shop.open().engine
    for body in (b"[" + b"1," * LARGE_BYTES + b"1]", b"[" * 1000 + b" " * LARGE_BYTES, b"7"):
        engine.broker.send(Outgoing("plain", body))
    engine.start("plain")
    until(lambda: "7" in shop.done("plain"))
    assert shop.done("plain") == [str(LARGE_BYTES + 1), "7"]
    (letter,) = engine.broker.dead_letters.records()
    assert letter.error.startswith("BodyDecodeError: ")
    assert letter.attempts == 1
    (failure,) = shop.errors
    assert isinstance(failure, BodyDecodeError)
