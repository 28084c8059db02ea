"""Perform the actions that operators request from a worker, see `qdo.fleet.action_machine`."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import gevent

from qdo.fleet import actions as names
from qdo.fleet.action_machine import CANCEL, FAILED, Finish, Perform, Result, UnfitError
from qdo.fleet.audit_entries import Values
from qdo.settings.live import SettingsInForce
from qdo.system import logs
from qdo.worker.drain import StopSignals
from qdo.worker.engine.cancellations import Cancellations, CannotCancelError
from qdo.worker.engine.pipeline import running_in
from qdo.worker.runs import Runs

_log = logging.getLogger(__name__)

# Maximum number of frames to show of a stack, counted from the innermost frame.
MAX_FRAMES = 60
# The class `greenlet.greenlet`. Callbacks of gevent's hub are not `gevent.Greenlet` objects.
_GREENLET: Any = gevent.Greenlet.__mro__[-2]

_Key = tuple[str, tuple[tuple[str, int, str], ...]]


class OwnActions:
    def __init__(
        self,
        stop: StopSignals,
        in_force: SettingsInForce,
        ask_parent: Callable[[str], None] | None,
        runs: Runs,
        cancellations: Cancellations,
    ) -> None:
        self._cancellations = cancellations
        self._in_force = in_force
        self._stop = stop
        self._ask_parent = ask_parent
        self._runs = runs
        self._restore_level: Callable[[], None] | None = None
        self._level_timer: Any = None

    def table(self) -> Mapping[str, Perform]:
        return MappingProxyType(
            {
                names.PING: _ping,
                names.STACKS: _stacks,
                names.RUNS: self._runs.perform,
                names.LOG_LEVEL: self._log_level,
                CANCEL: self._cancel,
                names.DRAIN: self._drain,
                names.RESTART: partial(self._restart, names.RESTART, "restarting"),
                names.RELOAD: partial(
                    self._restart, names.RELOAD, "restarting all workers of the parent process"
                ),
            }
        )

    def _drain(self, args: Values, finish: Finish) -> Result:
        if self._ask_parent is not None:
            self._ask_parent(names.DRAIN)  # the parent sends SIGTERM and starts no replacement
        elif not self._stop.signals:  # a second signal would abort the jobs
            self._stop.signal()
        return Result("draining")

    def _restart(self, action: str, text: str, args: Values, finish: Finish) -> Result:
        if self._ask_parent is None:
            raise UnfitError("this worker has no parent process that could start another one")
        self._ask_parent(action)
        return Result(text)

    def _cancel(self, args: Values, finish: Finish) -> None:
        queue, positions = names.cancelled_in(args)
        gevent.spawn(self._cancel_and_record, queue, positions, finish)

    def _cancel_and_record(self, queue: str, positions: Sequence[int], finish: Finish) -> None:
        try:
            outcomes = self._cancellations.cancel(queue, positions)
        except CannotCancelError as error:
            finish(Result(str(error), outcome=FAILED))
        else:
            counts = Counter(each.value for each in outcomes.values())
            text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            by_position = {str(position): each.value for position, each in outcomes.items()}
            finish(Result(text, json.dumps(by_position)))

    def _log_level(self, args: Values, finish: Finish) -> Result:
        level = names.level_of(args)
        seconds = names.seconds_of(args)
        restore = logs.set_level(level)
        if self._restore_level is None:
            self._restore_level = restore  # a later change restores the same levels
        if self._level_timer is not None:
            self._level_timer.kill(block=False)
        self._level_timer = gevent.spawn_later(seconds, self._end_log_level)
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        return Result(f"{level} until {until}")

    def _end_log_level(self) -> None:
        restore = self._restore_level
        self._restore_level = None
        self._level_timer = None
        settings = self._in_force.now
        if not settings.log_config:
            logs.set_level(settings.log_level)  # live settings may have changed the level
        elif restore is not None:
            restore()
        _log.info("the log has its configured level again")


def _ping(args: Values, finish: Finish) -> Result:
    return Result(f"pid {os.getpid()}")


def _stacks(args: Values, finish: Finish) -> Result:
    return Result(f"pid {os.getpid()}", all_stacks())


def all_stacks() -> str:
    """Return the stacks of this process, with running jobs first and equal stacks merged."""
    # Omit the values of variables, which may be bodies of messages.
    counts = Counter(_key(what, frame) for what, frame in _frames())
    order = sorted(counts, key=lambda key: (not key[0].startswith("job"), -counts[key], key))
    return "\n".join(_shown(key, counts[key]) for key in order)


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the stacks of all threads and waiting greenlets, except the calling greenlet."""
    own = sys._getframe()
    names = {each.ident: each.name for each in threading.enumerate()}
    current = threading.get_ident()
    for ident, frame in sys._current_frames().items():
        if not _contains(frame, own):
            name = "main" if ident == current else names.get(ident, str(ident))
            yield f"thread {name}", frame
    for found in gc.get_objects():
        if issubclass(
            type(found), _GREENLET
        ):  # `isinstance` trusts `__class__` of the object, which may lie
            frame = found.gr_frame
            if frame is not None and not _contains(frame, own):
                yield "greenlet", frame


def _contains(frame: FrameType | None, wanted: FrameType) -> bool:
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def _key(what: str, frame: FrameType) -> _Key:
    running = running_in(frame)
    if running is not None:
        message = running.message
        what = f"job {running.job.name}, queue {message.queue}, message {message.id}, in a {what}"
    lines: list[tuple[str, int, str]] = []
    for each, number in traceback.walk_stack(frame):
        code = each.f_code
        lines.append((code.co_filename, number, code.co_name))
        if len(lines) == MAX_FRAMES:
            break
    return what, tuple(reversed(lines))


def _shown(key: _Key, count: int) -> str:
    what, lines = key
    times = "" if count == 1 else f" ({count} with this stack)"
    stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(file, number, name) for file, number, name in lines]
    )
    return f"{what}{times}\n{''.join(stack.format())}"
