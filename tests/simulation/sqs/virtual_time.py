"""Virtual time for greenlets: it passes only when none of them can run."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import gevent
from gevent.event import Event

MOST_STEPS = 20_000
"""Greenlets that start or resume at one moment; more than this is an endless loop."""


class Spinning(AssertionError):
    """Something is done over and over again, and no time passes."""


class Life:
    """One process. While it is stopped, none of its greenlets runs; once dead, none ever does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.dead = False
        self.missed: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<Life {self.name}>"


class Alarm:
    """Something that is to happen at a time."""

    def __init__(self, call: Callable[[], object], life: Life | None) -> None:
        self._call: Callable[[], object] | None = call
        self._life = life

    def kill(self, block: bool = False) -> None:
        self._call = None

    def ring(self) -> None:
        call = self._call
        if call is None or (self._life is not None and self._life.dead):
            return
        if self._life is not None and self._life.stopped:
            self._life.missed.append(self.ring)
            return
        self._call = None
        call()


class Moments:
    """Replaces the module `gevent` in the code that it runs, and a clock.

    :ivar now: seconds.
    """

    getcurrent = staticmethod(gevent.getcurrent)

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, Alarm]] = []
        self._order = count()
        self._steps = 0
        self.spins = False
        self._greenlets: set[Any] = set()
        self._callbacks = gevent.get_hub().loop._callbacks
        self._driver = gevent.getcurrent()

    def clock(self) -> float:
        return self.now

    # --- as gevent does it --------------------------------------------------------------

    def spawn(self, call: Callable[..., object], *args: object) -> Any:
        return self.spawn_in(_life(), call, *args)

    def spawn_in(self, life: Life | None, call: Callable[..., object], *args: object) -> Any:
        self._step()
        greenlet = gevent.Greenlet(call, *args)
        greenlet.life = life
        self._greenlets.add(greenlet)
        greenlet.rawlink(self._greenlets.discard)
        greenlet.start()
        return greenlet

    def spawn_later(self, seconds: float, call: Callable[..., object]) -> Alarm:
        life = _life()
        return self.later(seconds, lambda: self.spawn_in(life, call), life)

    def sleep(self, seconds: float = 0.0) -> None:
        if seconds <= 0:
            self._step()
            gevent.sleep(0)
            return
        woken = Event()
        alarm = self.later(seconds, woken.set, _life())
        try:
            woken.wait()
        finally:
            alarm.kill()

    def event(self) -> MomentEvent:
        return MomentEvent(self)

    # --- time ---------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[[], object], life: Life | None) -> Alarm:
        self._step()
        alarm = Alarm(call, life)
        at = self.now + max(0.0, seconds)
        heapq.heappush(self._due, (at, next(self._order), alarm))
        return alarm

    def pass_until(self, until: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; return whether `over` came true."""
        while True:
            self._settle()
            if over():
                return True
            if not self._due or self._due[0][0] > until:
                self.now = max(self.now, until)
                return False
            at, _, alarm = heapq.heappop(self._due)
            if at > self.now:
                self.now = at
                self._steps = 0
            alarm.ring()

    def resume(self, life: Life) -> None:
        life.stopped = False
        missed, life.missed = life.missed, []
        for call in missed:
            call()

    def end(self, life: Life) -> None:
        """End a process as SIGKILL does: none of its code runs, not even its `finally` blocks."""
        life.dead = True
        life.missed.clear()

    def drop(self) -> None:
        """End all greenlets, which are no longer needed."""
        while left := [each for each in self._greenlets if not each.dead]:
            # More than once: the engine takes the end of a job for a failure, and continues.
            gevent.killall(left, block=False)
            gevent.sleep(0)
            gevent.sleep(0)

    def _settle(self) -> None:
        """Let greenlets run until all of them wait."""
        gevent.sleep(0)
        while self._callbacks and not self.spins:
            gevent.sleep(0)
        if self.spins:
            raise Spinning(f"{MOST_STEPS} steps at one moment")

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS and gevent.getcurrent() is not self._driver:
            self.spins = True
            Event().wait()  # the driver raises it: here it would be taken for anything else


class MomentEvent(Event):
    """An event whose timeouts pass in virtual time."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self._moments = moments

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or self.is_set():
            return bool(super().wait())
        woken = Event()

        def wake(_: object = None) -> None:
            woken.set()

        self.rawlink(wake)
        alarm = self._moments.later(timeout, wake, _life())
        try:
            woken.wait()
        finally:
            alarm.kill()
            self.unlink(wake)
        return bool(self.is_set())


def _life() -> Life | None:
    return getattr(gevent.getcurrent(), "life", None)
