"""The app of a soak: its jobs write each start and end of a run to one journal.

A line is one write to a file opened for appending, so the lines of all processes are in order:
``S|E queue number fence attempt pid time``, or ``X`` instead of ``E`` for an attempt that raised.
``L`` has the fence of a lock that the run holds.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import qdo

SERIAL = (*(f"ops-{number}" for number in range(5)), "opsblock-0", "opsblock-1", "opsbatch-0")
KEYED = ("opskey-0", "opskey-1")
KEPT = (*SERIAL, *KEYED)
DELETED = ("gone-0", "gone-1")
CREW_QUEUES = (*KEPT, *DELETED)
"""The queues that operators change."""
TIMEOUT_SECONDS = 2.0
"""Session timeout: messages of kind "block" block for up to 1.5 of it."""
BLOCK_ATTEMPTS = 4
"""Attempts of a message in the queues whose messages may block for ever."""

LIMIT, MOST_AT_ONCE = "crm", 3
"""A limit of the queues for it, and how many runs it allows at once."""
LOCK = "export"
HELD = "plain-1*"
"""The queues of sections."""
STUCK = 0.7
"""Share of the attempts of a stuck message that fail."""

app = qdo.App("soak", session_timeout_seconds=TIMEOUT_SECONDS, checkpoint_seconds=0.1)
_path = os.environ.get("SOAK_JOURNAL", os.devnull)
_journal = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_patient = qdo.Policy(attempts=100_000, backoff_seconds=0.02, backoff_max_seconds=0.1)
_strict = qdo.Policy(attempts=BLOCK_ATTEMPTS, backoff_seconds=0.02, backoff_max_seconds=0.1)
_two = {"attempts": 2, "backoff_seconds": 0.02, "backoff_max_seconds": 0.1}
_letters, _blocks = qdo.Policy(**_two), qdo.Policy(**_two, then="block")


def _note(kind: str, message: qdo.Message, fence: int = 0) -> None:
    fence = fence or message.fence
    run = f"{message.queue} {message.body['n']} {fence} {message.attempt} {os.getpid()}"
    os.write(_journal, f"{kind} {run} {time.monotonic()}\n".encode())


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _act(message: qdo.Message) -> None:
    kind, seconds = message.body["kind"], message.body["seconds"]
    first = message.attempt == 1
    if kind == "wait":
        time.sleep(seconds)
    elif kind == "block":
        _spin(seconds)
    elif kind == "endless":
        _spin(3600)
    elif kind == "fail" and first:
        raise ValueError("it fails once")
    elif kind == "die" and first:
        os._exit(1)
    elif kind == "stuck" and random.random() < STUCK:
        raise ValueError("an operator decides")


@app.job("lock-*", policy=_patient)
def locked_job(message: qdo.Message, context: Any) -> None:
    """Do what the message says while it holds a lock."""
    _note("S", message)
    try:
        with app.lock(LOCK) as held:
            held.check()
            _note("L", message, held.fence)
            _act(message)
    except BaseException:
        _note("X", message)
        raise
    _note("E", message)


@app.job("opsbatch-*", policy=_letters, batch=4)
def batch_job(batch: qdo.Batch, context: Any) -> None:
    """Do what each message says."""
    for index, message in enumerate(batch):
        try:
            job(message, context)
        except Exception as error:
            raise qdo.FailedAt(index) from error


@app.job("opsblock-*", policy=_blocks)
@app.job("opskey-*", policy=_letters, order="key")
@app.job("gone-*", policy=_letters)
@app.job("ops-*", policy=_letters)
@app.job("limit-*", policy=_patient, limits=[LIMIT])
@app.job(policy=_patient)
@app.job("thread-*", policy=_patient, executor="thread")
@app.job("key-*", policy=_patient, order="key")
@app.job("block-*", policy=_strict, timeout_seconds=1)
def job(message: qdo.Message, context: Any) -> None:
    """Do what the message says."""
    _note("S", message)
    try:
        _act(message)
    except BaseException:
        _note("X", message)
        raise
    _note("E", message)
