"""Recorded positions in the future."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.brokers.base import Broker, Outgoing, check_reached
from qdo.brokers.registry import open_broker
from qdo.errors import PositionAheadError
from qdo.positions import format_position, position_now


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = open_broker(f"sqlite:{tmp_path / 'messages.db'}", "a")
    broker.send(Outgoing("q", b"1"))
    yield broker
    broker.close()


def test_a_position_after_every_message_is_not_believed(broker: Broker) -> None:
    """Up to now and up to the last message is possible; later is not."""
    check_reached(broker, "q", 0)
    check_reached(broker, "q", position_now())
    with pytest.raises(PositionAheadError) as caught:
        check_reached(broker, "q", position_now() + 10**16)
    assert caught.value.details["queue"] == "q"


def test_messages_of_a_clock_that_was_ahead_count(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position in the future is right if a message has it."""
    head = broker.catalog.backlog("q", 0).head
    monkeypatch.setattr("qdo.brokers.base.position_now", lambda: head - 10**12)
    check_reached(broker, "q", head)
    with pytest.raises(PositionAheadError):
        check_reached(broker, "q", head + 1)


@pytest.mark.parametrize("position", [-(10**40), -1, 0, 2**63, 2**63 - 1, 10**40])
def test_every_position_has_a_text(position: int) -> None:
    """Tables show whatever a node contains."""
    assert format_position(position).endswith("Z")
