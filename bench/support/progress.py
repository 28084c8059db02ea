"""A process whose member owns all queues and progresses continuously in all of them.

``python -m bench.support.progress URL APP QUEUES SECONDS INTERVAL``; prints one line of JSON.
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

import gevent
from gevent.event import Event

from bench.support.access import access_of
from qdo.coordination.client import connect
from qdo.coordination.member import Member
from qdo.coordination.protocol.claims import Claim
from qdo.coordination.protocol.ownership import MemberOptions
from qdo.coordination.znodes.layout import Layout
from qdo.positions import position_now

CLAIM_SECONDS = 120.0


class ClaimHolder:
    """Holds its claims until it has all queues."""

    def __init__(self, queues: int) -> None:
        self._queues = queues
        self.claims: dict[str, Claim] = {}
        self.complete = Event()

    def claimed(self, claim: Claim) -> None:
        self.claims[claim.queue] = claim
        if len(self.claims) == self._queues:
            self.complete.set()

    def releasing(self, claim: Claim) -> None:
        raise RuntimeError(f"{claim} is to be released, although there is no other member")

    def released(self, claim: Claim) -> None:
        """Do nothing: `releasing` is the last event of interest."""

    def undone(self, claim: Claim) -> None:
        """Do nothing: a release follows."""

    def lost(self, claim: Claim) -> None:
        self.claims.pop(claim.queue, None)

    def decided(self, claim: Claim, decisions: object) -> bool:
        return False

    def repositioned(self, old: Claim, new: Claim) -> None:
        self.claims[new.queue] = new

    def expired(self) -> None:
        """Do nothing: the counts make the run fail."""


def main(url: str, app: str, queues: int, seconds: float, interval: float) -> None:
    """Own all queues, progress in all of them for a while, and print the figures."""
    owner = ClaimHolder(queues)
    layout = Layout.of(app)
    access = access_of(layout)
    client = connect(url, access=access, handler="gevent", session_timeout_seconds=10.0)
    component = {"host": socket.gethostname(), "pid": os.getpid()}
    options = MemberOptions(checkpoint_seconds=interval)
    member = Member(client, layout, owner, component=component, options=options)
    member.start()
    registered = time.monotonic()
    if not owner.complete.wait(CLAIM_SECONDS):
        raise RuntimeError(f"owns only {len(owner.claims)} of {queues} queues")
    claim_seconds = time.monotonic() - registered
    claims = list(owner.claims.values())
    began, began_unix, cpu = time.monotonic(), time.time(), time.process_time()
    passes = 0
    while time.monotonic() - began < seconds:
        # As a dispatcher does at the end of a queue's turn.
        done = position_now()
        for claim in claims:
            claim.done = done
            member.progress(claim)
        passes += 1
        gevent.sleep(interval / 2)
    used = time.process_time() - cpu
    elapsed = time.monotonic() - began
    for claim in claims:
        if not member.record(claim, 30.0):
            raise RuntimeError(f"{claim} was not recorded within 30 s")
    print(
        json.dumps(
            {
                "began_unix": began_unix,
                "busy": used / elapsed,
                "passes": passes,
                "done": done,
                "claim_seconds": claim_seconds,
            }
        ),
        flush=True,
    )
    member.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
