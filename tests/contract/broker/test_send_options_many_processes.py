"""Delays, deduplication and retried dead letters between real processes, killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.dead_letters import DeadLetterRecord
from qdo.brokers.registry import open_broker
from tests.support.processes import child, said, wait_until

_MOVE = """
import sys
import qdo.brokers.embedded.delayed as terms
from qdo.brokers.registry import open_broker

terms.MOVE_MESSAGES = 7
broker = open_broker(sys.argv[1], "app")
broker.listen(lambda names: None)
sys.stdin.read()
"""

_DELAY_FOR_EVER = """
import sys, time
from qdo.brokers.registry import open_broker
from qdo.brokers.base import Outgoing, SendOptions

broker = open_broker(sys.argv[1], "app")
number = 0
while True:
    due = time.time() + 0.02 * (number % 5)
    body = f"{sys.argv[2]}.{number}".encode()
    print(broker.send(Outgoing("q", body, terms=SendOptions(due))), flush=True)
    number += 1
"""

_RETRY_FOR_EVER = """
import sys
from qdo.brokers.registry import open_broker

broker = open_broker(sys.argv[1], "app")
while letters := broker.dead_letters.find()[:2]:
    broker.dead_letters.retry([(each.queue, each.position) for each in letters])
    print("retried", flush=True)
"""

_ONCE = """
import sys
from qdo.brokers.registry import open_broker
from qdo.brokers.base import Outgoing, SendOptions

broker = open_broker(sys.argv[1], "app")
sys.stdin.readline()
for number in range(100):
    print(broker.send(Outgoing("q", b"%d" % number, terms=SendOptions(None, f"key-{number}"))))
broker.close()
"""


@pytest.fixture(params=["embedded"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'messages.db'}"


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    broker = open_broker(url, "app")
    yield broker
    broker.close()


def kill(process: subprocess.Popen[str]) -> str:
    """Kill a process with kill -9; return the complete lines that it had printed."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    rest = process.stdout.read() if process.stdout else ""
    return rest.rpartition("\n")[0]


def stored(broker: Broker, name: str) -> list[bytes]:
    return [row[1] for row in broker.reader(name, 0).fetch(1_000_000)]


def test_whoever_moves_may_be_killed_at_any_moment(url: str, broker: Broker) -> None:
    """While two processes move and are killed again and again, every message arrives once, and
    in the order of the due times."""
    chance = random.Random(20120129)
    now = time.time()
    total = 600
    batch = [
        Outgoing("q", b"%d" % number, terms=SendOptions(now + 1.0 + 0.005 * number))
        for number in range(total)
    ]
    chance.shuffle(batch)
    broker.send_many(batch)
    kills = 0
    while left := broker.catalog.backlog("q", 0).delayed:
        enough = max(0, left - chance.randrange(1, 80))
        with child(_MOVE, url, kill=True) as one, child(_MOVE, url, kill=True) as two:
            wait_until(lambda: broker.catalog.backlog("q", 0).delayed <= enough, "some have moved")  # noqa: B023
            kill(one)
            kill(two)
            kills += 1
    assert kills > 3
    found = [int(body) for body in stored(broker, "q")]
    assert Counter(found) == Counter(range(total))
    assert found == sorted(found)
    assert broker.catalog.backlog("q", 0).count == total


def test_what_a_killed_sender_was_told_will_arrive(url: str, broker: Broker) -> None:
    """kill -9 between storing and moving: acknowledged messages arrive, once."""
    acknowledged: list[str] = []
    for process in range(4):
        with child(_DELAY_FOR_EVER, url, str(process), kill=True) as sender:
            acknowledged.extend(said(sender) for _ in range(40))
            acknowledged.extend(kill(sender).split())
    stop = broker.listen(lambda names: None)
    wait_until(lambda: broker.catalog.backlog("q", 0).delayed == 0, "all have moved")
    stop()
    bodies = stored(broker, "q")
    assert len(bodies) == len(set(bodies))
    for process in range(4):
        mine = {int(body.split(b".")[1]) for body in bodies if body.startswith(b"%d." % process)}
        assert mine == set(range(len(mine)))
    assert len(acknowledged) <= len(bodies) <= len(acknowledged) + 4


def test_a_letter_is_always_a_letter_or_a_message(url: str, broker: Broker) -> None:
    """A process that retries dead letters may be killed at any time: none is lost or doubled."""
    for number in range(600):
        body = b"%d" % number
        broker.dead_letters.store(
            DeadLetterRecord("q", number + 1, body, None, None, "E", "", 1, "w", 1, float(number))
        )
    everything = Counter(b"%d" % number for number in range(600))
    chance = random.Random(20120129)
    for _ in range(8):
        with child(_RETRY_FOR_EVER, url, kill=True) as operator:
            for _ in range(chance.randrange(1, 6)):
                said(operator)
            kill(operator)
        letters = [letter.body for letter in broker.dead_letters.records("q")]
        assert Counter(stored(broker, "q") + letters) == everything
    assert stored(broker, "q")


def test_senders_of_several_processes_share_keys(url: str, broker: Broker) -> None:
    """Each key is stored once, whichever sender is first, and all senders get the same id."""
    with child(_ONCE, url) as one, child(_ONCE, url) as two, child(_ONCE, url) as three:
        for each in (one, two, three):
            each.stdin.write("go\n")  # type: ignore[union-attr]
            each.stdin.flush()  # type: ignore[union-attr]
        told = [[said(each) for _ in range(100)] for each in (one, two, three)]
    assert told[0] == told[1] == told[2]
    assert len(set(told[0])) == 100
    assert sorted(map(int, stored(broker, "q"))) == list(range(100))
