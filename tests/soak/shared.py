"""What the processes of a soak share beside queues: a limit, a lock, and sections."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import qdo
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import QdoError
from qdo.fleet.hold_node import HoldNode
from qdo.fleet.limit_node import LimitNode
from qdo.fleet.limits import LimitWish, set_limit
from tests.soak.app import HELD, LIMIT, LOCK, MOST_AT_ONCE

SECTION_TIMEOUT_SECONDS = 10.0
"""Longer than any message that blocks, and than the session of a frozen process."""
_LAYOUT = Layout.of("soak")


class SharedParts:
    """Makes the limit; holds sections from `hold_sections` to `end`.

    :ivar sections: begin and end of each section on `time.monotonic`.
    :ivar not_held: how many sections did not begin or were lost.
    """

    def __init__(self, coordinator: str, seed: int) -> None:
        self.sections: list[tuple[float, float]] = []
        self.not_held = 0
        self._random = random.Random(seed)
        self._client = connect(coordinator, handler="threading")
        self._client.open(10.0)
        set_limit(self._client, _LAYOUT, LIMIT, LimitWish(max=str(MOST_AT_ONCE)))
        self._app = qdo.App("soak", coordinator=coordinator)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def hold_sections(self) -> None:
        """Begin to hold sections."""
        self._thread.start()

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

    def end(self) -> None:
        """Hold no further section."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def left_behind(self) -> Iterator[str]:
        """Return what nobody needs once all workers have ended; call this after `end`."""
        self._app.close()
        fleet = _LAYOUT.fleet
        if self._client.exists(fleet.lock(LOCK)):
            for name in self._client.get_children(fleet.lock(LOCK)):
                yield f"left: contender {name} of the lock"
        if self._client.exists(fleet.holds):
            for hold in HoldNode.parse(self._client.get(fleet.holds)[0]).holds:
                yield f"left: {hold}"
        for kind in self._client.get_children(_LAYOUT.components):
            for name in self._client.get_children(f"{_LAYOUT.components}/{kind}"):
                yield f"left: component {kind}/{name}"
        node = LimitNode.parse(self._client.get(fleet.limit(LIMIT))[0])
        if node.max != MOST_AT_ONCE:
            yield f"left: {node}"

    def close(self) -> None:
        """End everything."""
        self.end()
        self._app.close()
        self._client.stop()
        self._client.close()
