"""Jobs in processes that do what their message says, and a greenlet job beside them."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import qdo
from qdo import Message


class OwnError(ValueError):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def say(*words: object) -> None:
    with open("said", "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


@contextlib.contextmanager
def job_context() -> Iterator[dict[str, Any]]:
    apart = "gevent" not in sys.modules
    if apart and os.path.exists("broken"):
        raise RuntimeError("the context is broken")
    if apart:
        say("enter", os.getpid())
    yield {"pid": os.getpid()}
    if apart:
        say("leave", os.getpid())


app = qdo.App("test", job_context=job_context)


def spin() -> None:
    while True:
        pass


def eat() -> None:
    held = []
    while True:
        held.append(bytearray(b"x") * (4 << 20))


def babble() -> None:
    """Write to the sockets of the process."""
    for each in gc.get_objects():
        if isinstance(each, socket.socket) and each.fileno() >= 0:
            os.write(each.fileno(), b"\x00\x00\x00\x02\x00\x00\x00\x00[]")
    spin()


def close() -> None:
    os.closerange(3, 4096)
    spin()


def leave() -> None:
    sys.exit(3)


def be_mute() -> None:
    raise MuteError


def raise_own() -> None:
    raise OwnError("one", "two")


def give_up() -> None:
    raise qdo.DeadLetter("so be it")


def skip() -> None:
    raise qdo.Skip("not wanted")


def sleep() -> None:
    say("waiting", os.getpid())
    time.sleep(600)


ACTS = {
    "exit": lambda: os._exit(7),
    "system-exit": leave,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "spin": spin,
    "c": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "eat": eat,
    "mute": be_mute,
    "own": raise_own,
    "dead": give_up,
    "skip": skip,
    "close": close,
    "babble": babble,
    "environment": lambda: say("environment", *sorted(os.environ)),
    "sleep": sleep,
}


def act(message: Message, context: dict[str, Any]) -> None:
    body = len(message.body) if isinstance(message.body, list) else message.body
    if isinstance(body, str) and body in ACTS:
        ACTS[body]()
    elif body == "leak":
        context.setdefault("held", []).append(bytearray(b"x") * (120 << 20))
    elif body == "retry" and message.attempt < 3:
        raise qdo.Retry(after=0.01)
    elif body == "fork":
        if os.fork() == 0:
            return  # the copy
        os.wait()
    elif body == "stopping":
        say("waiting", os.getpid())
        while not message.stopping:
            time.sleep(0.005)
    say("done", message.queue, body, message.attempt, os.getpid(), context["pid"])


async def later(message: Message, context: object) -> None:
    say("done", message.queue)


app.job("timed", executor="process", timeout_seconds=0.5)(act)
app.job("unfinished", executor="process")(lambda *arguments: later(*arguments))
app.job("small", executor="process", memory_mib=128)(act)
app.job("recycled", executor="process", recycle_after=2)(act)
app.job("plain*", executor="process")(act)
app.job("poison-*", executor="process", memory_mib=128)(act)


@app.job("greenlet")
def greenlet(message: Message, context: object) -> None:
    say("quick", message.body)
