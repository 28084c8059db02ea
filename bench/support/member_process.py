"""A process with one member of the coordination and no jobs, controlled by commands.

It reads one command per line and answers each with a line of JSON. Times are CLOCK_MONOTONIC
nanoseconds. Used as ``python -m bench.support.member_process URL APP``; see `main`.
"""

# ruff: noqa: E402 - everything else must be imported after the patching, as in a worker

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import json
import os
import socket
import sys
import time
from typing import Any

from gevent.fileobject import FileObject

from bench.support.access import access_of
from qdo.coordination.client import connect
from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.znodes.layout import Layout

SESSION_TIMEOUT_SECONDS = 10.0


class ClaimJournal:
    """Accepts every claim, releases it immediately when requested, and records the times."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, str]] = []
        self.claims: dict[str, Claim] = {}
        self.member: Member | None = None

    def claimed(self, claim: Claim) -> None:
        self.events.append((time.monotonic_ns(), "claimed", claim.queue))
        self.claims[claim.queue] = claim

    def releasing(self, claim: Claim) -> None:
        self.lost(claim)
        if self.member is not None:
            self.member.finished(claim)

    def released(self, claim: Claim) -> None:
        """Do nothing: `releasing` is the last event of interest."""

    def undone(self, claim: Claim) -> None:
        """Do nothing: a release follows."""

    def lost(self, claim: Claim) -> None:
        self.events.append((time.monotonic_ns(), "stopped", claim.queue))
        self.claims.pop(claim.queue, None)

    def decided(self, claim: Claim, decisions: object) -> bool:
        return False

    def repositioned(self, old: Claim, new: Claim) -> None:
        self.claims[new.queue] = new

    def expired(self) -> None:
        """Do nothing: the journal contains the lost queues."""


class MemberCommands:
    """The commands. Each method returns the answer."""

    def __init__(self, url: str, app: str) -> None:
        self._journal = ClaimJournal()
        layout = Layout.of(app)
        self._client = connect(
            url,
            access=access_of(layout),
            handler="gevent",
            session_timeout_seconds=SESSION_TIMEOUT_SECONDS,
        )
        component = {"host": socket.gethostname(), "pid": os.getpid()}
        self._member = Member(self._client, layout, self._journal, component=component)
        self._journal.member = self._member

    def join(self) -> dict[str, Any]:
        """Connect and register; return the start time and how to end the session."""
        began = time.monotonic_ns()
        self._member.start()
        identity, password = self._client.client_id
        return {
            "began": began,
            "registered": time.monotonic_ns(),
            "name": self._member.name,
            "session": identity,
            "password": password.hex(),
        }

    def state(self) -> dict[str, Any]:
        return {
            "held": len(self._journal.claims),
            "settled": self._member.settled(),
            "leads": self._member.leader.is_leader(),
        }

    def leave(self) -> dict[str, Any]:
        """Release all queues, then end the session."""
        began = time.monotonic_ns()
        self._member.drain()
        released = self._member.wait_released(60)
        ended = time.monotonic_ns()
        self._member.stop()
        return {"began": began, "released": released, "seconds": (ended - began) / 1e9}

    def events(self) -> dict[str, Any]:
        """Return the events since the last call."""
        events, self._journal.events = self._journal.events, []
        return {"events": events}


def main(url: str, app: str) -> None:
    """Answer commands until standard input ends."""
    crewman = MemberCommands(url, app)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    # Not sys.stdin itself, whose reads would block every greenlet.
    for line in FileObject(sys.stdin.fileno(), "r"):
        answer = getattr(crewman, line.strip())()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
