"""Jobs in processes that leave processes of their own behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import qdo
from qdo import Message

app = qdo.App("desk")
ENDS = qdo.Policy(attempts=3, backoff_seconds=0.01, backoff_max_seconds=0.01)
SLEEP = ["sh", "-c", "echo $$; exec sleep 600"]
# A daemon: a session of its own, and init would be its parent. It starts another program.
DAEMON = [
    "setsid",
    "--fork",
    "bash",
    "-c",
    "(echo $BASHPID; sh -c 'echo $$; exec sleep 600'; true) &",
]


def say(*words: object) -> None:
    with open("said", "a") as file:
        file.write(" ".join(str(word) for word in words) + "\n")


def leave_programs() -> None:
    with open("left", "a") as left:
        subprocess.Popen(SLEEP, stdout=left)
        subprocess.Popen(SLEEP, stdout=left, start_new_session=True)
        subprocess.run(DAEMON, stdout=left, check=True)
    before = [line for line in Path("said").read_text().splitlines() if line.startswith("left")]
    while len(Path("left").read_text().split()) < 4 * (1 + len(before)):
        time.sleep(0.01)
    say("left", os.getpid())


@app.job("late", executor="process", timeout_seconds=2, policy=ENDS)
def late(message: Message, context: object) -> None:
    leave_programs()
    time.sleep(600)


@app.job("crashes", executor="process", policy=ENDS)
def crashes(message: Message, context: object) -> None:
    leave_programs()
    ctypes.string_at(0) if message.body == "signal" else os._exit(3)


@app.job("recycled", executor="process", recycle_after=1)
def recycled(message: Message, context: object) -> None:
    leave_programs()


@app.job("plain", executor="process")
def plain(message: Message, context: object) -> None:
    leave_programs()
    time.sleep(message.body)


@app.job("forks", executor="process", timeout_seconds=1, policy=ENDS)
def forks(message: Message, context: object) -> None:
    # Each copy goes on forking, until the machine or the deadline stops them.
    say("left", os.getpid())
    for _ in range(6):
        os.fork()
    with open("left", "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


@app.job("memory", executor="process", memory_mib=256, policy=qdo.Policy(attempts=1))
def memory(message: Message, context: object) -> None:
    # Two programs of 150 MiB each, or 150 MiB that four copies share.
    use = "m = bytearray(150 << 20); print(1, flush=True); import time; time.sleep(600)"
    if message.body == "apart":
        for _ in range(2):
            subprocess.Popen([sys.executable, "-c", use], start_new_session=True)
        time.sleep(600)
    kept = b"x" * (150 << 20)
    for _ in range(4):
        if os.fork() == 0:
            sum(kept[::4096])
            time.sleep(600)
    time.sleep(1.0)
    say("done", message.body)
