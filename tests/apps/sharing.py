"""Jobs that share locks, queues and pools of threads."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import qdo
from qdo import Message

app = qdo.App("desk", attempts=5, backoff_seconds=0.01)
locks: dict[str, Any] = {
    "lock": threading.Lock(),
    "rlock": threading.RLock(),
    "semaphore": threading.BoundedSemaphore(1),
    "condition": threading.Condition(),
}
queues: dict[str, Any] = {"queue": queue.Queue(), "simple": queue.SimpleQueue()}
pool = ThreadPoolExecutor(2)
event = threading.Event()
waiting: set[str] = set()
inside = dict.fromkeys(locks, 0)
short = threading.Lock()


def seven() -> int:
    time.sleep(0.001)
    return 7


async def nap() -> None:
    await asyncio.sleep(0.05)


def use(kind: str, queue: str) -> None:
    if kind in locks:
        for _ in range(5):
            with locks[kind]:
                inside[kind] += 1
                assert inside[kind] == 1
                time.sleep(0.001)
                inside[kind] -= 1
    elif kind == "short":
        for _ in range(1000):
            with short:
                pass
    elif kind in queues:
        queues[kind].put(queue)
        assert queues[kind].get(timeout=20) is not None
    elif kind == "pool":
        assert pool.submit(seven).result(timeout=20) == 7
    elif kind == "thread":
        thread = threading.Thread(target=time.sleep, args=(0.001,))
        thread.start()
        thread.join()
    elif kind == "event":
        waiting.add(queue)
        if len(waiting) == 4 or queue.startswith("process"):
            event.set()
        assert event.wait(20)
    elif kind == "run":
        asyncio.run(nap())
    elif kind == "processes":
        with multiprocessing.Pool(1) as processes:
            assert processes.map(abs, [-1]) == [1]
    elif kind == "program":
        echo = subprocess.run(["cat"], input=queue.encode(), capture_output=True, check=True)
        assert echo.stdout == queue.encode()
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "600"], check=False, timeout=0.05)
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["no-such-program"], check=True)
        assert [subprocess.call(["sh", "-c", f"exit {n}"]) for n in range(8)] == [*range(8)]


def wrote(message: Message) -> None:
    with open("out", "a") as file:
        print(message.queue, 0, message.attempt, os.getpid(), file=file)


def job(message: Message, context: object) -> None:
    use(message.queue.split(".")[1], message.queue)
    wrote(message)


async def coroutine(message: Message, context: object) -> None:
    kind = message.queue.split(".")[1]
    if kind in locks:
        with locks[kind]:
            inside[kind] += 1
            assert inside[kind] == 1
            await asyncio.sleep(0.01)
            inside[kind] -= 1
    elif kind in queues:
        queues[kind].get()
    elif kind == "event":
        event.wait()
    elif kind == "executor":
        for _ in range(5):
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(pool, seven) == 7
    else:
        use(kind, message.queue)
    wrote(message)


app.job("thread.*", executor="thread")(job)
app.job("process.*", executor="process")(job)
app.job("async.*")(coroutine)
app.job("greenlet.*")(job)
