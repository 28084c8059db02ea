"""One member of kazoo's SetPartitioner, with the commands of `bench.support.member_process`.

Used as ``python -m bench.peers.with_setpartitioner HOSTS PATH SIZE TIME_BOUNDARY``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from kazoo.client import KazooClient

from bench.peers import common as tally


class PartitionerCommands:
    """The commands. Each method returns the answer."""

    def __init__(self, hosts: str, path: str, size: int, time_boundary: float) -> None:
        self._client = KazooClient(hosts=hosts, timeout=10.0)
        self._path = path
        self._set = tuple(tally.set_member(number) for number in range(size))
        self._time_boundary = time_boundary
        self._events: list[tuple[int, str, str]] = []
        self._held: list[str] = []
        self._settled = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def join(self) -> dict[str, Any]:
        """Connect and join; return the start time and how to end the session."""
        began = time.monotonic_ns()
        self._client.start()
        self._thread.start()
        identity, password = self._client.client_id
        return {
            "began": began,
            "registered": time.monotonic_ns(),
            "name": str(os.getpid()),
            "session": identity,
            "password": password.hex(),
        }

    def state(self) -> dict[str, Any]:
        return {"held": len(self._held), "settled": self._settled, "leads": False}

    def leave(self) -> dict[str, Any]:
        """Release all queues, then end the session."""
        began = time.monotonic_ns()
        self._stopping.set()
        self._thread.join()
        ended = time.monotonic_ns()
        self._client.stop()
        return {"began": began, "released": True, "seconds": (ended - began) / 1e9}

    def events(self) -> dict[str, Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return {"events": events}

    def _run(self) -> None:
        """Run the loop that kazoo's documentation of the recipe prescribes."""
        party = self._client.SetPartitioner(
            self._path, self._set, time_boundary=self._time_boundary
        )
        while not self._stopping.is_set():
            if party.release:
                self._stop_all()
                party.release_set()
            elif party.acquired:
                self._take(list(party))
                # Watches set the state, but the recipe has no event to wait for, so poll it often.
                self._stopping.wait(0.002)
            elif party.allocating:
                party.wait_for_acquire()
            else:
                return
        self._stop_all()
        party.finish()

    def _take(self, names: list[str]) -> None:
        if not self._settled:
            now = time.monotonic_ns()
            self._events.extend((now, "claimed", name) for name in names)
            self._held = names
            self._settled = True

    def _stop_all(self) -> None:
        now = time.monotonic_ns()
        self._settled = False
        self._events.extend((now, "stopped", name) for name in self._held)
        self._held = []


def main(hosts: str, path: str, size: int, time_boundary: float) -> None:
    """Answer commands until standard input ends."""
    crewman = PartitionerCommands(hosts, path, size, time_boundary)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        answer = getattr(crewman, line.strip())()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
