"""Calls that are made where Python forbids waiting: they end with an error, and never hang."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.grouped_calls import GroupedCall, GroupedCalls
from qdo.errors import UsageError
from tests.support.forks.processes import run
from tests.support.paths import ROOT


class OwnThread(GroupedCalls[Callable[[], Any]]):
    """Calls functions on its thread."""

    def __init__(self) -> None:
        super().__init__("runner")
        self.start()

    def handle(self, calls: list[GroupedCall[Callable[[], Any]]]) -> None:
        for call in calls:
            try:
                call.finish(call.work())
            except Exception as error:  # noqa: BLE001 - raised where the call was made
                call.fail(error)

    def release(self) -> None:
        """Do nothing."""


class Interrupted:
    """A queue during whose first `put` a signal handler, or a `__del__`, runs."""

    def __init__(self, queue: Any, handler: Callable[[], object]) -> None:
        self._queue = queue
        self._handlers = [handler]

    def put(self, item: Any) -> None:
        if self._handlers:
            self._handlers.pop()()
        self._queue.put(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


@pytest.fixture
def runner() -> Iterator[OwnThread]:
    runner = OwnThread()
    yield runner
    runner.close()


def test_a_call_on_its_own_thread_is_refused(runner: OwnThread) -> None:
    """The garbage collector runs `__del__` there, too: it waited for itself, and all others."""
    with pytest.raises(UsageError):
        runner.call(lambda: runner.call(lambda: 1))
    runner.call(runner.close)
    assert runner.call(lambda: 2) == 2


def test_a_call_within_a_call_of_the_same_thread_runs(runner: OwnThread) -> None:
    inner: list[int] = []
    runner._calls = Interrupted(  # type: ignore[assignment]
        runner._calls, lambda: inner.append(runner.call(lambda: 1))
    )
    assert runner.call(lambda: 2) == 2
    assert inner == [1]


SCRIPT = """
import qdo

app = qdo.App("desk", broker="sqlite:messages.db")

class Farewell:
    def __del__(self):
        app.send("q", "bye")

app.send("q", "hello")
kept = Farewell()
kept.cycle = kept
"""


@pytest.mark.exec  # the warm interpreter ends its forks with os._exit
def test_a_send_while_the_interpreter_exits_is_refused(tmp_path: Path) -> None:
    """Its threads have ended: the process waited for them forever."""
    argv = [sys.executable, "-c", SCRIPT]
    env = {"PYTHONPATH": str(ROOT)}
    ended = run(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, timeout=20)
    assert ended.returncode == 0
    assert "UnusableBrokerError" in ended.stderr
