"""Attack the nodes of a running fleet: ``python -m tests.soak.attacks --coordinator both``.

Every client of an open coordinator can write every node. During each attack the rules of `checks`
hold, and afterwards every message is processed. The queues that were not attacked pause for at
most `PAUSE_SECONDS`. Ghosts with a session are an exception: until they are set aside they get
queues, as workers would. With `acl` they cannot exist.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import qdo
from qdo.brokers.registry import open_broker
from qdo.coordination.client import connect
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NodeRefusedError
from qdo.ops.status import queue_statuses
from tests.soak.checks import check_journal, check_log, unfinished
from tests.soak.fleet import PROCESSES, QUEUES, SoakFleet
from tests.soak.hostile_nodes import TOUCHED, Attack, Outsider, attacks
from tests.support.processes import wait_until

PARENTS = 2
SEND_EVERY = 0.1
PAUSE_SECONDS = 1.0
HEAL_SECONDS = 60.0
REPORT_SECONDS = 10.0
ATTACKS_OF_A_FLEET = 16
"""Every check reads the whole journal: after 40 attacks this held up the sender for seconds."""


@dataclass
class AttackOutcome:
    """What an attack did.

    :ivar pause: the longest time in which an untouched queue started no message.
    :ivar reasons: why queues are not processed, as `qdo queues` tells, without what passes by
        itself; of "" if it is refused.
    :ivar violations: rules that the journal violates.
    """

    pause: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


class AttackedFleet(SoakFleet):
    """A fleet that gets a quick message for each queue ten times a second."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        super().__init__(folder, coordinator, seed=1)
        self._broker = open_broker(self.environment["QDO_BROKER"], "soak")
        self._client = connect(self._url, handler="threading")
        self.outsider = Outsider(self._client, Layout.of("soak"))
        self._over = threading.Event()
        self._sender = threading.Thread(target=self._send_on)

    def start(self) -> None:
        """Return once every queue is processed."""
        self._client.open(20.0)
        for _ in range(PARENTS):
            self.start_parent()
        self._sender.start()
        self._wait_processed()

    def _send_on(self) -> None:
        for number in itertools.count():
            body = {"n": number, "kind": "quick", "seconds": 0.0}
            key = f"k{number % 3}"
            self._app.send_many([qdo.NewMessage(queue, body, key=key) for queue in QUEUES])
            self.sent = dict.fromkeys(QUEUES, number + 1)
            if self._over.wait(SEND_EVERY):
                return

    def play(self, attack: Attack, seconds: float) -> AttackOutcome:
        """Return what an attack did, once everything sent before its end is processed."""
        workers = PARENTS * PROCESSES
        wait_until(lambda: len(self.outsider.workers()) == workers, "all workers", HEAL_SECONDS)
        begin = time.monotonic()
        steps = attack(self.outsider)
        next(steps)
        while time.monotonic() < begin + seconds:
            steps.send(False)
            time.sleep(0.02)
        found = AttackOutcome(self._longest_pause(begin))
        # A worker whose node was written over lists its queues again at once; others may have seen
        # that, and report it until their next reports.
        with suppress(AssertionError):
            wait_until(lambda: self._reasons().keys() <= {TOUCHED, ""}, "it", REPORT_SECONDS)
        found.reasons = self._reasons()
        with suppress(StopIteration):
            steps.send(True)
        self._wait_processed()
        found.violations = [
            line for line in check_journal(self.entries(), self.facts()) if line[:5] != "lost:"
        ]
        for _, output in self.outputs():
            found.violations += check_log(output)
        return found

    def _reasons(self) -> dict[str, str]:
        try:
            statuses = queue_statuses(self._client, self.outsider.layout, self._broker).queues
        except NodeRefusedError as error:  # a protected folder
            return {"": str(error)}
        return {each.queue: each.fault for each in statuses if each.fault}

    def finish(self) -> None:
        """Return once everything is processed."""
        self._over.set()
        self._sender.join()
        self._wait_processed()

    def _wait_processed(self) -> None:
        facts = self.facts()
        facts.sent = {queue: max(1, count) for queue, count in self.sent.items()}
        try:
            wait_until(
                lambda: not unfinished(self.entries(), facts), "all is processed", HEAL_SECONDS
            )
        except AssertionError as error:
            outputs = "\n".join(output[-2000:] for _, output in self.outputs())
            left = unfinished(self.entries(), facts)
            raise AssertionError(f"unprocessed: {left[:9]}\n{outputs}") from error

    def _longest_pause(self, begin: float) -> float:
        starts = {queue: [begin] for queue in QUEUES if queue != TOUCHED}
        for each in self.entries():
            if each.kind == "S" and each.at > begin and each.queue in starts:
                starts[each.queue].append(each.at)
        now = time.monotonic()
        pairs = (itertools.pairwise([*times, now]) for times in starts.values())
        return max(after - before for before, after in itertools.chain(*pairs))

    def close(self) -> None:
        """End everything, and wait for it."""
        self._over.set()
        if self._sender.ident is not None:
            self._sender.join()
        self._client.stop()
        self._client.close()
        self._broker.close()
        super().close()


@contextmanager
def attacked_fleet(folder: Path, coordinator: str) -> Iterator[AttackedFleet]:
    """Yield a fleet that processes messages, and end it."""
    fleet = AttackedFleet(folder, coordinator)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


def _play(folder: Path, kind: str, names: Sequence[str], seconds: float) -> int:
    """Play attacks on one fleet, print what each did, and return how many did harm."""
    url = f"sqlite:{folder}/coordination.db" if kind == "embedded" else kind
    bad = 0
    with attacked_fleet(folder, url) as fleet:
        for name in names:
            found = fleet.play(attacks()[name], seconds)
            bad += found.pause > PAUSE_SECONDS or bool(found.violations)
            print(f"{kind}, {name}: pause {found.pause:.2f} s", end="", flush=True)
            print("", *found.violations[:5], *sorted(found.reasons.items())[:2], sep="; ")
        fleet.finish()
    return bad


def main() -> int:
    """Play the attacks that the command line asks for, and print what each did."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.attacks", description=__doc__)
    parser.add_argument("--coordinator", choices=("embedded", "zookeeper", "both"), default="both")
    parser.add_argument("--only", default="*", metavar="GLOB", help="attacks to play")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack")
    arguments = parser.parse_args()
    both = arguments.coordinator == "both"
    wanted = fnmatch.filter(attacks(), arguments.only)
    bad = 0
    for kind in ("embedded", "zookeeper") if both else (arguments.coordinator,):
        for start in range(0, len(wanted), ATTACKS_OF_A_FLEET):
            names = wanted[start : start + ATTACKS_OF_A_FLEET]
            with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
                bad += _play(Path(folder), kind, names, arguments.seconds)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
