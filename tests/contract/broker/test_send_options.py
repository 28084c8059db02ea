"""The contract of every broker that can delay and deduplicate.

The same tests run a second time in a process that gevent has patched: see test_under_gevent.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.testing.contracts.options import *
from qdo.testing.contracts.options import Heard, bodies, delayed, wait_for


@pytest.fixture
def only_wakeups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("embedded.reader", "postgresql.listener"):
        monkeypatch.setattr(f"qdo.brokers.{module}.LOOK_SECONDS", 3600.0)


def test_messages_due_without_listeners_move_with_the_next_one(
    broker: Broker, connect: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages move, in order, before a reader could find the queue empty."""
    monkeypatch.setattr("qdo.brokers.embedded.delayed.MOVE_MESSAGES", 3)
    broker.send_many([delayed("q", number, 1.0 + 0.001 * number) for number in range(10)])
    broker.send(delayed("q", 10, 3600))
    assert broker.catalog.backlog("q", 0).delayed == 11
    threading.Event().wait(1.05)
    assert (broker.catalog.backlog("q", 0).count, broker.catalog.backlog("q", 0).delayed) == (0, 11)
    stop = connect().listen(lambda names: None)
    assert bodies(broker, "q") == list(range(10))
    assert broker.catalog.backlog("q", 0).delayed == 1
    stop()


@pytest.mark.parametrize(
    ("limit", "value", "count"), [("MESSAGES", 1000, 2000), ("MESSAGES", 3, 10), ("BYTES", 1, 5)]
)
def test_messages_of_one_due_time_keep_their_order(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, count: int
) -> None:
    """Also if it passes during the call, and although many or big ones are moved in parts."""
    monkeypatch.setattr(f"qdo.brokers.embedded.delayed.MOVE_{limit}", value)
    due = time.time() + 0.02
    heard = Heard(broker)
    broker.send_many(
        [Outgoing("q", b"%d" % number, terms=SendOptions(due)) for number in range(count)]
    )
    wait_for(broker, "q", count, heard)
    assert bodies(broker, "q") == list(range(count))
    heard.stop()
