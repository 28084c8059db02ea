"""The messages that are running now: for how long, and where their code stands."""

from __future__ import annotations

import heapq
import json
import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any

import gevent

import qdo
from qdo.fleet import action_arguments as names
from qdo.fleet.protocol.action_results import Finish, Result
from qdo.fleet.protocol.audit_entries import Values
from qdo.message import Message
from qdo.system.clock import clock
from qdo.worker.engine.slot import Slot
from qdo.worker.executors.thread import job_frames

MAX_FRAMES = 20
"""The innermost frames of a stack that are kept."""
_PACKAGES = ("site-packages", "dist-packages")
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_ENGINE = tuple(str(Path(module.__path__[0])) + os.sep for module in (qdo, gevent))

_Key = tuple[str, str, int]


class Runs:
    """Knows since when messages have been seen to run.

    A turn reads no clock for each message. So a message is known to have run since the look that
    saw it first; and it began after the look before, and after the start of its turn.

    :param in_flight: returns the slots with a message in flight.
    """

    def __init__(self, in_flight: Callable[[], Sequence[Slot]]) -> None:
        self._in_flight = in_flight
        self._since: dict[_Key, float] = {}
        self._looked = clock()

    def look(self) -> list[tuple[Slot, Message, float]]:
        """Return the messages in flight, with their seconds since the look that saw them first."""
        now, before = clock(), self._since
        self._looked = now
        running = [(slot, slot.message) for slot in self._in_flight() if slot.message is not None]
        self._since = {(key := _key(each)): before.get(key, now) for _, each in running}
        return [(slot, each, now - self._since[_key(each)]) for slot, each in running]

    def perform(self, args: Values, finish: Finish) -> Result:
        """Answer the action "runs"."""
        glob, most = names.runs_of(args)
        known, looked, now = self._since, self._looked, clock()
        runs = [
            (slot, each, seconds if _key(each) in known else now - max(looked, slot.started_at))
            for slot, each, seconds in self.look()
            if fnmatchcase(each.queue, glob)
        ]
        longest = heapq.nlargest(most, runs, key=lambda run: run[2])
        in_threads = job_frames()
        items = [_item(*run, _frame(*run[:2], in_threads)) for run in longest]
        return Result(f"{len(runs)} in flight", json.dumps({"total": len(runs), "runs": items}))


def _key(message: Message) -> _Key:
    return message.queue, message.id, message.attempt


def _item(slot: Slot, message: Message, seconds: float, frame: FrameType | None) -> dict[str, Any]:
    return {
        "queue": message.queue,
        "id": message.id,
        "attempt": message.attempt,
        "seconds": round(seconds, 1),
        "stack": _stack(frame),
    }


def _frame(slot: Slot, message: Message, in_threads: dict[int, FrameType]) -> FrameType | None:
    in_thread = in_threads.get(id(message))
    return in_thread if in_thread is not None else getattr(slot.greenlet, "gr_frame", None)


def _stack(frame: FrameType | None) -> list[str]:
    """Return the frames of the app and its libraries, the innermost one last."""
    found: list[str] = []
    for each, number in traceback.walk_stack(frame):
        code = each.f_code
        if _is_of_app(code.co_filename):
            found.insert(0, f"{code.co_filename}:{number} {code.co_name}")
        if len(found) == MAX_FRAMES:
            break
    return found


def _is_of_app(file: str) -> bool:
    """Return whether a file is neither Python's own nor one of the engine."""
    in_python = file.startswith(_PYTHON) and not any(name in file for name in _PACKAGES)
    return not in_python and not file.startswith((*_ENGINE, "<frozen"))
