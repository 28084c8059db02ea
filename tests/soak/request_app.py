"""The app of a soak of requests: jobs of pools, and of the queues that get the outcomes.

The journal has the lines of `app`, with a request in place of a queue, and its take in place of
a fence. A line of kind ``D`` is an outcome that its queue got: ``QUEUE|REQUEST|OUTCOME``.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import qdo
from tests.soak.app import TIMEOUT_SECONDS

POOLS = {"green": 10, "co": 10, "thread": 4, "process": 2}
"""Pools with the places of each worker; the executor of each is that of its name. A worker that has
started a request of the pool `rated` holds the next one for a while."""
QUEUES = tuple(f"then-{number}" for number in range(20))

app = qdo.App("soak", session_timeout_seconds=TIMEOUT_SECONDS, checkpoint_seconds=0.1)
_journal = os.open(os.environ.get("SOAK_JOURNAL", os.devnull), os.O_WRONLY | os.O_APPEND)
_policy = qdo.Policy(attempts=100_000, backoff_seconds=0.02, backoff_max_seconds=0.1)


def _note(kind: str, what: str, fence: int, attempt: int, pid: int) -> None:
    line = f"{kind} {what} 0 {fence} {attempt} {pid} {time.monotonic()}\n"
    os.write(_journal, line.encode())


class Noted:
    """Notes start and end of a run with the process that keeps its session."""

    def __init__(self, request: qdo.Request) -> None:
        pid = os.getppid() if request.pool == "process" else os.getpid()
        self._run = request.id, request.take, request.attempt, pid

    def __enter__(self) -> None:
        _note("S", *self._run)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _note("E" if kind is None else "X", *self._run)


def _end(request: qdo.Request) -> dict[str, Any]:
    """End as the body says; the result names the take."""
    kind = request.body["kind"]
    if kind == "fail" and request.attempt == 1:
        raise ValueError("it fails once")
    if kind == "skip":
        raise qdo.Skip("not needed")
    if kind == "letter":
        raise qdo.DeadLetter("it cannot be done")
    if kind == "die" and request.attempt == 1:
        os._exit(1)
    return {"take": request.take}


@app.job("rated", pool=True, policy=_policy, per_queue_rate="0.2/s")
@app.job("green", pool=True, policy=_policy, concurrency=POOLS["green"])
@app.job("thread", pool=True, policy=_policy, executor="thread", concurrency=POOLS["thread"])
@app.job("process", pool=True, policy=_policy, executor="process", concurrency=POOLS["process"])
def work(request: qdo.Request, context: Any) -> dict[str, Any]:
    """Do what the body says."""
    with Noted(request):
        if request.body["kind"] == "pause":
            request.pause("an operator goes on")
        time.sleep(request.body["seconds"])
        return _end(request)


@app.job("co", pool=True, policy=_policy, concurrency=POOLS["co"])
async def co(request: qdo.Request, context: Any) -> dict[str, Any]:
    """Do what the body says, in a loop."""
    with Noted(request):
        await asyncio.sleep(request.body["seconds"])
        return _end(request)


@app.job("then-*", policy=_policy)
def then(message: qdo.Message, context: Any) -> None:
    """Note an outcome; the first attempts of some ask for more, each with the same id."""
    told = message.body
    if told.get("more") and told["outcome"] == "done":
        body = {"kind": "quick", "seconds": 0.01}
        app.request("green", body, id=f"{message.id}/more", then=message.queue)
    what = f"{message.queue}|{told['request']}|{told['outcome']}"
    _note("D", what, message.fence, message.attempt, os.getpid())
