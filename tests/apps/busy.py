"""Jobs that compute, wait or send on each executor."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time

import qdo
from qdo import Message

app = qdo.App("desk")


def say(*words: object) -> None:
    with open("said", "a") as file:
        file.write(" ".join(str(word) for word in words) + "\n")


def held(message: Message) -> None:
    say("begin", message.queue, message.body, os.getpid())
    end = time.monotonic() + message.body
    if message.headers.get("how") == "c":
        ctypes.CDLL(None).usleep(int(message.body * 1e6))
    while time.monotonic() < end:
        pass
    say("end", message.queue, message.body, os.getpid())


@app.job("thread", executor="thread")
def in_thread(message: Message, context: object) -> None:
    held(message)


@app.job("process*", executor="process")
def in_process(message: Message, context: object) -> None:
    held(message)


@app.job("waits", executor="thread")
def waits(message: Message, context: object) -> None:
    time.sleep(0.01)
    app.send("echo", message.body)


@app.job("hangs", executor="thread", timeout_seconds=0.2)
def hangs(message: Message, context: object) -> None:
    time.sleep(60)


@app.job("mixed-*", executor="thread", timeout_seconds=0.3)
def mixed(message: Message, context: object) -> None:
    if message.body == "compute":
        while True:
            pass
    while True:
        time.sleep(0.001 * message.body)


@app.job("async", timeout_seconds=5)
async def on_loop(message: Message, context: object) -> None:
    await asyncio.sleep(0.01)
    await asyncio.to_thread(time.sleep, 0.01)
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)
    app.send("echo", message.body)


@app.job("sends", executor="process")
def sends(message: Message, context: object) -> None:
    time.sleep(0.01)
    app.send("echo", message.body)


@app.job("argv", executor="process")
def argv(message: Message, context: object) -> None:
    say("argv", *sys.argv[1:], len(sys.argv))
    time.sleep(message.body)


@app.job("echo")
def echo(message: Message, context: object) -> None:
    say("echo", message.body)


@app.job("quick")
def quick(message: Message, context: object) -> None:
    say("quick", message.body, time.time())
