"""Report the run times and the stacks of running messages."""

from __future__ import annotations

import heapq
import json
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any

import gevent

import qdo
from qdo.fleet import actions as names
from qdo.fleet.action_machine import Finish, Result
from qdo.fleet.audit_entries import Values
from qdo.fleet.names import exactly
from qdo.message import Message
from qdo.queues import command_text
from qdo.system.clock import clock
from qdo.text import fine_duration, short_duration
from qdo.worker.engine.durations import Durations
from qdo.worker.engine.slot import Slot, where
from qdo.worker.executors.thread import job_frames

_log = logging.getLogger(__name__)

# Maximum number of frames to keep of a stack, counted from the innermost frame.
MAX_FRAMES = 20
_PACKAGES = ("site-packages", "dist-packages")
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_ENGINE = tuple(str(Path(module.__path__[0])) + os.sep for module in (qdo, gevent))

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class MessageRun:
    """A message in flight. `seconds` count from the first look that saw the message."""

    slot: Slot
    message: Message
    seconds: float

    @property
    def key(self) -> _Key:
        return _key(self.message)

    @property
    def durations(self) -> Durations:
        return self.slot.durations

    @property
    def is_unusual(self) -> bool:
        """Whether the message has run for much longer than usual."""
        return self.durations.are_exceeded(self.seconds)


class Runs:
    """Records the run times of messages, and logs long runs."""

    # A turn does not read the clock for each message. A message has run at least since the first
    # look that saw the message. The message began after the previous look and after the start of
    # its turn.
    def __init__(self, in_flight: Callable[[], Sequence[Slot]]) -> None:
        self._in_flight = in_flight
        self._since: dict[_Key, float] = {}
        self._looked = clock()
        self._named: set[_Key] = set()

    def look(self) -> list[MessageRun]:
        """Return the messages in flight."""
        now = clock()
        before = self._since
        self._looked = now
        running = [(slot, slot.message) for slot in self._in_flight() if slot.message is not None]
        self._since = {(key := _key(each)): before.get(key, now) for _, each in running}
        return [MessageRun(slot, each, now - self._since[_key(each)]) for slot, each in running]

    def name_long(self) -> None:
        """Log once each message that runs for much longer than its queue's messages usually do."""
        runs = self.look()
        self._named &= self._since.keys()
        new = [each for each in runs if each.is_unusual and each.key not in self._named]
        in_threads = job_frames() if new else {}
        for each in new:
            self._named.add(each.key)
            stack = _stack(_frame(each, in_threads))
            _log.warning(
                "%s: message %s, attempt %d, has run for %s; messages of its queue usually take"
                " %s at most; %s. `%s` shows its stack",
                where(each.slot),
                each.message.id,
                each.message.attempt,
                short_duration(each.seconds),
                fine_duration(each.durations.usual_seconds),
                f"it stands at {stack[-1]}"
                if stack
                else "its executor does not tell where it stands",
                command_text("ps", exactly(each.message.queue), options="--stacks"),
            )

    def perform(self, args: Values, finish: Finish) -> Result:
        """Perform the action "runs"."""
        glob, most = names.runs_of(args)
        since = self._since
        looked = self._looked
        now = clock()
        runs = [
            each
            if each.key in since
            else replace(each, seconds=now - max(looked, each.slot.started_at))
            for each in self.look()
            if fnmatchcase(each.message.queue, glob)
        ]
        longest = heapq.nlargest(most, runs, key=lambda run: run.seconds)
        in_threads = job_frames()
        items = [_item(run, _frame(run, in_threads)) for run in longest]
        return Result(f"{len(runs)} in flight", json.dumps({"total": len(runs), "runs": items}))


def _key(message: Message) -> _Key:
    return message.queue, message.id, message.attempt


def _item(run: MessageRun, frame: FrameType | None) -> dict[str, Any]:
    message = run.message
    return {
        "queue": message.queue,
        "id": message.id,
        "position": str(message.position),
        "attempt": message.attempt,
        "seconds": round(run.seconds, 1),
        "stack": _stack(frame),
    }


def _frame(run: MessageRun, in_threads: dict[int, FrameType]) -> FrameType | None:
    in_thread = in_threads.get(id(run.message))
    return in_thread if in_thread is not None else getattr(run.slot.greenlet, "gr_frame", None)


def _stack(frame: FrameType | None) -> list[str]:
    """Return the frames of the app and its libraries, with the innermost frame last."""
    found: list[str] = []
    for each, number in traceback.walk_stack(frame):
        code = each.f_code
        if _is_of_app(code.co_filename):
            found.insert(0, f"{code.co_filename}:{number} {code.co_name}")
        if len(found) == MAX_FRAMES:
            break
    return found


def _is_of_app(file: str) -> bool:
    in_python = file.startswith(_PYTHON) and not any(name in file for name in _PACKAGES)
    return not in_python and not file.startswith((*_ENGINE, "<frozen"))
