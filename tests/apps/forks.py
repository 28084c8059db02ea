"""Jobs that fork, in a process that forks slowly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import gevent

import qdo
from qdo import Message

app = qdo.App("desk")


def write(name: str, **values: object) -> None:
    with open("out", "a") as file:
        file.write(json.dumps({"name": name, "pid": os.getpid(), **values}) + os.linesep)


@app.job("waiting-*")
def wait(message: Message, context: object) -> None:
    gevent.sleep(0.05 * message.body)
    write("ran", queue=message.queue, body=message.body)


@app.job("copies-*")
def copy(message: Message, context: object) -> None:
    """As a library does that forks and goes on in Python, and one that starts a program."""
    subprocess.run([sys.executable, "-c", ""], check=True)
    pid = os.fork()
    if pid == 0:
        for _ in range(10):
            gevent.sleep(0.02)
        write("copy", queue=message.queue, body=message.body)
        os._exit(0)
    os.waitpid(pid, 0)
    write("ran", queue=message.queue, body=message.body)


def terminated(message: Message) -> None:
    # As a pool of the standard library does with its processes.
    pid = os.fork()
    if pid == 0:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            open(f"child-{message.queue}", "w").close()
        time.sleep(20)
        os._exit(0)
    while not os.path.exists(f"child-{message.queue}"):
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    write("ran", queue=message.queue, body=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@app.job("signals-process-*", executor="process")
def signals_in_process(message: Message, context: object) -> None:
    terminated(message)


@app.job("signals-*")
def signals(message: Message, context: object) -> None:
    terminated(message)


@app.job("process", executor="process")
def in_process(message: Message, context: object) -> None:
    write("ran", queue=message.queue, body=message.body)


def linger() -> None:
    """As a lock does that is taken: others run meanwhile."""
    for _ in range(10):
        gevent.sleep(0.01)


os.register_at_fork(after_in_child=linger)
