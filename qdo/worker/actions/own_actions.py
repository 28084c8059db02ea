"""What operators can ask of a worker, done by the worker: see `qdo.fleet.action_machine`."""

from __future__ import annotations

import _thread
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import gevent

from qdo.fleet import actions as names
from qdo.fleet.action_machine import CANCEL, FAILED, Finish, Perform, Result, UnfitError
from qdo.fleet.audit_entries import Values
from qdo.settings.live import SettingsInForce
from qdo.system import logs
from qdo.system.native import original, signal, start_thread
from qdo.worker.actions.sampling import Samples, profile_result, sample
from qdo.worker.actions.stacks import all_stacks
from qdo.worker.drain import StopRequests
from qdo.worker.engine.cancellations import Cancellations, CannotCancelError
from qdo.worker.runs import Runs

_log = logging.getLogger(__name__)
_get_ident: Any = original("_thread", "get_ident", _thread.get_ident)

AskParent = Callable[[str], None]


class OwnActions:
    """The actions of one worker process.

    :param in_force: the settings that are in force now.
    :param ask_parent: asks the parent process for an action; None without a parent.
    :param runs: the messages in flight.
    :param cancellations: cancels messages of owned queues.
    """

    def __init__(
        self,
        stop: StopRequests,
        in_force: SettingsInForce,
        ask_parent: AskParent | None,
        runs: Runs,
        cancellations: Cancellations,
    ) -> None:
        self._cancellations = cancellations
        self._in_force = in_force
        self._stop = stop
        self._ask_parent = ask_parent
        self._runs = runs
        self._profiling = False
        self._restore_level: Callable[[], None] | None = None
        self._level_timer: Any = None

    def table(self) -> Mapping[str, Perform]:
        """Return how each action is done."""
        return MappingProxyType(
            {
                names.PING: _ping,
                names.STACKS: _stacks,
                names.RUNS: self._runs.perform,
                names.LOG_LEVEL: self._log_level,
                names.PROFILE: self._profile,
                CANCEL: self._cancel,
                names.DRAIN: self._drain,
                names.RESTART: partial(self._restart, names.RESTART, "restarting"),
                names.RELOAD: partial(
                    self._restart, names.RELOAD, "restarting all workers of the parent process"
                ),
            }
        )

    # --- processes ------------------------------------------------------------------------

    def _drain(self, args: Values, finish: Finish) -> Result:
        if self._ask_parent is not None:
            self._ask_parent(names.DRAIN)  # which sends SIGTERM, and starts no other process
        elif not self._stop.signals:  # a second one would abort the jobs
            self._stop.signal()
        return Result("draining")

    def _restart(self, action: str, text: str, args: Values, finish: Finish) -> Result:
        if self._ask_parent is None:
            raise UnfitError("this worker has no parent process that could start another one")
        self._ask_parent(action)
        return Result(text)

    # --- messages -------------------------------------------------------------------------

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
            found = {str(position): each.value for position, each in outcomes.items()}
            finish(Result(text, json.dumps(found)))

    # --- the log --------------------------------------------------------------------------

    def _log_level(self, args: Values, finish: Finish) -> Result:
        level, seconds = names.level_of(args), names.seconds_of(names.LOG_LEVEL, args)
        restore = logs.set_level(level)
        if self._restore_level is None:
            self._restore_level = restore  # a later change leads back to the same levels
        if self._level_timer is not None:
            self._level_timer.kill(block=False)
        self._level_timer = gevent.spawn_later(seconds, self._end_log_level)
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        return Result(f"{level} until {until}")

    def _end_log_level(self) -> None:
        restore, self._restore_level, self._level_timer = self._restore_level, None, None
        settings = self._in_force.now
        if not settings.log_config:
            logs.set_level(settings.log_level)  # live settings may have changed it meanwhile
        elif restore is not None:
            restore()
        _log.info("the log has its configured level again")

    # --- profiles -------------------------------------------------------------------------

    def _profile(self, args: Values, finish: Finish) -> None:
        seconds = names.seconds_of(names.PROFILE, args)
        if self._profiling:
            raise UnfitError("another profile of this worker is under way")
        self._profiling = True
        gevent.spawn(self._take_profile, seconds, finish)

    def _take_profile(self, seconds: float, finish: Finish) -> None:
        done, found = signal(), list[Samples]()

        def run() -> None:
            own = _get_ident()
            try:
                found.append(sample(seconds, own.__eq__))
            finally:
                done.set()

        try:
            start_thread(run)
            done.wait()
        finally:
            self._profiling = False
        if found:
            finish(profile_result(found[0], seconds))
        else:
            finish(Result("the thread that takes samples failed; see the log", outcome=FAILED))


def _ping(args: Values, finish: Finish) -> Result:
    return Result(f"pid {os.getpid()}")


def _stacks(args: Values, finish: Finish) -> Result:
    return Result(f"pid {os.getpid()}", all_stacks())
