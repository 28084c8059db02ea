"""A program with a worker in a thread, whose first message ignores the request to stop."""

from __future__ import annotations

import ctypes
import fcntl
import sys
import threading
import time
from pathlib import Path

import qdo
from qdo import Message
from tests.apps.busy import say

app = qdo.App("desk", executor="thread")


@app.job()
def alone(message: Message, context: object) -> None:
    with open("lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("twice", message.queue)
        say("begin", message.queue)
        if file.tell() == 0:  # the first run
            file.write("begun")
            file.flush()
            # Only a call of C tells that Python cannot interrupt it anymore.
            ctypes.CDLL(None).system(f"touch inside; sleep {message.body}".encode())


def main() -> int:
    """Stop the worker during its first message; return its exit code after the second run."""
    codes: list[int] = []
    worker = qdo.Worker(app, drain_seconds=0.0, session_timeout_seconds=1.0)
    thread = threading.Thread(target=lambda: codes.append(worker.run()))
    thread.start()
    while not Path("inside").exists():
        time.sleep(0.01)
    worker.request_stop()
    thread.join()
    while Path("said").read_text().count("begin") < 2:
        time.sleep(0.01)
    return codes[0]


if __name__ == "__main__":
    sys.exit(main())
