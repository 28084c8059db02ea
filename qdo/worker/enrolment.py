"""The duty "registration": a worker process is registered, and when that is over, anew."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import gevent
from gevent.event import Event

from qdo.coordination.slots import Claim
from qdo.describe import describe
from qdo.errors import QdoError, UnreachableError
from qdo.policy import Policy, backoff
from qdo.worker.counters import Counters
from qdo.worker.dispatcher import Dispatcher
from qdo.worker.registrar import Enrolled, Registrar

_log = logging.getLogger(__name__)

REGISTER_POLICY = Policy(backoff_seconds=0.1, backoff_max_seconds=5.0)
"""Pauses between attempts to register again, for as long as it takes."""


class Ear:
    """Hears what one registration says; nothing of an older one reaches the newer.

    :ivar over: set when the registration is over for good.
    """

    def __init__(self, dispatcher: Dispatcher, counters: Counters) -> None:
        self.member: Enrolled | None = None
        self.over = Event()
        self._dispatcher = dispatcher
        self._counters = counters

    def _of(self) -> Enrolled:
        if self.member is None:
            raise RuntimeError("the member spoke before it was known")
        return self.member

    def claimed(self, claim: Claim) -> None:
        self._counters.claimed += 1
        self._dispatcher.claimed(self._of(), claim)

    def releasing(self, claim: Claim) -> None:
        self._counters.released += 1
        self._dispatcher.releasing(self._of(), claim)

    def lost(self, claim: Claim) -> None:
        self._counters.lost += 1
        self._dispatcher.lost(claim)

    def moved(self, old: Claim, new: Claim) -> None:
        self._dispatcher.moved(self._of(), old, new)

    def expired(self) -> None:
        self.over.set()


class Enrolment:
    """Keeps a worker process registered.

    :ivar member: the registration in force, None while there is none.
    :ivar refusal: why the first registration failed.
    :param describe_worker: gives what the component node says of a worker of this name.
    :param on_registered: called with each new registration.
    :param on_refusal: called when `refusal` was set.
    :param connect_seconds: how long one attempt may take.
    """

    def __init__(
        self,
        registrar: Registrar,
        dispatcher: Dispatcher,
        counters: Counters,
        describe_worker: Callable[[str], Mapping[str, Any]],
        on_registered: Callable[[Enrolled], None],
        on_refusal: Callable[[], None],
        connect_seconds: float,
    ) -> None:
        self.member: Enrolled | None = None
        self.refusal: QdoError | None = None
        self._registrar = registrar
        self._dispatcher = dispatcher
        self._counters = counters
        self._describe_worker = describe_worker
        self._on_registered = on_registered
        self._on_refusal = on_refusal
        self._connect_seconds = connect_seconds

    def run(self) -> None:
        """Register, and again whenever the session is gone, as a new worker.

        The first attempt may be refused; later ones are made for as long as it takes.
        """
        ear = self._hear()
        try:
            self._register(ear)
        except QdoError as error:
            self.refusal = error
            self._on_refusal()
            return
        while True:
            self._outlive(ear)
            ear = self._register_again()

    def close(self) -> None:
        """End the registration in force, if there is one."""
        member, self.member = self.member, None
        if member is not None:
            self._registrar.close(member)
            _log.info("step 5: %s has left, its session is closed", member.name)

    def _hear(self) -> Ear:
        return Ear(self._dispatcher, self._counters)

    def _register(self, ear: Ear) -> None:
        member = self._registrar.make(ear, self._describe_worker(""))
        ear.member = member
        try:
            member.start(self._connect_seconds)
        except BaseException:
            self._registrar.close(member)
            raise
        self.member = member
        self._on_registered(member)

    def _register_again(self) -> Ear:
        attempt = 0
        while True:
            attempt += 1
            ear = self._hear()
            try:
                self._register(ear)
                return ear
            except UnreachableError as error:
                pause = backoff(attempt, REGISTER_POLICY, random.random())
                _log.warning("%s; trying again in %.1f s", describe(error), pause)
                gevent.sleep(pause)

    def _outlive(self, ear: Ear) -> None:
        """Wait for the end of the registration in force, and leave its session."""
        ear.over.wait()
        member, self.member = ear.member, None
        if member is None:
            return
        self._registrar.close(member)
        if member.failure is not None:
            raise RuntimeError(f"the coordination of {member.name} failed") from member.failure
        _log.warning(
            "%s: its session is over and its queues are lost: registering as a new worker",
            member.name,
        )
