"""Threads and descriptors that the system refuses: messages wait, and no attempt is charged."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

import pytest

from qdo.message import Message
from qdo.system.native import start_thread
from tests.support.app_runs import AppRuns
from tests.support.engine import EngineSetup, until
from tests.support.processes import children, wait_until

APP = "from tests.apps.scarce import app\n"


@pytest.mark.parametrize("free", [0, 3])
def test_messages_wait_for_descriptors_of_threads(local_runs: AppRuns, free: int) -> None:
    """The event loop of a thread needs some: libev wrote 20 MB of errors a second, forever."""
    queues = ["loop", *(f"thread-{number}" for number in range(3))]
    local_runs.app.send("limit", free)
    proc = local_runs.start(APP)
    wait_until(lambda: bool(children(proc.pid)), "the worker process")
    (pid,) = children(proc.pid)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    wait_until(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE) != before, "the limit")
    local_runs.app.send_many([(queue, 0) for queue in queues])
    for what in ("a thread", "the asyncio loop"):
        proc.wait_for_line(f"ERROR .* cannot start {what} of job")
    (local_runs.folder / "enough").touch()
    for queue in queues:
        wait_until(lambda queue=queue: local_runs.runs(queue) == [("0", 1)], queue)  # type: ignore[misc]
    assert len(proc.output) < 50_000


@pytest.mark.parametrize("is_async", [False, True])
def test_a_message_waits_for_a_thread_of_the_system(
    tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes, as containers have it, was charged to messages."""
    attempts: list[int] = []
    failing = iter(range(3))

    def start(*given: Any) -> int:
        if next(failing, None) is not None:
            raise RuntimeError("can't start new thread")
        return start_thread(*given)

    for module in ("aio", "thread"):
        monkeypatch.setattr(f"qdo.worker.executors.{module}.start_thread", start)

    def job(message: Message, context: Any) -> None:
        attempts.append(message.attempt)

    async def coroutine(message: Message, context: Any) -> None:
        attempts.append(message.attempt)

    with contextlib.closing(EngineSetup(tmp_path, attempts=2)) as engine:
        if is_async:
            engine.app.job()(coroutine)
        else:
            engine.app.job(executor="thread")(job)
        engine.send("q", 1)
        engine.start("q")
        until(lambda: attempts)
    assert attempts == [1]
