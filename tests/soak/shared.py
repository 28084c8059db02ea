"""What the processes of a soak share beside queues: a limit, a lock, sections, settings."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import qdo
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.fleet.audit import AuditTrail
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.limits import LimitWish, set_limit
from qdo.fleet.live_settings import change_settings, read_answers, read_settings, wait_in_use
from qdo.fleet.pause_machine import PauseNode
from tests.soak.app import HELD, LIMIT, LOCK, MOST_AT_ONCE

SECTION_TIMEOUT_SECONDS = 10.0
"""Longer than any message that blocks, and than the session of a frozen process."""
SETTINGS_TIMEOUT_SECONDS = 2.0
IN_USE_SECONDS = 30.0
LAYOUT = Layout.of("soak")
SOAK_ROOT = LAYOUT.root


class SharedParts:
    """Makes the limit; holds sections and changes settings from `begin` to `end`.

    :ivar sections: begin and end of each section on `time.monotonic`.
    :ivar not_held: how many sections did not begin or were lost.
    :ivar flips: how many times live settings came into force.
    :ivar not_flipped: how many changes of settings were given up.
    """

    def __init__(self, coordinator: str, seed: int) -> None:
        self.sections: list[tuple[float, float]] = []
        self.not_held = 0
        self._random = random.Random(seed)
        self.client = connect(coordinator, handler="threading")
        self.client.open(10.0)
        set_limit(self.client, LAYOUT, LIMIT, LimitWish(max=str(MOST_AT_ONCE)))
        self._settings_client = connect(coordinator, handler="threading")
        self._settings_client.open(10.0)
        self.flips = self.not_flipped = 0
        self._app = qdo.App("soak", coordinator=coordinator)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._hold, self._flip)]

    def begin(self) -> None:
        """Begin to hold sections and to change settings."""
        for thread in self._threads:
            thread.start()

    def _hold(self) -> None:
        while not self._over.wait(self._random.uniform(0.5, 3.0)):
            try:
                with self._app.exclusive(HELD, timeout_seconds=SECTION_TIMEOUT_SECONDS) as section:
                    began = time.monotonic()
                    self._over.wait(self._random.uniform(0.1, 0.8))
                    ended = time.monotonic()
                    section.check()
                    self.sections.append((began, ended))
            except QdoError:  # a frozen coordinator, or messages that block for ever
                self.not_held += 1

    def _flip(self) -> None:
        trail = AuditTrail(self._settings_client, LAYOUT, "soak")
        while not self._over.wait(self._random.uniform(0.2, 2.0)):
            text = f"fetch = {self._random.randint(10, 2000)}\n"
            try:
                change_settings(
                    self._settings_client,
                    LAYOUT,
                    lambda node, text=text: text,  # type: ignore[misc]
                    trail,
                    timeout_seconds=SETTINGS_TIMEOUT_SECONDS,
                )
                self.flips += 1
            except QdoError:  # a frozen worker or coordinator
                self.not_flipped += 1

    def end(self) -> None:
        """Hold no further section, and change no settings."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def settings_not_in_use(self) -> Iterator[str]:
        """Return the workers that do not use the settings in force, while all are well."""
        number = read_settings(self.client, LAYOUT).number
        workers = [each.worker for each in read_answers(self.client, LAYOUT)]
        for worker in wait_in_use(self.client, LAYOUT, number, workers, IN_USE_SECONDS):
            yield f"settings: {worker} does not use version {number}"

    def left_behind(self) -> Iterator[str]:
        """Return what nobody needs once all workers have ended; call this after `end`."""
        self._app.close()
        fleet = LAYOUT.fleet
        if self.client.exists(fleet.lock(LOCK)):
            for name in self.client.get_children(fleet.lock(LOCK)):
                yield f"left: contender {name} of the lock"
        if self.client.exists(fleet.holds):
            for pause in PauseNode.parse(self.client.get(fleet.holds)[0]).pauses:
                yield f"left: {pause}"
        for kind in self.client.get_children(LAYOUT.components):
            for name in self.client.get_children(f"{LAYOUT.components}/{kind}"):
                yield f"left: component {kind}/{name}"
        node = LimitNode.parse(self.client.get(fleet.limit(LIMIT))[0])
        if node.max != MOST_AT_ONCE:
            yield f"left: {node}"

    def close(self) -> None:
        """End everything."""
        self.end()
        self._app.close()
        for client in (self.client, self._settings_client):
            client.stop()
            client.close()
